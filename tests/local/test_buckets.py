"""Gradients in buckets: the same as one call each, in any order, in flight and compressed."""

import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from pycomm import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    Communicator,
    GradientBuckets,
    MismatchError,
)
from pycomm.algorithms.compression import ErrorFeedback

SHAPES: dict[str, tuple[int, ...]] = {
    "head.bias": (10,), "head.weight": (48, 10), "empty": (0, 3), "scalar": (),
    "body.bias": (48,), "body.weight": (64, 48), "norm": (48,),
}  # fmt: skip


def parameters(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {name: np.empty(shape, dtype) for name, shape in SHAPES.items()}


def gradient(name: str, rank: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([len(name), rank, step])
    return np.asarray(rng.integers(-8, 9, SHAPES[name]), np.float32)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_results_are_those_of_single_calls_in_any_order(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    limit = data.draw(st.sampled_from([1, 100, 2000, 1 << 20]))
    orders = [[data.draw(st.permutations(list(SHAPES))) for _ in range(size)] for _ in range(2)]
    compression = data.draw(st.sampled_from([None, "bf16"]))
    op = data.draw(st.sampled_from(["sum", "avg"]))

    def run(comm: Communicator) -> None:
        buckets = GradientBuckets(
            comm, parameters(), bucket_bytes=limit, op=op, compression=compression
        )
        for step, order in enumerate(orders):
            for index, name in enumerate(order[comm.rank]):
                value = gradient(name, comm.rank, step)
                if index % 2:
                    buckets[name][...] = value
                    buckets.ready(name)
                else:
                    buckets.ready(name, value)
                    value[...] = 77  # the bucket has a copy
            means = buckets.wait()
            assert set(means) == set(SHAPES)
            for name, mean in means.items():
                total = sum(gradient(name, rank, step) for rank in range(size))
                expected = total if op == "sum" else total / size
                # Whole numbers up to 32 are exact in bfloat16, their means within a step.
                np.testing.assert_allclose(mean, expected, atol=0.2 if compression else 1e-6)
                assert mean is buckets[name] or mean.base is buckets[name].base

    pycomm.run_local(size, run, timeout=20)


def test_buckets_go_in_their_order_and_overlap() -> None:
    def run(comm: Communicator) -> None:
        arrays = parameters()
        del arrays["empty"]
        buckets = GradientBuckets(comm, arrays, bucket_bytes=1)  # each has its own
        *others, first = arrays
        assert [bucket.names for bucket in buckets._buckets] == [[name] for name in arrays]
        buckets.ready(first, gradient(first, 0, 0))
        assert buckets._started == 0  # those before are not ready
        buckets.ready(others[0], gradient(others[0], 0, 0))
        assert buckets._started == 1
        x = comm.all_reduce(np.ones(3))  # other calls may come between
        assert (x == comm.size).all()
        for name in others[1:]:
            buckets.ready(name, gradient(name, 0, 0))
        assert buckets._started == len(arrays)
        np.testing.assert_array_equal(buckets.wait()[first], gradient(first, 0, 0))

    pycomm.run_local(3, run, timeout=20)


def test_what_is_exempt_is_not_rounded() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("fp8_e4m3")
        several = {**parameters(), "steps": np.zeros(3, np.int64)}
        buckets = GradientBuckets(
            comm, several, op="sum", compression=feedback, exempt=lambda _, x: x.ndim < 2
        )
        values = {
            name: np.full(x.shape, 1 + 2.0**-10 if x.dtype == np.float32 else 3, x.dtype)
            for name, x in several.items()
        }
        for name, value in values.items():
            buckets.ready(name, value)
        for name, total in buckets.wait().items():
            exact = (total == comm.size * values[name]).all()
            assert exact == (values[name].ndim < 2 or values[name].size == 0), name
        assert len(feedback.keys()) == 1

    pycomm.run_local(2, run, timeout=20)


def test_feedback_telescopes_through_buckets() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("fp8_e5m2")
        buckets = GradientBuckets(comm, parameters(), compression=feedback, bucket_bytes=1000)
        names = set(feedback.keys())
        totals = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(60):
            for name in SHAPES:
                buckets.ready(name, gradient(name, comm.rank, step) / 7)
            for name, mean in buckets.wait().items():
                exact = sum(gradient(name, rank, step) / 7 for rank in range(comm.size))
                totals[name] += mean - exact / comm.size
            names |= set(feedback.keys())
        assert len(names) == len(buckets._buckets)
        for total in totals.values():
            assert np.abs(total).max(initial=0) < 0.6  # a step of e5m2 or so, not 60

    pycomm.run_local(3, run, timeout=20)


def test_buckets_formed_anew_go_by_what_became_ready() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("bf16")
        buckets = GradientBuckets(comm, parameters(), bucket_bytes=500, compression=feedback)
        mine = list(SHAPES) if comm.rank else list(reversed(SHAPES))
        for _ in range(2):
            for name in mine:
                buckets.ready(name, gradient(name, comm.rank, 0))
            buckets.wait()
        buckets.reorder()
        assert [name for one in buckets._buckets for name in one.names] == list(reversed(SHAPES))
        assert feedback.keys() == ()
        for name in mine:
            buckets.ready(name, np.ones(SHAPES[name], np.float32))
        assert all((mean == 1).all() for mean in buckets.wait().values())
        buckets.ready("norm", gradient("norm", 0, 0))
        with pytest.raises(ArgumentValueError, match="between two steps"):
            buckets.reorder()

    pycomm.run_local(2, run, timeout=20)


def test_one_feedback_serves_several_buckets_by_name() -> None:
    def run(comm: Communicator) -> None:
        feedback = ErrorFeedback("fp8_e4m3")
        large = GradientBuckets(comm, parameters(), compression=feedback)
        small = GradientBuckets(comm, parameters(), compression=feedback)
        total = np.zeros(48)
        for step in range(30):
            for name in SHAPES:
                large.ready(name, gradient(name, comm.rank, step) * 1000)
                small.ready(name, gradient(name, comm.rank, step) / 7)
            total += small.wait()["norm"]
            large.wait()
            total -= sum(gradient("norm", rank, step) / 7 for rank in range(comm.size)) / comm.size
        assert np.abs(total).max() < 0.6
        assert feedback.keys() == ("gradients 0", "gradients 2 0")
        GradientBuckets(comm, parameters(), compression=feedback, name="more")

    pycomm.run_local(2, run, timeout=20)


def test_ranks_that_disagree_are_told_when_buckets_are_made() -> None:
    def run(comm: Communicator) -> None:
        names = ["a", "b"] if comm.rank else ["b", "a"]
        with pytest.raises(MismatchError, match="order"):
            GradientBuckets(comm, {name: np.zeros(3) for name in names})
        assert comm.all_reduce(np.ones(1))[0] == comm.size  # it is usable

    pycomm.run_local(2, run, timeout=20)


def test_arrays_of_any_origin() -> None:
    class Exporter:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    given = {
        "transposed": np.zeros((3, 4), np.float32).T,
        "array": array("f", [1, 2]),
        "exported": Exporter(np.zeros((2, 2), np.float32)),
    }
    with pycomm.init("local") as comm:
        buckets = GradientBuckets(comm, given)
        buckets.ready("transposed", np.arange(12, dtype=np.float32).reshape(3, 4).T)
        buckets.ready("array", array("f", [3, 4]))
        buckets.ready("exported", Exporter(np.full((2, 2), 5, np.float32)))
        means = buckets.wait()
        assert means["transposed"].tolist() == np.arange(12).reshape(3, 4).T.tolist()
        assert means["array"].tolist() == [3, 4]
        assert (means["exported"] == 5).all()


def test_a_step_that_failed_stays_failed() -> None:
    def run(comm: Communicator) -> None:
        arrays = {name: np.zeros(4, np.float32) for name in "ab"}
        buckets = GradientBuckets(comm, arrays, bucket_bytes=1, timeout=0.3)
        buckets.ready("a", np.ones(4, np.float32))
        if comm.rank == 0:
            buckets.ready("b", np.ones(4, np.float32))
            for _ in range(2):
                with pytest.raises(CommError):
                    buckets.wait()
        else:
            time.sleep(1)
        comm.abort()

    pycomm.run_local(2, run, timeout=20)


def test_arrays_fill_buckets_up_to_their_size() -> None:
    arrays = {
        name: np.zeros(count, np.float32)
        for name, count in zip("abcdef", (10, 90, 1, 300, 5, 5), strict=True)
    }
    with pycomm.init("local") as comm:
        buckets = GradientBuckets(comm, arrays, bucket_bytes=400)
        assert [one.names for one in buckets._buckets] == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_wrong_gradients_are_named_and_change_nothing() -> None:
    with pycomm.init("local") as comm:
        buckets = GradientBuckets(comm, parameters())
        with pytest.raises(ArgumentValueError, match="no parameter 'other'"):
            buckets.ready("other", np.zeros(3))
        with pytest.raises(ArgumentValueError, match=r"'norm' is float32 of shape \(48,\)"):
            buckets.ready("norm", np.zeros(48))
        with pytest.raises(ArgumentValueError, match="shape"):
            buckets.ready("norm", np.zeros((1, 48), np.float32))
        buckets.ready("norm", np.ones(48, np.float32))
        with pytest.raises(ArgumentValueError, match="ready before"):
            buckets.ready("norm", np.ones(48, np.float32))
        with pytest.raises(ArgumentValueError, match="not ready: head"):
            buckets.wait()
        for name in SHAPES:
            if name != "norm":
                buckets.ready(name, gradient(name, 0, 0))
        assert (buckets.wait()["norm"] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ([np.zeros(3)], {}, ArgumentTypeError),
        ({3: np.zeros(3)}, {}, ArgumentTypeError),
        ({"x": "no array"}, {}, ArgumentTypeError),
        ({"x": np.zeros(3, "U2")}, {}, ArgumentTypeError),
        ({"x": np.zeros(3)}, {"bucket_bytes": 0}, ArgumentValueError),
        ({"x": np.zeros(3)}, {"bucket_bytes": 1.5}, ArgumentTypeError),
        ({"x": np.zeros(3)}, {"op": "median"}, ArgumentValueError),
        ({"x": np.zeros(3, bool)}, {}, ArgumentTypeError),
        ({"x": np.zeros(3)}, {"compression": "zip"}, ArgumentValueError),
        ({"x": np.zeros(3, "f4")}, {"compression": "bf16", "op": "max"}, ArgumentValueError),
    ],
)
def test_what_cannot_be_put_in_buckets(
    arguments: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pycomm.init("local") as comm, pytest.raises(error):
        GradientBuckets(comm, arguments, **options)
