"""Inputs whose results are known exactly, and the count of elements that are not as they must be.

Every rank's input repeats a table of `PERIOD` elements. The period is an odd prime, so a chunk that
lands in the place of another (chunks are cut at round numbers) never looks right, and the result of
a reduction needs to be worked out for one period only, by NumPy, whatever the size of the message.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pycomm.bench.cases import Case, Counts
from pycomm.dtypes import DType, Kind

__all__ = ["PERIOD", "Pattern", "expected_result", "poison", "premul_factor", "wrong_elements"]

Array = NDArray[Any]

PERIOD = 10007

# Sums stay below this even where the element type could hold more: enough to tell ranks apart.
_LARGEST = 1 << 20
_MASK = (1 << 64) - 1

# NumPy's own knows no bfloat16; ml_dtypes' has no annotations.
_finfo: Callable[[np.dtype[Any]], Any] = ml_dtypes.finfo


def premul_factor(rank: int) -> int:
    """Return the factor of `rank` in the ``mulsum`` operation: 1 on even ranks, 2 on odd ones."""
    return 1 + rank % 2


def _scramble(rank: int, repeat: int, salt: int) -> NDArray[np.uint64]:
    """Return one period of well mixed integers, different for each argument."""
    seed = (rank * 0x2545F4914F6CDD1D + repeat * 0x632BE59BD9B4E019 + salt * 0x1B873593) & _MASK
    mixed: NDArray[np.uint64] = np.arange(1, PERIOD + 1, dtype=np.uint64)
    for factor, shift in ((0xD6E8FEB86659FD93, 32), (0xA0761D6478BD642F, 29)):
        mixed = (mixed + np.uint64(seed)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(shift)
    return mixed


def _integer_limit(dtype: DType) -> int:
    """Return up to which integer every integer is a value of `dtype`."""
    if dtype.kind is Kind.INT:
        return min(_LARGEST, int(np.iinfo(dtype.numpy).max))
    return min(_LARGEST, 1 << (int(_finfo(_real(dtype)).nmant) + 1))


def _real(dtype: DType) -> np.dtype[Any]:
    if dtype.kind is Kind.COMPLEX:
        return np.dtype(f"f{dtype.itemsize // 2}")
    return dtype.numpy


class Pattern:
    """The inputs of all ranks for one collective call, and what they reduce to.

    Parameters
    ----------
    dtype : pycomm.dtypes.DType
        The element type.
    op : str or None
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"`` or ``"mulsum"``; None where data is
        only moved: the elements are then arbitrary bytes.
    size : int
        Number of ranks. Values are small enough for every partial result to be exact.
    repeat : int
        Number of the check, so that a result left over from the one before is noticed.
    """

    def __init__(self, dtype: DType, op: str | None, size: int, repeat: int = 0) -> None:
        self.dtype = dtype
        self.op = op
        self.size = size
        self.repeat = repeat

    def input(self, rank: int, offset: int, count: int) -> Array:
        """Return elements `offset` to ``offset + count`` of the input of `rank`."""
        return _repeat(self._table(rank), offset, count)

    def reduced(self, offset: int, count: int) -> Array:
        """Return elements `offset` to ``offset + count`` of the reduction over all ranks."""
        tables = np.stack([self._values(rank) for rank in range(self.size)])
        return _repeat(self._reduce(tables), offset, count)

    def _table(self, rank: int) -> Array:
        if self.op is None:
            return self._bytes(rank)
        return self._values(rank).astype(self.dtype.numpy)

    def _bytes(self, rank: int) -> Array:
        columns = [_scramble(rank, self.repeat, salt) for salt in (1, 2)]
        raw: Array = np.stack(columns, axis=1).view(np.uint8)[:, : self.dtype.itemsize]
        if self.dtype.kind is Kind.BOOL:
            raw = raw & 1
        return np.ascontiguousarray(raw).view(self.dtype.numpy).reshape(PERIOD)

    def _values(self, rank: int) -> Array:
        """Return the table of `rank` in a type in which every reduction of it is exact."""
        values: Array = self._reals(rank, 1)
        if self.dtype.kind is Kind.COMPLEX:
            values = values + 1j * self._reals(rank, 2)
        return values

    def _reals(self, rank: int, salt: int) -> Array:
        mixed = _scramble(rank, self.repeat, salt)
        if self.dtype.kind is Kind.BOOL:
            # True often enough for both results of a reduction over all ranks to occur.
            rare: NDArray[np.bool_] = mixed % np.uint64(max(2, self.size)) == 0
            return rare if self.op in ("sum", "max") else ~rare
        if self.op == "prod":
            return self._ones_and_twos(rank, mixed)
        weight = 2 if self.op == "mulsum" else 1
        limit = _integer_limit(self.dtype)
        if self.op in ("min", "max"):
            level, awake = limit, np.ones(PERIOD, np.bool_)
        else:
            awake, ranks = self._awake(rank, max(1, limit // weight))
            level = max(1, limit // (ranks * weight))
        # Integer averages round; which way is a matter of taste for negative sums only.
        lowest = 0 if self._unsigned() or self.op == "avg" else -level
        values = (mixed % np.uint64(level - lowest + 1)).astype(np.int64) + lowest
        if self.op == "avg":
            # With many ranks and a narrow type the average would nearly always round to 0.
            agreed = _scramble(0, self.repeat, salt + 2) % np.uint64(2) == 0
            values = np.where(agreed, level, values)
        return np.where(awake, values, 0)

    def _ones_and_twos(self, rank: int, mixed: NDArray[np.uint64]) -> Array:
        if self.dtype.kind is Kind.INT:
            twos = int(np.iinfo(self.dtype.numpy).max).bit_length() - 1
        else:
            twos = int(_finfo(_real(self.dtype)).maxexp) - 1
        awake, _ = self._awake(rank, min(30, twos))
        return np.where(awake & (mixed % np.uint64(2) == 0), 2, 1)

    def _awake(self, rank: int, most: int) -> tuple[NDArray[np.bool_], int]:
        """Return where `rank` contributes, so that at most `most` ranks do, and how many do."""
        stride = -(-self.size // most)
        return (np.arange(PERIOD) + rank) % stride == 0, -(-self.size // stride)

    def _unsigned(self) -> bool:
        return self.dtype.kind is Kind.INT and int(np.iinfo(self.dtype.numpy).min) == 0

    def _reduce(self, tables: Array) -> Array:
        if self.dtype.kind is Kind.BOOL:
            either = np.logical_or if self.op in ("sum", "max") else np.logical_and
            return np.asarray(either.reduce(tables))
        result: Array
        if self.op == "mulsum":
            factors = np.array([premul_factor(rank) for rank in range(self.size)])
            result = (tables * factors[:, None]).sum(0)
        elif self.op == "avg":
            total = tables.sum(0)
            result = total // self.size if self.dtype.kind is Kind.INT else total / self.size
        else:
            functions = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
            result = functions[str(self.op)].reduce(tables)
        return result.astype(self.dtype.numpy)


def _repeat(table: Array, offset: int, count: int) -> Array:
    start = offset % PERIOD
    rotated = np.concatenate((table[start:], table[:start]))
    return np.resize(rotated, count)


def expected_result(case: Case, pattern: Pattern, rank: int, root: int, counts: Counts) -> Array:
    """Return what `case` must leave in the result array of `rank`."""
    n, part = pattern.size, counts.param
    if case.name == "reduce_scatter":
        return pattern.reduced(rank * part, part)
    if case.reduces:
        return pattern.reduced(0, part)
    if case.name == "broadcast":
        return pattern.input(root, 0, part)
    if case.name == "scatter":
        return pattern.input(root, rank * part, part)
    if case.name == "send_recv":
        return pattern.input((rank - 1) % n, 0, part)
    offset = rank * part if case.send_parts else 0
    return np.concatenate([pattern.input(peer, offset, part) for peer in range(n)])


def poison(result: Array, expected: Array) -> None:
    """Fill `result` so that no byte of it is right: an element nobody writes counts as wrong."""
    np.invert(expected.view(np.uint8), out=result.view(np.uint8))


def wrong_elements(got: Array, expected: Array, op: str | None) -> int:
    """Return how many elements of `got` are not as `expected`.

    Moved data (`op` None) is compared byte by byte, results by value; an average of floating point
    numbers may be off by two units in the last place.
    """
    itemsize = got.dtype.itemsize
    # NumPy takes every byte but 0 for the same True, and would not see a bool nobody wrote.
    if op is None or got.dtype.kind == "b":
        word = np.dtype(f"u{min(8, itemsize)}")
        differs = (got.view(word) != expected.view(word)).reshape(-1, itemsize // word.itemsize)
        return int(np.count_nonzero(differs.any(axis=1)))
    if op == "avg" and got.dtype.kind not in "iu":
        parts = 2 if got.dtype.kind == "c" else 1
        word = np.dtype(f"i{itemsize // parts}")
        far = _distance(got.view(word), expected.view(word)) > 2
        return int(np.count_nonzero(far.reshape(-1, parts).any(axis=1)))
    return int(np.count_nonzero(~(got == expected)))


def _distance(got: Array, expected: Array) -> NDArray[np.int64]:
    """Return how many representable numbers lie between two floats given as signed integers.

    Floats of one sign are ordered as their bits are; a negative one mirrors its magnitude.
    """

    def position(bits: Array) -> NDArray[np.int64]:
        lowest = np.int64(np.iinfo(bits.dtype).min)
        wide = bits.astype(np.int64)
        return np.where(wide < 0, lowest - wide, wide)

    distance: NDArray[np.int64] = np.abs(position(got) - position(expected))
    return distance
