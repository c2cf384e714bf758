"""All_reduce in registered memory, between processes of one host."""

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import pycomm
from pycomm import ArgumentTypeError, ArgumentValueError, Communicator


@pytest.fixture
def several(comm: Communicator) -> Communicator:
    if not comm._engine.transport.shares_memory:
        pytest.skip("needs several ranks on one host")
    return comm


def fill(x: Any, rank: int, seed: int = 0) -> None:
    values = np.random.default_rng([seed, rank]).integers(-4, 5, x.shape)
    x[...] = np.abs(values) if x.dtype.kind in "u" else values


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "i8", "u2", "c8", "bfloat16"])
@pytest.mark.parametrize("in_place", [True, False])
def test_it_gives_what_direct_gives(several: Communicator, dtype: str, in_place: bool) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    ops = ["sum"] if kind.kind == "c" else ["sum", "prod", "max", "avg"]
    for count in (1, 2, 3, 1000, 300_001):
        x = several.empty(count, kind)
        out = x if in_place else several.empty(count, kind)
        for op in ops:
            fill(x, several.rank, count)
            expected = several.all_reduce(np.array(x), op=op, algorithm="direct")
            before = several.bytes_sent
            result = several.all_reduce(x, out, op=op, algorithm="shared")
            assert several.bytes_sent - before < 1000  # nothing but the first meeting
            assert result is out
            assert result.tobytes() == expected.tobytes(), (count, op)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_call_registered_or_not(comm: Communicator, data: st.DataObject) -> None:
    """Each rank has its own mind about registered memory and place; all must get the same bits."""
    dtype = data.draw(st.sampled_from(["f4", "f8", "f2", "i2", "u1", "c16", "?"]))
    ops = {"?": ["sum", "max"], "c16": ["sum", "avg"]}.get(dtype, ["sum", "prod", "min", "avg"])
    op = data.draw(st.sampled_from(ops))
    count = data.draw(st.one_of(st.integers(0, 9), st.integers(10, 9000)))
    minds = data.draw(st.lists(st.tuples(*[st.booleans()] * 3), min_size=4, max_size=4))
    name = data.draw(st.sampled_from(["auto", "shared"]))
    if name == "shared" and not comm._engine.transport.shares_memory:
        name = "auto"
    x_registered, out_registered, in_place = minds[comm.rank % 4]
    x, out = comm.empty(count, dtype), comm.empty(count, dtype)
    x = x if x_registered else np.empty(count, dtype)
    out = x if in_place else out if out_registered else np.empty(count, dtype)
    fill(x, comm.rank, count)
    expected = comm.all_reduce(np.array(x), op=op, algorithm="direct")
    kept = x.copy()
    result = comm.all_reduce(x, out, op=op, algorithm=name)
    assert result is out
    np.testing.assert_array_equal(result, expected)
    assert in_place or (x == kept).all()


def test_auto_takes_it_where_memory_is_registered(several: Communicator) -> None:
    ordinary = np.ones(1 << 16)
    assert several.plan("all_reduce", ordinary).algorithm != "shared"
    x = several.zeros((256, 256))
    assert (x == 0).all()
    plan = several.plan("all_reduce", x)
    assert plan.algorithm == "shared"
    assert "memory is registered" in str(plan)
    assert several.plan("all_reduce", x[0, :8]).algorithm != "shared"  # too short
    for turn in range(3):
        x[:] = several.rank + turn
        plan()
        assert (x == sum(range(several.size)) + several.size * turn).all()


def test_views_and_other_places_on_each_rank(several: Communicator) -> None:
    memory = several.empty(100_000)
    for turn in range(12):  # more than are bound at a time
        start = 1000 * turn + 100 * several.rank
        x = memory[start : start + 50_001]
        x[:] = several.rank + 1
        several.all_reduce(x)
        assert (x == several.size * (several.size + 1) / 2).all()
        x[:] = 0


def test_registered_on_some_ranks_only(several: Communicator) -> None:
    several.empty(1)
    for registered in range(several.size + 1):
        for dtype, op in (("f4", "sum"), ("i4", "avg"), ("f2", "max")):
            x = several.empty(9000, dtype) if several.rank < registered else np.empty(9000, dtype)
            x[:] = several.rank
            several.all_reduce(x, op=op)
            ranks = range(several.size)
            expected = {"sum": sum(ranks), "avg": sum(ranks) // several.size, "max": max(ranks)}
            assert (x == expected[op]).all()


def test_in_flight_and_in_groups(several: Communicator) -> None:
    arrays = [several.empty(40_000) for _ in range(5)]
    for x in arrays:
        x[:] = 1
    works = [several.all_reduce(x, async_op=True) for x in arrays]
    assert several.all_reduce(np.array([2]))[0] == 2 * several.size
    for work in reversed(works):
        work.wait()
    pair = several.split(several.rank // 2)
    assert pair is not None
    for x in arrays:
        assert (x == several.size).all()
        pair.all_reduce(x)
        assert (x == several.size * pair.size).all()


def test_memory_is_given_back(several: Communicator) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    several.all_reduce(several.empty(20_000))
    before = open_files()
    for _ in range(100):
        x = several.empty(20_000)
        x[:] = 1
        assert several.all_reduce(x)[-1] == several.size
    del x
    gc.collect()
    several.barrier()
    assert open_files() <= before + 2 * 64 + 8  # what is bound, and what stays mapped of peers
    assert not [name for name in Path("/dev/shm").iterdir() if "pycomm" in name.name]


def test_what_cannot_be_registered(comm: Communicator) -> None:
    for shape, dtype, error in (
        (-1, "f4", ArgumentValueError),
        ((2, -3), "f4", ArgumentValueError),
        (2.5, "f4", ArgumentTypeError),
        ("ab", "f4", ArgumentTypeError),
        (2, "U3", ArgumentTypeError),
    ):
        with pytest.raises(error):
            comm.empty(shape, dtype)
    with pytest.raises(MemoryError):
        comm.empty(1 << 50)
    assert comm.empty(0).shape == (0,)
    assert comm.empty((), "f8").shape == ()
    assert comm.all_reduce(comm.empty((0, 3))).size == 0


def test_by_name(comm: Communicator) -> None:
    x = np.ones(30_000)
    if comm._engine.transport.shares_memory:
        assert comm.all_reduce(x, algorithm="shared")[0] == comm.size  # it goes the usual way
        assert comm.all_reduce(np.ones(0), algorithm="shared").size == 0
        with pytest.raises(ArgumentValueError, match="serves all_reduce"):
            comm.all_gather(x, algorithm="shared")
    else:
        with pytest.raises(ArgumentValueError, match="not processes of one host"):
            comm.all_reduce(x, algorithm="shared")


def test_a_rank_that_does_not_come(several: Communicator) -> None:
    world = pycomm.init("mpi", timeout=0.8)
    x = world.empty(20_000)
    world.all_reduce(x)
    if world.rank:
        with pytest.raises(pycomm.CommTimeoutError, match="not heard from: rank 0"):
            world.all_reduce(x)
    world.abort()
    several.barrier()
