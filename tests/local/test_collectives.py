"""Every collective against NumPy, on threads as ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import Example, cases, check_case, usable

import pycomm
from pycomm import Communicator, choice


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_against_numpy(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7), label="size")
    case = data.draw(cases(size), label="case")
    pycomm.run_local(size, check_case, case, timeout=20)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_segments_and_hosts_against_numpy(data: st.DataObject) -> None:
    """Short segments reach the pipeline with little data; ranks are spread over hosts."""
    size = data.draw(st.integers(2, 7), label="size")
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size), label="hosts")
    case = data.draw(cases(size), label="case")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "SEGMENT", data.draw(st.sampled_from([16, 64, 256])))
        pycomm.run_local(size, check_case, case, timeout=20, hosts=hosts)


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_long_reductions_in_segments(
    size: int, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every algorithm with uneven last segments, and less data than ranks."""
    monkeypatch.setattr(choice, "SEGMENT", 64)
    for dtype, op in (("float32", "sum"), ("bfloat16", "avg"), ("int8", "avg"), ("int16", "max")):
        for name in usable(collective, dtype, op):
            for count in (1, 2, size, 33, 257):
                for in_place in (False, True):
                    case = Example(
                        collective, dtype, op, (count,), size - 1, in_place, True, name, count
                    )
                    pycomm.run_local(size, check_case, case, timeout=20)


@pytest.mark.parametrize("size", range(1, 8))
def test_barrier_waits_for_all(size: int) -> None:
    arrived: list[int] = []

    def run(comm: Communicator) -> int:
        for turn in range(5):
            arrived.append(turn)
            comm.barrier()
            seen = arrived.count(turn)
            comm.barrier()
            assert seen == size
        return comm.rank

    assert pycomm.run_local(size, run, timeout=20) == list(range(size))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["min", "max", "sum"])
def test_nan_reaches_every_rank(dtype: str, op: str) -> None:
    def run(comm: Communicator) -> bool:
        x = np.full(3, float(comm.rank)).astype(pycomm.dtypes.DTYPES[dtype].numpy)
        if comm.rank == 1:
            x[1] = np.nan
        y = comm.all_reduce(x, op=op).astype(np.float64)
        return bool(np.isnan(y[1])) and not np.isnan(y[[0, 2]]).any()

    assert all(pycomm.run_local(4, run, timeout=20))


def test_every_rank_and_run_gets_the_same_bits() -> None:
    def run(comm: Communicator) -> bytes:
        x = np.random.default_rng(comm.rank).normal(size=5001).astype(np.float32)
        return bytes(comm.all_reduce(x).tobytes())

    first = pycomm.run_local(5, run, timeout=20)
    assert len(set(first + pycomm.run_local(5, run, timeout=20))) == 1
    exact = sum(
        np.random.default_rng(rank).normal(size=5001).astype(np.float32) for rank in range(5)
    )
    np.testing.assert_allclose(np.frombuffer(first[0], np.float32), exact, rtol=1e-5, atol=1e-6)


def test_aliases() -> None:
    for alias, name in {
        "allreduce": "all_reduce",
        "reducescatter": "reduce_scatter",
        "allgather": "all_gather",
        "alltoall": "all_to_all",
        "bcast": "broadcast",
    }.items():
        assert getattr(Communicator, alias) is getattr(Communicator, name)


def test_halves_are_rounded_once() -> None:
    """[2048, 1, 1, 1] is 2051; rounding after each step would lose the ones."""

    def run(comm: Communicator, value: float, op: str) -> float:
        return float(comm.all_reduce(np.array([value], np.float16), op=op)[0])

    def ladder(comm: Communicator) -> float:
        return run(comm, 2048.0 if comm.rank == 0 else 1.0, "sum")

    assert pycomm.run_local(4, ladder, timeout=20) == [2052.0] * 4  # 2051, a tie, to even
    assert pycomm.run_local(4, run, 40000.0, "avg", timeout=20) == [40000.0] * 4
    tiny = float(np.float16(1e-7))
    assert tiny > 0
    assert pycomm.run_local(4, run, tiny, "avg", timeout=20) == [tiny] * 4


def test_integers_wrap_and_average_toward_zero() -> None:
    def run(comm: Communicator, values: list[int], dtype: str, op: str) -> int:
        return int(comm.all_reduce(np.array([values[comm.rank]], dtype), op=op)[0])

    for values, dtype, op, expected in (
        ([120, 100], "int8", "sum", -36),
        ([200, 100], "uint8", "sum", 44),
        ([4, -3], "int32", "avg", 0),
        ([-4, -3], "int32", "avg", -3),
        ([4, -3, -3], "int32", "avg", 0),
        ([-4, -3, -4], "int32", "avg", -3),
        ([120, 100], "int8", "avg", 110),
        ([2**31 - 1, 2**31 - 1], "int32", "avg", 2**31 - 1),
    ):
        assert set(pycomm.run_local(len(values), run, values, dtype, op, timeout=20)) == {expected}
