"""Casts from float32 to narrow floats and back, at memory speed, with what NumKong leaves out.

NumKong rounds to nearest even, as ml_dtypes does, for every value that the format can hold. What it
does with the others differs from format to format (7.8.6: NaN with a low payload becomes inf in
bfloat16, what is too large becomes NaN in float8_e5m2), so blocks with such values go by NumPy.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numkong
import numpy as np

__all__ = ["FORMATS", "Array", "Format", "clamp", "exponents", "narrow", "rescale", "widen"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format.

    Attributes
    ----------
    name : str
        What it is called here.
    numpy : numpy.dtype
        Its NumPy (or ml_dtypes) type.
    largest : float
        Its largest finite value.
    top : int
        The lowest code that NumKong may give to what the format cannot hold, without its sign: that
        of infinity, or of the largest value where there is none.
    """

    name: str
    numpy: np.dtype[Any]
    largest: float = field(init=False)
    top: int = field(init=False)

    def __post_init__(self) -> None:
        info: Any = ml_dtypes.finfo
        largest = float(info(self.numpy).max)
        code = int(np.array(largest, self.numpy).view(f"u{self.numpy.itemsize}"))
        infinite = bool(np.isinf(np.array(np.inf, np.float32).astype(self.numpy)))
        object.__setattr__(self, "largest", largest)
        object.__setattr__(self, "top", code + infinite)


FORMATS = {
    name: Format(name, np.dtype(kind))
    for name, kind in (
        ("fp16", np.float16),
        ("bf16", ml_dtypes.bfloat16),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
    )
}

# Of float32: the bias of its exponents and of scales, bits of the fraction, magnitude, infinity.
_BIAS, _FRACTION, _ABS, _INF = 127, 23, 0x7FFFFFFF, 0x7F800000
_LOWEST = 1  # the lowest scale: its inverse is still a normal float32


def narrow(
    source: Array, target: Array, form: Format, *, saturate: bool, fits: bool = False
) -> tuple[int, bool]:
    """Round float32 to a narrow format, to nearest even.

    Parameters
    ----------
    source : numpy.ndarray
        float32, one-dimensional.
    target : numpy.ndarray
        Of ``form.numpy`` and equal length.
    form : Format
        The format.
    saturate : bool
        Whether finite values that are too large, so that rounding makes them infinite or, in a
        format without infinity, NaN, become the largest finite one instead.
    fits : bool
        Whether it is known that the format can hold all values.

    Returns
    -------
    int
        How many finite values were too large.
    bool
        Whether there may be values that are not finite, before or after.
    """
    if not source.size:
        return 0, False
    if target.flags.aligned and source.flags.aligned:
        name: Any = form.numpy.name.removesuffix("fn")
        numkong.astype(source, name, out=target)
        # As integers the codes of too large values are the highest, of either sign.
        size = form.numpy.itemsize
        positive, negative = target.view(f"i{size}"), target.view(f"u{size}")
        sign = 1 << (8 * size - 1)
        if fits or (positive.max() < form.top and negative.max() < form.top + sign):
            return 0, False
    np.copyto(target, source, casting="unsafe")
    too_large = np.isfinite(source) & ~np.isfinite(target)
    if saturate:
        target[too_large] = np.copysign(np.float32(form.largest), source[too_large])
    return int(np.count_nonzero(too_large)), True


def clamp(sums: Array, source: Array) -> None:
    """Make sums of finite values that overflowed the largest float32; `source` is one addend."""
    wrong = np.isinf(sums) & np.isfinite(source)
    sums[wrong] = np.copysign(np.finfo(np.float32).max, sums[wrong])


def widen(source: Array, target: Array, form: Format) -> None:
    """Write narrow floats as float32, which holds them all."""
    aligned = source.flags.aligned and target.flags.aligned
    if form.name != "bf16" and aligned and source.size:
        numkong.astype(source, "float32", out=target)
    else:
        np.copyto(target, source)  # widening bfloat16 is a shift, which NumPy does twice as fast


def exponents(source: Array, block: int, form: Format, scratch: Array, scales: Array) -> bool:
    """Find for each block the smallest power of two by which its values fit a format.

    Parameters
    ----------
    source : numpy.ndarray
        float32, one-dimensional.
    block : int
        Values that share a scale; the last block may be shorter.
    form : Format
        The format.
    scratch : numpy.ndarray
        float32, at least as long as `source`.
    scales : numpy.ndarray
        uint8, one for each block: receives the exponents plus 127 (the E8M0 scale of the OCP
        microscaling formats). Infinity and NaN do not count.

    Returns
    -------
    bool
        Whether all values fit: none is infinite, NaN, or so near to 2**128 that it would be rounded
        to that.
    """
    # As integers positive floats have the same order, and NumPy finds their maxima faster.
    bits = np.bitwise_and(source.view(np.int32), _ABS, out=scratch[: source.size].view(np.int32))
    peaks = _peaks(bits, block)
    finite = bool((peaks < _INF).all())
    if not finite:
        bits[bits >= _INF] = 0
        peaks = _peaks(bits, block)
    largest = int(np.float32(form.largest).view(np.int32))
    powers = (peaks >> _FRACTION) - (largest >> _FRACTION) + _BIAS
    below = (1 << _FRACTION) - 1
    powers += (peaks & below) > (largest & below)
    # Above, the largest value would be infinite in float32; a few float32 are too large then.
    highest = 3 * _BIAS - (largest >> _FRACTION)
    np.copyto(scales, np.clip(powers, _LOWEST, highest), casting="unsafe")
    return finite and int(powers.max(initial=0)) <= highest


def _peaks(bits: Array, block: int) -> Array:
    whole = bits.size // block * block
    peaks: Array = bits[:whole].reshape(-1, block).max(axis=1)
    if whole < bits.size:
        peaks = np.append(peaks, bits[whole:].max())
    return peaks


def rescale(source: Array, target: Array, block: int, scales: Array, *, up: bool) -> None:
    """Divide float32 values by the powers of two of their blocks, or multiply if `up`.

    `target` may be `source`. Exact, but for what becomes subnormal.
    """
    codes = scales.astype(np.uint32)
    factors = ((codes if up else 2 * _BIAS - codes) << _FRACTION).view(np.float32)
    whole = source.size // block * block
    rows = whole // block
    np.multiply(
        source[:whole].reshape(rows, block),
        factors[:rows, np.newaxis],
        out=target[:whole].reshape(rows, block),
    )
    if whole < source.size:
        np.multiply(source[whole:], factors[-1], out=target[whole:])
