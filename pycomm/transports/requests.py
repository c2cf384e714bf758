"""MPI requests and the memory they need: mpi4py's requests do not keep it alive."""

from collections.abc import Callable, Sequence

from mpi4py import MPI

from pycomm.buffers import Buffer
from pycomm.errors import MismatchError
from pycomm.scratch import ScratchPool
from pycomm.transports.base import MESSAGE_LIMIT, Array, message_spans

__all__ = ["Messages", "NoteRequest", "Round", "Staged", "Test", "pieces"]

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
        open_rounds: "set[Round]",
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
            # "Error in status": which one it was, the status of each message tells.
            codes = [status.Get_error() for status in self._statuses or ()]
            known = [code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
            if error.Get_error_class() == MPI.ERR_IN_STATUS and known:
                raise MPI.Exception(known[0]) from error
            raise
        if self._statuses is not None:
            for (source, part), status in zip(self._recvs, self._statuses, strict=False):
                if status.Get_count(MPI.BYTE) != part.size:
                    raise MismatchError(
                        f"rank {self._rank} waits for {part.size} bytes from rank {source}, which "
                        f"sends {status.Get_count(MPI.BYTE)}",
                        rank=self._rank,
                    )
            self._statuses = None
        self._open.discard(self)
        return True


def pieces(messages: Messages) -> Messages:
    """Cut messages that are longer than MPI's counts allow."""
    for _, data in messages:
        if data.size > MESSAGE_LIMIT:
            break
    else:
        return messages
    return [
        (peer, data[start:stop])
        for peer, data in messages
        for start, stop in message_spans(data.size)
    ]
