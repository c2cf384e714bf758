"""What was found by trying to break it, on one rank: each of these once went wrong."""

import ctypes
import gc
import time
from typing import Any

import numpy as np
import pytest
from support.gpu import Interfaced, Packed, to_device, write_late

import pycomm
from pycomm import ArgumentTypeError, ArgumentValueError, CommError, Communicator, premul_sum
from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.buffers import as_buffer
from pycomm.device.programs import DeviceProgram
from pycomm.device_arrays import allocate
from pycomm.devices import get_device
from pycomm.dtypes import DTYPES, ReduceOp
from pycomm.kernels.cuda import MOST_SOURCES, kernels_of
from pycomm.program import OUTPUT, STAGE, BoundRound, Piece, Reduction
from pycomm.stream_memory import StreamMemory
from pycomm.streams import Stream


@pytest.fixture
def alone():
    comm = pycomm.init("local", timeout=20)
    yield comm
    comm.abort()


def array(values: Any, stream: int = 1) -> Interfaced:
    return Interfaced(np.asarray(values, np.float32), 0, stream)


# --------------------------------------------------------------------------------------- groups


def test_a_group_is_of_one_communicator(alone: Communicator) -> None:
    x = array(np.ones(100))
    with pycomm.init("local", timeout=20) as other:
        other.all_reduce(array(np.ones(10)))
        for call in (
            lambda: other.all_reduce(x),
            lambda: other.all_reduce(x, algorithm="ring"),
            lambda: other.send_recv(x, array(np.ones(100)), dest=0, source=0),
            lambda: other.empty(3, device="cuda"),
            lambda: other.group().__enter__(),
        ):
            with pytest.raises(ArgumentValueError, match="another communicator"), alone.group():
                call()
        third = pycomm.init("local")
        with pytest.raises(ArgumentValueError, match="another communicator"), alone.group():
            third.all_reduce(x)
        third.close()
        other.all_reduce(x)
    with pytest.raises(CommError, match="do not nest"), alone.group(), alone.group():
        pass
    with pytest.raises(ArgumentValueError, match="async_op inside"), alone.group():
        alone.all_reduce(x, async_op=True)
    assert alone.all_reduce(np.ones(3)).sum() == 3
    alone.all_reduce(x)


# --------------------------------------------------------------------------------- interruptions


