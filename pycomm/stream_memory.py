"""Scratch in device memory, in the order of a stream."""

import ctypes
from collections.abc import Callable
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import CUdevice_attribute
from pycomm.devices import Device

__all__ = ["FixedMemory", "StreamMemory", "copy"]


class StreamMemory:
    """Scratch of one run: taken in the order of a stream, and given back in it.

    With `fixed` it is taken once and kept for the next run: memory of a plan.
    """

    def __init__(self, device: Device, fixed: "FixedMemory | None" = None) -> None:
        self._fixed = fixed
        self._taken: list[int] = []
        self._pools = device.attribute(
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        )

    def take(self, nbytes: int, stream: int) -> int:
        """Return the address of so many bytes."""
        nbytes = max(nbytes, 1)
        if self._fixed is not None:
            return self._fixed.take(nbytes)
        pointer = ctypes.c_uint64()
        if self._pools:
            code = cuda.cuMemAllocAsync(ctypes.byref(pointer), nbytes, stream)
            cuda.check(code, "cuMemAllocAsync")
        else:
            cuda.check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), nbytes), "cuMemAlloc")
        self._taken.append(pointer.value)
        return pointer.value

    def give_back(self, stream: int) -> None:
        """Give back all of it, once the stream has come so far."""
        for pointer in self._taken:
            if self._pools:
                cuda.check(cuda.cuMemFreeAsync(pointer, stream), "cuMemFreeAsync")
            else:  # which waits until nothing uses the device
                cuda.check(cuda.cuMemFree_v2(pointer), "cuMemFree")
        self._taken.clear()
        if self._fixed is not None:
            self._fixed.rewind()


class FixedMemory:
    """The scratch of a plan: blocks that are the same in each run."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._blocks: list[Any] = []
        self._next = 0

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes; in each run the same, if asked in the same order."""
        if self._next == len(self._blocks):
            self._blocks.append(self._allocate(nbytes))
        block = self._blocks[self._next]
        self._next += 1
        return int(block.pointer)

    def rewind(self) -> None:
        """Begin the next run."""
        self._next = 0


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy device memory, in the order of a stream."""
    if nbytes and target != source:
        code = cuda.cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)
        cuda.check(code, "cuMemcpyDtoDAsync")
