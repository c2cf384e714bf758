"""How fast all_reduce could be: the bytes it must move, at the speed of this machine's memory.

Without a library in between, each of n ranks would read its n-th part of all n inputs, add them up,
and write the sum to all n outputs: for D bytes of data 2 D bytes a rank. The same reads, additions
and writes are done in the rank's own buffers, by all ranks at once, and timed like everything else.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["moved_bytes", "work"]

Array = NDArray[Any]

_BLOCK = 256 << 10  # bytes: what is added is still in a second-level cache when it is copied


def moved_bytes(nbytes: int) -> int:
    """Return the bytes that a rank reads and writes to all_reduce `nbytes`."""
    return 2 * nbytes


def work(source: Array, target: Array, ranks: int) -> Callable[[], None]:
    """Return the reads, additions and writes of one rank, as a function.

    Parameters
    ----------
    source, target : numpy.ndarray
        One-dimensional buffers of equal length, maybe the same, that hold zeros.
    ranks : int
        Among how many ranks the work is shared out, at least 2.
    """
    length = source.size // ranks
    block = max(1, _BLOCK // source.itemsize)
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        parts = [slice(rank * length + start, rank * length + stop) for rank in range(ranks)]
        blocks.append(([source[part] for part in parts], [target[part] for part in parts]))

    def run() -> None:
        for (first, second, *others), (total, *copies) in blocks:
            np.add(first, second, out=total)
            for other in others:
                np.add(total, other, out=total)
            for copy in copies:
                copy[:] = total

    return run
