"""Checked mode: the ranks compare what they are about to do."""

import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["as_check", "differences", "encode"]

Array = np.ndarray[Any, Any]

_TEXT = 400  # bytes for the texts of a call
_LONGEST = 64  # of one of them, which are short names but for those of users' codecs


def as_check(check: bool | None) -> bool:
    """Return whether calls are compared across ranks; None asks ``PYCOMM_CHECK``."""
    if check is None:
        return os.environ.get("PYCOMM_CHECK", "0").strip().lower() not in ("", "0", "false", "no")
    return bool(check)


def encode(texts: Sequence[str], numbers: Sequence[int]) -> Array:
    """Return a call as one record of bytes, equal in length for all calls.

    Parameters
    ----------
    texts : sequence of str
        Operation, dtype, op ("" for none), algorithm, and what that means on this rank.
    numbers : sequence of int
        Sequence number, count and root (-1 for none).
    """
    short = [
        one if len(one) <= _LONGEST else f"{one[: _LONGEST - 9]}~{zlib.crc32(one.encode()):08x}"
        for one in (text.encode("ascii", "replace").decode() for text in texts)
    ]
    text = "\0".join(short).encode().ljust(_TEXT, b"\0")
    return np.frombuffer(text + struct.pack("3q", *numbers), np.uint8)


def differences(records: Array) -> str:
    """Return what the ranks disagree about: each call, with the ranks that made it.

    Parameters
    ----------
    records : numpy.ndarray
        One record of `encode` a rank. The text is the same on all ranks that hold the same records.
    """
    calls: dict[str, list[int]] = {}
    for meaning in (False, True):  # what a name means only where all else is equal
        calls.clear()
        for rank, record in enumerate(records):
            calls.setdefault(_call(record.tobytes(), meaning=meaning), []).append(rank)
        if len(calls) > 1:
            break
    listed = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {call}"
        for call, ranks in calls.items()
    )
    return (
        f"the ranks disagree about a call, nothing was sent: {listed}. All ranks must make the "
        "same calls in the same order, with equal dtype, count (here of one rank's part) and op"
    )


def _call(raw: bytes, *, meaning: bool) -> str:
    operation, dtype, op, algorithm, chosen, *_ = raw[:_TEXT].decode(errors="replace").split("\0")
    sequence, count, root = struct.unpack("3q", raw[_TEXT:])
    parts = [f"{count} x {dtype}"]
    parts += [f"op={op}"] if op else []
    parts += [f"root={root}"] if root >= 0 else []
    parts += [f"algorithm={algorithm}"] if algorithm != "auto" or meaning else []
    parts += [f"which is {chosen} here"] if meaning else []
    return f"{operation} #{sequence} ({', '.join(parts)})"
