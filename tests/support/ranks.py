"""Fixtures of tests that run on the ranks of an MPI job."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pycomm
from pycomm import Communicator


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """A communicator of all ranks, of its own for each test, with a short deadline."""
    with pycomm.init("mpi", timeout=30) as world:
        yield world


@pytest.fixture
def together(comm: Communicator) -> Callable[..., None]:
    """Run something on all ranks, and fail on all of them if it fails on any.

    A test that fails on one rank alone would go on with something else than its peers.
    """

    def run(function: Callable[..., Any], *args: Any) -> None:
        failure: Exception | None = None
        try:
            function(comm, *args)
        except Exception as error:
            failure = error
        told = comm.all_gather_object(None if failure is None else f"{failure!r}")
        if failure is not None:
            raise failure
        others = {rank: text for rank, text in enumerate(told) if text is not None}
        assert not others, others

    return run
