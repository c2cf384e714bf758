"""Sizes and times, read from text and written as text."""

import re

from pycomm.errors import ArgumentValueError

__all__ = ["format_bytes", "format_rate", "format_seconds", "parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``512K`` or ``1G``, in powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentValueError(f"{text!r} is not a size, such as 64K, 8M or 1G")
    return int(float(match[1]) * _BINARY[match[2].upper()])


def format_bytes(nbytes: float) -> str:
    """Return a size with a binary unit, to four digits."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def format_rate(rate: float) -> str:
    """Return bytes per second with a decimal unit, as links are rated, to three digits."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.4g} GB/s"


def format_seconds(seconds: float) -> str:
    """Return a time in seconds, milliseconds or microseconds, to three digits."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
