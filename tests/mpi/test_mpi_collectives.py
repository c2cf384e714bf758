"""Every collective against NumPy, on MPI. Every rank draws the same examples."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import Example, allowed, cases, check_case, same_on_all

from pycomm import ArgumentValueError, Communicator, ReduceOp, premul_sum
from pycomm.dtypes import DTYPES
from pycomm.transports.mpi import MPITransport

pytestmark = pytest.mark.mpi

Together = Callable[..., None]


@same_on_all(150)
@given(data=st.data())
def test_against_numpy(comm: Communicator, together: Together, data: st.DataObject) -> None:
    case = data.draw(cases(comm.size))
    assert len(set(comm.all_gather_object(repr(case)))) == 1
    together(check_case, case)


@pytest.mark.parametrize("count", [1000, 16_384, 70_000, 600_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "complex64"])
@pytest.mark.parametrize("algorithm", ["auto", "direct"])
def test_sizes_that_change_roads(
    together: Together, count: int, dtype: str, algorithm: str, comm: Communicator
) -> None:
    """From MPI's own collective to messages, in one piece and in segments."""
    for collective in ("all_reduce", "reduce", "reduce_scatter"):
        for in_place, alike in ((True, True), (False, True), (True, False)):
            op = "avg" if in_place else "sum"
            case = Example(
                collective, dtype, op, (count,), comm.size - 1, in_place, alike, algorithm, count
            )
            together(check_case, case)


def test_what_mpi_does_itself(comm: Communicator) -> None:
    """The native road is taken where it is right: not for NaN, halves, bool or avg."""
    native = comm._engine.transport.native
    for name, row in DTYPES.items():
        for op in filter(lambda op: allowed(op, row), ReduceOp):
            wide = ("int32", "uint32", "int64", "uint64")
            expected = name in wide and op is not ReduceOp.AVG
            expected |= name in ("float32", "float64") and op in (ReduceOp.SUM, ReduceOp.PROD)
            expected |= name.startswith("complex") and op is ReduceOp.SUM
            for collective in ("all_reduce", "reduce", "reduce_scatter"):
                assert (native(collective, row, op, 4) is not None) == expected, (name, op)
        assert native("all_gather", row, None, 4) is not None
        assert native("all_reduce", row, premul_sum(1), 4) is None


def test_counts_over_two_gigabytes_are_cut(comm: Communicator) -> None:
    """MPI's counts are C ints; a stub in its place sees that none is longer."""
    transport = comm._engine.transport
    float64 = DTYPES["float64"]
    assert transport.native("broadcast", float64, None, 2**28 + 1) is None
    assert transport.native("reduce_scatter", float64, ReduceOp.SUM, 2**31 + 3) is None
    assert transport.native("broadcast", float64, None, 2**28 - 1) is not None
    counts: list[int] = []

    class Stub:
        def Isend(self, message: list[Any], *_: int) -> None:  # noqa: N802
            counts.append(message[0].size)

        Irecv = Isend

    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**32 + 5,), (1,))
    assert isinstance(transport, MPITransport)
    transport._start(Stub(), [(0, huge)], [], 0)  # type: ignore[arg-type]
    transport._open.clear()
    assert sum(counts) == huge.size
    assert max(counts) < 2**31


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint64"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_integer_sums_wrap_in_every_element(
    comm: Communicator, dtype: str, collective: str
) -> None:
    """Vector kernels of an MPI may saturate, and only where a whole vector fits."""
    largest = np.iinfo(dtype).max
    for count in (1, 33, 132, 4099):
        x = np.full(count * comm.size, largest, dtype)
        result = getattr(comm, collective)(x)
        if result is not None:
            expected = np.full(1, largest, dtype) * np.array(comm.size).astype(dtype)
            assert (result == expected).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["min", "max", "sum", "avg"])
def test_nan_reaches_every_rank(comm: Communicator, dtype: str, op: str) -> None:
    x = np.full(3, float(comm.rank)).astype(DTYPES[dtype].numpy)
    if comm.rank == comm.size - 1:
        x[1] = np.nan
    y = comm.all_reduce(x, op=op).astype(np.float64)
    assert np.isnan(y).tolist() == [False, True, False]


def test_halves_average_without_overflow(comm: Communicator) -> None:
    for value in (40000.0, 1e-7):
        x = np.full(100, value, np.float16)
        assert (comm.all_reduce(x.copy(), op="avg") == x).all()


def test_every_rank_gets_the_same_bits(comm: Communicator) -> None:
    for count in (17, 40_001, 700_001):
        for dtype in ("f4", "f2", ml_dtypes.bfloat16):
            x = np.random.default_rng(comm.rank).normal(size=count).astype(dtype)
            results = comm.all_gather_object(comm.all_reduce(x).tobytes())
            assert len(set(results)) == 1


