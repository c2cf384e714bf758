"""One rank's place in a communicator: what all of its operations stand on."""

from typing import Any

from pycomm.engine import Engine
from pycomm.recent import Key

__all__ = ["Member"]


class Member:
    """The state that the parts of `Communicator` share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rank = engine.transport.rank
        self._size = engine.transport.size

    def _quickly(
        self, known: Key, x: Any, out: Any, stream: Any, timeout: float | None, async_op: bool
    ) -> bool:
        """Make a call on device arrays the short way; return whether that was possible."""
        quick = self._engine.quick
        if timeout is not None or async_op or quick is None:
            return False
        return quick(known, x, out, stream)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size
