"""Arithmetic on host memory: NumPy, and NumKong for half precision.

Sources are combined in the order they are given, in blocks that stay in cache. Halves accumulate
in float32 and are rounded once, to nearest even. NumKong casts them at memory speed, where NumPy's
own float16 arithmetic is 20 to 40 times slower.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numkong
import numpy as np

from pycomm.dtypes import DType, Kind, Op, PremulSum, ReduceOp

__all__ = ["Reducer", "divide", "premultiply", "quietly", "reduce_arrays", "reducer"]

Array = np.ndarray[Any, Any]
Cast = Callable[[Array, Array], None]
Reducer = Callable[[Sequence[Array], Array], None]

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
    quietly(reducer(dtype, op), sources, out)


def reducer(dtype: DType, op: Op) -> Reducer:
    """Return the function of (sources, out) that `reduce_arrays` runs, within `quietly`."""
    kind = _SUM if isinstance(op, PremulSum) else op
    found = _reducers.get((dtype, kind))
    if found is None:
        found = _reducers[dtype, kind] = _new_reducer(dtype, kind)
    return found


_reducers: dict[tuple[DType, ReduceOp], Reducer] = {}


def _new_reducer(dtype: DType, op: ReduceOp) -> Reducer:
    ufunc = (_BOOL_UFUNCS if dtype.kind is Kind.BOOL else _UFUNCS)[op]
    average = op is _AVG
    if dtype.kind is Kind.HALF:
        casts = _half_casts(dtype)
        one_by_one = partial(_reduce_wide, ufunc, average, np.dtype(np.float32), casts)
        if ufunc is not np.add:
            return one_by_one
        return partial(_reduce_pair, dtype.name, 0.5 if average else 1.0, one_by_one)
    if average and dtype.kind is Kind.INT:
        wide = np.dtype(np.int64 if dtype.numpy.kind == "i" else np.uint64)
        return partial(_reduce_wide, ufunc, average, wide, (np.copyto, _copy_narrow))
    return partial(_reduce_direct, ufunc, average)


class _Quiet(threading.local):
    """A context of each thread in which NumPy reports nothing; quicker to enter than errstate."""

    def __init__(self) -> None:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run
        self.entered = False


_quiet = _Quiet()


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; inf and NaN are values in there, not events to report."""
    quiet = _quiet
    if quiet.entered:  # a signal handler, or another interruption, in the midst of it
        with np.errstate(all="ignore"):
            return function(*args)
    quiet.entered = True
    try:
        return quiet.run(function, *args)
    finally:
        quiet.entered = False


def _reduce_direct(ufunc: np.ufunc, average: bool, sources: Sequence[Array], out: Array) -> None:
    if len(sources) == 2 and not average:
        ufunc(sources[0], sources[1], out=out)
        return
    if len(sources) == 1:
        np.copyto(out, sources[0])  # an average of one, too
        return
    accumulator = np.empty(min(_BLOCK, out.size), out.dtype)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        if stop - start == out.size:
            blocks, total, target = sources, accumulator, out
        else:
            blocks = [source[start:stop] for source in sources]
            total, target = accumulator[: stop - start], out[start:stop]
        block = blocks[0]
        for other in blocks[1:-1]:
            ufunc(block, other, out=total)
            block = total
        ufunc(block, blocks[-1], out=target)  # the only write: out may be a source
        if average:
            np.divide(target, len(sources), out=target)


def _reduce_wide(
    ufunc: np.ufunc,
    average: bool,
    wide: np.dtype[Any],
    casts: tuple[Cast, Cast],
    sources: Sequence[Array],
    out: Array,
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
        if average and len(sources) > 1:
            _divide(total, len(sources))
        narrow(out[start:stop], total)


def _reduce_pair(
    name: Any, factor: float, otherwise: Reducer, sources: Sequence[Array], out: Array
) -> None:
    """Add two arrays of halves in one pass over memory: in float32, rounded once."""
    if len(sources) != 2:
        otherwise(sources, out)
        return
    if not all(one.flags.aligned for one in (*sources, out)):
        # The same arithmetic for all: ranks must not differ in what overflows.
        aligned = np.empty_like(out)
        _reduce_pair(name, factor, otherwise, [one.copy() for one in sources], aligned)
        out[:] = aligned
        return
    # As plain 16-bit words: NumKong takes another, slower way for arrays that name their dtype.
    a, b, result = (one.view(np.uint16) for one in (*sources, out))
    numkong.blend(a, b, dtype=name, alpha=factor, beta=factor, out=result)


def _copy_narrow(target: Array, source: Array) -> None:
    np.copyto(target, source, casting="unsafe")


def _half_casts(dtype: DType) -> tuple[Cast, Cast]:
    name: Any = dtype.name

    # NumKong takes aligned memory only; halves at odd addresses are rare, and NumPy casts them too.
    # Widening bfloat16 is a shift, which NumPy does twice as fast.
    def widen(target: Array, source: Array) -> None:
        if name == "float16" and source.flags.aligned:
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
    quietly(_divide, array, divisor)


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
    quietly(_premultiply, source, out, dtype, op.factor)


def _premultiply(source: Array, out: Array, dtype: DType, factor: int | float | complex) -> None:
    if dtype.kind is not Kind.HALF:
        np.multiply(source, dtype.numpy.type(factor), out=out)
        return
    widen, narrow = _half_casts(dtype)
    product = np.empty(min(_BLOCK, out.size), np.float32)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        part = product[: stop - start]
        widen(part, source[start:stop])
        np.multiply(part, np.float32(factor.real), out=part)
        narrow(out[start:stop], part)
