"""On MPI: mismatches, late ranks, and errors that all ranks see."""

import time

import numpy as np
import pytest

import pycomm
from pycomm import CommError, CommTimeoutError, Communicator, MismatchError

pytestmark = pytest.mark.mpi


def test_checked_calls_fail_alike(comm: Communicator) -> None:
    with pycomm.init("mpi", timeout=30, check=True) as checked:
        last = checked.size - 1
        if last == 0:
            return
        x = np.ones(6 if checked.rank == last else 4, np.float32)
        with pytest.raises(MismatchError) as caught:
            checked.all_reduce(x)
        messages = checked.all_gather_object(str(caught.value))
        assert len(set(messages)) == 1
        assert f"rank {last}: all_reduce #0 (6 x float32, op=sum)" in messages[0]


def test_empty_on_one_rank_only_ends_at_the_deadline(comm: Communicator) -> None:
    """An MPI may return at once from an empty collective, and pair the next call with this one."""
    if comm.size == 1:
        return
    world = pycomm.init("mpi", timeout=0.7)
    with pytest.raises(CommTimeoutError):
        world.all_reduce(np.ones(0 if world.rank == 0 else 4))
    world.abort()
    assert comm.all_reduce(np.ones(0)).size == 0
    assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_a_longer_message_than_expected(comm: Communicator) -> None:
    if comm.size == 1:
        return
    with pycomm.init("mpi", timeout=30) as pair:
        if pair.rank == 0:
            pair.send(np.ones(4), 1)
        elif pair.rank == 1:
            with pytest.raises(MismatchError):
                pair.recv(np.empty(3), 0)
        pair.abort()
    comm.barrier()


def test_a_shorter_message_than_expected(comm: Communicator) -> None:
    if comm.size == 1:
        return
    with pycomm.init("mpi", timeout=30) as pair:
        if pair.rank == 0:
            pair.send(np.ones(2), 1)
        elif pair.rank == 1:
            with pytest.raises(MismatchError, match="for 24 bytes from rank 0, which sends 16"):
                pair.recv(np.empty(3), 0)
        pair.abort()
    comm.barrier()


def test_a_missing_rank_is_named_and_the_process_lives(comm: Communicator) -> None:
    if comm.size == 1:
        return
    world = pycomm.init("mpi", timeout=0.5)
    world.barrier(timeout=30)
    if world.rank == 0:
        time.sleep(1.8)
    else:
        began = time.monotonic()
        with pytest.raises(CommTimeoutError, match="not heard from: rank 0") as caught:
            world.all_reduce(np.ones(100_000), op="max")
        assert time.monotonic() - began < 3
        assert caught.value.missing == (0,)
        with pytest.raises(CommError, match=r"only abort\(\)"):
            world.barrier()
    world.abort()
    # Another communicator of the same process works on.
    assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_a_rank_that_leaves_frees_the_others(comm: Communicator) -> None:
    if comm.size == 1:
        return
    world = pycomm.init("mpi", timeout=60)
    if world.rank == 0:
        with pytest.raises(ZeroDivisionError), world:
            world.barrier(timeout=1 / 0)
    else:
        began = time.monotonic()
        with pytest.raises(pycomm.PeerError, match="rank 0 left with ZeroDivisionError"):
            world.all_reduce(np.ones(100_000), op="max")
        assert time.monotonic() - began < 10
        world.abort()
    comm.barrier()


def test_auto_uses_an_mpi_that_is_in_use(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by a launcher that leaves no variables pycomm knows."""
    monkeypatch.setattr("pycomm.start.detect", lambda _: None)
    with pycomm.init(timeout=30) as world:
        assert world.size == comm.size


def test_a_late_member_of_a_group_is_told_that_the_others_gave_up(comm: Communicator) -> None:
    """MPI makes a group without a deadline: nobody may enter it alone."""
    if comm.size == 1:
        return
    world = pycomm.init("mpi", timeout=0.4)
    world.barrier(timeout=30)
    if world.rank == 0:
        time.sleep(1.6)
    with pytest.raises(CommTimeoutError):
        world.split_ranks(range(world.size))
    world.abort()
    assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_a_split_that_does_not_come_about_breaks_the_parent(comm: Communicator) -> None:
    """The deadline given to split reaches the making of the new communicator."""
    if comm.size == 1:
        return
    world = pycomm.init("mpi", timeout=30)
    world.barrier()
    if world.rank == 0:
        time.sleep(1.2)
    else:
        with pytest.raises(CommTimeoutError, match="split"):
            world.split(0, timeout=0.3)
        with pytest.raises(CommError, match=r"only abort\(\)"):
            world.barrier()
    world.abort()
