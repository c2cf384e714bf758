"""Collectives with encoded messages, between processes."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import same_on_all

from pycomm import Communicator
from pycomm.algorithms.compression import Cast, ErrorFeedback


@same_on_all(60)
@given(data=st.data())
def test_small_whole_numbers_are_exact(
    comm: Communicator, together: Callable[..., None], data: st.DataObject
) -> None:
    collective = data.draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]))
    codec = data.draw(st.sampled_from(["bf16", "fp16", Cast("fp8_e4m3", block=0)]))
    count = data.draw(st.sampled_from([0, 1, 3, 1000, 40_000, 300_001]))
    feedback = data.draw(st.booleans())

    def check(comm: Communicator) -> None:
        size, rank = comm.size, comm.rank
        many = size if collective == "reduce_scatter" else 1
        inputs = [
            np.random.default_rng([count, peer]).integers(-2, 3, count * many).astype(np.float32)
            for peer in range(size)
        ]
        one = ErrorFeedback(codec) if feedback else codec
        result = getattr(comm, collective)(inputs[rank].copy(), compression=one, key="x")
        if collective == "all_gather":
            expected = np.concatenate(inputs)
        else:
            expected = sum(inputs)
            if collective == "reduce_scatter":
                expected = expected[rank * count : (rank + 1) * count]
        np.testing.assert_array_equal(result, expected)

    together(check)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_all_ranks_end_with_the_same_bits(comm: Communicator, name: str) -> None:
    feedback = ErrorFeedback(name)
    for step in range(5):
        rng = np.random.default_rng([step, comm.rank])
        x = rng.standard_normal(500_000).astype(np.float32)
        mean = comm.all_reduce(x.astype(np.float64), op="avg")
        comm.all_reduce(x, op="avg", compression=feedback, key="w")
        assert np.abs(x - mean).max() < 1
        assert len({one.tobytes() for one in comm.all_gather_object(x[::97].copy())}) == 1
