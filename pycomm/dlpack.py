"""Reading host arrays out of DLPack capsules.

NumPy reads DLPack too, but knows neither bfloat16 nor float8, which are what frameworks send. The
structures follow the DLPack specification, version 1.0 (dlpack.h of the DMLC project).
"""

import ctypes
import math
from typing import Any

import ml_dtypes
import numpy as np

from pycomm.errors import ArgumentTypeError

__all__ = ["HOST_DEVICES", "from_dlpack"]

#: DLDeviceType values whose memory the host can read: CPU, pinned by CUDA, pinned by ROCm.
HOST_DEVICES = frozenset({1, 3, 11})

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


def from_dlpack(x: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view of the host memory that `x` exports by DLPack.

    Strides are honoured, the read-only flag is kept, and the view keeps the exporter's memory
    alive. Nothing is copied.

    Raises
    ------
    ArgumentTypeError
        If the producer refuses, or for a dtype, device or DLPack version this reader does not know.
    """
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = x.__dlpack__()
    except Exception as error:
        raise ArgumentTypeError(f"{type(x).__name__} refuses to be read: {error}") from error
    tensor, readonly = _open(capsule)
    if tensor.device.device_type not in HOST_DEVICES:
        raise ArgumentTypeError(f"DLPack device type {tensor.device.device_type} is not the host")
    key = (tensor.dtype.code, tensor.dtype.bits)
    if key not in _DTYPES or tensor.dtype.lanes != 1:
        raise ArgumentTypeError(
            f"DLPack dtype with code {key[0]}, {key[1]} bits and {tensor.dtype.lanes} lanes "
            "is not supported"
        )
    dtype = _DTYPES[key]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if math.prod(shape) == 0:  # the pointer may be NULL
        empty = np.empty(shape, dtype)
        empty.flags.writeable = not readonly
        return empty
    strides = (
        tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
        if tensor.strides
        else None  # NULL: C order
    )
    interface = {
        "version": 3,
        "shape": shape,
        "strides": strides,
        "data": (tensor.data + tensor.byte_offset, readonly),
        "typestr": dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}",
    }
    return np.asarray(_Exporter(interface, capsule)).view(dtype)


def _open(capsule: Any) -> tuple[_Tensor, bool]:
    """Return the tensor in `capsule` and whether it is read-only."""
    if _is_valid(capsule, b"dltensor_versioned"):
        head = _VersionedHead.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if head.major != 1:
            raise ArgumentTypeError(f"DLPack version {head.major}.{head.minor} is not supported")
        return head.tensor, bool(head.flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), False
    raise ArgumentTypeError("__dlpack__ returned something that is not an unused DLPack capsule")
