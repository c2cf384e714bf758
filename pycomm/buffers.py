"""Arrays of any origin as one kind of thing: contiguous host memory with a dtype.

`as_buffer` never copies. What cannot be sent as it lies in memory is refused by name, because a
silent copy means that the result of an in-place operation lands in the copy.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pycomm.dlpack import HOST_DEVICES, from_dlpack
from pycomm.dtypes import BY_NUMPY, DType, as_dtype
from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Buffer", "address_of", "as_buffer", "new_like", "same_memory"]

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


def as_buffer(x: Any, writable: bool = False, name: str = "x") -> Buffer:
    """Return `x` as a `Buffer`, without a copy.

    Parameters
    ----------
    x : array
        A NumPy array, anything with the buffer protocol, ``__array_interface__`` or DLPack on the
        host.
    writable : bool
        Whether the call will write into it.
    name : str
        What messages call it.

    Raises
    ------
    ArgumentTypeError
        If `x` is no array, lies on a device, or has an unsupported dtype.
    ArgumentValueError
        If `x` is not C-contiguous, or is read-only where it must be written.
    """
    array = x if type(x) is np.ndarray else _as_host_array(x, name)
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


def _as_host_array(x: Any, name: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(f"{name} is a masked array; send {name}.data and {name}.mask")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if isinstance(x, np.generic):
        scalar = np.asarray(x)  # a copy, which nobody would see change
        scalar.flags.writeable = False
        return scalar
    _refuse_device(x, name)
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


def _refuse_device(x: Any, name: str) -> None:
    device = None
    if hasattr(x, "__dlpack_device__"):
        try:
            kind, number = x.__dlpack_device__()
        except Exception as error:
            raise ArgumentTypeError(
                f"{name} does not say on which device it lies: {error}"
            ) from error
        if int(kind) not in HOST_DEVICES:
            device = f"device {int(kind)}:{number}"
    elif hasattr(x, "__cuda_array_interface__"):
        device = "a CUDA device"
    if device is not None:
        raise ArgumentTypeError(
            f"{name} lies on {device}, and this version of pycomm moves host arrays only; device "
            "arrays need NCCL, the extra pycomm-collectives[cuda12], which it does not use yet: "
            "copy the array to the host first"
        )


def same_memory(a: Buffer, b: Buffer) -> bool:
    """Whether `a` and `b` are the same bytes.

    Raises
    ------
    ArgumentValueError
        If they overlap in part.
    """
    first, second = a.array, b.array
    if first is not second:
        if first.flags.owndata and second.flags.owndata:
            return False
        # For contiguous arrays the comparison of bounds is exact.
        if not np.may_share_memory(first, second):
            return False
    if a.nbytes == b.nbytes and a.pointer == b.pointer:
        return True
    raise ArgumentValueError(
        "x and out overlap without being the same elements; the result would overwrite input that "
        "is still to be read"
    )


def new_like(like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """Return a new, uninitialised buffer of the dtype of `like` and of the same kind of array.

    NumPy arrays and plain buffers give NumPy arrays. Other arrays are made with their own
    ``new_empty`` method, or with the ``from_dlpack`` of the module their type comes from.

    Raises
    ------
    ArgumentTypeError
        If that kind of array cannot be made; the caller then has to pass ``out``.
    """
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
