"""MPI requests and the memory they need: mpi4py's requests do not keep it alive."""

from collections.abc import Callable, Sequence

from mpi4py import MPI

from pycomm.buffers import Buffer
from pycomm.errors import MismatchError
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, message_spans

__all__ = ["Messages", "NoteRequest", "PreparedRound", "Round", "Staged", "Test", "pieces"]

Test = Callable[[], bool]
Messages = Sequence[tuple[int, Array]]


class NoteRequest:
    """The `Pending` of a note that is being sent."""

    __slots__ = ("_keep", "test")

    def __init__(self, request: MPI.Request, keep: object) -> None:
        self.test = request.Test
        self._keep = keep


class Staged:
    """A copy of an input, held until the request that reads it is complete."""

    __slots__ = ("_block", "_done", "_pool", "_test", "octets")

    def __init__(self, x: Buffer, pool: ScratchPool) -> None:
        self._pool = pool
        self._block = pool.take(x.nbytes)  # fresh pages cost more than the copy
        self._done = False
        self.octets = self._block[: x.nbytes]
        self.octets[:] = x.octets

    def until(self, request: MPI.Request) -> Test:
        """Return the test of the request that reads the copy; it gives the memory back."""
        self._test = request.Test
        return self

    def __call__(self) -> bool:
        """Return whether the request is complete, then and ever after."""
        if not self._done and self._test():
            self._done = True
            self._pool.give(self._block)
        return self._done


class Round:
    """The `Pending` of posted messages; it checks that each receive got all of its bytes.

    It stays in `open_rounds` until it is complete, and holds the memory: requests do not.
    """

    __slots__ = ("_open", "_rank", "_recvs", "_sends", "_statuses", "requests")

    def __init__(
        self,
        sends: Messages,
        recvs: Messages,
        statuses: list[MPI.Status] | None,
        rank: int,
        open_rounds: set[object],
    ) -> None:
        self.requests: list[MPI.Request] = []  # of the receives, then of the sends
        self._sends = sends
        self._recvs = recvs
        self._statuses = statuses
        self._rank = rank
        self._open = open_rounds
        open_rounds.add(self)

    def test(self) -> bool:
        """Return whether all messages are complete, then and ever after."""
        try:
            if not MPI.Request.Testall(self.requests, self._statuses):
                return False
        except MPI.Exception as error:
            raise explain_status(error, self._statuses or ()) from error
        if self._statuses is not None:
            check_lengths(self._recvs, self._statuses, self._rank)
            self._statuses = None
        self._open.discard(self)
        return True


def check_lengths(recvs: Messages, statuses: Sequence[MPI.Status], rank: int) -> None:
    """Raise `MismatchError` if a receive that is complete got fewer bytes than it has room for."""
    for (source, part), status in zip(recvs, statuses, strict=False):
        if status.Get_count(MPI.BYTE) != part.size:
            raise MismatchError(
                f"rank {rank} waits for {part.size} bytes from rank {source}, which sends "
                f"{status.Get_count(MPI.BYTE)}",
                rank=rank,
            )


def explain_status(error: MPI.Exception, statuses: Sequence[MPI.Status]) -> MPI.Exception:
    """Return which error it was where MPI says no more than "in status"."""
    codes = [status.Get_error() for status in statuses]
    known = [code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
    if error.Get_error_class() == MPI.ERR_IN_STATUS and known:
        return MPI.Exception(known[0])
    return error


class PreparedRound:
    """A round that is started again and again: MPI's persistent requests, and its own `Pending`."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        sends: Messages,
        recvs: Messages,
        tag: int,
        rank: int,
        open_rounds: set[object],
    ) -> None:
        self._sends, self._recvs = sends, recvs
        self._rank = rank
        self._open = open_rounds
        self._requests: list[MPI.Prequest] = []
        for peer, part in self._recvs:
            self._requests.append(comm.Recv_init([part, MPI.BYTE], peer, tag))
        for peer, part in self._sends:
            self._requests.append(comm.Send_init([part, MPI.BYTE], peer, tag))
        self._statuses = [MPI.Status() for _ in self._requests]
        self._complete = True

    def start(self) -> "PreparedRound":
        """Start the round, which is complete if it was started before."""
        self._complete = False
        self._open.add(self)
        # Startall may start them in any order, and messages to one peer must keep theirs.
        for request in self._requests:
            request.Start()
        return self

    def test(self) -> bool:
        """Return whether all messages are complete, then and until the next start."""
        if self._complete:
            return True
        try:
            if not MPI.Request.Testall(self._requests, self._statuses):
                return False
        except MPI.Exception as error:
            raise explain_status(error, self._statuses) from error
        check_lengths(self._recvs, self._statuses, self._rank)
        self._complete = True
        self._open.discard(self)
        return True

    def __del__(self) -> None:
        if getattr(self, "_complete", False) and not MPI.Is_finalized():
            for request in self._requests:
                request.Free()


def pieces(messages: Messages, limits: Sequence[int]) -> Messages:
    """Cut messages to a rank that are longer than its limit in bytes."""
    for peer, data in messages:
        if data.size > limits[peer]:
            break
    else:
        return messages
    return [
        (peer, data[start:stop])
        for peer, data in messages
        for start, stop in message_spans(data.size, limits[peer])
    ]
