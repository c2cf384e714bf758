"""Arithmetic on host memory: NumPy, and NumKong for half precision.

Sources are combined in the order they are given, in blocks that stay in cache. Halves accumulate
in float32 and are rounded once, to nearest even. NumKong casts them at memory speed, where NumPy's
own float16 arithmetic is 20 to 40 times slower.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numkong
import numpy as np

from pycomm.dtypes import DType, Kind, Op, PremulSum, ReduceOp

__all__ = ["divide", "premultiply", "reduce_arrays"]

Array = np.ndarray[Any, Any]

# Elements a block: 64 KiB of float32, so that accumulator and source share a second-level cache.
_BLOCK = 1 << 14

_SUM, _AVG = ReduceOp.SUM, ReduceOp.AVG  # looking a member up takes a while in Python 3.11

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,  # minimum and maximum return NaN if either side is NaN
    ReduceOp.MAX: np.maximum,
}
_BOOL_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.PROD: np.logical_and,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.MAX: np.logical_or,
}


def reduce_arrays(sources: Sequence[Array], out: Array, dtype: DType, op: Op) -> None:
    """Combine `sources` element by element, in their order, into `out`.

    Parameters
    ----------
    sources : sequence of numpy.ndarray
        One-dimensional arrays of equal length and of `dtype`, at least one.
    out : numpy.ndarray
        Target of that length; it may be one of the sources, but not overlap one in part.
    dtype : DType
        The element type.
    op : ReduceOp or PremulSum
        The operation; for ``avg`` the divisor is the number of sources. Inputs of a PremulSum have
        been multiplied already, see `premultiply`.

    Notes
    -----
    Integer sums wrap, as in NumPy, NCCL and MPI. Integer averages accumulate in 64 bits and round
    toward zero. For bool, ``sum`` is a logical or.
    """
    kind = _SUM if isinstance(op, PremulSum) else op
    ufunc = (_BOOL_UFUNCS if dtype.kind is Kind.BOOL else _UFUNCS)[kind]
    average = len(sources) if kind is _AVG else 1
    with np.errstate(all="ignore"):  # inf and NaN are values here, not events to report
        if dtype.kind is Kind.HALF:
            _reduce_wide(sources, out, ufunc, average, np.dtype(np.float32), _half_casts(dtype))
        elif average > 1 and dtype.kind is Kind.INT:
            wide = np.dtype(np.int64 if dtype.numpy.kind == "i" else np.uint64)
            _reduce_wide(sources, out, ufunc, average, wide, (np.copyto, _copy_narrow))
        else:
            _reduce_direct(sources, out, ufunc, average)


Cast = Callable[[Array, Array], None]


def _reduce_direct(sources: Sequence[Array], out: Array, ufunc: np.ufunc, average: int) -> None:
    if len(sources) == 1:
        np.copyto(out, sources[0])  # an average of one, too
        return
    first, *between, last = sources
    if not between and average == 1:
        ufunc(first, last, out=out)
        return
    accumulator = np.empty(min(_BLOCK, out.size), out.dtype)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        total, target = accumulator[: stop - start], out[start:stop]
        block = first[start:stop]
        for source in between:
            ufunc(block, source[start:stop], out=total)
            block = total
        ufunc(block, last[start:stop], out=target)  # the only write: out may be a source
        if average > 1:
            np.divide(target, average, out=target)


def _reduce_wide(
    sources: Sequence[Array],
    out: Array,
    ufunc: np.ufunc,
    average: int,
    wide: np.dtype[Any],
    casts: tuple[Cast, Cast],
) -> None:
    widen, narrow = casts
    block = min(_BLOCK, out.size)
    accumulator, operand = np.empty(block, wide), np.empty(block, wide)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        total, other = accumulator[: stop - start], operand[: stop - start]
        widen(total, sources[0][start:stop])
        for source in sources[1:]:
            widen(other, source[start:stop])
            ufunc(total, other, out=total)
        if average > 1:
            _divide(total, average)
        narrow(out[start:stop], total)


def _copy_narrow(target: Array, source: Array) -> None:
    np.copyto(target, source, casting="unsafe")


def _half_casts(dtype: DType) -> tuple[Cast, Cast]:
    name: Any = dtype.name

    # NumKong takes aligned memory only; halves at odd addresses are rare, and NumPy casts them too.
    def widen(target: Array, source: Array) -> None:
        if source.flags.aligned:
            numkong.astype(source, "float32", out=target)
        else:
            np.copyto(target, source)

    def narrow(target: Array, source: Array) -> None:
        if target.flags.aligned:
            numkong.astype(source, name, out=target)
        else:
            _copy_narrow(target, source)

    return widen, narrow


def divide(array: Array, divisor: int) -> None:
    """Divide a sum in `array` by `divisor` in place: the second half of an average.

    Integers round toward zero.
    """
    with np.errstate(all="ignore"):
        _divide(array, divisor)


def _divide(array: Array, divisor: int) -> None:
    if array.dtype.kind == "i":
        # floor_divide rounds down; one up again where that went away from zero.
        negative = array < 0
        remainder = np.remainder(array, divisor)
        np.floor_divide(array, divisor, out=array)
        array += negative & (remainder != 0)
    elif array.dtype.kind == "u":
        np.floor_divide(array, divisor, out=array)
    else:
        np.divide(array, divisor, out=array)


def premultiply(source: Array, out: Array, dtype: DType, op: PremulSum) -> None:
    """Write ``source * op.factor`` to `out`, rounded to `dtype`; `out` may be `source`."""
    with np.errstate(all="ignore"):
        if dtype.kind is Kind.HALF:
            widen, narrow = _half_casts(dtype)
            product = np.empty(min(_BLOCK, out.size), np.float32)
            for start in range(0, out.size, _BLOCK):
                stop = min(start + _BLOCK, out.size)
                part = product[: stop - start]
                widen(part, source[start:stop])
                np.multiply(part, np.float32(op.factor.real), out=part)
                narrow(out[start:stop], part)
        else:
            np.multiply(source, dtype.numpy.type(op.factor), out=out)
