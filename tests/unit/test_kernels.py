"""Arithmetic on one rank against NumPy and ml_dtypes, bit for bit where that is defined."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import ReduceOp, premul_sum
from pycomm.dtypes import DTYPES
from pycomm.kernels import host

HALVES = ["float16", "bfloat16"]


def every_half(name: str) -> np.ndarray[Any, Any]:
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name].numpy)


def assert_same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    """Compare bits, but any NaN equals any NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        nan = np.isnan(b)
        assert np.isnan(a)[nan].all()
    unsigned = np.dtype(f"u{a.itemsize}")
    assert np.array_equal(a.view(unsigned)[~nan], b.view(unsigned)[~nan])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("op", list(ReduceOp))
def test_halves_all_bit_patterns(name: str, op: ReduceOp) -> None:
    """All 2**16 values with a shuffled copy: float32 arithmetic, then one rounding."""
    dtype = DTYPES[name]
    x = every_half(name)
    y = np.random.default_rng(1).permutation(x)
    out = np.empty_like(x)
    host.reduce_arrays([x, y], out, dtype, op)
    a, b = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(all="ignore"):
        wide = {
            ReduceOp.SUM: a + b,
            # Of two: halved before they are added, so that the sum cannot overflow.
            ReduceOp.AVG: a * np.float32(0.5) + b * np.float32(0.5),
            ReduceOp.PROD: a * b,
            ReduceOp.MIN: np.minimum(a, b),
            ReduceOp.MAX: np.maximum(a, b),
        }[op]
        expected = wide.astype(dtype.numpy)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("name", HALVES)
def test_halves_of_many_sources_round_once(name: str) -> None:
    dtype = DTYPES[name]
    rows = np.random.default_rng(2).normal(size=(7, 40_000)).astype(dtype.numpy)
    out = np.empty(40_000, dtype.numpy)
    host.reduce_arrays(list(rows), out, dtype, ReduceOp.SUM)
    total = np.zeros(40_000, np.float32)
    for row in rows:
        total += row.astype(np.float32)
    assert_same_bits(out, total.astype(dtype.numpy))


@pytest.mark.parametrize("name", [n for n, row in DTYPES.items() if row.kind.value != "opaque"])
@pytest.mark.parametrize("count", [0, 1, 5, host._BLOCK - 1, host._BLOCK, 2 * host._BLOCK + 3])
@pytest.mark.parametrize("alias", [None, 0, 1, 2])
def test_the_output_may_be_a_source(name: str, count: int, alias: int | None) -> None:
    dtype = DTYPES[name]
    rows = [((np.arange(count) + k) % 3).astype(dtype.numpy) for k in range(3)]
    expected = sum(row.astype(np.complex128) for row in rows)
    if name == "bool":
        expected = expected != 0
    out = np.empty(count, dtype.numpy) if alias is None else rows[alias]
    host.reduce_arrays(rows, out, dtype, ReduceOp.SUM)
    assert (out.astype(np.complex128) == expected).all()


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_integer_averages_round_toward_zero(values: list[int], divisor: int) -> None:
    array = np.array(values, np.int64)
    host.divide(array, divisor)
    assert array.tolist() == [int(abs(v) // divisor) * (1 if v >= 0 else -1) for v in values]
    sources = [np.array([v], np.int32) for v in values]
    out = np.empty(1, np.int32)
    host.reduce_arrays(sources, out, DTYPES["int32"], ReduceOp.AVG)
    total = sum(values)
    assert out[0] == abs(total) // len(values) * (1 if total >= 0 else -1)


def test_extreme_integers_divide() -> None:
    low, high = -(2**63), 2**63 - 1
    array = np.array([low, high, -1, 0, 1])
    host.divide(array, 2)
    assert array.tolist() == [-(2**62), 2**62 - 1, 0, 0, 0]
    unsigned = np.array([2**64 - 1, 5], np.uint64)
    host.divide(unsigned, 2)
    assert unsigned.tolist() == [2**63 - 1, 2]


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_min_and_max_keep_nan_whichever_side_has_it(name: str) -> None:
    dtype = DTYPES[name]
    nan = np.array([np.nan, 1.0], dtype.numpy)
    one = np.array([1.0, np.nan], dtype.numpy)
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        out = np.empty(2, dtype.numpy)
        host.reduce_arrays([nan, one], out, dtype, op)
        assert np.isnan(out).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int16", "complex64"])
def test_premultiply(name: str) -> None:
    dtype = DTYPES[name]
    x = np.arange(-3, host._BLOCK + 9).astype(np.int64) % 7
    x = x.astype(dtype.numpy)
    out = np.empty_like(x)
    host.premultiply(x, out, dtype, premul_sum(3))
    assert (out.astype(np.complex128) == x.astype(np.complex128) * 3).all()
    host.premultiply(x, x, dtype, premul_sum(3))
    assert x.tobytes() == out.tobytes()


@pytest.mark.parametrize("name", HALVES)
def test_halves_at_odd_addresses(name: str) -> None:
    dtype = DTYPES[name]
    odd = np.zeros(2001, np.uint8)[1:].view(dtype.numpy)
    odd[:] = np.arange(1000)
    assert not odd.flags.aligned
    host.reduce_arrays([odd, odd], odd, dtype, ReduceOp.SUM)
    expected = (2 * np.arange(1000).astype(dtype.numpy).astype(np.float32)).astype(dtype.numpy)
    assert_same_bits(odd.copy(), expected)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    dtype = DTYPES["bfloat16"]
    # 1 + 2**-8 is a tie and goes to the even 1; 1 + 3 * 2**-8 is a tie and goes up.
    one, small = np.array([1.0, 1.0], dtype.numpy), np.array([2**-8, 3 * 2**-8], dtype.numpy)
    out = np.empty(2, dtype.numpy)
    host.reduce_arrays([one, small], out, dtype, ReduceOp.SUM)
    assert out.astype(float).tolist() == [1.0, 1.0 + 2**-6]
    quiet = np.array([0x7FC1, 0xFFC1, 0x7F81, 0x7FFF], np.uint16).view(ml_dtypes.bfloat16)
    out = np.empty(4, dtype.numpy)
    host.reduce_arrays([quiet, np.ones(4, dtype.numpy)], out, dtype, ReduceOp.SUM)
    assert np.isnan(out.astype(np.float32)).all()
