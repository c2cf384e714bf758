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
        self._stream = 0
        self._pools = device.attribute(
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        )

    @property
    def cold(self) -> bool:
        """Whether it is that of a plan which has not run yet."""
        return self._fixed is not None and not self._fixed.warm

    def run(self, stream: int) -> "StreamMemory":
        """Return it, as the scope of a run on a stream."""
        self._stream = stream
        return self

    def __enter__(self) -> "StreamMemory":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Give back all of it, once the stream has come so far."""
        if self._fixed is not None:
            self._fixed.rewind(complete=error is None)
        codes = []
        while self._taken:
            pointer = self._taken.pop()
            if self._pools:
                codes.append(cuda.cuMemFreeAsync(pointer, self._stream))
            else:  # which waits until nothing uses the device
                codes.append(cuda.cuMemFree_v2(pointer))
        if error is None:
            for code in codes:
                cuda.check(code, "cuMemFree")

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes."""
        nbytes = max(nbytes, 1)
        if self._fixed is not None:
            return self._fixed.take(nbytes)
        pointer = ctypes.c_uint64()
        if self._pools:
            code = cuda.cuMemAllocAsync(ctypes.byref(pointer), nbytes, self._stream)
            cuda.check(code, "cuMemAllocAsync")
        else:
            cuda.check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), nbytes), "cuMemAlloc")
        self._taken.append(pointer.value)
        return pointer.value


class FixedMemory:
    """The scratch of a plan: blocks that are the same in each run."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._blocks: list[Any] = []
        self._next = 0
        #: Whether a run has taken all that it needs.
        self.warm = False

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes; in each run the same, if asked in the same order."""
        if self._next == len(self._blocks):
            self._blocks.append(self._allocate(nbytes))
        block = self._blocks[self._next]
        self._next += 1
        return int(block.pointer)

    def rewind(self, *, complete: bool) -> None:
        """Begin the next run, after one that was completed, or not."""
        self._next = 0
        self.warm |= complete


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy device memory, in the order of a stream."""
    if nbytes and target != source:
        code = cuda.cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)
        cuda.check(code, "cuMemcpyDtoDAsync")