def test_native_by_name_or_an_error(comm: Communicator) -> None:
    x = np.ones(4, np.float32)
    assert comm.all_reduce(x, algorithm="native")[0] == comm.size
    with pytest.raises(ArgumentValueError, match="cannot do all_reduce here: the library"):
        comm.all_reduce(x.astype(np.float16), algorithm="native")


def test_asynchronous_operations_on_both_roads(comm: Communicator) -> None:
    arrays = [np.full(count, comm.rank + 1.0, np.float32) for count in (1, 5000, 900_000)]
    works = [
        comm.all_reduce(x, algorithm=algorithm, async_op=True, op=op)
        for x, algorithm, op in zip(
            arrays, ("auto", "direct", "auto"), ("sum", "max", "avg"), strict=True
        )
    ]
    gathered = comm.all_gather(np.array([comm.rank]), async_op=True)
    barrier = comm.barrier(async_op=True)
    total = comm.size * (comm.size + 1) / 2
    for index in (2, 0, 1) if comm.rank % 2 else (1, 2, 0):
        works[index].wait()
    barrier.wait()
    assert gathered.wait().tolist() == list(range(comm.size))
    for x, expected in zip(arrays, (total, comm.size, total / comm.size), strict=True):
        assert (x == np.float32(expected)).all()


def test_point_to_point(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    for count in (0, 1, 1000, 300_000):
        x, out = np.full(count, r, np.int32), np.empty(count, np.int32)
        comm.send_recv(x, out, dest=(r + 1) % n, source=(r - 1) % n)
        assert (out == (r - 1) % n).all()
    if n > 1 and r < 2:
        first, second = np.array([1.0]), np.array([2.0])
        if r == 0:
            comm.send(first, 1, tag=1)
            comm.send(second, 1, tag=2)
        else:
            # Tags choose, whatever came first.
            comm.recv(second, 0, tag=2)
            comm.recv(first, 0, tag=1)
            assert (first[0], second[0]) == (1.0, 2.0)


def test_memory_that_only_pycomm_holds(comm: Communicator) -> None:
    """Inputs that the caller drops at once are alive until the data has gone."""
    n, r, count = comm.size, comm.rank, 300_000
    out = np.empty(count)
    moved = comm.send_recv(
        np.full(count, float(r)), out, dest=(r + 1) % n, source=(r - 1) % n, async_op=True
    )
    works = [
        comm.all_reduce(np.full(count // 20, 1.0), async_op=True, algorithm=algorithm)
        for algorithm in ("native", "direct")
    ]
    works.append(comm.all_gather(np.full(count, float(r)), async_op=True))
    junk = [np.full(count, -1.0) for _ in range(10)]
    moved.wait()
    assert (out == (r - 1) % n).all()
    assert (works[0].wait() == n).all()
    assert (works[1].wait() == n).all()
    assert (works[2].wait().reshape(n, count)[:, -1] == np.arange(n)).all()
    del junk


def test_groups(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    part = comm.split(r % 2, key=-r)
    assert part is not None
    assert part.all_gather_object(r) == [k for k in range(n - 1, -1, -1) if k % 2 == r % 2]
    backwards = comm.split_ranks(range(n - 1, -1, -1))
    assert backwards is not None
    assert backwards.rank == n - 1 - r
    assert backwards.broadcast_object(r if r == n - 1 else None) == n - 1
    assert comm.split(None) is None
    # One machine: the host's ranks are all ranks, and that comes from shared memory.
    assert comm.host.size == comm.local_size == n
    assert comm.local_rank == comm.host.rank == r


def test_from_mpi_leaves_the_callers_communicator_alone(comm: Communicator) -> None:
    from mpi4py import MPI

    theirs = MPI.COMM_WORLD.Split(0, key=-MPI.COMM_WORLD.Get_rank())
    with Communicator.from_mpi(theirs, timeout=30) as ours:
        assert ours.rank == comm.size - 1 - comm.rank
        assert ours.all_reduce(np.ones(1))[0] == comm.size
    assert theirs.allreduce(1) == comm.size
    theirs.Free()
    with pytest.raises(TypeError, match="Intracomm"):
        Communicator.from_mpi(None)


def test_objects(comm: Communicator) -> None:
    obj = {"rank": 0, "data": list(range(100_000))}
    assert comm.broadcast_object(obj if comm.rank == 0 else None) == obj
    assert comm.all_gather_object("x" * comm.rank) == ["x" * r for r in range(comm.size)]
