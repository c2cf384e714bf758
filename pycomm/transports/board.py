"""Where the ranks of one host meet: flags in shared memory, which they poll.

Each rank has two places on the board, used in turn, that it alone writes: the number of the
arrival, when it was, and a record of what the rank wants to do, which comes before the number. On
x86 stores become visible in the order in which they are made, and loads are made in order;
elsewhere a lock is released and taken in between, which on ARM64 is a store-release and a
load-acquire, and together a full barrier.
"""

import os
import platform
import threading
import time
from collections.abc import Sequence

from pycomm.errors import MismatchError, PeerError
from pycomm.transports.base import Array
from pycomm.transports.shared import start_time

__all__ = ["Board"]

_WORDS = 16  # of a number with its moment, and of a record: processors fetch two lines at a time
_LINE = 8 * _WORDS
_LOOK_EVERY = 0.25  # seconds between looks whether peers live
_DYING = 0.3  # seconds
_LATE = 1_000_000_000  # nanoseconds after which who has arrived may have died meanwhile
_ORDERED = platform.machine() in ("x86_64", "AMD64")


class Board:
    """Where the ranks of one host meet; the `Pending` of a meeting.

    Parameters
    ----------
    rank : int
        Whose side this is.
    memory : array
        `Board.nbytes` bytes that all ranks map, zeros at first.
    pids, starts : sequence
        The process of each rank, and when it was started.
    ranks : sequence of int
        What to call each rank in messages.
    crowded : bool
        Whether there are more ranks than cores: waiting then yields the core each time.

    Attributes
    ----------
    turn : int
        0 or 1 in turn: which of two places the next arrival uses. What is written there is read
        until the ranks have met twice more.
    """

    #: Bytes of a record.
    RECORD = _LINE

    def __init__(
        self,
        rank: int,
        memory: Array,
        pids: Sequence[int],
        starts: Sequence[str],
        ranks: Sequence[int],
        *,
        crowded: bool = False,
    ) -> None:
        size = len(pids)
        self.pids = tuple(pids)
        self.starts = tuple(starts)
        self.turn = 0
        self._ranks = tuple(ranks)
        self._crowded = crowded
        self._octets = memory.data
        self._words = memory.data.cast("q")
        # For each turn the numbers of all ranks, and the same for their records.
        numbers, records = (
            [[(at + turn * size + peer) * _WORDS for peer in range(size)] for turn in (0, 1)]
            for at in (0, 2 * size)
        )
        self._lines, self._records = numbers, records
        self._own = [line[rank] for line in numbers]
        self._peers = [[at for at in line if at != line[rank]] for line in numbers]
        self._tells = [8 * line[rank] for line in records]
        self._spans = [slice(8 * line[0], 8 * line[0] + size * _LINE) for line in records]
        self._arrivals = 0
        self._awaited = self._peers[0]
        self._look_at = 0.0
        self._fence = threading.Lock()
        self._fence.acquire()

    def _order(self) -> None:
        """Have all that was read and written before be seen before all that comes after."""
        self._fence.release()
        self._fence.acquire()

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of a board for `size` ranks."""
        return 4 * size * _LINE

    def arrive(self, record: bytes = b"") -> "Board":
        """Arrive, and tell the others a record, whose first eight bytes name the call.

        One arrival at a time: the next one only once this one's meeting is complete.
        """
        self._arrivals = arrivals = self._arrivals + 1
        turn, words = self.turn, self._words
        own = self._own[turn]
        if record:
            at = self._tells[turn]
            self._octets[at : at + len(record)] = record
        words[own + 1] = time.monotonic_ns()
        if not _ORDERED:
            self._order()
        words[own] = arrivals
        self._awaited = self._peers[turn]
        self._look_at = 0.0
        self.turn = 1 - turn
        return self

    def test(self) -> bool:
        """Return whether all have arrived.

        Raises
        ------
        PeerError
            If a process has ended that has not.
        """
        words, arrivals = self._words, self._arrivals
        for line in self._awaited:
            if words[line] < arrivals:
                return self._absent()
        if not _ORDERED:
            self._order()
        return True

    def _absent(self) -> bool:
        if self._crowded:
            os.sched_yield()
        now = time.monotonic()
        if now >= self._look_at:
            if self._look_at:
                self._alive(self._missing())
            self._look_at = now + _LOOK_EVERY
        return False

    def _missing(self) -> list[int]:
        lines = self._lines[1 - self.turn]
        return [peer for peer, line in enumerate(lines) if self._words[line] < self._arrivals]

    def records(self) -> bytes:
        """Return the records of all ranks, one after the other, of a meeting that is complete."""
        return self._octets[self._spans[1 - self.turn]].tobytes()

    def compare(self, call: int) -> None:
        """Raise `MismatchError` if a rank has come to a meeting, now complete, for another call."""
        words = self._words
        for line in self._records[1 - self.turn]:
            if words[line] != call:
                break
        else:
            return
        others = [
            self._ranks[peer]
            for peer, line in enumerate(self._records[1 - self.turn])
            if words[line] != call
        ]
        raise MismatchError(
            f"rank {', '.join(map(str, others))} calls something else: another collective, dtype, "
            "count, op or root; with check=True, or PYCOMM_CHECK=1, the message says what"
        )

    def check_recent(self) -> None:
        """Raise `PeerError` if a process has ended that arrived long ago."""
        first = min([self._words[line + 1] for line in self._awaited])
        if time.monotonic_ns() - first > _LATE:
            self.check()

    def _alive(self, peers: Sequence[int]) -> None:
        """Raise `PeerError` if one of `peers` is dead."""
        dead = [peer for peer in peers if self._dead(peer)]
        if dead:
            ranks = tuple(self._ranks[peer] for peer in dead)
            error = PeerError(f"the process of rank {', '.join(map(str, ranks))} has ended")
            error.peers = ranks
            raise error

    def _dead(self, peer: int) -> bool:
        try:
            return start_time(self.pids[peer]) != self.starts[peer]
        except OSError:
            return False  # unknown is not dead

    def check_dying(self) -> None:
        """Raise `PeerError` if a process of any rank has ended, or does so within a moment.

        A process that is killed gives up its memory before it counts as dead.
        """
        moment = time.monotonic() + _DYING
        while time.monotonic() < moment:
            self.check()
            time.sleep(0.002)

    def check(self) -> None:
        """Raise `PeerError` if a process of any rank has ended."""
        self._alive(range(len(self.pids)))
