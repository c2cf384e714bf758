"""Schedules and plans on MPI: persistent requests, segments, fixed orders."""

import numpy as np
import pytest

import pycomm
from pycomm import ArgumentValueError, Communicator, MismatchError, choice
from pycomm.algorithms import names


@pytest.mark.parametrize("name", ["native", *names("all_reduce")])
def test_a_plan_runs_again_and_again(comm: Communicator, name: str) -> None:
    for count in (1, 1000, 200_000):
        x = np.empty(count)
        plan = comm.plan("all_reduce", x, algorithm=name)
        for turn in range(4):
            x[:] = comm.rank + turn
            assert plan() is x
            assert (x == sum(range(comm.size)) + comm.size * turn).all()


def test_plans_of_everything_else(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    x = np.empty(size * 50, np.float32)
    for collective in ("all_gather", "all_to_all", "reduce_scatter"):
        for name in ("native", *names(collective)):
            plan = comm.plan(collective, x, algorithm=name)
            for turn in range(2):
                x[:] = np.arange(x.size) * (rank + 1) + turn
                assert (plan() == getattr(comm, collective)(x)).all()
    for name in ("native", *names("broadcast")):
        plan = comm.plan("broadcast", x, root=size - 1, algorithm=name)
        for turn in range(2):
            x[:] = rank + turn
            assert (plan() == size - 1 + turn).all()


def test_plans_in_flight_together_end_in_any_order(comm: Communicator) -> None:
    arrays = [np.ones(count) for count in (3, 5000, 300_000)]
    plans = [
        comm.plan("all_reduce", x, algorithm=name)
        for x, name in zip(arrays, ("ring", "one_shot", "halving_doubling"), strict=True)
    ]
    for turn in range(3):
        works = [plan(async_op=True) for plan in plans]
        assert comm.all_reduce(np.array([1]), algorithm="ring")[0] == comm.size
        for work in works[::-1]:
            work.wait()
        for x in arrays:
            assert (x == comm.size ** (turn + 1)).all()


def test_many_plans_come_and_go(comm: Communicator) -> None:
    x = np.ones(100)
    for turn in range(300):
        plan = comm.plan("all_reduce", x, algorithm="ring")
        if turn % 3 == 0:
            x[:] = 1
            assert plan()[0] == comm.size
        if turn % 50 == 0:  # dropped, with its array: both live until it is done
            comm.plan("all_reduce", np.ones(5000), algorithm="ring")(async_op=True)
    comm.barrier()


@pytest.mark.parametrize("segment", [4 << 20, 1 << 12])
def test_segments_do_not_change_bits(
    comm: Communicator, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(comm.rank)
    x = generator.normal(size=30_001).astype(np.float32)
    whole = {name: comm.all_reduce(x.copy(), algorithm=name) for name in names("all_reduce")}
    monkeypatch.setattr(choice, "SEGMENT", segment)
    with pycomm.init("mpi", timeout=30, deterministic=True) as other:
        for name, expected in whole.items():
            found = other.all_reduce(x.copy(), algorithm=name)
            assert found.tobytes() == expected.tobytes()
            assert len(set(comm.all_gather_object(found.tobytes()))) == 1


def test_a_fixed_order_is_never_the_librarys(comm: Communicator) -> None:
    x = np.ones(4, np.float32)
    assert comm.plan("all_reduce", x).algorithm == "native"
    ours = "shared" if comm._engine.choices.host is not None else "one_shot"
    assert comm.plan("all_reduce", x, deterministic=True).algorithm == ours
    assert comm.plan("all_reduce", x.astype(int), deterministic=True).algorithm == "native"
    with pytest.raises(ArgumentValueError, match="promises no order"):
        comm.all_reduce(x, algorithm="native", deterministic=True)
    with pycomm.init("mpi", timeout=30, deterministic=True) as other:
        ours = "shared" if comm._engine.choices.host is not None else "direct"
        assert other.plan("reduce_scatter", np.ones(comm.size)).algorithm == ours
        assert other.plan("all_reduce", x, deterministic=False).algorithm == "native"


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_auto_in_a_fixed_order_gives_the_same_bits_in_every_run(
    comm: Communicator, collective: str
) -> None:
    """Sizes on both sides of every limit of the built-in table; `comm` is the root of reduce."""
    generator = np.random.default_rng(comm.rank)
    for count in (60, 24_000, 600_000):
        x = (generator.normal(size=count) * 10.0 ** generator.integers(-4, 5, count)).astype("f4")
        found = []
        for _ in range(3):
            with pycomm.init("mpi", timeout=30, deterministic=True) as other:
                result = getattr(other, collective)(x.copy())
                found.append(None if result is None else result.tobytes())
        assert len(set(found)) == 1
        if collective == "all_reduce":
            assert len(set(comm.all_gather_object(found[0]))) == 1


def test_checked_mode_sees_algorithms_and_plans_that_differ() -> None:
    with pycomm.init("mpi", timeout=30, check=True) as comm:
        if comm.size == 1:
            return
        x = np.ones(4)
        for options in (
            {"algorithm": "ring" if comm.rank else "direct"},
            {"algorithm": "ring", "deterministic": comm.rank == 0},
        ):
            plan = comm.plan("all_reduce", x, **options)
            with pytest.raises(MismatchError):
                plan()
        assert comm.plan("all_reduce", x, algorithm="ring")()[0] == comm.size


def test_bytes_sent_are_counted(comm: Communicator) -> None:
    x = np.ones(1200 * comm.size, np.float32)
    plan = comm.plan("all_reduce", x, algorithm="ring")
    for run in (plan, lambda: comm.all_reduce(x, algorithm="ring")):
        before = comm.bytes_sent
        run()
        assert comm.bytes_sent - before == plan.bytes_sent == 2 * (comm.size - 1) * 1200 * 4
