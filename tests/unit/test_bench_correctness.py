import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.bench.cases import CASES
from pycomm.bench.correctness import (
    PERIOD,
    Pattern,
    expected_result,
    poison,
    premul_factor,
    wrong_elements,
)
from pycomm.dtypes import DTYPES, Kind, as_op, check_op

OPS = ("sum", "prod", "min", "max", "avg", "mulsum")


def allowed(dtype, op):
    if op == "mulsum":
        return dtype.kind not in (Kind.BOOL, Kind.OPAQUE)
    try:
        check_op(as_op(op), dtype)
    except TypeError:
        return False
    return True


COMBINATIONS = [(dtype, op) for dtype in DTYPES.values() for op in OPS if allowed(dtype, op)]


def brute_force(inputs, op):
    """Reduce in float64, int64 or complex128, one rank after the other."""
    dtype = inputs[0].dtype
    wide = np.complex128 if dtype.kind == "c" else np.float64 if dtype.kind not in "biu" else object
    arrays = [x.astype(wide) for x in inputs]
    if op == "mulsum":
        arrays = [x * premul_factor(rank) for rank, x in enumerate(arrays)]
    total = arrays[0]
    for x in arrays[1:]:
        if op == "prod":
            total = total * x
        elif op in ("min", "max"):
            total = np.where((x < total) if op == "min" else (x > total), x, total)
        else:
            total = total + x
    if op == "avg":
        total = total // len(inputs) if wide is object else total / len(inputs)
    if dtype.kind == "b":
        return total > 0
    return total.astype(dtype)


@settings(max_examples=150, deadline=None)
@given(
    combination=st.sampled_from(COMBINATIONS),
    size=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33, 64]),
    offset=st.integers(0, 3 * PERIOD),
    count=st.integers(0, 300),
    repeat=st.integers(0, 3),
)
def test_expected_values_are_those_of_brute_force(combination, size, offset, count, repeat):
    dtype, op = combination
    pattern = Pattern(dtype, op, size, repeat)
    inputs = [pattern.input(rank, offset, count) for rank in range(size)]
    result = pattern.reduced(offset, count)
    assert {x.dtype for x in (*inputs, result)} == {dtype.numpy}
    if op == "avg":
        # One rounding may differ between two ways to divide; exactness is the next test's.
        assert wrong_elements(result, brute_force(inputs, op), op) == 0
    else:
        assert result.tobytes() == brute_force(inputs, op).tobytes()


@pytest.mark.parametrize("size", [2, 64, 300])
@pytest.mark.parametrize(
    ("dtype", "op"),
    # A smallest or largest input is an input, and so is a logical and/or.
    [pair for pair in COMBINATIONS if pair[0].kind is not Kind.BOOL and pair[1][0] != "m"]
    + [pair for pair in COMBINATIONS if pair[1] == "mulsum"],
)
def test_every_partial_result_can_be_held(dtype, op, size):
    if dtype.kind is Kind.INT:
        limit = int(np.iinfo(dtype.numpy).max)
    else:
        real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind is Kind.COMPLEX else dtype.numpy
        bits = ml_dtypes.finfo(real).nmant + 1
        limit = 1 << (bits if op != "prod" else ml_dtypes.finfo(real).maxexp - 1)
    pattern = Pattern(dtype, op, size)
    wide = np.complex128 if dtype.kind is Kind.COMPLEX else np.float64
    inputs = np.stack([pattern.input(rank, 0, PERIOD).astype(wide) for rank in range(size)])
    if op == "prod":
        assert np.abs(inputs).prod(0).max() <= limit
        return
    if op == "mulsum":
        inputs *= np.array([premul_factor(rank) for rank in range(size)])[:, None]
    parts = (inputs.real, inputs.imag) if dtype.kind is Kind.COMPLEX else (inputs,)
    assert max(np.abs(part).sum(0).max() for part in parts) <= limit


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_ranks_and_places_differ(dtype):
    pattern = Pattern(dtype, None, 4)
    inputs = [pattern.input(rank, 0, 4096) for rank in range(4)]
    assert wrong_elements(inputs[0], inputs[1], None) > 1000
    for step in (1, 2, 64, 1024, 65536, 1 << 20):
        assert wrong_elements(inputs[0], pattern.input(0, step, 4096), None) > 1000, step
    assert wrong_elements(inputs[0], Pattern(dtype, None, 4, 1).input(0, 0, 4096), None) > 1000


