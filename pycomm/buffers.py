"""Arrays of any origin as one kind of thing: contiguous memory with a dtype.

`as_buffer` never copies. What cannot be sent as it lies in memory is refused by name, because a
silent copy means that the result of an in-place operation lands in the copy.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pycomm.dlpack import from_dlpack
from pycomm.dtypes import BY_NUMPY, DType, as_dtype
from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Buffer", "address_of", "as_buffer", "may_share", "new_like", "same_memory"]

Array = np.ndarray[Any, Any]


def address_of(array: Array) -> int:
    """Return the address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])


class Buffer:
    """Contiguous host memory that a call may read or write.

    Attributes
    ----------
    array : numpy.ndarray
        A C-contiguous view of the memory, in the caller's shape.
    dtype : DType
        The row of the dtype table.
    count : int
        Elements.
    owner : object
        What the caller passed in, and gets back.
    held : object
        Whatever has to live as long as the buffer is in use; unset by default.
    """

    __slots__ = ("array", "count", "dtype", "held", "owner")

    #: Of a device, its number in this process; this memory is the host's.
    device: int | None = None

    def __init__(self, array: Array, dtype: DType, owner: Any) -> None:
        self.array = array
        self.dtype = dtype
        self.count: int = array.size
        self.held: object
        self.owner = owner

    def result(self) -> Any:
        """Return what the caller gets."""
        return self.owner

    @property
    def shape(self) -> tuple[int, ...]:
        """The caller's shape."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.array.nbytes)

    @property
    def flat(self) -> Array:
        """The elements as a one-dimensional view."""
        return self.array.reshape(-1)

    @property
    def octets(self) -> Array:
        """The bytes as a one-dimensional uint8 view."""
        return self.array.reshape(-1).view(np.uint8)

    @property
    def pointer(self) -> int:
        """Address of the first byte."""
        return address_of(self.array)


class _Foreign(Buffer):
    """A new buffer whose caller gets it as an array of another library."""

    __slots__ = ("_wrap",)

    def __init__(self, array: Array, dtype: DType, wrap: Callable[[Array], Any]) -> None:
        super().__init__(array, dtype, array)
        self._wrap = wrap

    def result(self) -> Any:
        # Only once the data is there: some libraries copy what they import.
        return self._wrap(self.array)


def as_buffer(x: Any, writable: bool = False, name: str = "x") -> Any:
    """Return `x` as a `Buffer`, or as a `DeviceBuffer`, without a copy.

    Parameters
    ----------
    x : array
        A NumPy array, anything with the buffer protocol or ``__array_interface__``; of a device,
        anything with ``__cuda_array_interface__``; DLPack of both.
    writable : bool
        Whether the call will write into it.
    name : str
        What messages call it.

    Raises
    ------
    ArgumentTypeError
        If `x` is no array, lies on a device that is not CUDA's, or has an unsupported dtype.
    ArgumentValueError
        If `x` is not C-contiguous, or is read-only where it must be written.
    """
    if type(x) is np.ndarray:
        array = x
    else:
        if hasattr(type(x), "__dlpack_device__") or _has_interface(x):
            on_device = _as_device_buffer(x, writable, name)
            if on_device is not None:
                return on_device
        array = _as_host_array(x, name)
    flags = array.flags
    if not flags.c_contiguous:
        order = "Fortran-ordered" if flags.f_contiguous else "strided"
        raise ArgumentValueError(
            f"{name} is {order} (shape {array.shape}, strides {array.strides} bytes); only "
            "C-contiguous arrays can be sent in place: pass numpy.ascontiguousarray(...) and copy "
            "the result back if you need it there"
        )
    if writable and not flags.writeable:
        raise ArgumentValueError(
            f"{name} is read-only and the result would be written into it; pass out= or a copy"
        )
    dtype = array.dtype
    return Buffer(array, BY_NUMPY.get(dtype) or as_dtype(dtype), x)


def _has_interface(x: Any) -> bool:
    """Return whether an array may have the interface of CUDA, or raises when asked for it."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except Exception:
        return True


def _as_device_buffer(x: Any, writable: bool, name: str) -> Any:
    """Return `x` as a `DeviceBuffer`, None if it is on the host."""
    # What belongs to CUDA is loaded when the first array comes that might be on a device.
    global _as_device_buffer
    from pycomm.device_buffers import as_device_buffer

    _as_device_buffer = as_device_buffer
    return as_device_buffer(x, writable, name)


