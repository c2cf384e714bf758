"""Collectives with encoded messages: what they sum, what they keep, how much they send."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from pycomm import (
    ArgumentTypeError,
    ArgumentValueError,
    Communicator,
    GradientBuckets,
    MismatchError,
    choice,
)
from pycomm.algorithms.compression import Cast, ErrorFeedback

LAYOUTS: list[list[int]] = [[0], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1]]
NAMES = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
# Relative to the largest value of a block: half a step, twice.
STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}


def on(layout: list[int], run: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    return pycomm.run_local(len(layout), run, timeout=20, hosts=layout, **options)


def values(rank: int, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    return rng.standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_is_near_and_equal_on_all_ranks(layout: list[int], name: str, op: str) -> None:
    def run(comm: Communicator) -> list[bytes]:
        found = []
        for count in (0, 1, 2, 5, 1000, 70_001):
            inputs = [values(rank, count) for rank in range(comm.size)]
            exact = np.sum(inputs, axis=0, dtype=np.float64) / (comm.size if op == "avg" else 1)
            bound = np.sum(np.abs(inputs), axis=0).max(initial=0) * 2 * STEP[name]
            for in_place in (True, False):
                x = inputs[comm.rank].copy()
                out = x if in_place else np.full(count, 7, np.float32)
                assert comm.all_reduce(x, out, op=op, compression=name) is out
                np.testing.assert_allclose(out, exact, atol=bound)
                if not in_place:
                    np.testing.assert_array_equal(x, inputs[comm.rank])
                found.append(out.tobytes())
        return found

    results = on(layout, run)
    assert all(one == results[0] for one in results)
    assert results[0][::2] == results[0][1::2]  # in place or not


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_small_whole_numbers_are_exact(data: st.DataObject) -> None:
    """Against NumPy, to the bit: sums that every format holds."""
    layout = data.draw(st.sampled_from(LAYOUTS))
    collective = data.draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]))
    codec = data.draw(
        st.sampled_from(["bf16", "fp16", Cast("fp8_e4m3", block=0), Cast("fp16", block=2)])
    )
    feedback = data.draw(st.booleans())
    count = data.draw(st.integers(0, 40))
    in_place = data.draw(st.booleans())
    size = len(layout)

    def run(comm: Communicator) -> None:
        many = comm.size if collective == "reduce_scatter" else 1
        inputs = [
            np.random.default_rng([count, rank]).integers(-2, 3, count * many).astype(np.float32)
            for rank in range(size)
        ]
        one = ErrorFeedback(codec) if feedback else codec
        for _ in range(2):
            x = inputs[comm.rank].copy()
            options = {"compression": one, "key": "x"}
            if collective == "all_reduce":
                np.testing.assert_array_equal(comm.all_reduce(x, **options), sum(inputs))
            elif collective == "reduce_scatter":
                part = slice(comm.rank * count, (comm.rank + 1) * count)
                out = x[part] if in_place else None
                result = comm.reduce_scatter(x, out, **options)
                np.testing.assert_array_equal(result, sum(inputs)[part])
            else:
                out = np.zeros(count * size, np.float32)
                if in_place:
                    own = out[comm.rank * count : (comm.rank + 1) * count]
                    own[:] = x
                    x = own
                result = comm.all_gather(x, out, **options)
                np.testing.assert_array_equal(result, np.concatenate(inputs))

    on(layout, run)


@pytest.mark.parametrize("layout", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_feedback_telescopes_on_every_rank(
    layout: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 steps: what was applied is the true mean of all, within one final residual."""
    monkeypatch.setattr(choice, "SEGMENT", 1 << 9)  # several segments

    def run(comm: Communicator) -> bytes:
        count, steps = 300, 200
        feedback = ErrorFeedback(name)
        applied, true = np.zeros(count), np.zeros(count)
        for step in range(steps):
            inputs = [values(rank, count, step) for rank in range(comm.size)]
            true += np.mean(inputs, axis=0, dtype=np.float64)
            update = comm.all_reduce(
                inputs[comm.rank], op="avg", compression=feedback, key="weight"
            )
            applied += update
        # What is missing is the last residual of the owner and the mean of those of all ranks, each
        # at most half a step of what was sent.
        ((_, own),) = feedback._kept.values()
        kept = comm.all_gather_object(own)
        largest = max(float(np.abs(array).max()) for arrays in kept for array in arrays)
        np.testing.assert_allclose(applied, true, atol=2 * largest + steps * 2.0**-20)
        assert largest < 8 * STEP[name]
        without = np.zeros(count)
        for step in range(steps):
            without += comm.all_reduce(values(comm.rank, count, step), op="avg", compression=name)
        # Without feedback errors add up, as a random walk.
        assert np.abs(applied - true).max() < np.abs(without - true).max()
        assert feedback.keys() == ("weight",)
        assert feedback.dropped == 0
        return applied.tobytes()

    assert len(set(on(layout, run))) == 1


