"""Memory that all ranks of a host map: nameless files, and a board of flags to meet at.

A region is a memory file without a name (memfd). Peers open it through ``/proc/PID/fd``; it is gone
when the last process that maps it is, however that one ends, and it is not bound by the size of
/dev/shm.

The board has a page for each rank, written by that rank alone: a sequence number that says how
often it has arrived, and what it has published for an arrival. Publishing comes before arriving: on
x86 stores become visible in the order in which they are made; elsewhere a lock is released and
taken between them, which on ARM64 is a store-release and a load-acquire, and together a full
barrier.
"""

import mmap
import os
import platform
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm.errors import PeerError
from pycomm.transports.base import Array

__all__ = ["REGIONS", "Arrival", "Board", "Regions", "available_memory", "start_time"]

_WORDS = 8  # of a published record: one cache line
_RECORD = struct.Struct(f"{_WORDS}q")
_LINE = 64  # bytes of a cache line: flag and records do not share one
_KEPT = 64  # regions of a peer that stay mapped
_LOOK_EVERY = 0.25  # seconds between looks whether peers live
_ORDERED = platform.machine() in ("x86_64", "AMD64")
_fence = threading.Lock()
_fence.acquire()


def start_time(pid: int) -> str | None:
    """Return when a process was started, None if there is no such process or it is dead."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def available_memory() -> int | None:
    """Return the bytes that the system could give, None if it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


class Regions:
    """The regions of this process, and those of peers that it has opened."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, int, int]] = {}  # number -> fd, address, bytes
        self._numbers = 0
        self._opened: OrderedDict[tuple[int, str, int], Array] = OrderedDict()

    def allocate(self, nbytes: int) -> Array:
        """Return new zeros, as bytes, that peers can map; freed with the last view of them.

        Raises
        ------
        MemoryError
            If there is less memory, before any page of it is used.
        """
        free = available_memory()
        if free is not None and nbytes > free:
            raise MemoryError(
                f"{nbytes} bytes of registered memory asked for, the system has {free} bytes"
            )
        size = max(nbytes, 1)
        fd = os.memfd_create("pycomm", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        array = np.frombuffer(memory, np.uint8)
        self._numbers += 1
        number = self._numbers
        self._made[number] = (fd, int(array.__array_interface__["data"][0]), size)
        weakref.finalize(memory, self._free, number)
        return array[:nbytes]

    def _free(self, number: int) -> None:
        fd, _, _ = self._made.pop(number)
        os.close(fd)

    def find(self, address: int, nbytes: int) -> tuple[int, int, int, int] | None:
        """Return number, fd, length and offset of the region that holds a piece of memory."""
        # A copy, since the end of an array may take its region out meanwhile.
        for number, (fd, start, size) in self._made.copy().items():
            if start <= address and address + nbytes <= start + size:
                return number, fd, size, address - start
        return None

    def open(self, pid: int, start: str, number: int, fd: int, size: int) -> Array:
        """Return the bytes of a region of a peer, a process that was started at `start`.

        Raises
        ------
        OSError
            If this process may not open it.
        """
        key = (pid, start, number)
        found = self._opened.get(key)
        if found is None:
            handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = np.frombuffer(mmap.mmap(handle, size), np.uint8)
            finally:
                os.close(handle)
            self._opened[key] = found
            if len(self._opened) > _KEPT:
                self._opened.popitem(last=False)
        else:
            self._opened.move_to_end(key)
        return found


#: Those of this process: memory may be used with any communicator.
REGIONS = Regions()


class Board:
    """Where the ranks of a communicator meet, all on one host.

    Parameters
    ----------
    rank : int
        Whose side this is.
    pages : sequence of array
        The page of each rank, of `SIZE` bytes, zeros at first.
    pids, starts : sequence
        The process of each rank, and when it was started.
    crowded : bool
        Whether there are more ranks than cores: waiting then yields the core each time.
    """

    #: Bytes of a page: a flag, and two records in turn.
    SIZE = 4 * _LINE

    def __init__(
        self,
        rank: int,
        pages: Sequence[Array],
        pids: Sequence[int],
        starts: Sequence[str],
        *,
        crowded: bool = False,
    ) -> None:
        self._rank = rank
        self._pages: list[Any] = [page.data for page in pages]
        self._flags = [page[:8].data.cast("Q") for page in pages]
        self._peers = [peer for peer in range(len(pages)) if peer != rank]
        self.pids = tuple(pids)
        self.starts = tuple(starts)
        self._sequence = 0
        self.crowded = crowded

    def arrive(self, *record: int) -> "Arrival":
        """Publish a record of up to eight numbers, and arrive; the others' are in the result.

        It holds until all have arrived once more: records have two places in turn.
        """
        self._sequence += 1
        place = _LINE * (1 + self._sequence % 2)
        padded = record + (0,) * (_WORDS - len(record))
        _RECORD.pack_into(self._pages[self._rank], place, *padded)
        if not _ORDERED:
            _fence.release()
            _fence.acquire()
        self._flags[self._rank][0] = self._sequence
        return Arrival(self, self._sequence)

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not arrived so often."""
        flags = self._flags
        return [peer for peer in self._peers if flags[peer][0] < sequence]

    def records(self, sequence: int) -> list[tuple[int, ...]]:
        """Return what each rank has published for an arrival that is complete."""
        place = _LINE * (1 + sequence % 2)
        return [_RECORD.unpack_from(page, place) for page in self._pages]

    def check(self, missing: Sequence[int]) -> None:
        """Raise `PeerError` if one of the ranks that are missing is dead."""
        dead = [peer for peer in missing if start_time(self.pids[peer]) != self.starts[peer]]
        if dead:
            error = PeerError(f"the process of rank {', '.join(map(str, dead))} has ended")
            error.peers = tuple(dead)
            raise error


class Arrival:
    """The `Pending` of one arrival of all ranks."""

    __slots__ = ("_board", "_look_at", "_sequence")

    def __init__(self, board: Board, sequence: int) -> None:
        self._board = board
        self._sequence = sequence
        self._look_at = 0.0

    def test(self) -> bool:
        """Return whether all have arrived.

        Raises
        ------
        PeerError
            If a process has ended that has not.
        """
        missing = self._board.missing(self._sequence)
        if not missing:
            if not _ORDERED:
                _fence.release()
                _fence.acquire()
            return True
        if self._board.crowded:
            os.sched_yield()
        now = time.monotonic()
        if now >= self._look_at:
            if self._look_at:
                self._board.check(missing)
            self._look_at = now + _LOOK_EVERY
        return False

    def records(self) -> list[tuple[int, ...]]:
        """Return what each rank has published, once all have arrived."""
        return self._board.records(self._sequence)
