"""Arrays of frameworks that do not exist, in device memory: each speaks one protocol."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycomm.bindings.cuda import cuda
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.devices import get_device
from pycomm.dtypes import as_dtype
from pycomm.streams import LEGACY, PER_THREAD, Stream

Array = np.ndarray[Any, Any]


class Interfaced:
    """An array as CuPy has one: ``__cuda_array_interface__`` with its stream."""

    def __init__(self, values: Array, device: int, stream: int | None = LEGACY) -> None:
        self.base = values if isinstance(values, DeviceArray) else to_device(values, device)
        self.stream = stream
        self.dtype = self.base.dtype
        self.changes: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.base.__cuda_array_interface__, "stream": self.stream, **self.changes}

    def numpy(self) -> Array:
        """Return its values, once its stream has done its work."""
        return read_back(self.base, self.stream)

    def __getitem__(self, key: slice) -> "Interfaced":
        return Interfaced(self.base[key], self.base.device, self.stream)


class Packed:
    """An array as JAX has one: DLPack only; it makes the consumer's stream wait for its own."""

    def __init__(self, values: Array, device: int, own: Stream | None = None) -> None:
        self.base = values if isinstance(values, DeviceArray) else to_device(values, device)
        self.own = own
        self.asked: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.base.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.asked.append(stream)
        if self.own is not None and stream is not None:
            event = self.own.record()
            with get_device(self.base.device).entered():
                cuda.check(cuda.cuStreamWaitEvent(stream, event.handle, 0), "cuStreamWaitEvent")
        return self.base.__dlpack__(stream=stream, **options)

    def numpy(self) -> Array:
        """Return its values."""
        return read_back(self.base, LEGACY)

    def __getitem__(self, key: slice) -> "Packed":
        return Packed(self.base[key], self.base.device, self.own)

    def new_empty(self, shape: tuple[int, ...]) -> "Packed":
        """Return a new array of this kind."""
        row = as_dtype(self.base.dtype)
        return Packed(allocate(get_device(self.base.device), shape, row), self.base.device)


def to_device(values: Array, device: int) -> DeviceArray:
    """Return a copy of host values in device memory."""
    array = np.asarray(values)
    return allocate(get_device(device), array.shape, as_dtype(array.dtype)).fill(array)


def read_back(base: DeviceArray, stream: int | None) -> Array:
    """Return the values of an array, once a stream has done its work."""
    with get_device(base.device).entered():
        if stream not in (None, LEGACY, PER_THREAD):
            cuda.check(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize")
        elif stream == PER_THREAD:
            cuda.check(cuda.cuStreamSynchronize(PER_THREAD), "cuStreamSynchronize")
    return base.copy()


def write_late(base: DeviceArray, values: Array, stream: int) -> ctypes.Array[Any]:
    """Let a stream write values, some time: what a kernel of a framework does."""
    raw = np.ascontiguousarray(values).tobytes()
    held = ctypes.create_string_buffer(raw, len(raw))
    with get_device(base.device).entered():
        code = cuda.cuMemcpyHtoDAsync_v2(base.pointer, ctypes.addressof(held), len(raw), stream)
    cuda.check(code, "cuMemcpyHtoDAsync")
    return held


__all__ = ["Interfaced", "Packed", "read_back", "to_device", "write_late"]


@contextmanager
def graph_of(run: Callable[[], Any], stream: Stream) -> Iterator[Callable[[], None]]:
    """Capture what `run` gives to a stream as a CUDA graph, and yield what launches it there."""
    graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
    with stream.device.entered():
        cuda.check(cuda.cuStreamBeginCapture_v2(stream.handle, 0), "cuStreamBeginCapture")
        run()
        code = cuda.cuStreamEndCapture(stream.handle, ctypes.byref(graph))
        cuda.check(code, "cuStreamEndCapture")
        code = cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, 0)
        cuda.check(code, "cuGraphInstantiate")

    def launch() -> None:
        with stream.device.entered():
            cuda.check(cuda.cuGraphLaunch(ready, stream.handle), "cuGraphLaunch")

    yield launch
    cuda.check(cuda.cuGraphExecDestroy(ready), "cuGraphExecDestroy")
    cuda.check(cuda.cuGraphDestroy(graph), "cuGraphDestroy")
