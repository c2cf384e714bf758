"""The training example on the ranks of an MPI job: the same network as one process trains."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import pycomm

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_digits.py"


@pytest.fixture(scope="module")
def train():
    pytest.importorskip("sklearn", reason="the example reads its data from scikit-learn")
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def test_training_on_ranks_gives_the_weights_of_one_process(train):
    # Each rank trains alone as well, before any of them waits for another.
    with pycomm.init("local") as comm:
        expected, accuracy_alone = train(comm)
    with pycomm.init("mpi", timeout=60) as comm:
        weights, accuracy = train(comm)
        everywhere = comm.all_gather_object((weights.tobytes(), accuracy))
    assert accuracy == accuracy_alone >= 0.95
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
    assert len(set(everywhere)) == 1, "all ranks end with the same bits"
