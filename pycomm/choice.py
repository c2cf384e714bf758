"""Which road a collective takes."""

from collections.abc import Callable

from pycomm.collectives import AtOnce
from pycomm.dtypes import DType, Op
from pycomm.errors import ArgumentValueError
from pycomm.transports.base import Native, Transport

__all__ = ["ALGORITHMS", "COMPOSED", "Choices"]

#: ``auto``: the library's own collective where it is right and fast, else ``direct``.
#: ``native``: the library's own or nothing. ``direct``: messages and pycomm's own reduction.
ALGORITHMS = ("auto", "native", "direct")

_LIMIT = 1024
_PREPARED_LIMIT = 64 << 20  # bytes


def _composed(*_: object) -> Callable[[], bool]:
    raise AssertionError("stands for a collective made of messages, and is never called")


#: The choice of messages, see `pycomm.collectives.composed`.
COMPOSED: Native = _composed


class Choices:
    """The choices of one communicator, each made once.

    Only what is equal on all ranks may enter them, or ranks would take different roads.

    Attributes
    ----------
    known : dict
        What `choose` has returned, by its arguments.
    """

    def __init__(self, transport: Transport, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self._prepared = 0  # bytes that known choices hold
        self.known: dict[tuple[str, DType, Op | None, int, str], Native] = {}

    def choose(
        self, collective: str, dtype: DType, op: Op | None, count: int, algorithm: str
    ) -> Native:
        """Return what starts such a collective, `COMPOSED` for messages.

        Raises
        ------
        ArgumentValueError
            If `algorithm` is unknown, or ``native`` where the library has nothing.
        """
        if algorithm not in ALGORITHMS:
            raise ArgumentValueError(
                f"unknown algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}"
            )
        transport = self._transport
        nbytes = count * dtype.itemsize
        native = None
        # An MPI may return from an empty collective at once, on one rank alone if only its count is
        # 0: the next call of that rank would then be paired with this one of the others.
        empty = count == 0 and collective != "barrier"
        if algorithm != "direct" and not empty:
            native = transport.native(collective, dtype, op, count)
        if algorithm == "native" and native is None and not empty:
            raise ArgumentValueError(
                f"there is no native {collective} for {count} elements of {dtype.name}"
                + ("" if op is None else f" with op {str(op)!r}")
            )
        if algorithm == "auto" and not transport.prefers_native(collective, nbytes):
            native = None
        chosen: Native = native or COMPOSED
        short = AtOnce.fits(transport.size, nbytes) and not empty
        if native is None and collective == "all_reduce" and short:
            assert op is not None
            chosen = AtOnce(transport, self._tag, dtype, op, count)
            self._prepared += nbytes * transport.size
        if len(self.known) >= _LIMIT or self._prepared > _PREPARED_LIMIT:
            self.known.clear()
            self._prepared = 0
        self.known[collective, dtype, op, count, algorithm] = chosen
        return chosen
