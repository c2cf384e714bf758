"""Plans: the same as the call they stand for, again and again; and what they say."""

from itertools import product

import numpy as np
import pytest

import pycomm
from pycomm import ArgumentValueError, CommError, Communicator, Plan, choice
from pycomm.algorithms import Schedule, names, register, unregister
from pycomm.algorithms.ring import ring_all_reduce
from pycomm.dtypes import DTYPES

HOSTS = [0, 1, 0, 1]


@pytest.mark.parametrize("name", names("all_reduce"))
@pytest.mark.parametrize("in_place", [True, False])
def test_a_plan_does_what_the_call_does(name: str, in_place: bool) -> None:
    def run(comm: Communicator) -> None:
        for count in (0, 1, 1000):
            x = np.zeros(count)
            out = x if in_place else np.empty(count)
            plan = comm.plan("all_reduce", x, out, algorithm=name, op="avg")
            for turn in range(3):
                x[:] = np.arange(count) + comm.rank + turn
                assert plan() is out
                np.testing.assert_array_equal(out, np.arange(count) + 1.5 + turn)

    pycomm.run_local(4, run, timeout=20, hosts=HOSTS)


def test_every_collective_can_be_planned() -> None:
    def run(comm: Communicator) -> None:
        rank, size = comm.rank, comm.size
        x = np.zeros(size, np.int64)
        for collective in ("all_gather", "all_to_all", "reduce_scatter"):
            for name in names(collective):
                plan = comm.plan(collective, x, algorithm=name)
                for turn in range(2):
                    x[:] = np.arange(size) + 10 * rank + turn
                    expected = getattr(comm, collective)(x)
                    np.testing.assert_array_equal(plan(), expected)
        for collective in ("broadcast", "reduce"):
            for name in names(collective):
                y = np.zeros(3)
                plan = comm.plan(collective, y, root=1, algorithm=name)
                for turn in range(2):
                    y[:] = rank + turn
                    plan()
                    if collective == "broadcast" or rank == 1:
                        total = (
                            1 + turn
                            if collective == "broadcast"
                            else sum(range(size)) + size * turn
                        )
                        assert (y == total).all()
        part, whole = np.array([rank]), np.arange(size) * 5
        assert comm.plan("gather", part, root=2)() is None or rank == 2
        assert comm.plan("scatter", whole if rank == 0 else None, np.empty(1, int))()[0] == 5 * rank
        assert comm.plan("barrier")() is None

    pycomm.run_local(4, run, timeout=20, hosts=HOSTS)


def test_all_to_all_in_place_reads_its_array_each_time() -> None:
    def run(comm: Communicator) -> None:
        x = np.zeros(comm.size)
        plan = comm.plan("all_to_all", x, x)
        for turn in range(3):
            x[:] = comm.rank + turn
            plan()
            assert x.tolist() == [peer + turn for peer in range(comm.size)]

    pycomm.run_local(3, run, timeout=20)


def test_long_plans_go_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SEGMENT", 256)

    def run(comm: Communicator) -> None:
        x = np.empty(2000)
        plan = comm.plan("all_reduce", x, algorithm="ring")
        assert plan.segments == 16
        assert "each in 16 segments" in str(plan)
        for turn in range(3):
            x[:] = turn
            assert (plan() == 4 * turn).all()

    pycomm.run_local(4, run, timeout=20)


def test_a_run_waits_for_the_one_before() -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(5000)
        plan = comm.plan("all_reduce", x, algorithm="ring")
        works = [plan(async_op=True) for _ in range(4)]
        if comm.rank == 1:
            works[0].wait()
        works[-1].wait()
        assert (x == comm.size**4).all()
        assert (plan() == comm.size**5).all()

    pycomm.run_local(3, run, timeout=20)


def test_asynchronous_plans_and_calls_between() -> None:
    def run(comm: Communicator) -> None:
        x, y = np.ones(10), np.ones(5000)
        first = comm.plan("all_reduce", x, algorithm="ring")
        second = comm.plan("all_reduce", y, algorithm="direct")
        works = [first(async_op=True), second(async_op=True)]
        assert comm.all_reduce(np.array([1]))[0] == comm.size
        for work in reversed(works):
            work.wait()
        assert (x == comm.size).all()
        assert (y == comm.size).all()

    pycomm.run_local(3, run, timeout=20)


