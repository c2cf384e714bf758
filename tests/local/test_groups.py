"""Splitting communicators, and objects."""

import threading
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import CommError, Communicator, MismatchError, PeerError, choice


@pytest.mark.parametrize("size", range(1, 8))
def test_split_by_color_and_key(size: int) -> None:
    def run(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        assert part is not None
        same = [r for r in range(size) if r % 2 == comm.rank % 2]
        assert part.all_gather_object(comm.rank) == same[::-1]
        assert part.size == len(same)
        assert part.all_reduce(np.ones(3))[0] == len(same)

    pycomm.run_local(size, run, timeout=20)


def test_split_without_a_color_and_with_odd_keys() -> None:
    def run(comm: Communicator) -> Any:
        part = comm.split(None if comm.rank == 1 else 7, key=[5, 0, -(2**40), 5][comm.rank])
        return None if part is None else part.all_gather_object(comm.rank)

    assert pycomm.run_local(4, run, timeout=20) == [[2, 0, 3], None, [2, 0, 3], [2, 0, 3]]


def test_split_ranks_keeps_the_order_and_needs_members_only() -> None:
    def run(comm: Communicator) -> Any:
        if comm.rank == 3:
            assert comm.split_ranks([2, 0]) is None
            return None
        first = comm.split_ranks([2, 0])
        second = comm.split_ranks(range(3))
        assert second is not None
        ranks = None if first is None else first.all_gather_object(comm.rank)
        second.barrier()
        return ranks

    assert pycomm.run_local(4, run, timeout=20) == [[2, 0], None, [2, 0], None]


def test_members_that_disagree_are_told() -> None:
    def run(comm: Communicator) -> Any:
        ranks = [0, 1] if comm.rank == 0 else [1, 0]
        with pytest.raises(MismatchError, match="do not all give the same list"):
            comm.split_ranks(ranks)
        comm.barrier()

    pycomm.run_local(2, run, timeout=10)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_one_member_that_disagrees_is_an_error_on_all(size: int) -> None:
    def run(comm: Communicator) -> None:
        ranks = list(range(size))
        with pytest.raises(MismatchError):
            comm.split_ranks(ranks[1:] + ranks[:1] if comm.rank == 0 else ranks)
        comm.barrier()

    pycomm.run_local(size, run, timeout=10)


def test_nested_groups_are_closed_with_their_parent() -> None:
    def run(comm: Communicator) -> None:
        half = comm.split(comm.rank // 2)
        assert half is not None
        single = half.split(half.rank)
        assert single is not None
        assert (single.rank, single.size) == (0, 1)
        assert comm.host is comm.host
        assert comm.host.size == comm.local_size == 4
        assert comm.local_rank == comm.host.rank == comm.rank
        comm.close()
        for group in (half, single, comm.host) if comm._host else (half, single):
            with pytest.raises(CommError, match="closed"):
                group.barrier()

    pycomm.run_local(4, run, timeout=20)


def test_groups_do_not_disturb_each_other() -> None:
    """A rank waits in one group while its peers talk in another."""

    def run(comm: Communicator) -> float:
        left, right = comm.split(0), comm.split(0)
        assert left is not None
        assert right is not None
        a = left.all_reduce(np.full(50_000, 1.0), async_op=True)
        b = right.all_reduce(np.full(50_000, 10.0), async_op=True)
        c = comm.all_reduce(np.full(50_000, 100.0), async_op=True)
        return float(c.wait()[0] + b.wait()[0] + a.wait()[0])

    assert pycomm.run_local(3, run, timeout=20) == [333.0] * 3


OBJECTS: list[Any] = [None, 0, "text", {"a": [1, 2]}, b"", np.arange(3), ["x"] * 10_000]


def test_objects() -> None:
    def run(comm: Communicator) -> None:
        for root in range(comm.size):
            for obj in OBJECTS:
                got = comm.broadcast_object(obj if comm.rank == root else None, root=root)
                assert np.array_equal(got, obj) if isinstance(obj, np.ndarray) else got == obj
                assert (got is obj) or comm.rank != root
        gathered = comm.all_gather_object({"rank": comm.rank, "pad": "p" * comm.rank * 1000})
        assert [one["rank"] for one in gathered] == list(range(comm.size))
        assert [len(one["pad"]) for one in gathered] == [1000 * r for r in range(comm.size)]

    pycomm.run_local(3, run, timeout=20)


def test_what_cannot_be_pickled_is_an_error_everywhere() -> None:
    def run(comm: Communicator) -> None:
        bad = threading.Lock()
        if comm.rank == 1:
            with pytest.raises(TypeError, match="pickle"):
                comm.broadcast_object(bad, root=1)
        else:
            with pytest.raises(CommError, match="rank 1 could not pickle"):
                comm.broadcast_object(root=1)
        with pytest.raises(CommError, match="rank 1: TypeError") as caught:
            comm.all_gather_object(bad if comm.rank == 1 else 3)
        assert isinstance(caught.value.__cause__, TypeError) == (comm.rank == 1)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]

    pycomm.run_local(3, run, timeout=10)


def test_groups_are_aborted_and_left_with_their_parent() -> None:
    def run(comm: Communicator) -> Any:
        half, other = comm.split(0), comm.split(0)
        assert half is not None
        assert other is not None
        if comm.rank == 1:
            comm.leave(KeyError("gone"))
            with pytest.raises(CommError, match="aborted"):
                other.barrier()
            return None
        with pytest.raises(PeerError, match="rank 1 left with KeyError"):
            half.barrier()
        comm.abort()
        with pytest.raises(CommError, match="aborted"):
            other.barrier()

    pycomm.run_local(3, run, timeout=10)


def test_choices_are_forgotten_when_they_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_LIMIT", 8)

    def run(comm: Communicator) -> int:
        most = 0
        for turn in range(3):
            for count in range(1, 400, 37):
                assert comm.all_reduce(np.full(count, turn))[-1] == 2 * turn
                most = max(most, len(comm._engine.choices.known))
        return most

    assert all(0 < most <= 8 for most in pycomm.run_local(2, run, timeout=20))
