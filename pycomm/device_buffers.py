"""Arrays in device memory, by the protocols that they speak.

``__cuda_array_interface__`` is read first, because reading it costs little and takes nothing away
from anybody; DLPack where there is none, or where the interface cannot name the element type.
"""

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from pycomm.device_arrays import DeviceArray, allocate
from pycomm.devices import device_of, get_device
from pycomm.dlpack import CUDA_DEVICES, HOST_DEVICES, read
from pycomm.dtypes import BY_NUMPY, DType, as_dtype
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.streams import LEGACY, as_stream, current_stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceBuffer", "as_device_buffer", "new_device_buffer"]


_ELSEWHERE = (0, 0)


class DeviceBuffer:
    """Contiguous memory of one device that a call may read or write.

    Attributes
    ----------
    pointer : int
        Address of the first byte; may be 0 where there are none.
    shape : tuple of int
        The caller's shape.
    dtype : DType
        The row of the dtype table.
    count, nbytes : int
        Elements, and their bytes.
    owner : object
        What the caller passed in, and gets back.
    device : int
        The number of the device in this process.
    stream : int
        The stream that its owner uses: a call works there if it is given no other one.
    produced : bool
        Whether another stream must wait for that one before it touches the memory.
    held : object
        Whatever has to live as long as the buffer is in use.
    """

    __slots__ = (
        "count", "device", "dtype", "held", "nbytes", "owner", "pointer", "produced", "shape",
        "stream", "wrap",
    )  # fmt: skip

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: DType,
        device: int,
        owner: Any,
        stream: int = LEGACY,
        *,
        produced: bool = True,
    ) -> None:
        self.pointer, self.shape, self.dtype, self.device = pointer, shape, dtype, device
        self.count = math.prod(shape)
        self.nbytes = self.count * dtype.itemsize
        self.owner, self.stream, self.produced = owner, stream, produced
        self.held: Any = None
        self.wrap: Callable[[Any], Any] | None = None

    def result(self) -> Any:
        """Return what the caller gets."""
        return self.owner if self.wrap is None else self.wrap(self.owner)


def as_device_buffer(x: Any, writable: bool, name: str) -> DeviceBuffer | None:
    """Return `x` as a `DeviceBuffer` without a copy, None if it is not on a CUDA device.

    Raises
    ------
    ArgumentTypeError
        If it is on another kind of device, or has an unsupported dtype.
    ArgumentValueError
        If it is not C-contiguous, masked, read-only where it must be written, or names stream 0.
    """
    kind = _kind_of(x, name)
    interface = None
    if kind is None or kind[0] == 2:
        try:
            interface = getattr(x, "__cuda_array_interface__", None)
        except Exception as error:
            raise ArgumentTypeError(f"{name} refuses to be read: {error}") from error
    if interface is not None:
        found = _by_interface(x, interface, writable, name)
        if found is not None:
            return found
    if kind is None or kind == _ELSEWHERE:
        return None
    return _by_dlpack(x, kind[1], writable, name)


def _kind_of(x: Any, name: str) -> tuple[int, int] | None:
    """Return DLDeviceType and number of a device, `_ELSEWHERE` on the host, None if untold."""
    if not hasattr(x, "__dlpack_device__"):
        return None
    try:
        kind, number = map(operator.index, x.__dlpack_device__())
    except Exception as error:
        raise ArgumentTypeError(f"{name} does not say on which device it lies: {error}") from error
    if kind in CUDA_DEVICES:
        return kind, number
    if kind in HOST_DEVICES:
        return _ELSEWHERE
    raise ArgumentTypeError(
        f"{name} lies on device {kind}:{number}, which is neither the host nor CUDA's"
    )


def _by_interface(x: Any, interface: Any, writable: bool, name: str) -> DeviceBuffer | None:
    """Return what the interface describes; None if only DLPack can name its element type."""
    try:
        shape = tuple(map(operator.index, interface["shape"]))
        pointer, readonly = interface["data"]
        typestr, version = interface["typestr"], operator.index(interface["version"])
        strides = interface.get("strides")
        pointer = int(pointer or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"the __cuda_array_interface__ of {name} is wrong: {type(error).__name__}: {error}"
        ) from error
    if interface.get("mask") is not None:
        raise ArgumentValueError(f"{name} is a masked array; send its data and its mask")
    if any(length < 0 for length in shape):
        raise ArgumentValueError(f"{name} has a negative length: {shape}")
    dtype = _dtype_of(x, typestr)
    if dtype is None:
        return None
    _check_contiguous(shape, strides, dtype.itemsize, name)
    _check_writable(bool(readonly), writable, name)
    device = _device_at(pointer, math.prod(shape), dtype.itemsize, x, name)
    told = interface.get("stream") if version >= 3 else None
    if told is None:
        stream = current_stream(x, device)
        # Version 3 without a stream says that the data is there; version 2 says nothing.
        produced = version < 3
    elif told == 0:
        raise ArgumentValueError(
            f"the __cuda_array_interface__ of {name} names stream 0, which the protocol forbids "
            "because it could mean two streams: 1 is the legacy default stream, 2 the thread's"
        )
    else:
        stream, produced = as_stream(told), True
    return DeviceBuffer(
        pointer, shape, dtype, device, x, LEGACY if stream is None else stream, produced=produced
    )


