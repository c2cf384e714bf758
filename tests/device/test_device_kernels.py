"""The kernels, compiled for the host from the same source, against what hosts do."""

import numpy as np
import pytest
from support.gpu import to_device

from pycomm.algorithms.compression import Cast
from pycomm.devices import get_device
from pycomm.dtypes import DTYPES, Kind, PremulSum, ReduceOp, check_op
from pycomm.kernels.cuda import MOST_SOURCES, Kernels, kernels_of
from pycomm.kernels.host import premultiply, reduce_arrays

pytestmark = pytest.mark.usefixtures("_alone")
LEGACY = 1


@pytest.fixture
def _alone() -> None:
    """In the context of device 0, as callers of kernels are."""


@pytest.fixture
def kernels():
    device = get_device(0)
    with device.entered():
        yield kernels_of(0)


def values_of(name: str, count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    kind = DTYPES[name]
    if kind.kind is Kind.BOOL:
        return generator.integers(0, 2, count).astype(np.bool_)
    if kind.kind is Kind.INT:
        info = np.iinfo(kind.numpy)
        return generator.integers(info.min, info.max, count, kind.numpy, endpoint=True)
    values = generator.normal(0, 100, count)
    if kind.kind is Kind.COMPLEX:
        return (values + 1j * generator.normal(0, 100, count)).astype(kind.numpy)
    values[: count // 8] = np.resize([np.nan, np.inf, -np.inf, 0.0, 65504.0, 1e-7], count // 8)
    return values.astype(kind.numpy)


CASES = [
    (name, op)
    for name, row in DTYPES.items()
    if row.kind is not Kind.OPAQUE
    for op in ReduceOp
    if not (row.kind in (Kind.BOOL, Kind.COMPLEX) and op not in (ReduceOp.SUM,))
    and not (row.kind in (Kind.FLOAT, Kind.COMPLEX) and op is ReduceOp.AVG)
]


@pytest.mark.parametrize(("name", "op"), CASES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_reductions_have_the_bits_of_hosts(kernels: Kernels, name: str, op: ReduceOp, offset: int):
    row = DTYPES[name]
    check_op(op, row)
    for count, number in ((1, 2), (257, 3), (4099, 2)):
        inputs = [values_of(name, count + offset, seed) for seed in range(number)]
        expected = np.empty(count, row.numpy)
        reduce_arrays([one[offset:] for one in inputs], expected, row, op)
        arrays = [to_device(one, 0)[offset:] for one in inputs]
        kernels.reduce([one.pointer for one in arrays], arrays[0].pointer, row, op, count, LEGACY)
        found = arrays[0].copy()
        same = found.view(np.uint8) == expected.view(np.uint8)
        nans = np.isnan(found) & np.isnan(expected) if row.kind in (Kind.FLOAT, Kind.HALF) else None
        if nans is not None:
            same = same.reshape(count, -1).all(axis=1) | nans
        assert same.all(), (name, op, count, found[:5], expected[:5])


def test_more_sources_than_one_kernel_takes(kernels: Kernels):
    row, count = DTYPES["int32"], 33
    inputs = [values_of("int32", count, seed) for seed in range(MOST_SOURCES * 2 + 3)]
    arrays = [to_device(one, 0) for one in inputs]
    target = to_device(np.zeros(count, np.int32), 0)
    kernels.reduce(
        [one.pointer for one in arrays], target.pointer, row, ReduceOp.SUM, count, LEGACY
    )
    assert (target.copy() == np.sum(inputs, axis=0, dtype=np.int32)).all()
    half = [one.pointer for one in arrays]
    with pytest.raises(TypeError, match="rounded once"):
        kernels.reduce(half, target.pointer, DTYPES["float16"], ReduceOp.SUM, count, LEGACY)


@pytest.mark.parametrize(
    "name", [n for n, r in DTYPES.items() if r.kind not in (Kind.BOOL, Kind.OPAQUE)]
)
def test_products_have_the_bits_of_hosts(kernels: Kernels, name: str):
    row = DTYPES[name]
    x = values_of(name, 1000, 3)
    factors: list = [3, 0]
    if row.kind is not Kind.INT:
        factors += [0.3, 1e-3]
    if row.kind is Kind.COMPLEX:
        factors += [2 - 0.5j]
    for factor in factors:
        expected = np.empty_like(x)
        premultiply(x, expected, row, PremulSum(factor))
        array = to_device(x, 0)
        kernels.scale(array.pointer, array.pointer, row, factor, x.size, LEGACY)
        found = array.copy()
        if row.kind is Kind.COMPLEX:  # NumPy's own product may differ in the last bit
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
            wide = np.float64 if row.kind is Kind.HALF else row.numpy
            np.testing.assert_array_equal(found.astype(wide), expected.astype(wide))


FORMS = ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]


def hard_values(count: int, seed: int) -> np.ndarray:
    """Random words: all magnitudes, NaN with any payload, infinity, subnormals."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 2**32, count, np.uint32)
    words[::3] = generator.normal(0, 1, words[::3].size).astype(np.float32).view(np.uint32)
    words[:6] = [0x7F800001, 0x7F7FFFFF, 0xFF800000, 0x477FE000, 0x33000000, 0x387FC000]
    return words.view(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [None, 0, 1, 2, 64])
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("offset", [0, 1])
def test_casts_have_the_bits_of_hosts(
    kernels: Kernels, form: str, block, saturate: bool, offset: int
):
    codec = Cast(form, block, saturate)
    shift = codec.block.bit_length() - 1 if codec.block else None
    for count in (1, 255, 1027, 70000):
        x = hard_values(count + 6, count)[:count].copy()
        encoded = np.zeros(codec.encoded_size(count), np.uint8)
        large = codec.encode(x, encoded)
        # Values and codes at any address that suits their type.
        source = to_device(np.pad(x, (offset, 0)), 0)[offset:]
        shifted = offset * codec._form.numpy.itemsize
        target = to_device(np.pad(encoded * 0, (shifted, 0)), 0)[shifted:]
        peaks = to_device(np.zeros(max(1, count), np.uint32), 0)
        tally = to_device(np.zeros(2, np.uint64), 0)
        kernels.encode(
            form, source.pointer, target.pointer, count, LEGACY, shift=shift, saturate=saturate,
            peaks=peaks.pointer, tally=tally.pointer, residual=0,
        )  # fmt: skip
        found = target.copy()
        back, expected = np.empty(count, np.float32), np.empty(count, np.float32)
        codec.decode(encoded, expected)
        decoded = to_device(np.pad(back, (offset, 0)), 0)[offset:]
        kernels.decode(form, target.pointer, decoded.pointer, count, LEGACY, shift=shift)
        np.testing.assert_array_equal(decoded.copy(), expected)
        nan = np.isnan(expected)
        width = codec._form.numpy.itemsize
        codes = found[: count * width].reshape(count, width)
        assert (codes == encoded[: count * width].reshape(count, width))[~nan].all()
        assert (found[count * width :] == encoded[count * width :]).all()
        assert tally.copy()[0] == large


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [None, 0, 32])
def test_error_feedback_has_the_bits_of_hosts(kernels: Kernels, form: str, block):
    codec = Cast(form, block)
    shift = codec.block.bit_length() - 1 if codec.block else None
    count = 1000
    residual = np.zeros(count, np.float32)
    kept = to_device(np.zeros(count + 1, np.float32), 0)[1:]
    tally = to_device(np.zeros(2, np.uint64), 0)
    peaks = to_device(np.zeros(count, np.uint32), 0)
    dropped = 0
    for step in range(4):
        x = (
            hard_values(count, step)
            if step == 0
            else np.random.default_rng(step).normal(0, 1, count).astype("f4")
        )
        encoded = np.zeros(codec.encoded_size(count), np.uint8)
        dropped += codec.compensate(x, encoded, residual)[1]
        source, target = to_device(x, 0), to_device(encoded * 0, 0)
        kernels.encode(
            form, source.pointer, target.pointer, count, LEGACY, shift=shift,
            saturate=bool(codec.saturate), peaks=peaks.pointer, tally=tally.pointer,
            residual=kept.pointer,
        )  # fmt: skip
        assert np.isfinite(kept.copy()).all()
        np.testing.assert_array_equal(kept.copy(), residual)
    assert tally.copy()[1] == dropped


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_encoded_values(kernels: Kernels, form: str):
    codec, count, ranks = Cast(form), 515, 4
    inputs = [np.random.default_rng(rank).normal(0, 1, count).astype("f4") for rank in range(ranks)]
    codes = [np.zeros(codec.encoded_size(count), np.uint8) for _ in inputs]
    total = np.zeros(count, np.float32)
    for rank, (x, code) in enumerate(zip(inputs, codes, strict=True)):
        codec.encode(x, code)
        part = np.empty(count, np.float32)
        codec.decode(code, part)
        part = x if rank == 2 else part
        total = part.copy() if rank == 0 else total + part
    arrays = [to_device(code, 0) for code in codes]
    own, result = to_device(inputs[2], 0), to_device(np.zeros(count, "f4"), 0)
    shift = codec.block.bit_length() - 1 if codec.block else None
    kernels.add_up(
        form, [one.pointer for one in arrays], 2, own.pointer, result.pointer, 3, count, LEGACY,
        shift=shift,
    )  # fmt: skip
    np.testing.assert_array_equal(result.copy(), total / np.float32(3))
