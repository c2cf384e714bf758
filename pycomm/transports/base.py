"""The protocol of a road between ranks for host memory.

A transport starts things and never waits: it hands out a `Pending`, and whoever needs the result
polls it under a deadline (`pycomm.waiting`). That keeps every wait in one place, where signals,
deadlines and lost peers are seen.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pycomm.deadline import Deadline
from pycomm.dtypes import DType, Op
from pycomm.errors import CommTimeoutError

__all__ = [
    "MESSAGE_LIMIT",
    "Array",
    "Native",
    "Pending",
    "Tested",
    "Transport",
    "await_transport",
    "message_spans",
]

Array = np.ndarray[Any, Any]

#: MPI counts are C ints, and Open MPI 5 has no other: longer messages go in pieces of this size.
MESSAGE_LIMIT = 1 << 30


def message_spans(nbytes: int, limit: int = MESSAGE_LIMIT) -> list[tuple[int, int]]:
    """Cut ``[0, nbytes)`` into spans of at most `limit` bytes.

    An empty message is one empty span: it still has to arrive.
    """
    if nbytes <= limit:
        return [(0, nbytes)]
    return [(start, min(start + limit, nbytes)) for start in range(0, nbytes, limit)]


class Pending(Protocol):
    """Communication that has been started."""

    def test(self) -> bool:
        """Make progress; return whether all of it is complete, then and ever after.

        Raises
        ------
        Exception
            If it failed; `Transport.explain` puts it in pycomm's terms.
        """


class Tested:
    """The `Pending` of what is tested by a function."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self.test = test


#: ``native(x, out, root, in_place) -> test``, `x` and `out` being buffers, or None where a rank has
#: none, and `root` a rank or -1: starts a collective of the library underneath, and
#: returns the test whether it is complete. The caller keeps `x`, `out` and the test until then.
Native = Callable[..., Callable[[], bool]]


class Transport(Protocol):
    """A road between the ranks of one communicator."""

    rank: int
    size: int
    #: For each rank, a number that is equal for the ranks of one host.
    hosts: tuple[int, ...]
    #: Whether a host has more ranks than cores: who waits has to let others run.
    crowded: bool
    #: Whether the ranks of a host are processes that may map each other's memory.
    shares_memory: bool
    #: Name and version of the library underneath.
    library: str
    #: Bytes that this rank has sent in rounds, to whomever.
    bytes_sent: int
    #: Tags below this are free for messages.
    tag_limit: int

    def post(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        tag: int,
    ) -> Pending:
        """Start one round of messages, all in flight together.

        Each is (peer, bytes as a one-dimensional uint8 array). Messages between a pair of ranks
        with one tag arrive in the order in which they were posted. The arrays must stay alive and
        unchanged until the round is complete.
        """

    def prepare(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        tag: int,
    ) -> Callable[[], Pending]:
        """Return what starts the same round, as `post` does, any number of times.

        It holds the arrays. A round must be complete before it is started again.
        """

    def post_message(self, peer: int, data: Array, tag: int, *, receive: bool) -> Pending:
        """Start one message of the user's, apart from those of collectives.

        Completing a receive whose message has another length raises `MismatchError`.
        """

    def native(
        self, collective: str, dtype: DType, op: Op | None, count: int, *, in_turn: bool = False
    ) -> Native | None:
        """Return the library's own `collective` if it is right for such calls.

        `count` is the number of elements of the smaller side: the whole of all_reduce, reduce and
        broadcast, a rank's part of the others. The answer is the same on all ranks.

        All ranks start what this returns in the same order; those that are `in_turn` have an order
        of their own, in which nothing else counts.
        """

    def explain(self, error: BaseException) -> BaseException:
        """Return `error` in pycomm's terms, itself if it is no error of the library underneath."""

    def idle(self, spins: int) -> None:
        """Let others run; called by a wait that has found nothing `spins` times in a row."""

    def notify(self, peer: int, note: bytes) -> Pending | None:
        """Start sending a short note outside of all operations; None if the peer is unreachable."""

    def notes(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived, as (peer, note)."""

    def split(self, ranks: Sequence[int]) -> "Pending":
        """Start making a transport for `ranks` of this one, in that order.

        Called by those ranks only, after they have met. The `Pending` carries the new transport as
        its ``transport`` attribute once complete.
        """

    def close(self) -> None:
        """Free what the transport holds; all ranks have met before."""

    def abort(self) -> None:
        """Give everything up without talking to any peer."""


def await_transport(creation: Any, deadline: Deadline, what: str) -> Transport:
    """Wait for a transport in the making.

    Raises
    ------
    CommTimeoutError
        If the deadline passes: not all ranks take part.
    """
    try:
        while not creation.test():
            if deadline.passed:
                error = CommTimeoutError(
                    f"{what}: not all ranks have taken part within {deadline.timeout:g} s",
                    operation=what,
                )
                error.timeout = deadline.timeout
                raise error
            time.sleep(0)
    except BaseException:
        creation.abandon()
        raise
    transport: Transport = creation.transport
    return transport
