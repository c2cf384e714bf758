"""Memory that all ranks of a host map: files without a name.

A region is a memory file without a name (memfd). Peers open it through ``/proc/PID/fd``; it is gone
when the last process that maps it is, however that one ends, and it is not bound by the size of
/dev/shm. Its pages lie on the NUMA node of the core that first writes to them.
"""

import errno
import os
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from pycomm.bindings._memory import mapped
from pycomm.buffers import address_of
from pycomm.transports.base import Array
from pycomm.units import parse_size

__all__ = [
    "REGIONS", "Region", "Regions", "ancestors", "available_memory", "second_level_cache",
    "start_time",
]  # fmt: skip

_KEPT = 512  # regions of peers that stay mapped
_SHORT, _SLAB = 64 << 10, 1 << 20  # bytes of arrays that share a region, and of such a region
_ALIGNMENT = 64
_SWEEP_EVERY = 0.1  # seconds
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)

#: Number, file descriptor, length, and an offset in it.
Region = tuple[int, int, int, int]


def ancestors(pid: int) -> list[tuple[int, str]]:
    """Return the parents of a process, nearest first, each with the name of its program."""
    found: list[tuple[int, str]] = []
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            name, fields = _stat(pid)
            found.append((pid, name))
            pid = int(fields[1])
    return found[1:]


