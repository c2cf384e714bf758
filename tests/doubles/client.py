"""A small client of the doubles for their own tests: ctypes, and nothing of pycomm."""

import ctypes
import os
import time
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_int, c_longlong, c_size_t, c_ulonglong, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
IN_PROGRESS = 7


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy data type of one of `TYPES`."""
    return np.dtype(getattr(ml_dtypes, name, name))


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", c_char * 128)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` as far as its first field of choice; the library knows by the size."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("rest", c_int),
    ]


def config(blocking: bool) -> Config:
    """Return a configuration of the oldest size."""
    return Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, int(blocking), -(2**31))


class CudaError(Exception):
    """A function of CUDA that failed; ``code`` says how."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Cuda:
    """The driver, with one context of one device."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.double_races.restype = c_ulonglong
        self.library.double_calls.restype = c_ulonglong
        self.library.double_allocated.restype = c_longlong
        self.library.double_last_race.restype = c_char_p
        self("cuInit", 0)
        self.context = c_void_p()
        self("cuDevicePrimaryCtxRetain", byref(self.context), device)
        self("cuCtxSetCurrent", self.context)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; raise what it reports."""
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code)

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code."""
        return int(getattr(self.library, name)(*arguments))

    def stream(self) -> c_void_p:
        """Return a new stream that the legacy stream does not touch."""
        stream = c_void_p()
        self("cuStreamCreate", byref(stream), 1)
        return stream

    def event(self) -> c_void_p:
        """Return a new event."""
        event = c_void_p()
        self("cuEventCreate", byref(event), 2)
        return event

    def allocate(self, nbytes: int) -> c_void_p:
        """Return the address of new memory."""
        address = c_void_p()
        self("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return pinned memory as bytes."""
        address = c_void_p()
        self("cuMemHostAlloc", byref(address), c_size_t(nbytes), 0)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value or 0))

    def upload(self, array: np.ndarray, stream: c_void_p | None = None) -> c_void_p:
        """Return the address of a copy of an array."""
        address = self.allocate(max(array.nbytes, 1))
        data = array.ctypes.data_as(c_void_p)
        self("cuMemcpyHtoDAsync_v2", address, data, c_size_t(array.nbytes), stream)
        return address

    def download(self, address: c_void_p, like: np.ndarray, stream: c_void_p | None) -> np.ndarray:
        """Return what memory holds after all that is in the stream."""
        result = np.empty_like(like)
        data = result.ctypes.data_as(c_void_p)
        self("cuMemcpyDtoHAsync_v2", data, address, c_size_t(result.nbytes), stream)
        self("cuStreamSynchronize", stream)
        return result


class Nccl:
    """The library, with helpers that a rank of a test needs."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["PYCOMM_NCCL_LIB"])
        self.library.ncclGetLastError.restype = c_char_p
        self.library.double_last_misuse.restype = c_char_p
        self.library.double_misuse.restype = c_ulonglong

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function that has to succeed."""
        code = self.code(name, *arguments)
        assert code == 0, (name, code, self.last_error())

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code."""
        return int(getattr(self.library, name)(*arguments))

    def last_error(self) -> str:
        """Return the text of the last error."""
        return str(self.library.ncclGetLastError(None).decode())

    def init(self, nranks: int, unique: UniqueId, rank: int) -> c_void_p:
        """Return a communicator, when all ranks have come."""
        comm = c_void_p()
        self("ncclCommInitRank", byref(comm), nranks, unique, rank)
        return comm

    def state(self, comm: c_void_p) -> int:
        """Return the asynchronous error."""
        code = c_int(-1)
        self("ncclCommGetAsyncError", comm, byref(code))
        return code.value

    def settle(self, comm: c_void_p, seconds: float = 5) -> int:
        """Return the asynchronous error when there is no operation in progress any more."""
        wait_for(lambda: self.state(comm) != IN_PROGRESS, seconds)
        return self.state(comm)

    def all_reduce(
        self,
        comm: c_void_p,
        source: c_void_p,
        target: c_void_p,
        count: int,
        stream: c_void_p,
        dtype: str = "float32",
        op: int = 0,
    ) -> int:
        """Enqueue and return the code."""
        arguments = (source, target, c_size_t(count), TYPES[dtype], op, comm, stream)
        return self.code("ncclAllReduce", *arguments)


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Wait for a condition, for so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