def test_an_interruption_of_the_short_way_breaks_it(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = array(np.ones(100))
    alone.all_reduce(x)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(alone._side._tools.watch), "mark", interrupted)
    alone._side._tools.watch.current = None
    with pytest.raises(KeyboardInterrupt):
        alone.all_reduce(x)
    monkeypatch.undo()
    with pytest.raises(CommError, match="interrupted"):
        alone.all_reduce(x)
    assert alone._side.comm.busy == 0


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_an_interruption_breaks_it(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    x = array(np.ones(100))
    alone.all_reduce(x, algorithm=algorithm)
    inside = type(alone._side.comm.inside())

    def interrupted(self: Any) -> None:
        entered(self)
        raise KeyboardInterrupt

    entered = inside.__enter__
    monkeypatch.setattr(inside, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alone.all_reduce(x, timeout=3, algorithm=algorithm)
    monkeypatch.undo()
    with pytest.raises(CommError, match="interrupted"):
        alone.all_reduce(x)
    assert nccl.ncclGroupEnd() == 5  # no group is open


# --------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("check", [False, True])
def test_a_wrong_stream_is_found_before_anything_is_sent(check: bool) -> None:
    with pycomm.init("local", timeout=20, check=check) as comm:
        x = array(np.ones(10))
        comm.all_reduce(x)
        gone = Stream(0)
        handle = gone.handle
        del gone
        before = comm._engine.sequence
        for wrong, error in (("nonsense", ArgumentTypeError), (handle, ArgumentValueError)):
            with pytest.raises(error, match="stream"):
                comm.all_reduce(x, stream=wrong)
            with pytest.raises(error, match="stream"):
                comm.send_recv(x, array(np.ones(10)), dest=0, source=0, stream=wrong)
        lost = array(np.ones(10), handle)
        with pytest.raises(ArgumentValueError, match="destroyed"):
            comm.all_reduce(lost)
        assert comm._engine.sequence == before
        comm.all_reduce(x)


def test_an_output_of_another_stream_is_ordered_both_ways(
    libcuda: ctypes.CDLL, alone: Communicator
) -> None:
    libcuda.double_set_delay_us(2000)
    first, second = Stream(0), Stream(0)
    for _ in range(2):  # the long way, and the one after it
        x, out = array(np.zeros(100), first.handle), array(np.zeros(100), second.handle)
        held = write_late(x.base, np.ones(100, np.float32), first.handle)
        alone.all_reduce(x, out)
        assert out.numpy().sum() == 100
        del held
    libcuda.double_set_delay_us(20)


def test_memory_that_came_by_dlpack_lives_until_it_is_read(
    libcuda: ctypes.CDLL, alone: Communicator
) -> None:
    libcuda.double_set_delay_us(3000)
    out = Packed(np.zeros(1000, np.float32), 0)
    for _ in range(3):
        x = Packed(np.ones(1000, np.float32), 0)
        alone.all_reduce(x, out)
        del x
        gc.collect()
    assert out.numpy().sum() == 1000
    libcuda.double_set_delay_us(20)


# -------------------------------------------------------------------------------------- captures


def capture(stream: Stream, function: Any) -> None:
    graph = ctypes.c_void_p()
    with stream.device.entered():
        cuda.check(cuda.cuStreamBeginCapture_v2(stream.handle, 0), "cuStreamBeginCapture")
    try:
        function()
    finally:
        with stream.device.entered():
            code = cuda.cuStreamEndCapture(stream.handle, ctypes.byref(graph))
            if graph.value:
                cuda.cuGraphDestroy(graph)
            cuda.check(code, "cuStreamEndCapture")


def test_a_capture_takes_no_mark(libcuda: ctypes.CDLL, alone: Communicator) -> None:
    libcuda.double_calls.restype = ctypes.c_ulonglong
    stream = Stream(0)
    x = array(np.ones(10), stream.handle)
    plan = alone.plan("all_reduce", x)
    plan()
    before = libcuda.double_calls(b"cuEventRecord")
    capture(stream, plan)
    capture(stream, lambda: alone.all_reduce(x))
    assert libcuda.double_calls(b"cuEventRecord") == before


def test_memory_is_freed_beside_a_capture(libcuda: ctypes.CDLL, alone: Communicator) -> None:
    stream = Stream(0)
    x = array(np.ones(10), stream.handle)
    alone.all_reduce(x)
    dead = [to_device(np.ones(10), 0)]

    def body() -> None:
        dead.clear()
        gc.collect()
        time.sleep(0.2)
        alone.all_reduce(x)

    capture(stream, body)


def test_what_a_capture_cannot_have_is_refused(alone: Communicator) -> None:
    stream = Stream(0)
    x = array(np.ones(10), stream.handle)
    plan = alone.plan("all_reduce", x, algorithm="ring")
    with pytest.raises(ArgumentValueError, match="run it once before"):
        capture(stream, plan)
    plan()
    capture(stream, plan)
    for call in (lambda: plan(async_op=True), lambda: alone.all_reduce(x, async_op=True)):
        with pytest.raises(ArgumentValueError, match="captured"):
            capture(stream, call)
    assert alone.all_reduce(x, async_op=True).wait() is x


# ----------------------------------------------------------------------------------------- works


def test_a_work_that_failed_stays_failed(libnccl: ctypes.CDLL, alone: Communicator) -> None:
    x = array(np.ones(10))
    alone.all_reduce(x)
    comm = ctypes.c_void_p(alone._side.comm.handle)
    libnccl.double_mute(comm, 1)
    works = [alone.all_reduce(x, async_op=True) for _ in range(3)]
    libnccl.double_async_error(comm, 2)
    for work in works:
        for _ in range(2):
            with pytest.raises(pycomm.NCCLSystemError):
                work.wait()
        assert isinstance(work.exception(), pycomm.NCCLSystemError)


def test_works_are_done_when_it_is_closed() -> None:
    comm = pycomm.init("local", timeout=20)
    x = array(np.ones(10))
    works = [comm.all_reduce(x, async_op=True) for _ in range(100)]
    plan = comm.plan("all_reduce", x, algorithm="direct")
    comm.close()
    assert all(work.wait() is x for work in works)
    assert plan.bytes_sent == 0
    assert "all_reduce" in str(plan)
    with pytest.raises(CommError, match="closed"):
        plan()


def test_to_close_is_bounded_also_with_registered_memory(libnccl: ctypes.CDLL) -> None:
    comm = pycomm.init("local", timeout=1)
    x = comm.empty(1000, device="cuda")
    comm.all_reduce(x)
    libnccl.double_mute(ctypes.c_void_p(comm._side.comm.handle), 1)
    comm.all_reduce(x, timeout=60)
    begin = time.monotonic()
    with pytest.raises(pycomm.NCCLTimeoutError):
        comm.close()
    assert time.monotonic() - begin < 9


# ---------------------------------------------------------------------------------------- memory


def live(libcuda: ctypes.CDLL) -> int:
    """Return the live bytes, once memory that is given back has been freed."""
    gc.collect()
    time.sleep(0.1)
    return int(libcuda.double_allocated())


def test_scratch_is_given_back_also_after_a_failure(libcuda: ctypes.CDLL) -> None:
    kept = []
    for _ in range(3):
        comm = pycomm.init("local", timeout=5)
        x, out = array(np.ones(100_000)), array(np.ones(100_000))
        comm.all_reduce(x, out, op=premul_sum(2), algorithm="ring")
        libcuda.double_fail_next(b"cuMemcpyDtoDAsync", 1, 1)
        with pytest.raises(CommError):
            comm.all_reduce(x, out, op=premul_sum(2), algorithm="ring")
        comm.abort()
        del x, out, comm
        kept.append(live(libcuda))
    assert kept[0] == kept[-1]


def test_memory_is_freed_by_a_thread_of_its_own(libcuda: ctypes.CDLL) -> None:
    device = get_device(0)
    before = live(libcuda)
    for _ in range(100):
        allocate(device, (1000,), DTYPES["uint8"])
    assert live(libcuda) == before


def test_first_use_that_fails_leaves_nothing_behind(libcuda: ctypes.CDLL) -> None:
    with pycomm.init("local", timeout=5) as comm:
        x = array(np.ones(10))
        libcuda.double_fail_next(b"cuMemAlloc", 2, 1)
        with pytest.raises(pycomm.CUDAError):
            comm.all_reduce(x)
        comm.all_reduce(x)
        assert x.numpy().sum() == 10


# ------------------------------------------------------------------------------------- arguments


def test_aliases_are_refused_each_time(alone: Communicator) -> None:
    base = to_device(np.arange(8, dtype=np.float32), 0)
    for _ in range(2):
        with pytest.raises(ArgumentValueError, match="overlap"):
            alone.all_reduce(base[0:4], base[2:6])
        alone.all_reduce(base[0:4], base[4:8])
    # The same elements by another object: in place.
    alone.all_to_all(base[0:4], base[0:4])
    assert base[0:4].copy().tolist() == [0, 1, 2, 3]


def test_strange_exporters_are_refused_by_name() -> None:
    class Raises:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("requires grad")

    with pytest.raises(ArgumentTypeError, match="requires grad"):
        as_buffer(Raises())
    for changes in ({"version": "3"}, {"shape": (1.5,)}):
        x = array(np.ones(3))
        x.changes = changes
        with pytest.raises(ArgumentTypeError, match="wrong"):
            as_buffer(x)

    class Odd(Packed):
        def __dlpack_device__(self) -> Any:
            return ("cuda", 0)

    with pytest.raises(ArgumentTypeError, match="on which device"):
        as_buffer(Odd(np.ones(3), 0))


@pytest.mark.parametrize("wrong", ["0", 1.0, True])
def test_a_device_is_a_number(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="device"):
        pycomm.init("local", device=wrong)


def test_large_factors(alone: Communicator) -> None:
    row = DTYPES["bfloat16"]
    x = allocate(get_device(0), (10,), row).fill(1)
    alone.all_reduce(x, op=premul_sum(10**30))
    for factor in range(100):  # each an operation of its own
        alone.all_reduce(x, op=premul_sum(factor / 7))
    alone.all_reduce(x, op=premul_sum(10**30), algorithm="ring")


def test_a_target_among_many_sources() -> None:
    class Alone:
        rank, size = 0, 1
        device = get_device(0)

    row, number, count = DTYPES["int64"], MOST_SOURCES + 20, 5
    for place in (0, MOST_SOURCES, number - 1):
        stage = to_device(np.repeat(np.arange(number), count), 0)
        out = to_device(np.full(count, place), 0)
        sources = [Piece(STAGE, one * count, one * count + count) for one in range(number)]
        sources[place] = Piece(OUTPUT, 0, count)
        bound = BoundRound((), (), (), (Reduction(tuple(sources), Piece(OUTPUT, 0, count)),), ())
        program = DeviceProgram.__new__(DeviceProgram)
        program._dtype, program._combine, program._kernels = row, ReduceOp.SUM, kernels_of(0)

        def at(piece: Piece, stage: Any = stage, out: Any = out) -> int:
            return (stage if piece.memory == STAGE else out).pointer + piece.start * 8

        with Alone.device.entered(), StreamMemory(Alone.device).run(1) as memory:
            program._reduce(bound, at, 1, memory)
        assert out.copy().tolist() == [sum(range(number))] * count, place