def _stat(pid: int) -> tuple[str, list[str]]:
    """Return the name of a process, which may hold anything, and the fields after it."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], after.split()


def start_time(pid: int) -> str | None:
    """Return when a process was started, None if there is no such process or it is dead.

    Raises
    ------
    OSError
        If the system does not say, for want of a file descriptor, for instance.
    """
    try:
        _, fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def available_memory(root: str = "/") -> int | None:
    """Return the bytes that the system, or the container, could give; None if it does not say.

    `root` is where the system's files are.
    """
    limits = []
    with suppress(OSError, ValueError, IndexError), open(f"{root}proc/meminfo") as file:  # noqa: PTH123
        limits += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    # What a container may have (cgroups, version 2); its caches of files can be given up.
    with suppress(OSError, ValueError, KeyError):
        group = Path(root, "sys/fs/cgroup")
        most = int((group / "memory.max").read_text())  # "max" where there is no limit
        used = int((group / "memory.current").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        limits.append(max(0, most - used + int(facts["inactive_file"])))
    return min(limits, default=None)


def second_level_cache(root: str = "/") -> int:
    """Return the bytes of a core's second-level cache; 1 MiB if the system does not say."""
    with suppress(OSError, ValueError):
        text = Path(root, "sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return parse_size(text)
    return 1 << 20


class Regions:
    """The regions of this process, and those of peers that it has opened.

    Attributes
    ----------
    freed : int
        How many regions of this process have been freed so far.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, int, int]] = {}  # address -> number, fd, bytes
        self._starts: list[int] = []  # addresses, ascending
        self._numbers = count(1)
        self.forget_slab()
        self._swept = 0.0
        self._total = 0  # bytes of all regions
        self.freed = 0
        self._opened: OrderedDict[tuple[int, str, int], tuple[Array, int, os.stat_result]]
        self._opened = OrderedDict()

    def forget_slab(self) -> None:
        """Share no region with arrays that were made before: after a fork they are the parent's."""
        self._lock = threading.Lock()
        self._slab: tuple[weakref.ref[Array], int] | None = None  # and what of it is used

    def allocate(self, nbytes: int) -> Array:
        """Return new zeros, as bytes, that peers can map; freed with the last view of them.

        Short arrays share a region, which is freed with the last view of any of them.

        Raises
        ------
        MemoryError
            If there is less memory, before any page of it is used, or no descriptor is left.
        OSError
            If the system has no such memory.
        """
        if nbytes > _SHORT:
            now = time.monotonic()
            if now - self._swept > _SWEEP_EVERY:
                self._swept = now
                self.sweep()
            return self._region(nbytes)[:nbytes]
        # Whoever comes meanwhile, another thread or a signal handler in the midst of this, does not
        # wait: it gets a region of its own.
        if not self._lock.acquire(blocking=False):
            return self._region(nbytes)[:nbytes]
        try:
            slab, used = (None, 0) if self._slab is None else (self._slab[0](), self._slab[1])
            if slab is None or used + nbytes > slab.size:
                slab, used = self._region(_SLAB), 0
            self._slab = weakref.ref(slab), used + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return slab[used : used + nbytes]
        finally:
            self._lock.release()

    def _region(self, nbytes: int) -> Array:
        free = available_memory()
        if free is not None and nbytes + self._total > free:
            self.sweep()  # what peers have freed meanwhile counts as free
            promised = self._untouched()
            free = (available_memory() or 0) - promised
            if nbytes > free:
                raise MemoryError(
                    f"{nbytes} bytes of registered memory asked for, the system has {max(0, free)} "
                    f"bytes, {promised} bytes promised to arrays that are not written yet left out"
                )
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory that processes can share so")
        try:
            fd = os.memfd_create("pycomm", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, nbytes)
                memory = mapped(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise MemoryError(
                f"{nbytes} bytes of registered memory: {error.strerror}; this process has "
                f"{len(self._made)} such pieces, each takes a descriptor (ulimit -n) and a mapping"
            ) from error
        array = np.frombuffer(memory, np.uint8)
        address = address_of(array)
        self._made[address] = (next(self._numbers), fd, nbytes)
        self._total += nbytes
        insort(self._starts, address)
        weakref.finalize(memory, self._free, address)
        return array

    def _untouched(self) -> int:
        """Return the bytes of regions that have no pages yet: they will be wanted."""
        return sum(
            max(0, size - 512 * os.fstat(fd).st_blocks)
            for _, fd, size in self._made.copy().values()
        )

    def _free(self, address: int) -> None:
        _, fd, size = self._made.pop(address)
        self._total -= size
        self._starts.remove(address)
        os.close(fd)
        self.freed += 1

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the region that holds a piece of memory, and where in it that begins."""
        # The end of another array may take its region out meanwhile: then this misses, no more.
        starts = self._starts
        index = bisect_right(starts, address) - 1
        try:
            start = starts[index] if index >= 0 else 0
        except IndexError:
            return None
        number, fd, size = self._made.get(start, (0, 0, -1))
        offset = address - start
        return (number, fd, size, offset) if 0 <= offset <= size - nbytes else None

    def open(self, pid: int, start: str, number: int, fd: int, size: int) -> Array:
        """Return the bytes of a region of a peer, a process that was started at `start`.

        Raises
        ------
        OSError
            If this process may not open it.
        """
        key = (pid, start, number)
        found = self._opened.get(key)
        if found is not None:
            with suppress(KeyError):  # another thread has let go of it meanwhile
                self._opened.move_to_end(key)
            return found[0]
        handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            array = np.frombuffer(mapped(handle, size), np.uint8)
            self._opened[key] = array, fd, os.fstat(handle)
        finally:
            os.close(handle)
        if len(self._opened) > _KEPT:
            self._opened.popitem(last=False)
        return array

    def sweep(self, pids: Sequence[int] | None = None) -> None:
        """Let go of regions that peers have freed; of some of them only, if `pids` are given."""
        for key, (_, fd, file) in self._opened.copy().items():
            pid = key[0]
            if pids is not None and pid not in pids:
                continue
            try:
                # Numbers of descriptors and processes are used again, those of files are not.
                now = os.stat(f"/proc/{pid}/fd/{fd}")  # noqa: PTH116
                alive = os.path.samestat(now, file)
            except OSError:
                alive = False
            if not alive:
                self._opened.pop(key, None)


#: Those of this process: memory may be used with any communicator.
REGIONS = Regions()
os.register_at_fork(after_in_child=REGIONS.forget_slab)
