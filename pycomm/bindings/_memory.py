"""Memory that processes share: files that are mapped, and what the kernel copies between them."""

import ctypes
import mmap
import os
import weakref
from array import array
from typing import Any

__all__ = ["Reach", "admit", "at", "available", "mapped"]

_FAILED = ctypes.c_void_p(-1).value
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_PR_SET_PTRACER = 0x59616D61  # prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)


def _load(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_libc, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = result
    return function


_int, _long, _address, _size = ctypes.c_int, ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t
# The process; spans of this one and how many; spans of the other one and how many; flags.
_copy = (_int, _address, ctypes.c_ulong, _address, ctypes.c_ulong, ctypes.c_ulong)
_read = _load("process_vm_readv", ctypes.c_ssize_t, *_copy)
_write = _load("process_vm_writev", ctypes.c_ssize_t, *_copy)
_mmap = _load("mmap", _address, _address, _size, _int, _int, _int, _long)
_munmap = _load("munmap", _int, _address, _size)
_madvise = _load("madvise", _int, _address, _size, _int)
_prctl = _load("prctl", _int, _int, *4 * (ctypes.c_ulong,))


def at(address: int, nbytes: int) -> Any:
    """Return memory as an object with a buffer, which does not hold its owner."""
    return (ctypes.c_char * nbytes).from_address(address)


def mapped(fd: int, nbytes: int) -> Any:
    """Return the first bytes of a file as an object with a buffer; unmapped when that dies.

    Python's own mmap would keep a descriptor of the file open for every mapping.

    Raises
    ------
    OSError
        If the system refuses.
    """
    both = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, nbytes, both, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{nbytes} bytes cannot be mapped: {os.strerror(code)}")
    if _HUGE is not None:
        # Where the system gives large pages to such files, it wants to be told; else it refuses.
        _madvise(address, nbytes, _HUGE)
    memory = at(address, nbytes)
    # Not at exit: other threads may still use it, and the system frees it anyway.
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    return memory


def available() -> bool:
    """Return whether this system has such calls at all."""
    return _read is not None and _write is not None


def admit(pid: int) -> None:
    """Let a process and its descendants reach memory of this process.

    Where the Yama security module is at its level 1, as on Ubuntu, only ancestors may otherwise.
    Other systems have no such restriction, and nothing happens.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


class Reach:
    """Reads and writes memory of other processes, for one thread at a time."""

    def __init__(self) -> None:
        # Two spans (iovec): of this process and of the other, each an address and a length.
        self._spans = array("L", (0, 0, 0, 0))
        self._own, _ = self._spans.buffer_info()
        self._other = self._own + 2 * self._spans.itemsize

    def read(self, pid: int, own: int, other: int, nbytes: int) -> None:
        """Copy memory of process `pid` at address `other` to address `own`.

        The caller knows that `nbytes` bytes are valid at both.

        Raises
        ------
        OSError
            If the kernel refuses: EPERM where this process may not, ESRCH where there is no such
            process any more, EFAULT where it has no such memory.
        """
        self._move(_read, pid, own, other, nbytes)

    def write(self, pid: int, own: int, other: int, nbytes: int) -> None:
        """Copy memory at address `own` to address `other` of process `pid`; see `read`."""
        self._move(_write, pid, own, other, nbytes)

    def _move(self, function: Any, pid: int, own: int, other: int, nbytes: int) -> None:
        spans = self._spans
        while True:
            spans[0], spans[1], spans[2], spans[3] = own, nbytes, other, nbytes
            done = function(pid, self._own, 1, self._other, 1, 0)
            if done == nbytes:
                return
            if done <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"memory of process {pid}: {os.strerror(code)}")
            own, other, nbytes = own + done, other + done, nbytes - done
