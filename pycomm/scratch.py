"""Scratch memory that is used again: fresh pages cost more than the copy into them."""

from typing import Any

import numpy as np

__all__ = ["ScratchPool"]

_SMALLEST = 1 << 12
_KEEP = 64 << 20  # bytes kept for later


class ScratchPool:
    """Blocks of bytes in power-of-two sizes, handed out and given back."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._kept = 0

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return a uint8 array of at least `nbytes`."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        blocks = self._free.get(size)
        if blocks:
            self._kept -= size
            return blocks.pop()
        return np.empty(size, np.uint8)

    def give(self, block: np.ndarray[Any, Any]) -> None:
        """Take `block` back, once no transport can touch it any more."""
        if self._kept + block.size <= _KEEP:
            self._free.setdefault(block.size, []).append(block)
            self._kept += block.size