def _as_host_array(x: Any, name: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(f"{name} is a masked array; send {name}.data and {name}.mask")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if isinstance(x, np.generic):
        scalar = np.asarray(x)  # a copy, which nobody would see change
        scalar.flags.writeable = False
        return scalar
    try:
        view = memoryview(x)
    except (TypeError, ValueError, BufferError):
        pass
    else:
        return np.asarray(view)
    interface = getattr(x, "__array_interface__", None)
    if isinstance(interface, dict):
        # Through the interface only: asarray(x) would fall back to copying what it cannot view.
        try:
            return np.asarray(_Interface(interface, x))
        except Exception as error:
            raise ArgumentTypeError(
                f"the __array_interface__ of {name} is wrong: {error}"
            ) from error
    if hasattr(x, "__dlpack__"):
        return from_dlpack(x)
    raise ArgumentTypeError(
        f"{name} is a {type(x).__name__}, not an array: it has neither the buffer protocol nor "
        "__array_interface__ nor DLPack; use numpy.asarray(...), or the object collectives"
    )


class _Interface:
    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def same_memory(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are the same bytes.

    Raises
    ------
    ArgumentValueError
        If they overlap in part.
    """
    if a.device is not None or b.device is not None:
        if a.device is None or b.device is None:
            raise ArgumentTypeError(
                "one of x and out is on the host and the other on a device; both must be in one "
                "memory"
            )
        if not _overlap(a, b):
            return False
        if a.nbytes == b.nbytes and a.pointer == b.pointer:
            return True
        raise _overlapping()
    first, second = a.array, b.array
    if first is not second:
        if first.flags.owndata and second.flags.owndata:
            return False
        # For contiguous arrays the comparison of bounds is exact.
        if not np.may_share_memory(first, second):
            return False
    if a.nbytes == b.nbytes and a.pointer == b.pointer:
        return True
    raise _overlapping()


def may_share(a: Any, b: Any) -> bool:
    """Whether two buffers overlap."""
    if a.device is not None or b.device is not None:
        return a.device is not None and b.device is not None and _overlap(a, b)
    return bool(np.may_share_memory(a.array, b.array))


def _overlap(a: Any, b: Any) -> bool:
    """Whether contiguous buffers overlap, as far as their addresses tell."""
    both = a.nbytes and b.nbytes
    return bool(both and a.pointer < b.pointer + b.nbytes and b.pointer < a.pointer + a.nbytes)


def _overlapping() -> ArgumentValueError:
    return ArgumentValueError(
        "x and out overlap without being the same elements; the result would overwrite input that "
        "is still to be read"
    )


def new_like(like: Any, shape: tuple[int, ...]) -> Any:
    """Return a new, uninitialised buffer of the dtype of `like` and of the same kind of array.

    NumPy arrays and plain buffers give NumPy arrays. Other arrays are made with their own
    ``new_empty`` method, or with the ``from_dlpack`` of the module their type comes from.

    Raises
    ------
    ArgumentTypeError
        If that kind of array cannot be made; the caller then has to pass ``out``.
    """
    if like.device is not None:
        from pycomm.device_buffers import new_device_buffer

        return new_device_buffer(like, shape)
    owner = like.owner
    if not hasattr(owner, "__dlpack__") or isinstance(owner, np.ndarray | np.generic):
        array = np.empty(shape, like.array.dtype)
        return Buffer(array, like.dtype, array)
    if hasattr(owner, "new_empty"):
        return as_buffer(owner.new_empty(shape), writable=True, name="out")
    if hasattr(owner, "__array_namespace__"):
        module = owner.__array_namespace__()
    else:
        module = sys.modules.get(type(owner).__module__.partition(".")[0])
    array = np.empty(shape, like.array.dtype)
    try:
        wrap = module.from_dlpack
        wrap(np.empty(0, like.array.dtype))  # whether it knows the dtype shows before data moves
    except Exception as error:
        raise ArgumentTypeError(
            f"cannot make a new {type(owner).__name__} for the result ({error}); pass out="
        ) from error
    return _Foreign(array, like.dtype, wrap)
