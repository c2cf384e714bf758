"""One rank's place in a communicator: what all of its operations stand on."""

from pycomm.engine import Engine

__all__ = ["Member"]


class Member:
    """The state that the parts of `Communicator` share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rank = engine.transport.rank
        self._size = engine.transport.size

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size
