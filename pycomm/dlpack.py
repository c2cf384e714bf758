"""DLPack capsules: reading arrays out of them, and device memory into them.

NumPy reads DLPack too, but knows neither bfloat16 nor float8, which are what frameworks send. The
structures follow the DLPack specification, version 1.0 (dlpack.h of the DMLC project).
"""

import ctypes
import math
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pycomm.errors import ArgumentTypeError

__all__ = ["CUDA_DEVICES", "HOST_DEVICES", "Exported", "export", "from_dlpack", "peek", "read"]

#: DLDeviceType values whose memory the host can read: CPU, pinned by CUDA, pinned by ROCm.
HOST_DEVICES = frozenset({1, 3, 11})
#: Those of CUDA's own memory: of a device, and managed.
CUDA_DEVICES = frozenset({2, 13})
_CUDA = 2

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# (DLDataTypeCode, bits) -> dtype.
_DTYPES: dict[tuple[int, int], Any] = {
    **{(0, 8 * size): np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{(1, 8 * size): np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{(2, 8 * size): np.dtype(f"f{size}") for size in (2, 4, 8)},
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (5, 64): np.dtype(np.complex64),
    (5, 128): np.dtype(np.complex128),
    (6, 8): np.dtype(np.bool_),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
}


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


# To read: data, device type and number, axes, dtype code, bits and lanes, addresses of shape and
# strides, byte offset; and what comes before in the versioned form: version, two addresses, flags.
_TENSOR = struct.Struct("QiiiBBHQQQ")
_HEAD = struct.Struct("IIQQQ")
_BOTH = _HEAD.size + _TENSOR.size
_WHERE = struct.Struct("Q8xi4xQQQ")  # what of a tensor is no fact but a place: and its axes


class _VersionedHead(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p


class _Exporter:
    """Memory that belongs to a capsule, in the form NumPy takes; keeps the capsule alive."""

    def __init__(self, interface: dict[str, Any], capsule: Any) -> None:
        self.__array_interface__ = interface
        # Never renamed to "used_dltensor": the capsule's own destructor then frees the tensor.
        self.capsule = capsule


class Exported(NamedTuple):
    """Memory that an exporter has described.

    Attributes
    ----------
    pointer : int
        Address of the first element; may be 0 where there are none.
    shape, strides : tuple of int
        Its shape; bytes from element to element along each axis, None for C order.
    dtype : numpy.dtype
        The element type.
    readonly : bool
        Whether it must not be written.
    device : tuple of int
        DLDeviceType and number.
    capsule : object
        What keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    readonly: bool
    device: tuple[int, int]
    capsule: Any


def read(x: Any, stream: int | None = None) -> Exported:
    """Return what `x` exports by DLPack.

    Parameters
    ----------
    x : array
        Has a ``__dlpack__`` method.
    stream : int, optional
        For device memory: the stream that is going to use it. The exporter makes it wait until the
        data is there.

    Raises
    ------
    ArgumentTypeError
        If the producer refuses, or for a dtype or DLPack version this reader does not know.
    """
    try:
        try:
            if stream is None:
                capsule = x.__dlpack__(max_version=(1, 0))
            else:
                capsule = x.__dlpack__(max_version=(1, 0), stream=stream)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = x.__dlpack__() if stream is None else x.__dlpack__(stream=stream)
    except Exception as error:
        raise ArgumentTypeError(f"{type(x).__name__} refuses to be read: {error}") from error
    raw, readonly = _open(capsule)
    data, kind, number, ndim, code, bits, lanes, shape_at, strides_at, offset = _TENSOR.unpack(raw)
    dtype = _DTYPES.get((code, bits))
    if ndim < 0:
        raise ArgumentTypeError(f"a DLPack tensor of {ndim} axes")
    if dtype is None or lanes != 1:
        raise ArgumentTypeError(
            f"DLPack dtype with code {code}, {bits} bits and {lanes} lanes is not supported"
        )
    strides = None
    if strides_at:
        strides = tuple(step * dtype.itemsize for step in _numbers(strides_at, ndim))
    shape = _numbers(shape_at, ndim)
    return Exported(data + offset, shape, strides, dtype, readonly, (kind, number), capsule)


def peek(x: Any, stream: int) -> tuple[tuple[bytes, ...], int, Any]:
    """Return what `x` exports, to be compared, its pointer, and the capsule; quicker than `read`.

    What is equal describes memory of equal device, dtype, shape and strides, and is as read-only.

    Raises
    ------
    Exception
        Whatever is wrong with it, which `read` can say.
    """
    capsule = x.__dlpack__(max_version=(1, 0), stream=stream)
    if _is_valid(capsule, b"dltensor_versioned"):
        raw = ctypes.string_at(_get_pointer(capsule, b"dltensor_versioned"), _BOTH)
        head, raw = raw[: _HEAD.size], raw[_HEAD.size :]
        head = head[:8] + head[24:]  # version and flags
    else:
        head, raw = b"", ctypes.string_at(_get_pointer(capsule, b"dltensor"), _TENSOR.size)
    data, ndim, shape_at, strides_at, offset = _WHERE.unpack(raw)
    shape = ctypes.string_at(shape_at, 8 * ndim) if ndim > 0 else b""
    strides = ctypes.string_at(strides_at, 8 * ndim) if strides_at and ndim > 0 else b""
    return (head, raw[8:24], shape, strides), data + offset, capsule


def _numbers(address: int, count: int) -> tuple[int, ...]:
    if not count:
        return ()
    return struct.unpack(f"{count}q", ctypes.string_at(address, 8 * count))


def from_dlpack(x: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view of the host memory that `x` exports by DLPack.

    Strides are honoured, the read-only flag is kept, and the view keeps the exporter's memory
    alive. Nothing is copied.

    Raises
    ------
    ArgumentTypeError
        If the producer refuses, or for a dtype, device or DLPack version this reader does not know.
    """
    found = read(x)
    if found.device[0] not in HOST_DEVICES:
        raise ArgumentTypeError(f"DLPack device type {found.device[0]} is not the host")
    dtype, shape = found.dtype, found.shape
    if math.prod(shape) == 0:  # the pointer may be NULL
        empty = np.empty(shape, dtype)
        empty.flags.writeable = not found.readonly
        return empty
    interface = {
        "version": 3,
        "shape": shape,
        "strides": found.strides,
        "data": (found.pointer, found.readonly),
        "typestr": dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}",
    }
    return np.asarray(_Exporter(interface, found.capsule)).view(dtype)


def _open(capsule: Any) -> tuple[bytes, bool]:
    """Return the bytes of the tensor in `capsule`, and whether it is read-only."""
    if _is_valid(capsule, b"dltensor_versioned"):
        address = _get_pointer(capsule, b"dltensor_versioned")
        raw = ctypes.string_at(address, _HEAD.size + _TENSOR.size)
        major, minor, _, _, flags = _HEAD.unpack_from(raw)
        if major != 1:
            raise ArgumentTypeError(f"DLPack version {major}.{minor} is not supported")
        return raw[_HEAD.size :], bool(flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return ctypes.string_at(_get_pointer(capsule, b"dltensor"), _TENSOR.size), False
    raise ArgumentTypeError("__dlpack__ returned something that is not an unused DLPack capsule")


# ------------------------------------------------------------------------------------- exporting


class _Legacy(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


# Exports that somebody holds: the structure, what it points to, and whose memory it is.
_exports: dict[int, tuple[object, ...]] = {}


def _delete(address: int) -> None:
    """Free an export; called by its consumer, from any thread."""
    _exports.pop(address, None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)


# The destructor gets a capsule that nobody holds any more: as an address, for an object would be
# freed a second time.
_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _destroy(capsule: int) -> None:
    """Free an export whose capsule nobody has taken."""
    for name in (b"dltensor_versioned", b"dltensor"):
        if _valid_at(capsule, name):
            _exports.pop(_pointer_at(capsule, name), None)


_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_CODES = {dtype: key for key, dtype in _DTYPES.items()}


def export(
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    owner: object,
    *,
    versioned: bool,
) -> Any:
    """Return a capsule with C-contiguous memory of a CUDA device.

    Parameters
    ----------
    pointer, shape, dtype
        The memory.
    device : int
        The number of its device.
    owner : object
        What keeps the memory alive.
    versioned : bool
        Whether the consumer knows DLPack 1.0.
    """
    code, bits = _CODES[dtype]
    lengths = (ctypes.c_int64 * len(shape))(*shape)
    steps, step = [], 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    strides = (ctypes.c_int64 * len(shape))(*reversed(steps))
    tensor = _Tensor(
        pointer or None,
        _Device(_CUDA, device),
        len(shape),
        _DataType(code, bits, 1),
        ctypes.cast(lengths, ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        0,
    )
    deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    managed: ctypes.Structure
    if versioned:
        managed, name = _VersionedHead(1, 0, None, deleter, 0, tensor), b"dltensor_versioned"
    else:
        managed, name = _Legacy(tensor, None, deleter), b"dltensor"
    address = ctypes.addressof(managed)
    _exports[address] = (managed, lengths, strides, owner)
    return _new_capsule(address, name, ctypes.cast(_destructor, ctypes.c_void_p))
