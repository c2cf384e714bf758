"""Checked mode: the same error on every rank, before anything is sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Communicator, MismatchError

Act = Callable[[Communicator], Any]


def x(count: int = 4, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.ones(count, dtype)


ODD_ONE_OUT: dict[str, tuple[Act, Act, str]] = {
    "operation": (lambda c: c.all_reduce(x()), lambda c: c.all_gather(x()), "all_gather #1"),
    "barrier": (lambda c: c.all_reduce(x()), lambda c: c.barrier(), "barrier #1"),
    "dtype": (
        lambda c: c.all_reduce(x()),
        lambda c: c.all_reduce(x(dtype="int32")),
        "rank 1: all_reduce #1 (4 x int32, op=sum)",
    ),
    "count": (lambda c: c.all_reduce(x()), lambda c: c.all_reduce(x(6)), "6 x float32"),
    "empty": (lambda c: c.all_reduce(x()), lambda c: c.all_reduce(x(0)), "0 x float32"),
    "op": (lambda c: c.all_reduce(x()), lambda c: c.all_reduce(x(), op="max"), "op=max"),
    "avg": (lambda c: c.all_reduce(x()), lambda c: c.all_reduce(x(), op="avg"), "op=avg"),
    "premul_sum": (
        lambda c: c.reduce(x()),
        lambda c: c.reduce(x(), op=pycomm.premul_sum(2)),
        "op=premul_sum",
    ),
    "root": (lambda c: c.broadcast(x()), lambda c: c.broadcast(x(), root=1), "root=1"),
    "algorithm": (
        lambda c: c.all_reduce(x()),
        lambda c: c.all_reduce(x(), algorithm="direct"),
        "algorithm=direct",
    ),
    "object": (
        lambda c: c.all_gather_object(1),
        lambda c: c.broadcast_object(1, root=1),
        "broadcast_object #1",
    ),
}


@pytest.mark.parametrize("name", ODD_ONE_OUT)
def test_every_rank_gets_the_same_error(name: str) -> None:
    most, odd, text = ODD_ONE_OUT[name]

    def run(comm: Communicator) -> str:
        comm.barrier()
        with pytest.raises(MismatchError) as caught:
            (odd if comm.rank == 1 else most)(comm)
        # Nothing was sent: all go on.
        assert comm.all_reduce(x())[0] == 3
        return str(caught.value)

    messages = set(pycomm.run_local(3, run, timeout=20, check=True))
    assert len(messages) == 1
    message = messages.pop()
    assert text in message
    assert "ranks 0, 2: " in message


def test_a_name_that_means_something_else_on_a_rank() -> None:
    """``"auto"`` must choose alike: tables and environment are rank 0's, and this would show."""

    def run(comm: Communicator) -> str:
        if comm.rank == 1:
            comm._engine.choices.overrides = {"all_reduce": "ring"}
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(np.ones(4))
        return str(caught.value)

    for message in pycomm.run_local(3, run, timeout=10, check=True):
        assert "ranks 0, 2: all_reduce #0 (4 x float64, op=sum, algorithm=auto, which is" in message
        assert "algorithm=auto, which is ring here" in message


def test_a_skipped_call_shows_in_the_sequence_number() -> None:
    def run(comm: Communicator) -> str:
        if comm.rank == 0:
            comm._engine.sequence += 1  # as if it had made one call more
        with pytest.raises(MismatchError) as caught:
            comm.barrier()
        return str(caught.value)

    messages = pycomm.run_local(2, run, timeout=20, check=True)
    assert messages[0] == messages[1]
    assert "barrier #1" in messages[0]
    assert "barrier #0" in messages[0]


def test_equal_calls_pass_and_groups_inherit() -> None:
    def run(comm: Communicator) -> None:
        assert comm.all_reduce(x(), op=pycomm.premul_sum(comm.rank))[0] == 3
        part = comm.split(0)
        assert part is not None
        with pytest.raises(MismatchError):
            part.all_reduce(x(4 + comm.rank))

    pycomm.run_local(3, run, timeout=20, check=True)


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_the_environment_turns_it_on(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOMM_CHECK", value)
    with pycomm.init("local") as comm:
        assert comm._engine.check is expected
    with pycomm.init("local", check=not expected) as comm:
        assert comm._engine.check is not expected
