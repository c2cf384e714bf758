"""The training example on threads as ranks: the same network as one process trains."""

import numpy as np
import pytest
from support.examples import load_train

import pycomm
from pycomm.algorithms.compression import ErrorFeedback


@pytest.fixture(scope="module")
def train():
    return load_train()


@pytest.fixture(scope="module")
def alone(train):
    with pycomm.init("local") as comm:
        return train(comm)


def test_one_process_learns(alone):
    assert alone[1] >= 0.95


# 3 divides neither the batch of 100 nor the 1,400 pictures; 5 leaves ranks with equal shares.
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_learn_what_one_process_learns(train, alone, size):
    results = pycomm.run_local(size, train)
    for weights, accuracy in results:
        np.testing.assert_array_equal(weights, results[0][0])
        assert accuracy == alone[1]
    np.testing.assert_allclose(results[0][0], alone[0], rtol=0, atol=1e-5)


def test_a_batch_smaller_than_the_ranks_leaves_some_without_work(train):
    options = {"epochs": 1, "batch": 3, "rate": 0.01}  # small steps: large ones magnify rounding
    with pycomm.init("local") as comm:
        weights, _ = train(comm, **options)
    results = pycomm.run_local(4, lambda comm: train(comm, **options))
    np.testing.assert_allclose(results[3][0], weights, rtol=0, atol=1e-5)


def test_report_comes_from_rank_0_once_an_epoch(train):
    losses = []
    pycomm.run_local(
        2, lambda comm: train(comm, epochs=3, report=lambda *seen: losses.append(seen))
    )
    assert [epoch for epoch, _ in losses] == [0, 1, 2]
    assert losses[2][1] < losses[0][1] / 2


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_with_error_feedback_training_does_not_notice(train, name):
    """Its loss is that of float32 within 1%; the study in docs/examples measures the others."""

    def run(comm):
        losses = []
        for compression in (None, ErrorFeedback(name)):
            train(
                comm, epochs=12, compression=compression, report=lambda *seen: losses.append(seen)
            )
        return losses

    losses = pycomm.run_local(4, run)[0]
    assert losses[-1][1] == pytest.approx(losses[11][1], rel=0.01)