def test_reductions_notice_a_rank_that_is_left_out_or_counted_twice():
    for dtype, op in COMBINATIONS:
        if op in ("sum", "mulsum"):
            pattern = Pattern(dtype, op, 4)
            inputs = [pattern.input(rank, 0, 4096) for rank in range(4)]
            without = brute_force([*inputs[:3], np.zeros_like(inputs[3])], op)
            twice = brute_force([*inputs[:3], inputs[0]], op)
            for result in (without, twice):
                assert wrong_elements(result, pattern.reduced(0, 4096), op) > 300, (dtype, op)


@pytest.mark.parametrize(("dtype", "op"), [*COMBINATIONS, *((d, None) for d in DTYPES.values())])
def test_one_wrong_element_counts_one_and_poison_counts_all(dtype, op):
    pattern = Pattern(dtype, op, 3)
    right = pattern.input(1, 0, 1000) if op is None else pattern.reduced(0, 1000)
    got = right.copy()
    assert wrong_elements(got, right, op) == 0
    # The highest byte of an element: sign and exponent.
    got.view(np.uint8).reshape(1000, -1)[617, -1] ^= 0x41
    assert wrong_elements(got, right, op) == 1
    poison(got, right)
    assert wrong_elements(got, right, op) == 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_an_average_may_be_off_by_two_units_in_the_last_place(dtype):
    dtype = DTYPES[dtype]
    word = f"i{dtype.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1)}"
    right = np.linspace(-3, 3, 50).astype(dtype.numpy)
    for units, wrong in ((2, 0), (-2, 0), (3, 50), (-3, 50)):
        got = right.copy()
        got.view(word)[:: 2 if dtype.kind is Kind.COMPLEX else 1] += units
        assert wrong_elements(got, right, "avg") == wrong
    assert wrong_elements(right.copy(), right, "sum") == 0


def test_units_in_the_last_place_are_counted_across_zero_and_not_for_nan():
    tiny = np.float32(1e-45)
    assert wrong_elements(np.array([-tiny]), np.array([tiny]), "avg") == 0
    assert wrong_elements(np.array([-2 * tiny]), np.array([tiny]), "avg") == 1
    assert wrong_elements(np.array([np.float64("nan")]), np.array([1.0]), "avg") == 1
    assert wrong_elements(np.array([np.float64("nan")]), np.array([1.0]), "sum") == 1


def test_moved_bytes_are_compared_as_bytes():
    nan = np.array([np.nan, 0.0], np.float32)
    assert wrong_elements(nan.copy(), nan, None) == 0
    assert wrong_elements(np.array([np.nan, -0.0], np.float32), nan, None) == 1


def test_expected_results_by_hand():
    size, counts = 3, CASES["all_to_all"].counts(192, 1, 3)
    part = counts.param
    assert part == 64
    pattern = Pattern(DTYPES["uint8"], None, size)
    inputs = [pattern.input(rank, 0, 192) for rank in range(size)]

    def expected(name, rank, root=1):
        case = CASES[name]
        return expected_result(case, pattern, rank, root, case.counts(192, 1, size))

    def same(found, *parts):
        return found.tobytes() == b"".join(part.tobytes() for part in parts)

    assert same(expected("all_to_all", 2), *(x[128:192] for x in inputs))
    assert same(expected("all_gather", 2), *(x[:64] for x in inputs))
    assert same(expected("gather", 1), *(x[:64] for x in inputs))
    assert same(expected("scatter", 2), inputs[1][128:192])
    assert same(expected("broadcast", 2), inputs[1])
    assert same(expected("send_recv", 0), inputs[2])
    summed = Pattern(DTYPES["float32"], "sum", size)
    counts = CASES["reduce_scatter"].counts(192, 4, size)
    whole = sum(summed.input(rank, 0, counts.send) for rank in range(size))
    found = expected_result(CASES["reduce_scatter"], summed, 2, -1, counts)
    assert same(found, whole[2 * counts.param :])
