"""Collectives in shared memory, between processes of one host."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import cases, check_case, same_on_all

import pycomm
from pycomm import ArgumentTypeError, ArgumentValueError, Communicator, MismatchError
from pycomm.bindings import _memory
from pycomm.transports.shared import REGIONS


@pytest.fixture
def several(comm: Communicator) -> Communicator:
    if comm._engine.choices.host is None:
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


@same_on_all(300)
@given(data=st.data())
def test_against_numpy(
    several: Communicator, together: Callable[..., None], data: st.DataObject
) -> None:
    """Any collective, each rank with its own mind about registered memory and place."""
    together(check_case, data.draw(cases(several.size, shared=True)))


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "c16"])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_odd_addresses_on_some_ranks_change_no_bit(
    several: Communicator, dtype: str, op: str
) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    if kind.kind == "c" and op == "max":
        pytest.skip("complex numbers have no order")
    for count in (1, 7, 1000, 40_000):
        expected = b""
        for odd in (0, 1):
            raw = np.zeros(count * kind.itemsize + 1, np.uint8)
            shift = odd * (several.rank % 2)
            x = raw[shift : shift + count * kind.itemsize].view(kind)
            x[:] = np.random.default_rng([count, several.rank]).standard_normal(count)
            if kind.kind != "c":
                x[: count // 2] = ml_dtypes.finfo(kind).max  # what overflows does so everywhere
            several.all_reduce(x, op=op, algorithm="shared")
            bits = several.all_gather_object(x.tobytes())
            assert len(set(bits)) == 1
            assert bits[0] == (expected or bits[0])
            expected = bits[0]


def test_auto_takes_it_for_long_arrays(several: Communicator) -> None:
    x = several.zeros((1024, 1024))
    assert (x == 0).all()
    plan = several.plan("all_reduce", x)
    assert plan.algorithm in ("shared", "registered")  # the latter where ranks outnumber cores
    assert several.plan("all_reduce", np.ones(1 << 24, np.float32)).algorithm == "shared"
    assert several.plan("all_reduce", x[0, :8]).algorithm == "native"
    assert "two meetings, no messages" in str(plan)
    assert "reads 4 MiB and writes 4 MiB" in str(plan)
    assert "one meeting" in str(several.plan("all_reduce", x[0, :8], algorithm="shared"))
    assert plan.bytes_sent == 0
    assert plan.schedule is None
    for turn in range(3):
        x[:] = several.rank + turn
        before = several.bytes_sent
        plan()
        assert several.bytes_sent - before < 1000  # nothing but the first meeting
        assert (x == sum(range(several.size)) + several.size * turn).all()


def test_registered_only(several: Communicator) -> None:
    """Long ordinary arrays, on any rank, go another way."""
    x, y = several.empty(100_000), np.empty(100_000, np.float32)
    for one, messages in ((x, False), (y, True), (y if several.rank == 0 else x, True)):
        one[:] = 1
        several.all_reduce(one, algorithm="registered")
        one[:] = 1
        before = several.bytes_sent
        several.all_reduce(one, algorithm="registered")
        assert (one == several.size).all()
        native = several.plan("all_reduce", y, algorithm="native")
        assert native.algorithm == "native"
        assert messages or several.bytes_sent == before


def test_where_the_kernel_does_not_reach(
    several: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems refuse: then ordinary arrays go another way, registered and short ones stay."""
    monkeypatch.setattr(_memory, "available", lambda: several.rank != 0)
    with pycomm.init("mpi", timeout=30) as comm:
        for x in (comm.empty(100_000), np.empty(100_000, np.float32), np.empty(2, np.float32)):
            x[:] = comm.rank
            comm.all_reduce(x, algorithm="shared")
            assert (x == sum(range(comm.size))).all()
        host = comm._engine.choices.host
        assert host is not None
        assert host.usable
        assert not host.reaches_all


