"""Casts to 16 and 8 bits, with or without a scale for each block."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pycomm.algorithms.compression.codec import Array, checked, readers
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.kernels.casts import FORMATS, clamp, exponents, narrow, rescale, widen
from pycomm.kernels.host import quietly

__all__ = ["Cast"]

# Values that are encoded at a time: what they need stays in a second-level cache.
_PIECE = 1 << 16
_BLOCK = 256  # values that share a scale in the formats of 8 bits


@dataclass(frozen=True)
class Cast:
    """Casts float32 values to a narrow format, rounding to nearest even; NaN stays NaN.

    Encoded values come first, in the order of the values, then the scales, one byte for each block:
    exponents of powers of two plus 127. Infinity stays infinity, except in fp8_e4m3, which has
    none: there it is NaN.

    Parameters
    ----------
    format : str
        ``"fp16"``, ``"bf16"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"`` (the OCP 8-bit formats).
    block : int, optional
        So many values share a scale, the smallest power of two by which they fit the format; 0 for
        no scales. By default 256 for the formats of 8 bits, and 0 for the others. With scales
        1e-7 does not vanish in fp16, nor does 70000 overflow.
    saturate : bool, optional
        Whether finite values that are too large become the largest of the format instead of
        infinite. By default yes, except for bf16, which overflows only in the last half step below
        2**128, and keeps the bits of IEEE rounding there.
    """

    format: str
    block: int | None = None
    saturate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ArgumentValueError(f"no format {self.format!r}; known: {', '.join(FORMATS)}")
        if self.block is None:
            object.__setattr__(self, "block", _BLOCK if self._form.numpy.itemsize == 1 else 0)
        elif isinstance(self.block, bool) or not isinstance(self.block, int):
            raise ArgumentTypeError(f"block is a number of values, not {self.block!r}")
        elif not 0 <= self.block <= _PIECE or self.block & (self.block - 1):
            raise ArgumentValueError(
                f"block is a power of two up to {_PIECE}, or 0 for no scales, not {self.block}"
            )
        if self.saturate is None:
            object.__setattr__(self, "saturate", self.format != "bf16")
        elif not isinstance(self.saturate, bool):
            raise ArgumentTypeError(f"saturate is True or False, not {self.saturate!r}")

    @property
    def _form(self) -> Any:
        return FORMATS[self.format]

    def encoded_size(self, count: int) -> int:
        """Return the bytes that `count` values take: the values, and a byte for each block."""
        scales = -(-count // self.block) if self.block else 0
        return count * int(self._form.numpy.itemsize) + scales

    def encode(self, source: Array, target: Array, key: Any = None) -> int:  # noqa: ARG002
        """Encode values; see `Codec.encode`. No key is needed: nothing is remembered."""
        checked(self, source, target)
        saturated: int = quietly(self._encode, source, target, None)[0]
        return saturated

    def compensate(self, source: Array, target: Array, residual: Array) -> tuple[int, int]:
        """Encode ``source + residual``, and leave in `residual` what the encoding took away.

        Parameters
        ----------
        source, target
            As in `encode`.
        residual : numpy.ndarray
            float32, as long as `source`.

        Returns
        -------
        tuple of int
            What `encode` returns, and how many errors were not finite and are left as 0: those of
            NaN, of infinity, and of what overflows.
        """
        checked(self, source, target)
        found: tuple[int, int] = quietly(self._encode, source, target, residual)
        return found

    def decode(self, source: Array, target: Array) -> None:
        """Write encoded values as float32; see `Codec.decode`."""
        checked(self, source, target, decoding=True)
        quietly(self._decode, source, target)

    def _parts(self, encoded: Array, count: int) -> tuple[Array, Array]:
        nbytes = count * self._form.numpy.itemsize
        return encoded[:nbytes].view(self._form.numpy), encoded[nbytes:]

    def _encode(self, source: Array, target: Array, residual: Array | None) -> tuple[int, int]:
        block, count = self.block, source.size
        values, scales = self._parts(target, count)
        scratch = np.empty(min(count, _PIECE), np.float32)
        saturated = dropped = 0
        for start in range(0, count, _PIECE):
            stop = min(start + _PIECE, count)
            piece, codes, other = source[start:stop], values[start:stop], scratch[: stop - start]
            exps = scales[start // block : -(-stop // block)] if block else scales
            if residual is None:
                saturated += self._narrow(piece, codes, exps, other)[0]
            else:
                found = self._compensate(piece, codes, exps, residual[start:stop], other)
                saturated, dropped = saturated + found[0], dropped + found[1]
        return saturated, dropped

    def _narrow(self, piece: Array, codes: Array, exps: Array, scratch: Array) -> tuple[int, bool]:
        """Encode one piece; see `narrow`."""
        form, block = self._form, self.block
        assert self.saturate is not None
        fits = False
        if block:
            fits = exponents(piece, block, form, scratch, exps)
            rescale(piece, scratch, block, exps, up=False)
            piece = scratch
        return narrow(piece, codes, form, saturate=self.saturate, fits=fits)

    def _compensate(
        self, piece: Array, codes: Array, exps: Array, kept: Array, scratch: Array
    ) -> tuple[int, int]:
        """Encode one piece and its residual, and keep the error there."""
        np.add(piece, kept, out=kept)
        saturated, look = self._narrow(kept, codes, exps, scratch)
        if look:
            clamp(kept, piece)
            saturated, _ = self._narrow(kept, codes, exps, scratch)
        self._widen(codes, exps, scratch)
        np.subtract(kept, scratch, out=kept)
        if not look:
            return saturated, 0
        wrong = ~np.isfinite(kept)
        kept[wrong] = 0
        return saturated, int(np.count_nonzero(wrong))

    def _widen(self, codes: Array, exps: Array, target: Array) -> None:
        widen(codes, target, self._form)
        if self.block:
            rescale(target, target, self.block, exps, up=True)

    def _decode(self, source: Array, target: Array) -> None:
        block, count = self.block, target.size
        values, scales = self._parts(source, count)
        for start in range(0, count, _PIECE):
            stop = min(start + _PIECE, count)
            exps = scales[start // block : -(-stop // block)] if block else scales
            self._widen(values[start:stop], exps, target[start:stop])

    def to_dict(self) -> dict[str, Any]:
        """Return format, block and saturate, for `from_dict`."""
        return {"codec": "cast", **asdict(self)}

    def __str__(self) -> str:
        """Return the format, and what differs from its defaults."""
        plain = Cast(self.format)
        words = [self.format]
        words += [f"block {self.block}"] if self.block != plain.block else []
        words += [f"saturate {self.saturate}"] if self.saturate != plain.saturate else []
        return ", ".join(words)


def _read(told: Mapping[str, Any]) -> Cast:
    return Cast(**{name: value for name, value in told.items() if name != "codec"})


readers["cast"] = _read
