"""MPI through mpi4py. Importing this module initialises MPI.

Everything is started non-blocking and polled, since a blocking MPI call sees neither deadlines nor
Ctrl-C. Each communicator has two MPI communicators of its own: one for collectives, one for notes
and the user's messages, so that none of them can match another's.
"""

import faulthandler
import os
from collections.abc import Callable, Generator, Sequence

import numpy as np
from mpi4py import MPI

from pycomm.dtypes import DType, Op
from pycomm.errors import MismatchError, MPIError
from pycomm.fabric import has_fabric
from pycomm.scratch import ScratchPool
from pycomm.transports.base import MESSAGE_LIMIT, Array, Native, Pending
from pycomm.transports.natives import Natives
from pycomm.transports.requests import NoteRequest, PreparedRound, Round, pieces

__all__ = ["MPI", "Creation", "MPITransport", "library", "shut_down"]

_NOTE_TAG = 0
_FIRST_USER_TAG = 8
_NOTE_LIMIT = 1024  # bytes
_YIELD_EVERY = 16
# Over TCP a message that is announced before it is sent waits for its announcement to be answered,
# and that answer waits behind whatever is on its way. Messages up to Open MPI's limit (64 KiB with
# their headers) are sent at once: between hosts long ones go as many of these, which fills 1 Gbit/s
# to 96 to 99% in both directions where announced messages of 256 KiB reached 70 to 90%.
_AT_ONCE = 60 << 10
_PATIENCE = 1000  # spins after which a wait yields even where every rank has a core

# Whether a communicator of this process was given up with messages in flight.
_unclean = False
# Transports whose making was given up.
_kept: list[object] = []


def library() -> str:
    """Return the name and version of the MPI in use, for messages."""
    return str(MPI.Get_library_version()).partition("\n")[0].rstrip("\0 ,")


class Creation:
    """The `Pending` of a new transport, which is `transport` once complete."""

    def __init__(self, steps: "Generator[MPI.Request, None, MPITransport]") -> None:
        self._steps = steps
        self._request: MPI.Request | None = None
        self.transport: MPITransport | None = None

    def test(self) -> bool:
        """Go as far as is possible without waiting; return whether the transport is there."""
        try:
            while self.transport is None:
                if self._request is not None and not self._request.Test():
                    return False
                self._request = next(self._steps)
        except StopIteration as end:
            self.transport = end.value
        return True

    def abandon(self) -> None:
        """Keep what MPI may still touch; MPI will not shut down cleanly."""
        _give_up()
        _kept.append(self)