def _by_dlpack(x: Any, number: int, writable: bool, name: str) -> DeviceBuffer:
    stream = current_stream(x, number)
    # Stream 0 is CUDA's own word for the legacy default stream, but not DLPack's.
    stream = stream or LEGACY
    found = read(x, stream)
    if found.device[0] not in CUDA_DEVICES:
        raise ArgumentTypeError(f"DLPack device type {found.device[0]} is not CUDA")
    dtype = as_dtype(found.dtype)
    _check_contiguous(found.shape, found.strides, dtype.itemsize, name)
    _check_writable(found.readonly, writable, name)
    device = _device_at(found.pointer, math.prod(found.shape), dtype.itemsize, x, name)
    buffer = DeviceBuffer(found.pointer, found.shape, dtype, device, x, stream)
    buffer.held = found.capsule
    return buffer


def _dtype_of(x: Any, typestr: Any) -> DType | None:
    """Return the row of an element type; None if its name does not tell it."""
    if not isinstance(typestr, str):
        raise ArgumentTypeError(f"typestr is a string, not {typestr!r}")
    if typestr[1:2] != "V":
        return as_dtype(typestr)
    # bfloat16 and float8 have no names of their own there.
    own = getattr(x, "dtype", None)
    if isinstance(own, np.dtype) and own in BY_NUMPY:
        return BY_NUMPY[own]
    if hasattr(x, "__dlpack__"):
        return None
    return as_dtype(typestr)  # which refuses it


def _check_contiguous(shape: tuple[int, ...], strides: Any, itemsize: int, name: str) -> None:
    if strides is None or 0 in shape:
        return
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if length != 1 and stride != expected:
            raise ArgumentValueError(
                f"{name} is strided (shape {shape}, strides {tuple(strides)} bytes); only "
                "C-contiguous arrays can be sent in place: pass a contiguous copy, and copy the "
                "result back if you need it there"
            )
        expected *= length


def _check_writable(readonly: bool, writable: bool, name: str) -> None:
    if readonly and writable:
        raise ArgumentValueError(
            f"{name} is read-only and the result would be written into it; pass out= or a copy"
        )


def _device_at(pointer: int, count: int, itemsize: int, x: Any, name: str) -> int:
    """Return the number of the device of some memory, as the driver tells it."""
    if count == 0:
        said = getattr(x, "__dlpack_device__", None)
        return int(said()[1]) if said is not None else -1  # on any
    device = device_of(pointer)
    if device is None:
        raise ArgumentValueError(
            f"{name} points to {pointer:#x}, which is no memory of CUDA's: was it freed?"
        )
    if pointer % itemsize:
        raise ArgumentValueError(
            f"{name} points to {pointer:#x}, which is not aligned to elements of {itemsize} bytes"
        )
    return device


def new_device_buffer(like: DeviceBuffer, shape: tuple[int, ...]) -> DeviceBuffer:
    """Return a new buffer of the dtype, device and kind of array of `like`.

    Raises
    ------
    ArgumentTypeError
        If that kind of array cannot be made; the caller then has to pass ``out``.
    """
    owner = like.owner
    make = getattr(owner, "new_empty", None)
    if make is not None:
        found = as_device_buffer(make(shape), True, "out")
        assert found is not None
        return found
    array = allocate(get_device(max(like.device, 0)), shape, like.dtype)
    buffer = DeviceBuffer(
        array.pointer, shape, like.dtype, array.device, array, like.stream, produced=False
    )
    if isinstance(owner, DeviceArray):
        return buffer
    namespace = getattr(owner, "__array_namespace__", None)
    root = sys.modules.get(type(owner).__module__.partition(".")[0])
    module = root if namespace is None else namespace()
    buffer.wrap = getattr(module, "from_dlpack", None)
    if buffer.wrap is None:
        raise ArgumentTypeError(
            f"cannot make a new {type(owner).__name__} for the result: pass out="
        )
    return buffer
