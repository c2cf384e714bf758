"""What a codec is, and how one is named."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "Array", "Codec", "as_codec", "checked", "exact_size", "from_dict", "name_of", "readers",
]  # fmt: skip

Array = np.ndarray[Any, Any]


@runtime_checkable
class Codec(Protocol):
    """Turns float32 values into fewer bytes, and back.

    A codec without state is frozen and compares by value: equal codecs on all ranks do the same.
    """

    def encoded_size(self, count: int) -> int:
        """Return the bytes that `count` values take, exactly, before there are any values."""

    def encode(self, source: Array, target: Array, key: Any = None) -> int:
        """Encode values.

        Parameters
        ----------
        source : numpy.ndarray
            float32, one-dimensional, contiguous; it may be empty.
        target : numpy.ndarray
            ``encoded_size(source.size)`` bytes, as uint8.
        key : str or int, optional
            What the values are called from call to call, for codecs that remember.

        Returns
        -------
        int
            How many finite values were too large for the format, and were cut if it saturates.
        """

    def decode(self, source: Array, target: Array) -> None:
        """Write the values of `source`, as `encode` has left them, to `target`, float32."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` makes an equal codec of, without its state."""


#: What makes a codec of a dictionary, by its ``"codec"``.
readers: dict[str, Callable[[Mapping[str, Any]], Codec]] = {}

_named: dict[str, Codec] = {}


def from_dict(told: Mapping[str, Any]) -> Codec:
    """Return the codec described by what ``to_dict`` has returned.

    Raises
    ------
    ArgumentValueError
        If that is no codec.
    """
    try:
        return readers[told["codec"]](told)
    except (KeyError, TypeError) as error:
        raise ArgumentValueError(f"no codec: {told!r}") from error


def as_codec(compression: Any) -> Codec | None:
    """Return the codec that a caller means: its name, itself, or None for no compression.

    Raises
    ------
    ArgumentValueError
        If there is none of that name.
    ArgumentTypeError
        If it is neither a name nor a codec.
    """
    if compression is None or compression == "none":
        return None
    if isinstance(compression, str):
        codec = _named.get(compression)
        if codec is None:
            try:
                codec = _named[compression] = readers["cast"]({"format": compression})
            except ArgumentValueError as error:
                raise ArgumentValueError(f"compression={compression!r}: {error}") from None
        return codec
    if isinstance(compression, type) or not isinstance(compression, Codec):
        raise ArgumentTypeError(
            f"compression is a name, such as 'bf16', or a codec, not {compression!r}"
        )
    try:
        hash(compression)
    except TypeError:
        raise ArgumentTypeError(
            f"a codec is frozen, so that it can be hashed: {compression!r}"
        ) from None
    return compression


def name_of(codec: Codec) -> str:
    """Return what a codec is called, equal for equal codecs: its own text, or type and facts."""
    if type(codec).__str__ is not object.__str__:
        return str(codec)
    return f"{type(codec).__name__} {codec.to_dict()}"


def exact_size(codec: Codec) -> Callable[[int], int]:
    """Return a codec's `encoded_size`, which raises `ArgumentTypeError` if that is no number."""

    def size(count: int) -> int:
        nbytes = codec.encoded_size(count)
        try:
            return operator.index(nbytes)
        except TypeError:
            raise ArgumentTypeError(
                f"encoded_size is a number of bytes, not {nbytes!r}: {name_of(codec)}"
            ) from None

    return size


def checked(codec: Codec, source: Array, target: Array, *, decoding: bool = False) -> None:
    """Check the arrays of `Codec.encode`, or of `Codec.decode`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If their dtype, shape or length is wrong.
    """
    octets, values = (source, target) if decoding else (target, source)
    for array, kind in ((octets, np.uint8), (values, np.float32)):
        if not isinstance(array, np.ndarray) or array.dtype != kind:
            raise ArgumentTypeError(f"{np.dtype(kind)} array expected, not {_what(array)}")
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ArgumentValueError("arrays to encode and decode are flat and contiguous")
    if octets.size != codec.encoded_size(values.size):
        raise ArgumentValueError(
            f"{values.size} values take {codec.encoded_size(values.size)} bytes, not {octets.size}"
        )
    if not target.flags.writeable:
        raise ArgumentValueError("the target is read-only")


def _what(array: Any) -> str:
    return str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
