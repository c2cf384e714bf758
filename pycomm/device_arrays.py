"""Arrays in device memory that pycomm makes."""

import contextlib
import ctypes
import math
import os
import queue
import threading
from typing import Any

import numpy as np

from pycomm.bindings.cuda import cuda
from pycomm.devices import Device, relax, usable
from pycomm.dlpack import export
from pycomm.dtypes import DType
from pycomm.errors import CUDAError
from pycomm.streams import LEGACY

__all__ = ["DeviceArray", "allocate"]


class DeviceArray:
    """An array in device memory, made by `Communicator.empty`.

    It has no arithmetic: pass it to your library, which sees it without a copy through
    ``__cuda_array_interface__`` or DLPack (``cupy.asarray(x)``, ``torch.from_dlpack(x)``).

    Attributes
    ----------
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        The element type.
    pointer : int
        Address of the first element.
    row : DType
        The row of the dtype table.
    """

    def __init__(
        self, pointer: int, shape: tuple[int, ...], dtype: DType, device: Device, base: Any
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.row = dtype
        self._device = device
        self._base = base

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.row.numpy

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.size * self.row.itemsize

    @property
    def device(self) -> int:
        """The number of the device in this process."""
        return self._device.ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array, as version 3 of the protocol describes it."""
        kind = self.row.numpy
        return {
            "shape": self.shape,
            # What has no name of its own there is told apart by `dtype`.
            "typestr": kind.str if kind.isbuiltin == 1 else f"<V{kind.itemsize}",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
            "stream": LEGACY,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this memory can be shared as it is, not copied")
        versioned = max_version is not None and max_version[0] >= 1
        return export(
            self.pointer, self.shape, self.row.numpy, self._device.ordinal, self,
            versioned=versioned,
        )  # fmt: skip

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __getitem__(self, key: slice) -> "DeviceArray":
        """Return a view of consecutive elements along axis 0."""
        if not isinstance(key, slice) or not self.shape:
            raise TypeError("a device array is cut by a slice of axis 0 only")
        start, stop, step = key.indices(self.shape[0])
        if step != 1:
            raise ValueError("a device array is cut in steps of 1 only")
        rest = self.shape[1:]
        pointer = self.pointer + start * math.prod(rest) * self.row.itemsize
        shape = (max(stop - start, 0), *rest)
        return DeviceArray(pointer, shape, self.row, self._device, self)

    def fill(self, values: Any) -> "DeviceArray":
        """Copy host values, which are broadcast to this shape, into it; waits until that is done.

        Returns
        -------
        DeviceArray
            This array.
        """
        given = np.empty(self.shape, self.row.numpy)
        given[...] = values
        if given.size:
            with self._device.entered():
                code = cuda.cuMemcpyHtoD_v2(self.pointer, given.ctypes.data, given.nbytes)
            cuda.check(code, "cuMemcpyHtoD")
        return self

    def copy(self) -> np.ndarray[Any, Any]:
        """Return its values as a NumPy array, once what the default stream does is done."""
        host = np.empty(self.shape, self.row.numpy)
        if host.size:
            with self._device.entered():
                code = cuda.cuMemcpyDtoH_v2(host.ctypes.data, self.pointer, host.nbytes)
            cuda.check(code, "cuMemcpyDtoH")
        return host

    def __repr__(self) -> str:
        kind = self.row.name
        return f"<pycomm.DeviceArray of {self.shape} {kind} on device {self._device.ordinal}>"


# Memory that nobody uses any more. To free it waits for the device, and this may be any thread: one
# inside NCCL, or the one that ends what the device hangs in. So a thread does nothing else.
_dead: queue.SimpleQueue[tuple[Device, int]] = queue.SimpleQueue()  # whose put may interrupt itself
_reaper: threading.Thread | None = None


def _reap() -> None:
    global _reaper
    if _reaper is None and usable():
        _reaper = threading.Thread(target=_free, name="pycomm memory", daemon=True)
        _reaper.start()


def _free() -> None:
    relax()
    while True:
        device, pointer = _dead.get()
        if usable():
            # Nobody could do anything about a failure; a context that is lost has no memory.
            with contextlib.suppress(CUDAError), device.entered():
                cuda.cuMemFree_v2(pointer)


def _after_fork() -> None:
    global _reaper
    _reaper = None


os.register_at_fork(after_in_child=_after_fork)


class _Block:
    """Device memory that is freed with its last user."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        pointer = ctypes.c_uint64()
        if nbytes:
            with device.entered():
                code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), nbytes)
            cuda.check(code, "cuMemAlloc")
        self.pointer = pointer.value

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            _dead.put((self._device, self.pointer))
            _reap()


def allocate(device: Device, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
    """Return a new array in ordinary device memory, with whatever values that has."""
    block = _Block(device, math.prod(shape) * dtype.itemsize)
    return DeviceArray(block.pointer, shape, dtype, device, block)
