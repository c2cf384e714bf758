"""Codecs: every bit against ml_dtypes, scales, saturation, and error feedback that telescopes."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pycomm import ArgumentTypeError, ArgumentValueError
from pycomm.algorithms.compression import Cast, Codec, ErrorFeedback, as_codec, from_dict
from pycomm.kernels.casts import FORMATS

NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
ALL = [
    Cast("bf16"), Cast("fp16"), Cast("fp16", block=64), Cast("bf16", block=1),
    Cast("fp8_e4m3"), Cast("fp8_e5m2"), Cast("fp8_e4m3", block=0), Cast("fp8_e5m2", block=32),
    Cast("fp16", saturate=False), Cast("fp8_e4m3", block=0, saturate=False),
]  # fmt: skip


def encoded(codec: Codec, x: Any, key: Any = None) -> tuple[np.ndarray, int]:
    x = np.asarray(x, np.float32)
    target = np.full(codec.encoded_size(x.size), 0xA5, np.uint8)
    return target, codec.encode(x, target, key)


def decoded(codec: Codec, octets: np.ndarray, count: int) -> np.ndarray:
    out = np.full(count, 7, np.float32)
    codec.decode(octets, out)
    return out


def there_and_back(codec: Codec, x: Any, key: Any = None) -> np.ndarray:
    octets, _ = encoded(codec, x, key)
    return decoded(codec, octets, np.size(x))


def all_words() -> np.ndarray:
    """Every upper half of a float32, with lower halves at the ties, and at random."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    rng = np.random.default_rng(0)
    random = [rng.integers(0, 1 << 16, 1 << 16, dtype=np.uint32) for _ in range(4)]
    return np.concatenate([high | np.uint32(one) for one in low] + [high | r for r in random])