def test_what_a_plan_says() -> None:
    def run(comm: Communicator) -> tuple[str, Plan]:
        x = np.zeros(1 << 20, np.float32)
        plan = comm.plan("all_reduce", x, algorithm="ring")
        assert (plan.collective, plan.algorithm, plan.why) == ("all_reduce", "ring", "asked for")
        assert plan.schedule == ring_all_reduce(comm.rank, comm.size)
        assert (plan.steps, plan.bytes_sent) == (6, 6 << 20)
        assert plan.predicted_seconds is not None
        return str(plan), comm.plan("all_reduce", x)

    text, chosen = pycomm.run_local(4, run, timeout=20, hosts=HOSTS)[1]
    assert text.splitlines()[:4] == [
        "all_reduce of 1,048,576 float32 (4 MiB), sum, rank 1 of 4 on 2 hosts",
        "  algorithm  ring: asked for",
        "  steps      6",
        "  sends      6 MiB from this rank, at most 1 MiB a hop",
    ]
    assert "predicted" in text
    assert chosen.algorithm == "hierarchical"
    assert chosen.why == "built-in table, 4194304 bytes"
    assert repr(chosen) == "<pycomm.Plan all_reduce by hierarchical>"


def test_a_plan_without_data_says_so() -> None:
    with pycomm.init("local") as comm:
        for collective in ("all_reduce", "all_gather", "barrier"):
            plan = comm.plan(collective, *([] if collective == "barrier" else [np.ones(0)]))
            assert "dissemination" in str(plan)
            assert plan.bytes_sent == 0
            assert plan.predicted_seconds == 0


def test_what_cannot_be_planned() -> None:
    with pycomm.init("local") as comm:
        for arguments, options in (
            (("send", np.ones(1)), {}),
            (("all_reduce", np.ones(1)), {"algorithm": "magic"}),
            (("all_reduce", np.ones(1)), {"algorithm": "native"}),
            (("all_reduce", np.ones(1)), {"async_op": True}),
            (("all_reduce", np.ones((2, 2)).T), {}),
            (("reduce", np.ones(2)), {"root": 1}),
            (("all_reduce", np.ones(2)), {"timeout": -1}),
        ):
            with pytest.raises(ArgumentValueError):
                comm.plan(*arguments, **options)  # type: ignore[arg-type]
        plan = comm.plan("all_reduce", np.ones(1))
    with pytest.raises(CommError, match="closed"):
        plan()


# ----------------------------------------------------------------------------- choice of algorithm


def test_averages_of_integers_need_the_whole_sum() -> None:
    def run(comm: Communicator) -> int:
        x = np.array([100, 100, 101], np.int8)
        with pytest.raises(ArgumentValueError, match="'ring' cannot do all_reduce here: it adds"):
            comm.all_reduce(x, op="avg", algorithm="ring")
        return int(comm.all_reduce(x, op="avg")[2])

    assert pycomm.run_local(4, run, timeout=20, hosts=HOSTS) == [101] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_averages_of_equal_halves_are_equal(dtype: str) -> None:
    def run(comm: Communicator) -> None:
        for value in (1.0, 2.5):
            x = np.full(9, value).astype(DTYPES[dtype].numpy)
            for name in names("all_reduce"):
                result = comm.all_reduce(x.copy(), op="avg", algorithm=name).astype(float)
                # Each of up to n roundings of partial sums is of half a unit at most.
                unit = 2.0 ** (-10 if dtype == "float16" else -7) * value
                assert np.abs(result - value).max() <= unit, (name, comm.size)

    for size in (2, 3, 4, 5, 6, 7):
        pycomm.run_local(size, run, timeout=20)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 1]])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_averages_of_halves_neither_overflow_nor_vanish(collective: str, hosts: list[int]) -> None:
    def run(comm: Communicator) -> None:
        values = (("f2", 40000.0), ("f2", 1e-7), ("bfloat16", 40000.0), ("bfloat16", 1e-7))
        for name in ("auto", *names(collective)):
            for count, (dtype, value) in product((4, 40_000), values):
                x = np.full(count, value, dtype)
                same = x[0]
                result = getattr(comm, collective)(x, op="avg", algorithm=name)
                assert result is None or (result == same).all(), (name, value)
                plan = comm.plan(collective, x, op="avg", algorithm=name)
                x[:] = value
                before = comm.bytes_sent
                for _ in range(2):
                    result = plan()
                    assert result is None or (result == same).all(), (name, value)
                assert comm.bytes_sent - before == 2 * plan.bytes_sent

    pycomm.run_local(4, run, timeout=30, hosts=hosts)


