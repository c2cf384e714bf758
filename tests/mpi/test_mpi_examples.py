"""The training example on the ranks of an MPI job: the same network as one process trains."""

import numpy as np
import pytest
from support.examples import load_train

import pycomm


@pytest.fixture(scope="module")
def train():
    return load_train()


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