class MPITransport:
    """The road of this process in one MPI communicator."""

    def __init__(
        self,
        rounds: MPI.Intracomm,
        messages: MPI.Intracomm,
        hosts: tuple[int, ...],
        crowded: bool,
        ethernet: bool,
    ) -> None:
        self._ethernet = ethernet
        self._rounds = rounds
        self._messages = messages
        self.crowded = crowded
        self.bytes_sent = 0
        self._open: set[object] = set()  # rounds that are not complete
        self._statuses: dict[int, list[MPI.Status]] = {}
        self.rank: int = rounds.Get_rank()
        self.size: int = rounds.Get_size()
        self.hosts = hosts
        here = hosts[rounds.Get_rank()]
        # Bytes of a message to each rank.
        self._limits = [_AT_ONCE if ethernet and host != here else MESSAGE_LIMIT for host in hosts]
        self.shares_memory = True  # if the system lets them: they find out together
        self.library = library().split(",")[0]
        self.tag_limit = int(messages.Get_attr(MPI.TAG_UB) or 32767) - _FIRST_USER_TAG
        # Collectives of one MPI communicator must start in the same order on all ranks. Collectives
        # and messages never match each other, so those that wait for their turn take the other one.
        pool = ScratchPool()
        self._natives, self._natives_in_turn = Natives(rounds, pool), Natives(messages, pool)

    @classmethod
    def create(cls, comm: MPI.Intracomm) -> Creation:
        """Start making a transport over the ranks of `comm`, which stays the caller's."""
        return Creation(cls._create(comm))

    @classmethod
    def _create(cls, comm: MPI.Intracomm) -> "Generator[MPI.Request, None, MPITransport]":
        rounds, request = comm.Idup()
        yield request
        messages, request = rounds.Idup()
        yield request
        for made in (rounds, messages):
            made.Set_errhandler(MPI.ERRORS_RETURN)
        # Blocking, but all ranks have just met in the duplications above.
        shared = rounds.Split_type(MPI.COMM_TYPE_SHARED)
        # A record a rank: the lowest rank of its host, which cores it may use, and whether its host
        # has no better network than Ethernet.
        record = np.zeros(8 + 128 + 1, np.uint8)
        record[-1] = not has_fabric()
        leader = np.array([rounds.Get_rank()], np.int64)
        yield shared.Ibcast([leader, MPI.INT64_T], root=0)
        record[:8] = leader.view(np.uint8)
        for core in os.sched_getaffinity(0):
            if core < 1024:
                record[8 + core // 8] |= 1 << core % 8
        records = np.empty((rounds.Get_size(), record.size), np.uint8)
        yield rounds.Iallgather([record, MPI.BYTE], [records, record.size, MPI.BYTE])
        shared.Free()
        hosts = records[:, :8].copy().view(np.int64)[:, 0]
        here = hosts == leader[0]
        cores = int(np.unpackbits(np.bitwise_or.reduce(records[here, 8:-1], axis=0)).sum())
        crowded = int(here.sum()) > cores
        ethernet = bool(records[:, -1].all())
        return cls(rounds, messages, tuple(int(host) for host in hosts), crowded, ethernet)

    def post(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Pending:
        """Start one round of messages."""
        for _, data in sends:
            self.bytes_sent += data.size
        return self._start(self._rounds, sends, recvs, tag)

    def prepare(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Callable[[], Pending]:
        """Return what starts the same round any number of times: persistent requests."""
        cut = pieces(sends, self._limits), pieces(recvs, self._limits)
        prepared = PreparedRound(self._rounds, *cut, tag, self.rank, self._open)
        nbytes = sum(data.size for _, data in sends)

        def start() -> Pending:
            self.bytes_sent += nbytes
            return prepared.start()

        return start

    def post_message(self, peer: int, data: Array, tag: int, *, receive: bool) -> Pending:
        """Start one message of the user's."""
        sends, recvs = ([], [(peer, data)]) if receive else ([(peer, data)], [])
        return self._start(self._messages, sends, recvs, tag + _FIRST_USER_TAG)

    def _start(
        self,
        comm: MPI.Intracomm,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        tag: int,
    ) -> Pending:
        recvs, sends = pieces(recvs, self._limits), pieces(sends, self._limits)
        statuses = None
        if recvs:
            # Read as soon as they are filled in, so that rounds may share them.
            count = len(recvs) + len(sends)
            statuses = self._statuses.get(count)
            if statuses is None:
                statuses = self._statuses[count] = [MPI.Status() for _ in range(count)]
        # Held here before anything is posted: whatever happens to the caller, the memory stays.
        started = Round(sends, recvs, statuses, self.rank, self._open)
        requests, octet = started.requests, MPI.BYTE
        receive, send = comm.Irecv, comm.Isend
        for peer, part in recvs:
            requests.append(receive([part, octet], peer, tag))
        for peer, part in sends:
            requests.append(send([part, octet], peer, tag))
        return started

    def native(
        self, collective: str, dtype: DType, op: Op | None, count: int, *, in_turn: bool = False
    ) -> Native | None:
        """Return MPI's own non-blocking collective where it is right and fast."""
        natives = self._natives_in_turn if in_turn else self._natives
        return natives.find(collective, dtype, op, count)

    def explain(self, error: BaseException) -> BaseException:
        """Return an error of MPI as pycomm's."""
        if not isinstance(error, MPI.Exception):
            return error
        explained: MPIError | MismatchError
        error_class = error.Get_error_class()
        if error_class == MPI.ERR_TRUNCATE:
            explained = MismatchError(
                f"rank {self.rank} received more bytes than it expects: the ranks' counts or "
                "dtypes differ (for collectives, init(check=True) says on which)"
            )
        else:
            explained = MPIError(f"MPI failed on rank {self.rank}: {error.Get_error_string()}")
            explained.code, explained.error_class = error.Get_error_code(), error_class
        explained.__cause__ = error
        return explained

    def idle(self, spins: int) -> None:
        """Yield the core where ranks outnumber cores, or after a long while."""
        # MPI yields by itself inside Test when it was told so; doing it every time costs twice.
        if spins % _YIELD_EVERY == 0 and (self.crowded or spins > _PATIENCE):
            os.sched_yield()

    def notify(self, peer: int, note: bytes) -> Pending | None:
        """Start sending a note."""
        data = np.frombuffer(note[:_NOTE_LIMIT], np.uint8)
        return NoteRequest(self._messages.Isend([data, MPI.BYTE], peer, _NOTE_TAG), data)

    def notes(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived."""
        arrived = []
        status = MPI.Status()
        while (found := self._messages.Improbe(MPI.ANY_SOURCE, _NOTE_TAG, status)) is not None:
            note = bytearray(status.Get_count(MPI.BYTE))
            found.Recv([note, MPI.BYTE])
            arrived.append((status.Get_source(), bytes(note)))
        return arrived

    def split(self, ranks: Sequence[int]) -> Creation:
        """Start making a transport for `ranks`, who have met."""
        return Creation(self._split(tuple(ranks)))

    def _split(self, ranks: tuple[int, ...]) -> "Generator[MPI.Request, None, MPITransport]":
        group = self._rounds.Get_group()
        members = group.Incl(ranks)
        rounds = self._rounds.Create_group(members)
        members.Free()
        group.Free()
        messages, request = rounds.Idup()
        yield request
        for made in (rounds, messages):
            made.Set_errhandler(MPI.ERRORS_RETURN)
        hosts = tuple(self.hosts[rank] for rank in ranks)
        return MPITransport(rounds, messages, hosts, self.crowded, self._ethernet)

    def close(self) -> None:
        """Free the two communicators; all ranks have met before."""
        self._messages.Free()
        self._rounds.Free()

    def abort(self) -> None:
        """Leave everything as it is: freeing would talk to peers that may be gone."""
        _give_up()


def _give_up() -> None:
    global _unclean
    _unclean = True


def _after_fork() -> None:
    """Forget in a child process what concerns the parent alone: MPI belongs to it."""
    global _unclean
    _unclean = False


os.register_at_fork(after_in_child=_after_fork)


def shut_down(seconds: float) -> None:
    """Finalize MPI before the process ends, if a communicator was given up.

    MPI_Finalize waits for peers that may never come. Nothing hangs: after `seconds` the process
    ends with exit status 1, showing where it stood.
    """
    if _unclean and MPI.Is_initialized() and not MPI.Is_finalized():
        try:
            faulthandler.dump_traceback_later(seconds, exit=True)
        except RuntimeError:  # no thread can be started: no memory is left
            os._exit(1)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