def test_the_variable_overrides_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> tuple[str, str, str]:
        x = np.ones(8)
        plans = [comm.plan(c, x) for c in ("all_reduce", "broadcast", "all_to_all")]
        assert all(plan() is not None for plan in plans)
        return plans[0].algorithm, plans[1].algorithm, plans[2].algorithm

    for value, expected in (
        ("ring", ("ring", "ring", "direct")),
        ("all_reduce=binomial,all_to_all=bruck", ("binomial", "binomial", "bruck")),
        ("", ("one_shot", "binomial", "direct")),
    ):
        monkeypatch.setenv("PYCOMM_ALGORITHM", value)
        assert pycomm.run_local(2, run, timeout=20) == [expected] * 2
    for value in ("magic", "all_reduce=bruck", "sum=ring", "sum=native", "all_reduce="):
        monkeypatch.setenv("PYCOMM_ALGORITHM", value)
        with pytest.raises(ArgumentValueError, match="PYCOMM_ALGORITHM"):
            pycomm.run_local(2, run, timeout=20)
    # What it names may not be able to do everything; pycomm's own calls have to work.
    for value in ("native", "ring", "all_reduce=ring"):
        monkeypatch.setenv("PYCOMM_ALGORITHM", value)

        def work(comm: Communicator) -> None:
            x = comm.all_reduce(np.array([comm.rank, 3]), op="avg")
            assert x.tolist() == [0, 3]
            assert comm.all_gather_object(comm.rank) == [0, 1]

        pycomm.run_local(2, work, timeout=20)


def test_a_plan_of_one_rank_alone_disturbs_nobody() -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(100)
        if comm.rank == 0:
            assert "ring" in str(comm.plan("all_reduce", x, algorithm="ring"))
        plan = comm.plan("all_reduce", x, algorithm="ring")
        for turn in range(1, 3):
            assert plan()[0] == comm.size**turn

    pycomm.run_local(3, run, timeout=20)


def test_an_algorithm_of_ones_own_runs_by_its_name() -> None:
    def build(rank: int, size: int) -> Schedule:
        return ring_all_reduce(rank, size)

    register("all_reduce", "mine", build)
    try:

        def run(comm: Communicator) -> str:
            x = np.arange(11) * (comm.rank + 1)
            assert (comm.all_reduce(x, algorithm="mine") == np.arange(11) * 6).all()
            return comm.plan("all_reduce", x, algorithm="mine").algorithm

        assert pycomm.run_local(3, run, timeout=20) == ["mine"] * 3
    finally:
        unregister("all_reduce", "mine")


def test_errors_of_a_build_function_come_through() -> None:
    def build(rank: int) -> Schedule:
        return ring_all_reduce(rank, 1)

    register("all_reduce", "mine", build)
    try:
        with pycomm.init("local") as comm, pytest.raises(TypeError, match="positional argument"):
            comm.all_reduce(np.ones(3), algorithm="mine")
    finally:
        unregister("all_reduce", "mine")


def test_an_algorithm_that_is_gone_is_not_used_any_more() -> None:
    with pycomm.init("local") as comm:
        for build in (ring_all_reduce, lambda rank, size: Schedule("all_reduce", 0, 1, 7, ())):
            register("all_reduce", "mine", build)
            plan = comm.plan("all_reduce", np.ones(9), algorithm="mine")
            assert plan.schedule == build(0, 1)
            comm.all_reduce(np.ones(9), algorithm="mine")
            unregister("all_reduce", "mine")
            assert "mine" in str(plan)  # it goes on with what it has
            assert plan()[0] == 1
            with pytest.raises(ArgumentValueError, match="unknown algorithm 'mine'"):
                comm.all_reduce(np.ones(9), algorithm="mine")


# ------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("name", names("all_reduce"))
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_bits_do_not_depend_on_run_rank_or_segments(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(comm: Communicator) -> tuple[bytes, bytes]:
        generator = np.random.default_rng(comm.rank)
        wide = generator.normal(size=4001) * 10.0 ** generator.integers(-3, 4, 4001)
        x = wide.astype(dtype)
        parts = comm.reduce_scatter(np.resize(x, 4000), algorithm="ring")
        return comm.all_reduce(x, algorithm=name).tobytes(), parts.tobytes()

    found = []
    for segment in (4 << 20, 4 << 20, 1000, 96):
        monkeypatch.setattr(choice, "SEGMENT", segment)
        found.append(
            pycomm.run_local(5, run, timeout=30, hosts=[0, 0, 1, 1, 1], deterministic=True)
        )
    assert len({result for results in found for result, _ in results}) == 1
    assert len({tuple(part for _, part in results) for results in found}) == 1