def same_bits_or_nan(found: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    kind = f"u{expected.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(kind)[~nan], expected.view(kind)[~nan])


@pytest.mark.parametrize("name", NUMPY)
def test_plain_casts_are_those_of_ml_dtypes_bit_for_bit(name: str) -> None:
    x = all_words().view(np.float32)
    codec = Cast(name, block=0, saturate=False)
    octets, _ = encoded(codec, x)
    with np.errstate(all="ignore"):
        expected = x.astype(NUMPY[name])
    same_bits_or_nan(octets.view(NUMPY[name]), expected)
    with np.errstate(all="ignore"):
        wide = expected.astype(np.float32)
    same_bits_or_nan(decoded(codec, octets, x.size), wide)


def test_bf16_by_default_has_all_bits_of_ieee_rounding() -> None:
    x = all_words().view(np.float32)
    with np.errstate(all="ignore"):
        same_bits_or_nan(encoded(Cast("bf16"), x)[0].view(ml_dtypes.bfloat16), x.astype("bfloat16"))
    # Known traps: ties to even, the largest float, NaN with a low payload, subnormals.
    words = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0x00008001, 0xFF800001], "u4")
    codes = encoded(Cast("bf16"), words.view(np.float32))[0].view(np.uint16)
    assert codes[[0, 1, 2, 4]].tolist() == [0x3F80, 0x3F82, 0x7F80, 0x0001]
    assert np.isnan(codes[[3, 5]].view(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert there_and_back(Cast("bf16"), [0.2691408770292272])[0] == np.float32(0.26953125)


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("place", [0, 70_000])
def test_what_is_too_large_is_cut_and_counted(name: str, place: int) -> None:
    largest = FORMATS[name].largest
    assert largest == float(ml_dtypes.finfo(NUMPY[name]).max)
    beyond = np.nextafter(np.float32(largest), np.float32(np.inf))
    far = np.float32(3.4e38)  # rounds to 2**128 in bf16
    x = np.zeros(100_000, np.float32)
    x[place : place + 5] = [largest, beyond, -beyond, far, -far]
    octets, count = encoded(Cast(name, block=0, saturate=True), x)
    found = decoded(Cast(name, block=0), octets, x.size)
    assert count == 2  # what is just beyond the largest is rounded to it
    assert abs(found).max() == largest
    np.testing.assert_array_equal(np.sign(found), np.sign(x))
    assert np.isfinite(found).all()
    # Infinity is not a large number, and NaN is no number: both are passed on.
    special = there_and_back(Cast(name, block=0, saturate=True), [np.inf, -np.inf, np.nan, 1])
    assert special[3] == 1
    assert np.isnan(special[2])
    if name == "fp8_e4m3":
        assert np.isnan(special[:2]).all()
    else:
        assert special[:2].tolist() == [np.inf, -np.inf]
    # Without saturation they become what the format says.
    free, count = encoded(Cast(name, block=0, saturate=False), [3.4e38, -3.4e38])
    assert count == 2
    assert not np.isfinite(free.view(NUMPY[name]).astype(np.float32)).any()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("codec", ALL, ids=str)
@given(x=arrays(np.float32, st.integers(0, 700), elements=finite))
def test_the_error_is_at_most_half_a_step(codec: Cast, x: np.ndarray) -> None:
    octets, count = encoded(codec, x)
    found = decoded(codec, octets, x.size)
    info = ml_dtypes.finfo(NUMPY[codec.format])
    block = codec.block or max(1, x.size)
    for start in range(0, x.size, block):
        part, back = x[start : start + block], found[start : start + block].astype(np.float64)
        peak = float(np.abs(part).max())
        scale = 1.0
        if codec.block:
            # The smallest power of two by which the peak fits, as far as float32 has it.
            ratio = peak / float(info.max)
            scale = 2.0 ** max(-126.0, np.ceil(np.log2(ratio)) if peak else -126)
            while float(info.max) * scale >= 2.0**128:
                scale /= 2  # what is decoded has to be float32
        fits = np.abs(part) <= float(info.max) * scale
        assert codec.block == 0 or fits.all() or peak > 1.7 * 2.0**127
        step = np.maximum(np.abs(part) * float(info.eps), float(info.smallest_subnormal) * scale)
        # Subnormal float32 values may lose a bit when they are scaled down.
        assert (np.abs(back - part)[fits] <= step[fits] / 2 + 2.0**-149 * scale).all()
    if codec.saturate:
        assert count == 0 or not codec.block or abs(x).max() > 1.7 * 2.0**127
        assert np.isfinite(found).all() or codec.format == "bf16"


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_sizes_are_exact_and_pieces_do_not_show(codec: Cast, count: int) -> None:
    item = np.dtype(NUMPY[codec.format]).itemsize
    blocks = -(-count // codec.block) if codec.block else 0
    assert codec.encoded_size(count) == count * item + blocks
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    whole = there_and_back(codec, x)
    cut = (codec.block or 1) * (1000 // (codec.block or 1) or 1)
    for start in range(0, count, cut * 50):
        piece = x[start : start + cut]
        np.testing.assert_array_equal(there_and_back(codec, piece), whole[start : start + cut])
    # The scales are where they are said to be, powers of two.
    if codec.block and count:
        octets, _ = encoded(codec, x)
        scales = 2.0 ** (octets[count * item :].astype(int) - 127.0)
        values = octets[: count * item].view(NUMPY[codec.format]).astype(np.float64)
        np.testing.assert_array_equal(
            whole, (values * np.repeat(scales, codec.block)[:count]).astype(np.float32)
        )


def test_scales_keep_small_and_large_values() -> None:
    for value in (1e-7, 70_000.0, 1e-30, 3e38, 2.0**-140):
        x = np.full(300, value, np.float32)
        assert there_and_back(Cast("fp16", block=64), x) == pytest.approx(value, rel=2**-11)
        assert there_and_back(Cast("fp8_e4m3"), x) == pytest.approx(
            value, rel=2**-4 if value > 1e-38 else 0.6
        )
    assert there_and_back(Cast("fp16"), [70_000.0])[0] == 65_504
    assert there_and_back(Cast("fp16"), [1e-7])[0] == pytest.approx(1.19e-7, rel=1e-2)
    # A block with NaN or infinity keeps its other values.
    x = np.full(256, 0.001, np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    found = there_and_back(Cast("fp8_e5m2"), x)
    assert np.isnan(found[0])
    assert found[1:3].tolist() == [np.inf, -np.inf]
    assert found[3:] == pytest.approx(0.001, rel=2**-3)


def test_odd_addresses_are_no_obstacle() -> None:
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    for codec in ALL:
        raw = np.empty(codec.encoded_size(1000) + 1, np.uint8)
        codec.encode(x, raw[1:])
        np.testing.assert_array_equal(raw[1:], encoded(codec, x)[0])
        np.testing.assert_array_equal(decoded(codec, raw[1:], 1000), there_and_back(codec, x))


@pytest.mark.parametrize("codec", [ErrorFeedback(one) for one in ALL], ids=str)
def test_feedback_telescopes(codec: ErrorFeedback) -> None:
    """The sum of what arrives is the sum of what was sent, within one residual."""
    codec.reset()
    rng = np.random.default_rng(2)
    sent, arrived = np.zeros(700), np.zeros(700)
    for _ in range(200):
        x = (rng.standard_normal(700) * np.geomspace(1e-5, 10, 700)).astype(np.float32)
        sent += x
        arrived += there_and_back(codec, x, "w")
    ((_, (residual,)),) = codec._kept.values()
    np.testing.assert_allclose(sent - arrived, residual, atol=200 * 10 * 2.0**-22)
    one_step = there_and_back(codec.inner, x)
    assert np.abs(residual).max() <= 2 * max(np.abs(one_step - x).max(), 1e-3)


def test_feedback_is_one_pass_of_what_its_parts_do() -> None:
    """Fused or not, with a codec that knows nothing of residuals: the same bits."""

    class Plain:
        def __init__(self, inner: Cast) -> None:
            self.encoded_size, self.encode = inner.encoded_size, inner.encode
            self.decode, self.to_dict = inner.decode, inner.to_dict

    rng = np.random.default_rng(3)
    for cast in ALL:
        fused, parts = ErrorFeedback(cast), ErrorFeedback(Plain(cast))
        for _ in range(4):
            x = rng.standard_normal(70_001).astype(np.float32) * 1000
            np.testing.assert_array_equal(encoded(fused, x, 1)[0], encoded(parts, x, 1)[0])
        assert fused.saturated == parts.saturated


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_nothing_that_is_not_finite_stays(codec: Cast) -> None:
    feedback = ErrorFeedback(codec)
    for place in (0, 66_000):
        x = np.zeros(70_000, np.float32)
        x[place : place + 4] = [np.nan, np.inf, 70_000, 1]
        there_and_back(feedback, x, "w")
        ((_, (residual,)),) = feedback._kept.values()
        assert np.isfinite(residual).all()
        assert feedback.dropped >= 2
        for _ in range(4):
            y = np.ones(70_000, np.float32)
            found = there_and_back(feedback, y, "w")
            assert np.isfinite(found).all()
        feedback.reset("w")
    # What was cut comes later: 70000 and 1 are 4 times 70001 / 4.
    if codec == Cast("fp16"):
        assert feedback.saturated == 2
        total = there_and_back(feedback, [70_000], "v") + there_and_back(feedback, [1], "v")
        assert total[0] == pytest.approx(70_001, rel=2**-11)


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block", [0, 256])
def test_large_residuals_do_not_overflow(name: str, block: int) -> None:
    feedback = ErrorFeedback(Cast(name, block=block))
    for value in (3.2e38, -3.2e38):
        for _ in range(5):
            assert np.isfinite(there_and_back(feedback, np.full(256, value), "w")).all()
        feedback.reset()


def test_keys_are_the_callers_and_memory_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    feedback = ErrorFeedback("bf16")
    for step in range(1000):
        for key in ("layer.weight", 7):
            encoded(feedback, np.full(10, step + 0.1), key)  # a new array each time
    assert feedback.keys() == ("layer.weight", 7)
    for key in (None, 1.5, ("a",), np.zeros(1), True):
        with pytest.raises(ArgumentTypeError, match="key="):
            encoded(feedback, np.zeros(3), key)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "pycomm"):
        first = there_and_back(feedback, np.full(11, 1.001), 7)
    assert "error feedback of 7 starts anew" in caplog.text
    np.testing.assert_array_equal(first, there_and_back(Cast("bf16"), np.full(11, 1.001)))
    feedback.reset("layer.weight")
    feedback.reset("never there")
    assert feedback.keys() == (7,)
    feedback.reset()
    assert feedback.keys() == ()


def test_state_goes_on_where_it_was() -> None:
    rng = np.random.default_rng(4)
    one, two = ErrorFeedback("fp8_e4m3"), ErrorFeedback("fp8_e4m3")
    for _ in range(3):
        encoded(one, rng.standard_normal(300), "w")
    state = pickle.loads(pickle.dumps(one.state_dict()))
    two.load_state_dict(state)
    for _ in range(3):
        x = rng.standard_normal(300)
        np.testing.assert_array_equal(encoded(one, x, "w")[0], encoded(two, x, "w")[0])
    state["residuals"][0]["arrays"][0][:] = 0  # a copy: nobody else's
    np.testing.assert_array_equal(encoded(one, x, "w")[0], encoded(two, x, "w")[0])


def test_a_state_survives_json_and_another_size_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = ErrorFeedback("bf16"), ErrorFeedback("bf16")
    for key in (7, "7"):
        encoded(one, np.full(5, 1.001 + isinstance(key, str)), key)
    state = one.state_dict()
    for told in state["residuals"]:
        told["arrays"] = [array.tolist() for array in told["arrays"]]
    two.load_state_dict(json.loads(json.dumps(state)))
    assert two.keys() == (7, "7")
    for key in (7, "7"):
        x = np.full(5, 1.001)
        np.testing.assert_array_equal(encoded(one, x, key)[0], encoded(two, x, key)[0])
    assert not caplog.records
    state["residuals"][0]["arrays"] = [[0.0] * 4]  # not what the layout says
    two.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "pycomm"):
        encoded(two, np.full(5, 1.001), 7)
    assert "7 starts anew" in caplog.text


def test_a_state_through_numpy(tmp_path: Path) -> None:
    one, two = ErrorFeedback("bf16"), ErrorFeedback("bf16")
    encoded(one, [1.001], "w")
    np.savez(tmp_path / "state.npz", state=np.array(one.state_dict(), dtype=object))
    two.load_state_dict(np.load(tmp_path / "state.npz", allow_pickle=True)["state"])
    np.testing.assert_array_equal(encoded(one, [1.001], "w")[0], encoded(two, [1.001], "w")[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        None,
        np.zeros(3),
        *(
            {"codec": ErrorFeedback("bf16").to_dict(), "residuals": residuals}
            for residuals in (
                [{"key": "w", "layout": [], "arrays": ["x"]}],
                [{"key": "w", "layout": [], "arrays": [[[1], [2, 3]]]}],
                [{"key": "w", "layout": [{}], "arrays": []}],
                [{"key": "w", "layout": [], "arrays": []}] * 2,
            )
        ),
        {"codec": Cast("bf16").to_dict(), "residuals": 3},
        {"codec": ErrorFeedback("fp16").to_dict(), "residuals": {}},
        {"codec": ErrorFeedback("bf16").to_dict(), "residuals": [{"key": "w", "layout": []}]},
        {
            "codec": ErrorFeedback("bf16").to_dict(),
            "residuals": [{"key": "w", "layout": [], "arrays": [[np.nan]]}],
        },
        {
            "codec": ErrorFeedback("bf16").to_dict(),
            "residuals": [{"key": "w", "layout": [], "arrays": [[[1.0]]]}],
        },
    ],
)
def test_a_state_that_is_none_changes_nothing(wrong: Any) -> None:
    feedback = ErrorFeedback("bf16")
    encoded(feedback, [0.1], "kept")
    with pytest.raises(ArgumentValueError):
        feedback.load_state_dict(wrong)
    assert feedback.keys() == ("kept",)


@pytest.mark.parametrize("codec", [*ALL, ErrorFeedback("bf16")], ids=str)
def test_codecs_by_dictionary_and_by_value(codec: Any) -> None:
    told = json.loads(json.dumps(codec.to_dict()))
    again = from_dict(told)
    assert again.to_dict() == codec.to_dict()
    assert str(again) == str(codec)
    if isinstance(codec, Cast):
        assert again == codec
        assert hash(again) == hash(codec)
        with pytest.raises(AttributeError):
            codec.format = "fp16"  # type: ignore[misc]
    assert as_codec(codec) is codec


def test_names() -> None:
    assert as_codec(None) is None
    assert as_codec("none") is None
    assert as_codec("bf16") == Cast("bf16")
    assert str(Cast("fp8_e4m3")) == "fp8_e4m3"
    assert str(Cast("fp16", block=64)) == "fp16, block 64"
    assert str(ErrorFeedback("fp16")) == "fp16 with error feedback"
    for wrong, error in (
        ("fp32", ArgumentValueError),
        ("", ArgumentValueError),
        (3, ArgumentTypeError),
        (Cast, ArgumentTypeError),
        (ErrorFeedback, ArgumentTypeError),
    ):
        with pytest.raises(error):
            as_codec(wrong)
    for wrong_told in ({}, {"codec": "zip"}, {"codec": "cast"}, {"codec": "cast", "what": 3}, 5):
        with pytest.raises(ArgumentValueError):
            from_dict(wrong_told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Cast("fp12"), ArgumentValueError),
        (lambda: Cast(None), ArgumentValueError),
        (lambda: Cast("fp16", block=3), ArgumentValueError),
        (lambda: Cast("fp16", block=-2), ArgumentValueError),
        (lambda: Cast("fp16", block=1 << 20), ArgumentValueError),
        (lambda: Cast("fp16", block=2.0), ArgumentTypeError),
        (lambda: Cast("fp16", block=True), ArgumentTypeError),
        (lambda: Cast("fp16", saturate=1), ArgumentTypeError),
        (lambda: ErrorFeedback(ErrorFeedback("bf16")), ArgumentTypeError),
        (lambda: ErrorFeedback(None), ArgumentTypeError),
        (lambda: ErrorFeedback("fp12"), ArgumentValueError),
    ],
)
def test_codecs_that_cannot_be(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_arrays_that_cannot_be() -> None:
    codec = Cast("bf16")
    x, octets = np.zeros(4, np.float32), np.zeros(8, np.uint8)
    read_only = octets.copy()
    read_only.flags.writeable = False
    for source, target, error in (
        (x.astype("f8"), octets, ArgumentTypeError),
        ([0.0] * 4, octets, ArgumentTypeError),
        (x, octets.view("i1"), ArgumentTypeError),
        (x, octets[:7], ArgumentValueError),
        (x.reshape(2, 2), octets, ArgumentValueError),
        (np.zeros(8, np.float32)[::2], octets, ArgumentValueError),
        (x, read_only, ArgumentValueError),
    ):
        for one in (codec, ErrorFeedback(codec)):
            with pytest.raises(error):
                one.encode(source, target, "w")
    with pytest.raises(ArgumentValueError):
        codec.decode(octets, np.zeros(5, np.float32))