def test_where_memory_cannot_be_mapped(
    several: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks see that one may not, and never try again."""
    if several.rank == several.size - 1:

        def refused(*_: object) -> None:
            raise PermissionError("not here")

        monkeypatch.setattr(REGIONS, "open", refused)
    with pycomm.init("mpi", timeout=30) as comm:
        for count in (5, 5, 100_000, 3_000_000):
            x = comm.empty(count)
            x[:] = comm.rank
            comm.all_reduce(x, algorithm="auto")
            assert (x == sum(range(comm.size))).all()
            plan = comm.plan("all_reduce", x)
        assert plan.algorithm not in ("shared", "registered")
        with pytest.raises(ArgumentValueError, match="may not map"):
            comm.all_reduce(np.ones(9), algorithm="shared")


def test_calls_that_differ_are_an_error_on_all_ranks(several: Communicator) -> None:
    for count in (10, 100_000):
        with pycomm.init("mpi", timeout=5) as comm:
            comm.all_reduce(np.ones(count), algorithm="shared")
            mine = count + (comm.rank == 0)
            with pytest.raises(MismatchError, match="calls something else") as caught:
                comm.all_reduce(np.ones(mine), algorithm="shared")
            assert caught.value.operation == "all_reduce"
            comm.abort()
        several.barrier()


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


def test_short_calls_wait_for_long_ones(several: Communicator) -> None:
    arrays = [several.empty(2_000_000) for _ in range(2)]
    arrays += [np.empty(count, np.float32) for count in (4, 3, 9_000, 5)]
    for x in arrays:
        x[:] = 1
    for work in [several.all_reduce(x, algorithm="shared", async_op=True) for x in arrays]:
        work.wait()
    for x in arrays:
        assert (x == several.size).all()


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_one_rank_without_memory_to_share(
    several: Communicator, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The others hear of it, instead of waiting."""
    if several.rank == 0:

        def refused(_: int) -> None:
            raise error("none left")

        monkeypatch.setattr(REGIONS, "allocate", refused)
    with pycomm.init("mpi", timeout=10) as comm:
        for count in (4, 100_000):
            x = np.full(count, comm.rank, np.float32)
            comm.all_reduce(x, algorithm="auto", deterministic=True)
            assert (x == sum(range(comm.size))).all()


@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_a_call_that_falls_back_late_meets_no_other_one(
    several: Communicator, algorithm: str
) -> None:
    """Ranks notice at different times that memory is out of reach; calls keep their partners."""
    x, y = np.zeros(100_000, np.float32), np.zeros(100_000, np.float32)
    for turn in range(40):
        x[:], y[:] = (turn, 1000 + turn) if several.rank == 0 else (-1, -1)
        work = several.broadcast(x, root=0, algorithm="registered", async_op=True)
        if several.rank == turn % several.size:  # one rank alone goes on with it
            end = time.monotonic() + 0.002
            while time.monotonic() < end:
                work.done()
        several.broadcast(y, root=0, algorithm=algorithm)
        work.wait()
        assert (x == turn).all()
        assert (y == 1000 + turn).all()


def test_memory_that_the_kernel_does_not_copy(
    several: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has an array in such memory, of a device perhaps: all take another road."""
    x = np.full(100_000, several.rank, np.float32)
    several.all_reduce(np.ones(9), algorithm="shared")
    host = several._engine.choices.host
    assert host is not None
    if several.rank == 0:
        monkeypatch.setattr(host, "reads", lambda _: False)
    for turn in range(3):
        x[:] = several.rank + turn
        several.all_reduce(x, algorithm="shared")
        assert (x == sum(range(several.size)) + turn * several.size).all()


def test_memory_is_given_back(several: Communicator) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    several.all_reduce(several.empty(20_000))
    before = open_files()
    for _ in range(300):
        x = several.empty(20_000)
        x[:] = 1
        assert several.all_reduce(x)[-1] == several.size
    assert open_files() <= before + 256  # those of calls that are remembered
    for _ in range(20):
        x = several.empty(600_000)
        x[:] = 1
        assert several.all_reduce(x)[-1] == several.size
    # Of the long arrays nothing stays but the last one, with each rank.
    several.barrier()
    REGIONS.sweep()
    long = [array for array, *_ in REGIONS._opened.values() if array.size > 1 << 20]
    assert len(long) <= several.size - 1
    assert not [name for name in Path("/dev/shm").iterdir() if "pycomm" in name.name]


def test_what_cannot_be_registered(comm: Communicator) -> None:
    for shape, dtype, error in (
        (-1, "f4", ArgumentValueError),
        ((2, -3), "f4", ArgumentValueError),
        (2.5, "f4", ArgumentTypeError),
        ("ab", "f4", ArgumentTypeError),
        ((0, 1 << 70), "f4", ArgumentValueError),
        ([1] * 65, "f4", ArgumentValueError),
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
    if comm._engine.choices.host is not None:
        assert comm.all_reduce(x, algorithm="shared")[0] == comm.size
        assert comm.all_reduce(np.ones(0), algorithm="shared").size == 0
        assert (comm.all_gather(x, algorithm="shared") == comm.size).all()
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
