"""What the arguments of a call must satisfy, checked before anything is sent."""

import operator
from typing import Any, NoReturn

import numpy as np

from pycomm.algorithms.compression import Codec, ErrorFeedback, as_codec
from pycomm.algorithms.compression.feedback import check_key
from pycomm.buffers import Buffer, as_buffer, may_share, new_like, same_memory
from pycomm.dtypes import DTYPES, DType, Op, ReduceOp, as_op, check_op
from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "as_ordinal",
    "check_axis",
    "codec_of",
    "new_array",
    "own_slot",
    "part_count",
    "part_of",
    "rank_of",
    "reduce_op",
    "same_shape",
    "whole_of",
]


# What has passed check_op, by name; every reduction asks.
_checked_ops: dict[tuple[str, DType], Op] = {}


def reduce_op(op: Any, x: Any) -> Op:
    """Return the operation named `op` if it is defined for the dtype of `x`."""
    try:
        return _checked_ops[op, x.dtype]
    except (KeyError, TypeError):
        known = as_op(op)
        check_op(known, x.dtype)
        if isinstance(op, str):
            _checked_ops[op, x.dtype] = known
        return known


def codec_of(compression: Any, key: Any, x: Any, op: Op | None = None) -> Codec | None:
    """Return the codec of a call on `x`, None if nothing is to be encoded.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such codec, if it cannot encode this, or if it needs a key.
    """
    codec = as_codec(compression)
    if codec is None:
        return None
    if x.dtype is not DTYPES["float32"]:
        raise ArgumentTypeError(f"compression is of float32, not of {x.dtype}")
    if op not in (None, ReduceOp.SUM, ReduceOp.AVG):
        raise ArgumentValueError(f"compression is for sum and avg, not for {op}")
    if isinstance(codec, ErrorFeedback):
        check_key(key)
    return codec


def rank_of(rank: Any, size: int, name: str) -> int:
    """Return `rank` as an int if it is one of `size` ranks."""
    try:
        number = operator.index(rank)
    except TypeError:
        raise ArgumentTypeError(f"{name} is a rank, not {type(rank).__name__}") from None
    if isinstance(rank, bool | np.bool_) or not 0 <= number < size:
        raise ArgumentValueError(f"{name}={rank!r} is not a rank of a communicator of size {size}")
    return number


def as_ordinal(device: Any) -> int | None:
    """Return the number of a device as an int, None for None."""
    if device is None:
        return None
    if isinstance(device, bool) or not isinstance(device, int | np.integer):
        raise ArgumentTypeError(f"device is the number of one, not {device!r}")
    return int(device)


def same_shape(x: Any, out: Any) -> tuple[Any, bool]:
    """Return the output buffer for a result as large as `x`, and whether that is `x` itself."""
    if out is None or out is x.owner:
        # The caller of as_buffer has checked that x is writable only if out was None.
        return (x if out is None else as_buffer(out, True, "out")), True
    target = as_buffer(out, True, "out")
    if target.dtype is not x.dtype or target.count != x.count or _apart(x, target):
        _refuse(x, target, x.count)
    return target, same_memory(x, target)


def part_count(x: Any, size: int) -> int:
    """Return the elements of one of `size` equal parts of `x`."""
    part, rest = divmod(int(x.count), size)
    if rest:
        raise ArgumentValueError(
            f"x has {x.count} elements, which {size} ranks cannot share evenly"
        )
    return part


def check_axis(x: Any, size: int) -> None:
    """Raise unless axis 0 of `x` can be split into `size` equal parts."""
    shape = x.shape
    if not shape and size > 1:
        raise ArgumentValueError("x has no axis to split; pass a one-dimensional array")
    if shape and shape[0] % size:
        raise ArgumentValueError(
            f"axis 0 of x has length {shape[0]} (shape {shape}), which {size} ranks cannot share "
            "evenly; pass out= to split the elements regardless of shape"
        )


def part_of(x: Any, out: Any, size: int) -> Any:
    """Return the output buffer for one of `size` equal parts of `x`."""
    if out is not None:
        return _output(x, out, part_count(x, size))
    check_axis(x, size)
    shape = x.shape
    return new_like(x, (shape[0] // size, *shape[1:]) if shape else ())


def whole_of(x: Any, out: Any, size: int) -> Any:
    """Return the output buffer for `size` times `x`, joined along axis 0."""
    if out is not None:
        return _output(x, out, x.count * size)
    shape = x.shape
    return new_like(x, (size * shape[0], *shape[1:]) if shape else (size,))


def own_slot(whole: Any, part: Any, rank: int) -> bool:
    """Whether `part` is this rank's slot of `whole`; raise if they overlap in any other way."""
    if may_share(whole, part):
        return part.pointer == whole.pointer + rank * part.nbytes or same_memory(whole, part)
    return False


def new_array(like: Buffer) -> Any:
    """Return a new NumPy array as large as `like`."""
    array = np.empty(like.array.shape, like.array.dtype)
    return Buffer(array, like.dtype, array)


def _output(x: Any, out: Any, count: int) -> Any:
    target = as_buffer(out, True, "out")
    if target.dtype is not x.dtype or target.count != count or _apart(x, target):
        _refuse(x, target, count)
    return target


def _apart(x: Any, target: Any) -> bool:
    """Whether two buffers are in different memories; empty ones may be on any device."""
    if x.device == target.device:
        return False
    return x.device is None or target.device is None or min(x.device, target.device) >= 0


def _refuse(x: Any, target: Any, count: int) -> NoReturn:
    if target.dtype is not x.dtype:
        raise ArgumentTypeError(f"x is {x.dtype.name} and out is {target.dtype.name}")
    if _apart(x, target):
        places = [
            "the host" if one.device is None else f"device {one.device}" for one in (x, target)
        ]
        raise ArgumentTypeError(f"x is on {places[0]} and out is on {places[1]}")
    raise ArgumentValueError(
        f"out has {target.count} elements, the result has {count} (x has {x.count}); the order of "
        "arguments is (x, out)"
    )