def test_feedback_of_reduce_scatter_and_all_gather_telescopes() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("fp8_e5m2")
        size, count = comm.size, 50
        total, expected = np.zeros(count), np.zeros(count)
        gathered, sent = np.zeros(count * size), np.zeros(count * size)
        for step in range(100):
            whole = [values(rank, count * size, step) for rank in range(size)]
            part = slice(comm.rank * count, (comm.rank + 1) * count)
            expected += sum(whole)[part]
            total += comm.reduce_scatter(whole[comm.rank], compression=feedback, key="rs")
            parts = [one[:count] for one in whole]
            sent += np.concatenate(parts)
            gathered += comm.all_gather(parts[comm.rank], compression=feedback, key=0)
        np.testing.assert_allclose(total, expected, atol=size * 8 * STEP["fp8_e5m2"])
        np.testing.assert_allclose(gathered, sent, atol=8 * STEP["fp8_e5m2"])
        # A rank's own part of reduce_scatter is not rounded at all.
        layout, (residual,) = feedback._kept["rs"]
        assert residual.size == (size - 1) * count, layout

    on([0, 0, 1], run)


@pytest.mark.parametrize("layout", [[0, 0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_the_range_of_fp16_is_that_of_one_contribution(layout: list[int]) -> None:
    """Neither does a sum overflow on the wire, nor do small values vanish."""

    def run(comm: Communicator) -> None:
        for value in (40_000.0, 1e-7):
            for op, expected in (("avg", value), ("sum", 4 * value)):
                x = np.full(10, value, np.float32)
                comm.all_reduce(x, op=op, compression="fp16")
                assert x == pytest.approx(expected, rel=0.2 if value < 1 else 2**-11)
        assert comm.saturated == 0
        x = np.full(10, 70_000, np.float32)
        comm.all_reduce(x, op="avg", compression="fp16")
        assert (x == 65_504).all()
        assert comm.saturated > 0
        x = np.full(10, 70_000, np.float32)
        comm.all_reduce(x, op="avg", compression=Cast("fp16", block=16))
        assert x == pytest.approx(70_000, rel=2**-11)

    on(layout, run)


@pytest.mark.parametrize("layout", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_arrive_and_do_not_stay(layout: list[int], name: str) -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback(name)
        x = np.zeros(600, np.float32)
        if comm.rank == 1:
            x[300:304] = [np.nan, np.inf, 70_000, 1]
        comm.all_reduce(x, compression=feedback, key="w")
        assert np.isnan(x[300])
        assert not np.isfinite(x[301])
        for _ in range(4):
            y = comm.all_reduce(np.ones(600, np.float32), compression=feedback, key="w")
            assert np.isfinite(y).all()
        assert y == pytest.approx(comm.size, rel=0.3, abs=20_000 if name == "fp16" else 0)
        for _, arrays in feedback._kept.values():
            assert all(np.isfinite(one).all() for one in arrays)

    on(layout, run)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("segment", [1 << 10, 1 << 22])
def test_bytes_are_those_that_the_plan_says(
    layout: list[int], segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "SEGMENT", segment)

    size, hosts = len(layout), len(set(layout))
    inside = size // hosts  # ranks of a host, if only the hop between hosts is encoded
    if hosts == 1 or [layout.count(host) for host in set(layout)] != [inside] * hosts:
        hosts, inside = size, 1
    parts = 10_000
    # Values that a rank sends encoded, and as they are, for data or parts of that many.
    values_sent = {
        "all_reduce": (
            2 * (hosts - 1) * parts * size // size,
            2 * (inside - 1) * parts * size // inside,
        ),
        "reduce_scatter": ((hosts - 1) * parts, (inside - 1) * hosts * parts),
        "all_gather": ((hosts - 1) * parts, (inside - 1) * hosts * parts),
    }

    def run(comm: Communicator) -> None:
        for collective, (encoded, plain) in values_sent.items():
            for name, nbytes in (("bf16", 2), ("fp8_e4m3", 1)):
                x = np.ones(parts if collective == "all_gather" else parts * size, np.float32)
                plan = comm.plan(collective, x, compression=name)
                before = comm.bytes_sent
                plan()
                assert comm.bytes_sent - before == plan.bytes_sent
                assert plan.bytes_sent == pytest.approx(nbytes * encoded + 4 * plain, rel=0.03)
                assert f"as {name}" in str(plan)
                slower = "slower than without compression" in str(plan)
                assert slower is (len(set(layout)) == 1)

    on(layout, run)


def test_only_the_hop_between_hosts_is_rounded() -> None:
    """Values that bf16 cannot hold cancel inside each host: nothing of them is lost."""

    def run(comm: Communicator) -> None:
        x = np.full(1000, 1 + 2.0**-20, np.float32)
        if comm.rank % 2:
            x[:] = -1
        comm.all_reduce(x, compression="bf16")
        assert (x == 2 * 2.0**-20).all()
        plan = comm.plan("all_reduce", x, compression="bf16")
        assert plan.algorithm == "hierarchical"

    on([0, 0, 1, 1], run)


def test_plans_and_works_in_flight() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("bf16")
        xs = [np.zeros(3000, np.float32) for _ in range(4)]
        plans = [
            comm.plan("all_reduce", x, compression=feedback, key=index)
            for index, x in enumerate(xs)
        ]
        for turn in range(3):
            for index, x in enumerate(xs):
                x[:] = turn + index
            works = [plan(async_op=True) for plan in plans]
            works += [comm.all_gather(np.full(5, 3, np.float32), compression="fp16", async_op=True)]
            for work in reversed(works):
                work.wait()
            for index, x in enumerate(xs):
                assert (x == comm.size * (turn + index)).all()
            assert (works[-1].wait() == 3).all()

    on([0, 0, 1, 1], run)


def test_another_length_starts_anew_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Also where a rank's slice has the same length as before."""

    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("fp8_e4m3")
        comm.all_reduce(np.full(9, 1030, np.float32), compression=feedback, key="w")
        x = comm.all_reduce(np.zeros(10, np.float32), compression=feedback, key="w")
        assert not x.any()

    on([0, 0, 1, 1], run)
    assert caplog.text.count("'w' starts anew") == 4


def test_the_variable_chooses_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> str:
        return str(comm.plan("all_reduce", np.ones(4, np.float32), compression="bf16"))

    for value, said in (
        ("all_reduce=direct", "direct: PYCOMM_ALGORITHM says direct"),
        ("ring", "hierarchical: 2 hosts; PYCOMM_ALGORITHM says ring, which has no seat"),
    ):
        monkeypatch.setenv("PYCOMM_ALGORITHM", value)
        assert all(said in text for text in on([0, 0, 1, 1], run))


class Upper:
    """A user's codec: the upper half of each float, no more."""

    def encoded_size(self, count: int) -> int:
        return 2 * count

    def encode(self, source: np.ndarray, target: np.ndarray, key: Any = None) -> Any:
        target.view(np.uint16)[:] = source.view(np.uint32) >> 16

    def decode(self, source: np.ndarray, target: np.ndarray) -> None:
        target.view(np.uint32)[:] = source.view(np.uint16).astype(np.uint32) << 16

    def to_dict(self) -> dict[str, Any]:
        return {"codec": "upper", "more": "x" * 300}

    def __eq__(self, other: object) -> bool:
        return type(other) is Upper

    def __hash__(self) -> int:
        return 7


class Half(Cast):
    """Another encoding, by what a cast does."""

    def encode(self, source: np.ndarray, target: np.ndarray, key: Any = None) -> int:
        return super().encode(source * np.float32(0.5), target)

    def decode(self, source: np.ndarray, target: np.ndarray) -> None:
        super().decode(source, target)
        target *= 2


@pytest.mark.parametrize("check", [False, True])
def test_a_codec_of_ones_own(check: bool) -> None:
    def run(comm: Communicator) -> None:
        for codec in (Upper(), ErrorFeedback(Upper()), Half("bf16"), ErrorFeedback(Half("bf16"))):
            x = np.arange(100, dtype=np.float32)
            comm.all_reduce(x, compression=codec, key=1)
            assert (x == comm.size * np.arange(100)).all()
        GradientBuckets(comm, {"a": np.zeros(3, np.float32)}, compression=Upper())
        if check:
            with pytest.raises(MismatchError, match=r"4 x float32.*5 x float32"):
                comm.all_reduce(np.ones(4 + comm.rank % 2, np.float32), compression=Upper())

    on([0, 0, 1, 1], run, check=check)


class Unhashable(Upper):
    def __hash__(self) -> int:
        return hash([])


class Unsized(Upper):
    def encoded_size(self, count: int) -> Any:
        return 2.0 * count


def test_what_cannot_be_compressed_is_said_before_anything_is_sent() -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(8, np.float32)
        before = comm.bytes_sent
        feedback = ErrorFeedback("bf16")
        wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: comm.all_reduce(np.ones(8), compression="bf16"), ArgumentTypeError, "float32"),
            (lambda: comm.all_reduce(x, compression="zip"), ArgumentValueError, "no format"),
            (lambda: comm.all_reduce(x, compression=5), ArgumentTypeError, "codec"),
            (lambda: comm.all_reduce(x, op="max", compression="bf16"), ArgumentValueError, "avg"),
            (
                lambda: comm.all_reduce(x, op=pycomm.premul_sum(2.0), compression="bf16"),
                ArgumentValueError,
                "sum and avg",
            ),
            (lambda: comm.all_reduce(x, compression=feedback), ArgumentTypeError, "key="),
            (lambda: comm.all_reduce(x, compression=Unhashable()), ArgumentTypeError, "frozen"),
            (lambda: comm.all_reduce(x, compression=Unsized()), ArgumentTypeError, "encoded_size"),
            (lambda: comm.all_gather(x, compression=feedback), ArgumentTypeError, "key="),
            (
                lambda: comm.all_reduce(x, compression="bf16", algorithm="ring"),
                ArgumentValueError,
                "no seat",
            ),
            (
                lambda: comm.all_gather(x, compression="bf16", algorithm="bruck"),
                ArgumentValueError,
                "no seat",
            ),
            (
                lambda: comm.reduce_scatter(x, op="prod", compression="bf16"),
                ArgumentValueError,
                "avg",
            ),
        ]
        for call, error, text in wrong:
            with pytest.raises(error, match=text):
                call()
        assert comm.bytes_sent == before
        assert (comm.all_reduce(x, compression="none") == comm.size).all()

    on([0, 0, 1, 1], run)


def test_ranks_that_disagree_about_it_are_told() -> None:
    def run(comm: Communicator) -> str:
        x = np.ones(8, np.float32)
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(x, compression="bf16" if comm.rank else None)
        return str(caught.value)

    for text in on([0, 0], run, check=True):
        assert "compression bf16" in text


def test_one_rank_alone_rounds_nothing() -> None:
    def run(comm: Communicator) -> None:
        x = values(0, 9)
        np.testing.assert_array_equal(comm.all_reduce(x.copy(), compression="fp8_e4m3"), x)
        np.testing.assert_array_equal(comm.all_reduce(x.copy(), op="avg", compression="bf16"), x)

    on([0], run)
