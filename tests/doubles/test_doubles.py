"""The doubles of libcuda and libnccl: they must be harder on a program than hardware is."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest

from doubles import build
from doubles.client import (
    IN_PROGRESS,
    OPS,
    TYPES,
    Cuda,
    CudaError,
    Nccl,
    UniqueId,
    config,
    dtype_of,
    wait_for,
)

LIMIT = 30
INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 4, 5, 6
KERNEL = """
extern "C" __global__ void scale(float *target, float factor, unsigned long long count)
{
    unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (at < count)
        target[at] *= factor;
}
"""
PTX = b".version 8.0\n.target sm_90\n\0"


# --- running ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doubles() -> build.Doubles:
    return build.build()


def start(
    made: build.Doubles, function: Callable, *arguments: object, **variables: str
) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    environment = os.environ | made.environment() | {"PYTHONPATH": tests} | variables
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)


def finish(*processes: subprocess.Popen[str], expected: Sequence[int] = (0,)) -> None:
    """Wait for processes that started together, and compare how they ended."""
    late = threading.Timer(LIMIT, lambda: [process.kill() for process in processes])
    late.start()
    errors = [process.communicate()[1] for process in processes]
    late.cancel()
    assert [process.returncode for process in processes] == list(expected), "\n".join(errors)


def alone(made: build.Doubles, function: Callable, **variables: str) -> None:
    finish(start(made, function, **variables))


def unique_id(made: build.Doubles) -> str:
    library, unique = ctypes.CDLL(str(made.libnccl)), UniqueId()
    assert library.ncclGetUniqueId(byref(unique)) == 0
    return bytes(unique).hex()


def ranks(
    made: build.Doubles,
    function: Callable,
    count: int,
    expected: Sequence[int] = (),
    **variables: str,
) -> None:
    unique = unique_id(made)
    started = [start(made, function, rank, count, unique, **variables) for rank in range(count)]
    finish(*started, expected=expected or [0] * count)


class Rank:
    """What a function of a rank works with."""

    def __init__(self, rank: str, count: str, unique: str) -> None:
        self.rank, self.count = int(rank), int(count)
        self.unique = UniqueId.from_buffer_copy(bytes.fromhex(unique))
        self.cuda, self.nccl = Cuda(self.rank), Nccl()
        self.stream = self.cuda.stream()

    def init(self) -> c_void_p:
        return self.nccl.init(self.count, self.unique, self.rank)


# --- libcuda ------------------------------------------------------------------------------------


def host_reads_device_memory() -> None:
    ctypes.string_at(Cuda().allocate(64), 1)


def test_the_host_dies_of_device_memory(doubles: build.Doubles) -> None:
    finish(start(doubles, host_reads_device_memory), expected=[-signal.SIGSEGV])


def queue_order() -> None:
    cuda = Cuda()
    cuda.library.double_set_delay_us(20000)
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    target = cuda.pinned(8)
    source = cuda.allocate(8)
    target[:] = 0
    data = target.ctypes.data_as(c_void_p)
    cuda("cuMemsetD8Async", source, 7, c_size_t(8), first)
    cuda("cuEventRecord", event, first)
    cuda("cuStreamWaitEvent", second, event, 0)
    cuda("cuMemcpyDtoHAsync_v2", data, source, c_size_t(8), second)
    assert not target.any(), "nothing has run yet"
    assert cuda.code("cuEventQuery", event) == 600
    assert cuda.code("cuStreamQuery", second) == 600
    cuda("cuStreamSynchronize", second)
    assert (target == 7).all()
    assert cuda.library.double_races() == 0


def test_operations_run_in_the_order_of_streams_and_events(doubles: build.Doubles) -> None:
    alone(doubles, queue_order)


def host_function() -> None:
    cuda, codes = Cuda(), []
    stream, target = cuda.stream(), cuda.pinned(8)
    target[:] = 1
    call = ctypes.CFUNCTYPE(None, c_void_p)(
        lambda _: codes.append((int(target[0]), cuda.code("cuMemAlloc_v2", byref(c_void_p()), 8)))
    )
    address = target.ctypes.data_as(c_void_p)
    cuda("cuMemcpyHtoDAsync_v2", cuda.allocate(8), address, c_size_t(8), stream)
    cuda("cuLaunchHostFunc", stream, call, None)
    wait_for(lambda: bool(codes))
    assert codes == [(1, 800)]
    cuda("cuMemsetD8_v2", address, 2, c_size_t(8))
    assert cuda.library.double_races() == 0, "the function ran behind the copy"


def test_functions_of_the_host_may_not_call_cuda(doubles: build.Doubles) -> None:
    alone(doubles, host_function)


def missing_wait() -> None:
    cuda = Cuda()
    first, second, target = cuda.stream(), cuda.stream(), cuda.allocate(64)
    cuda("cuMemsetD8Async", target, 1, c_size_t(64), first)
    cuda("cuMemsetD8Async", c_void_p((target.value or 0) + 64 - 8), 2, c_size_t(8), first)
    cuda("cuMemsetD8Async", target, 2, c_size_t(8), second)
    assert cuda.library.double_races() == 1
    assert b"cuMemsetD8Async" in cuda.library.double_last_race()
    cuda("cuStreamSynchronize", first)
    cuda("cuMemsetD8Async", c_void_p((target.value or 0) + 32), 2, c_size_t(8), second)
    assert cuda.library.double_races() == 1, "the host has ordered it"
    cuda("cuMemsetD8_v2", target, 0, c_size_t(64))
    assert cuda.library.double_races() == 2, "the legacy stream orders blocking streams only"


def test_a_missing_wait_is_a_race(doubles: build.Doubles) -> None:
    alone(doubles, missing_wait)


def stale_memory() -> None:
    cuda = Cuda()
    address = cuda.allocate(100)
    fresh = cuda.download(address, np.zeros(100, np.uint8), None)
    assert (fresh == 0xA5).all()
    assert cuda.code("cuMemsetD8_v2", address, 0, c_size_t(101)) == 1
    assert cuda.library.double_allocated() == 100
    cuda("cuMemFree_v2", address)
    assert cuda.library.double_allocated() == 0
    assert cuda.code("cuMemsetD8_v2", address, 0, c_size_t(1)) == 1
    assert cuda.code("cuMemFree_v2", address) == 1
    stream = cuda.stream()
    cuda("cuStreamDestroy_v2", stream)
    assert cuda.code("cuStreamSynchronize", stream) == 400


def test_stale_pointers_and_handles_are_found(doubles: build.Doubles) -> None:
    alone(doubles, stale_memory)


def wrong_context() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuCtxGetCurrent(byref(c_void_p())) == 3, "before cuInit"
    cuda = Cuda(0)
    stream, event = cuda.stream(), cuda.event()
    cuda("cuCtxSetCurrent", None)
    assert cuda.library.double_context_depth() == 0
    assert cuda.code("cuMemAlloc_v2", byref(c_void_p()), c_size_t(8)) == 201
    cuda("cuStreamSynchronize", stream)
    assert cuda.code("cuStreamSynchronize", None) == 201
    other = Cuda(1)
    assert cuda.code("cuLaunchHostFunc", stream, None, None) == 400
    assert cuda.code("cuEventRecord", event, other.stream()) == 400
    cuda("cuDevicePrimaryCtxRelease_v2", 1)
    assert cuda.code("cuMemAlloc_v2", byref(c_void_p()), c_size_t(8)) == 709


def test_contexts_are_checked(doubles: build.Doubles) -> None:
    alone(doubles, wrong_context)


def visible_devices() -> None:
    library, count = ctypes.CDLL("libcuda.so.1"), c_int()
    assert library.cuInit(0) == 0
    assert library.cuDeviceGetCount(byref(count)) == 0
    assert count.value == 2


def test_visible_devices_end_at_the_first_wrong_entry(doubles: build.Doubles) -> None:
    alone(doubles, visible_devices, CUDA_VISIBLE_DEVICES="3,1,9,0")


def failures_on_demand() -> None:
    cuda = Cuda()
    cuda.library.double_fail_next(b"cuMemAlloc", 2, 2)
    cuda.allocate(8)
    assert cuda.code("cuMemAlloc_v2", byref(c_void_p()), c_size_t(8)) == 2
    cuda.allocate(8)
    assert cuda.library.double_calls(b"cuMemAlloc_v2") == 3


def test_a_test_can_make_calls_fail(doubles: build.Doubles) -> None:
    alone(doubles, failures_on_demand)


def graphs() -> None:
    cuda = Cuda()
    main, side = cuda.stream(), cuda.stream()
    fork, join = cuda.event(), cuda.event()
    zeros, target = np.zeros(8, np.uint8), cuda.allocate(8)

    def capture(*, joined: bool, ordered: bool = True) -> c_void_p:
        graph = c_void_p()
        cuda("cuStreamBeginCapture_v2", main, 1)
        cuda("cuMemsetD8Async", target, 3, c_size_t(8), main)
        cuda("cuEventRecord", fork, main)
        if not ordered:
            cuda("cuMemsetD8Async", target, 4, c_size_t(2), main)
        cuda("cuStreamWaitEvent", side, fork, 0)
        cuda("cuMemsetD8Async", target, 5, c_size_t(4), side)
        if joined:
            cuda("cuEventRecord", join, side)
            cuda("cuStreamWaitEvent", main, join, 0)
        cuda("cuStreamEndCapture", main, byref(graph))
        return graph

    cuda("cuMemsetD8Async", target, 0, c_size_t(8), main)
    graph = capture(joined=True)
    assert (cuda.download(target, zeros, main) == 0).all(), "capture ran nothing"
    made = c_void_p()
    cuda("cuGraphInstantiateWithFlags", byref(made), graph, ctypes.c_ulonglong(0))
    cuda("cuGraphDestroy", graph)
    for _ in range(2):
        cuda("cuGraphLaunch", made, main)
    assert cuda.download(target, zeros, main).tolist() == [5] * 4 + [3] * 4
    assert cuda.library.double_races() == 0
    cuda("cuGraphInstantiateWithFlags", byref(made), capture(joined=True, ordered=False), 0)
    cuda("cuGraphLaunch", made, main)
    assert cuda.library.double_races() == 1, "two branches write the same"
    with pytest.raises(CudaError) as unjoined:
        capture(joined=False)
    assert unjoined.value.code == 904
    cuda("cuStreamBeginCapture_v2", main, 1)
    cuda("cuEventRecord", fork, main)
    assert cuda.code("cuEventQuery", fork) == 907
    assert cuda.code("cuStreamSynchronize", main) == 901
    assert cuda.code("cuStreamEndCapture", main, byref(graph)) == 901


def test_capture_and_graphs(doubles: build.Doubles) -> None:
    alone(doubles, graphs)


def kernels() -> None:
    cuda = Cuda()
    module, function, stream = c_void_p(), c_void_p(), cuda.stream()
    assert cuda.code("cuModuleLoadData", byref(module), b"no code at all") == 200
    cuda("cuModuleLoadData", byref(module), PTX)
    assert cuda.code("cuModuleGetFunction", byref(function), module, b"other") == 500
    cuda("cuModuleGetFunction", byref(function), module, b"scale")

    def launch(target: c_void_p, count: int) -> None:
        values = [target, ctypes.c_float(3), ctypes.c_ulonglong(count)]
        parameters = (c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        cuda("cuLaunchKernel", function, 4, 1, 1, 32, 1, 1, 0, stream, parameters, None)

    array = np.arange(100, dtype=np.float32)
    target = cuda.upload(array, stream)
    launch(target, 100)
    np.testing.assert_array_equal(cuda.download(target, array, stream), array * 3)
    launch(target, 101)
    assert cuda.code("cuStreamSynchronize", stream) == 700, "one element over the end"
    assert cuda.code("cuMemAlloc_v2", byref(c_void_p()), c_size_t(8)) == 700


def test_kernels_compile_for_the_host(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text(KERNEL)
    made = build.build(kernels=["scale"], kernel_source=source, place=tmp_path)
    alone(made, kernels)


def test_an_old_library_lacks_what_is_new(tmp_path: Path) -> None:
    made = build.build(21805, place=tmp_path)
    library, version = ctypes.CDLL(str(made.libnccl)), c_int()
    assert library.ncclGetVersion(byref(version)) == 0
    assert version.value == 21805
    assert hasattr(library, "ncclCommSplit")
    assert not hasattr(library, "ncclCommShrink")


# --- libnccl ------------------------------------------------------------------------------------


def ring(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, count = job.init(), 1 << 20
    own = np.full(count, job.rank, np.float32)
    source, target = job.cuda.upload(own, job.stream), job.cuda.allocate(own.nbytes)
    after, before = (job.rank + 1) % job.count, (job.rank - 1) % job.count
    job.nccl("ncclGroupStart")
    job.nccl("ncclSend", source, c_size_t(count), TYPES["float32"], after, comm, job.stream)
    job.nccl("ncclRecv", target, c_size_t(count), TYPES["float32"], before, comm, job.stream)
    job.nccl("ncclGroupEnd")
    assert (job.cuda.download(target, own, job.stream) == before).all()
    assert job.nccl.code("ncclGroupEnd") == INVALID_USAGE
    job.nccl("ncclCommDestroy", comm)
    assert job.nccl.code("ncclCommDestroy", comm) == INVALID_ARGUMENT
    assert job.nccl.library.double_misuse() == 1
    assert job.cuda.library.double_races() == 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_ring_of_sends_and_receives(doubles: build.Doubles, count: int) -> None:
    ranks(doubles, ring, count)


def expected_reduction(inputs: list[np.ndarray], op: str) -> np.ndarray:
    dtype, small = inputs[0].dtype, inputs[0].dtype.itemsize < 4 and inputs[0].dtype.kind in "fV"
    wide = [each.astype(np.float32) if small else each for each in inputs]
    if op == "avg" and dtype.kind not in "iu":
        factor = wide[0].dtype.type(1) / wide[0].dtype.type(len(wide))
        wide = [each * factor for each in wide]
    steps = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}
    result = wide[0]
    for each in wide[1:]:
        result = steps.get(op, np.add)(result, each)
    if op == "avg" and dtype.kind in "iu":
        result = np.trunc(result / len(wide))
    return result.astype(dtype)


def reductions(*arguments: str) -> None:
    job = Rank(*arguments)
    comm = job.init()
    for name, number in TYPES.items():
        dtype = dtype_of(name)
        random = np.random.default_rng(number)
        low = 0 if dtype.kind == "u" else -5
        inputs = [random.uniform(low, 5, 1000).astype(dtype) for _ in range(job.count)]
        for op, op_number in OPS.items():
            source = job.cuda.upload(inputs[job.rank], job.stream)
            code = job.nccl.all_reduce(comm, source, source, 1000, job.stream, name, op_number)
            assert code == 0, job.nccl.last_error()
            result = job.cuda.download(source, inputs[0], job.stream)
            expected = expected_reduction(inputs, op)
            bits = f"u{dtype.itemsize}"
            np.testing.assert_array_equal(result.view(bits), expected.view(bits), f"{name} {op}")
            job.cuda("cuMemFree_v2", source)
    assert job.nccl.all_reduce(comm, None, None, 0, job.stream) == 0
    job.nccl("ncclCommDestroy", comm)


@pytest.mark.parametrize("count", [2, 3])
def test_all_reduce_of_every_type(doubles: build.Doubles, count: int) -> None:
    ranks(doubles, reductions, count)


def collectives(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, n, int32 = job.init(), job.count, TYPES["int32"]
    own = np.arange(n * 4, dtype=np.int32) + 100 * job.rank
    everyone = [np.arange(n * 4, dtype=np.int32) + 100 * rank for rank in range(n)]
    part = slice(4 * job.rank, 4 * job.rank + 4)

    def run(name: str, *last: object, count: int = 4, nbytes: int = 16) -> np.ndarray:
        source, target = job.cuda.upload(own, job.stream), job.cuda.allocate(nbytes)
        job.nccl(name, source, target, c_size_t(count), int32, *last, comm, job.stream)
        return job.cuda.download(target, np.empty(nbytes // 4, np.int32), job.stream)

    whole = own.nbytes
    gathered = np.concatenate([each[:4] for each in everyone])
    assert (run("ncclAllGather", nbytes=whole) == gathered).all()
    assert (run("ncclReduceScatter", 0) == sum(everyone)[part]).all()
    assert (run("ncclBroadcast", 1) == everyone[1][:4]).all()
    exchanged = np.concatenate([each[part] for each in everyone])
    assert (run("ncclAlltoAll", nbytes=whole) == exchanged).all()
    assert (run("ncclScatter", 0) == everyone[0][part]).all()
    on_root = run("ncclGather", 1, nbytes=whole)
    reduced = run("ncclReduce", 0, 1, count=n * 4, nbytes=whole)
    if job.rank == 1:
        assert (on_root == gathered).all()
        assert (reduced == sum(everyone)).all()
    op = c_int()
    factor = c_int(job.rank + 1)
    job.nccl("ncclRedOpCreatePreMulSum", byref(op), byref(factor), int32, 1, comm)
    multiplied = sum(each[:4] * (rank + 1) for rank, each in enumerate(everyone))
    assert (run("ncclAllReduce", op) == multiplied).all()
    job.nccl("ncclRedOpDestroy", op, comm)
    assert job.cuda.library.double_races() == 0
    job.nccl("ncclCommDestroy", comm)


@pytest.mark.parametrize("count", [2, 3])
def test_the_other_collectives(doubles: build.Doubles, count: int) -> None:
    ranks(doubles, collectives, count)


def groups(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, other = job.init(), c_void_p()
    job.nccl("ncclCommSplit", comm, 0, job.rank, byref(other), None)
    job.cuda.library.double_set_delay_us(5000)
    side, own = job.cuda.stream(), np.ones(4, np.float32)
    first, second = job.cuda.upload(own, job.stream), job.cuda.upload(own, side)
    third = job.cuda.upload(own, side)
    job.nccl("ncclGroupStart")
    job.nccl("ncclGroupStart")
    assert job.nccl.all_reduce(comm, first, first, 4, job.stream) == 0
    job.nccl("ncclGroupEnd")
    assert job.nccl.all_reduce(comm, second, second, 4, side) == 0
    assert job.nccl.all_reduce(other, third, third, 4, side) == 0
    time.sleep(0.05)
    assert job.cuda.code("cuStreamQuery", side) == 0, "nothing is enqueued before the end"
    job.nccl("ncclGroupEnd")
    # The group joins its streams, so either of them is behind all of it.
    assert (job.cuda.download(first, own, side) == 2).all()
    assert (job.cuda.download(second, own, job.stream) == 2).all()
    assert (job.cuda.download(third, own, side) == 2).all()
    assert job.cuda.library.double_races() == 0
    job.nccl("ncclGroupStart")
    assert job.nccl.all_reduce(comm, first, first, 4, job.stream) == 0
    assert job.nccl.all_reduce(comm, first, first, 4, job.stream, op=9) == INVALID_ARGUMENT
    assert job.nccl.code("ncclGroupEnd") == INVALID_ARGUMENT
    assert (job.cuda.download(first, own, job.stream) == 2).all(), "nothing of it was enqueued"


def test_groups(doubles: build.Doubles) -> None:
    ranks(doubles, groups, 2)


def captured_collective(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, own = job.init(), np.ones(16, np.float32)
    target, graph, made = job.cuda.upload(own, job.stream), c_void_p(), c_void_p()
    job.cuda("cuStreamBeginCapture_v2", job.stream, 1)
    assert job.nccl.all_reduce(comm, target, target, 16, job.stream) == 0
    job.cuda("cuStreamEndCapture", job.stream, byref(graph))
    job.cuda("cuGraphInstantiateWithFlags", byref(made), graph, ctypes.c_ulonglong(0))
    for _ in range(3):
        job.cuda("cuGraphLaunch", made, job.stream)
    assert (job.cuda.download(target, own, job.stream) == 8).all()
    job.nccl("ncclCommDestroy", comm)


def test_a_captured_collective_runs_at_every_launch(doubles: build.Doubles) -> None:
    ranks(doubles, captured_collective, 2)


def not_blocking(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, chosen = c_void_p(), config(blocking=False)
    if job.rank == 1:
        time.sleep(0.3)
    code = job.nccl.code(
        "ncclCommInitRankConfig", byref(comm), job.count, job.unique, job.rank, byref(chosen)
    )
    assert code == IN_PROGRESS
    if job.rank == 0:
        assert job.nccl.state(comm) == IN_PROGRESS
        assert job.nccl.code("ncclCommCount", comm, byref(c_int())) == INVALID_ARGUMENT
    assert job.nccl.settle(comm) == 0
    own = np.ones(4, np.float32)
    target = job.cuda.upload(own, job.stream)
    assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == IN_PROGRESS
    assert job.nccl.settle(comm) == 0
    assert (job.cuda.download(target, own, job.stream) == 2).all()
    half = c_void_p()
    code = job.nccl.code("ncclCommSplit", comm, job.rank, 0, byref(half), None)
    assert code == IN_PROGRESS
    assert job.nccl.settle(comm) == 0
    assert half.value
    assert job.nccl.code("ncclCommFinalize", comm) == IN_PROGRESS
    assert job.nccl.settle(comm) == 0
    job.nccl("ncclCommDestroy", comm)


def test_initialisation_that_does_not_block(doubles: build.Doubles) -> None:
    ranks(doubles, not_blocking, 2, PYCOMM_DOUBLE_IN_PROGRESS="2")


def never_joined(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, chosen = c_void_p(), config(blocking=False)
    job.nccl.code("ncclCommInitRankConfig", byref(comm), 2, job.unique, 0, byref(chosen))
    time.sleep(0.1)
    assert job.nccl.state(comm) == IN_PROGRESS
    begin = time.monotonic()
    job.nccl("ncclCommAbort", comm)
    assert time.monotonic() - begin < 2
    assert job.nccl.code("ncclCommAbort", comm) == INVALID_ARGUMENT


def test_a_rank_that_never_joins(doubles: build.Doubles, tmp_path: Path) -> None:
    finish(start(doubles, never_joined, 0, 2, unique_id(doubles), TMPDIR=str(tmp_path)))


def lost_peer(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, own = job.init(), np.ones(4, np.float32)
    target = job.cuda.upload(own, job.stream)
    job.cuda("cuStreamSynchronize", job.stream)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == 0
    begin = time.monotonic()
    job.cuda("cuStreamSynchronize", job.stream)
    assert time.monotonic() - begin < 2
    assert job.nccl.state(comm) == REMOTE_ERROR
    assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == REMOTE_ERROR
    job.nccl("ncclCommAbort", comm)


def test_a_peer_that_dies(doubles: build.Doubles) -> None:
    ranks(doubles, lost_peer, 2, expected=[0, -signal.SIGKILL])


def aborted_peer(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, own = job.init(), np.ones(4, np.float32)
    target = job.cuda.upload(own, job.stream)
    if job.rank == 1:
        job.nccl.library.double_mute(comm, 1)
    for _ in range(3):
        assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == 0
    if job.rank == 1:
        time.sleep(0.2)
        assert job.cuda.code("cuStreamQuery", job.stream) == 600
        begin = time.monotonic()
        job.nccl("ncclCommAbort", comm)
        assert time.monotonic() - begin < 2
    job.cuda("cuStreamSynchronize", job.stream)
    if job.rank == 0:
        assert job.nccl.state(comm) == REMOTE_ERROR
        job.nccl("ncclCommAbort", comm)


def test_abort_ends_what_runs_here_and_there(doubles: build.Doubles) -> None:
    ranks(doubles, aborted_peer, 2)


def mismatched(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, target = job.init(), job.cuda.allocate(64)
    assert job.nccl.all_reduce(comm, target, target, 4 + job.rank, job.stream) == 0
    job.cuda("cuStreamSynchronize", job.stream)
    assert job.nccl.state(comm) == INVALID_USAGE
    text = job.nccl.last_error()
    assert "ncclAllReduce(count=4, float32, sum)" in text
    assert "ncclAllReduce(count=5, float32, sum)" in text
    job.nccl("ncclCommAbort", comm)


def test_calls_that_differ(doubles: build.Doubles) -> None:
    ranks(doubles, mismatched, 2)


def wrong_ranks(*arguments: str) -> None:
    job = Rank(*arguments)
    code = job.nccl.code(
        "ncclCommInitRank", byref(c_void_p()), job.count + job.rank, job.unique, job.rank
    )
    assert code == INVALID_ARGUMENT


def test_ranks_that_disagree_about_their_number(doubles: build.Doubles, tmp_path: Path) -> None:
    ranks(doubles, wrong_ranks, 2, TMPDIR=str(tmp_path))


def one_device(*arguments: str) -> None:
    job = Rank(*arguments)
    other = Cuda(0)
    code = job.nccl.code("ncclCommInitRank", byref(c_void_p()), 2, job.unique, job.rank)
    assert code == INVALID_USAGE
    assert "Duplicate GPU detected" in job.nccl.last_error()
    assert other.library.double_races() == 0


def test_two_ranks_on_one_device(doubles: build.Doubles) -> None:
    ranks(doubles, one_device, 2)


def families(*arguments: str) -> None:
    job = Rank(*arguments)
    comm, half, most = job.init(), c_void_p(), c_void_p()
    own = np.full(4, job.rank + 1, np.float32)
    target = job.cuda.upload(own, job.stream)
    job.nccl("ncclCommSplit", comm, job.rank % 2, -job.rank, byref(half), None)
    rank, count = c_int(), c_int()
    job.nccl("ncclCommUserRank", half, byref(rank))
    job.nccl("ncclCommCount", half, byref(count))
    assert (rank.value, count.value) == {0: (1, 2), 1: (0, 1), 2: (0, 2)}[job.rank]
    assert job.nccl.all_reduce(half, target, target, 4, job.stream) == 0
    expected = 2 if job.rank == 1 else 4
    assert (job.cuda.download(target, own, job.stream) == expected).all()
    if job.rank == 2:
        job.nccl("ncclCommDestroy", half)
        job.nccl("ncclCommAbort", comm)
        return
    assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == 0
    excluded = (c_int * 1)(2)
    job.nccl("ncclCommShrink", comm, excluded, 1, byref(most), None, 1)
    assert job.nccl.all_reduce(most, target, target, 4, job.stream) == 0
    assert (job.cuda.download(target, own, job.stream) == 6).all()
    for each in (half, most):
        job.nccl("ncclCommDestroy", each)
    job.nccl("ncclCommAbort", comm)


def test_split_and_shrink(doubles: build.Doubles) -> None:
    ranks(doubles, families, 3)


def changes(*arguments: str) -> None:
    job = Rank(*arguments)
    own = np.ones(4, np.float32)
    target, grown, unique = job.cuda.upload(own, job.stream), c_void_p(), job.unique
    if job.rank < 2:
        comm = job.nccl.init(2, unique, job.rank)
        job.nccl("ncclCommSuspend", comm, 1)
        assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == INVALID_USAGE
        job.nccl("ncclCommResume", comm)
        given = byref(unique) if job.rank == 0 else None
        job.nccl("ncclCommGrow", comm, 3, given, -1, byref(grown), None)
        job.nccl("ncclCommRevoke", comm, 0)
        assert job.nccl.all_reduce(comm, target, target, 4, job.stream) == INVALID_USAGE
        assert job.nccl.code("ncclCommFinalize", comm) == INVALID_USAGE
        job.nccl("ncclCommDestroy", comm)
        assert job.nccl.library.double_misuse() == 3
    else:
        time.sleep(0.5)  # both communicators meet at one place, one after the other
        job.nccl("ncclCommGrow", None, 3, byref(unique), 2, byref(grown), None)
    assert job.nccl.all_reduce(grown, target, target, 4, job.stream) == 0
    assert (job.cuda.download(target, own, job.stream) == 3).all()
    job.nccl("ncclCommDestroy", grown)


def test_suspend_grow_and_revoke(doubles: build.Doubles) -> None:
    ranks(doubles, changes, 3)


def one_sided(*arguments: str) -> None:
    class Awaited(ctypes.Structure):
        _fields_ = [("count", c_int), ("peer", c_int), ("signal", c_int), ("context", c_int)]

    job = Rank(*arguments)
    comm, peer = job.init(), 1 - job.rank
    window, memory = c_void_p(), c_void_p()
    job.nccl("ncclMemAlloc", byref(memory), c_size_t(64))
    job.cuda("cuMemsetD8Async", memory, 0, c_size_t(64), job.stream)
    job.cuda("cuStreamSynchronize", job.stream)
    job.nccl("ncclCommWindowRegister", comm, memory, c_size_t(64), byref(window), 1)
    own = np.full(4, job.rank + 1, np.uint8)
    source = job.cuda.upload(own, job.stream)
    arguments_of_put = (source, c_size_t(4), TYPES["uint8"], peer, window, c_size_t(8), 0, 0, 0)
    job.nccl("ncclPutSignal", *arguments_of_put, comm, job.stream)
    job.nccl("ncclWaitSignal", 1, byref(Awaited(1, peer, 0, 0)), comm, job.stream)
    result = job.cuda.download(memory, np.zeros(64, np.uint8), job.stream)
    assert (result[8:12] == peer + 1).all()
    assert result.sum() == 4 * (peer + 1)
    job.nccl("ncclCommWindowDeregister", comm, window)
    job.nccl("ncclCommDestroy", comm)


def test_put_and_signal(doubles: build.Doubles) -> None:
    ranks(doubles, one_sided, 2)


def one_process() -> None:
    cudas, nccl = [Cuda(device) for device in range(3)], Nccl()
    comms = (c_void_p * 3)()
    nccl("ncclCommInitAll", comms, 3, None)
    own = np.ones(4, np.float32)
    streams, targets = [], []
    for cuda in cudas:
        cuda("cuCtxSetCurrent", cuda.context)
        streams.append(cuda.stream())
        targets.append(cuda.upload(own, streams[-1]))
    nccl("ncclGroupStart")
    for comm, target, stream in zip(comms, targets, streams, strict=True):
        assert nccl.all_reduce(c_void_p(comm), target, target, 4, stream) == 0
    nccl("ncclGroupEnd")
    for cuda, target, stream in zip(cudas, targets, streams, strict=True):
        cuda("cuCtxSetCurrent", cuda.context)
        assert (cuda.download(target, own, stream) == 3).all()


def test_several_ranks_in_one_process(doubles: build.Doubles) -> None:
    alone(doubles, one_process)


def raised_error() -> None:
    cuda, nccl, unique = Cuda(), Nccl(), UniqueId()
    nccl("ncclGetUniqueId", byref(unique))
    comm, stream = nccl.init(1, unique, 0), cuda.stream()
    target = cuda.upload(np.ones(4, np.float32), stream)
    nccl.library.double_mute(comm, 1)
    assert nccl.all_reduce(comm, target, target, 4, stream) == 0
    time.sleep(0.05)
    assert cuda.code("cuStreamQuery", stream) == 600
    nccl.library.double_async_error(comm, 2)
    wait_for(lambda: cuda.code("cuStreamQuery", stream) == 0, 2)
    assert nccl.state(comm) == 2
    assert nccl.code("ncclCommCount", None, byref(c_int())) == INVALID_ARGUMENT
    host = np.ones(4, np.float32).ctypes.data_as(c_void_p)
    other = c_void_p()
    nccl("ncclGetUniqueId", byref(unique))
    nccl("ncclCommInitRank", byref(other), 1, unique, 0)
    assert nccl.all_reduce(other, host, host, 4, stream) == INVALID_ARGUMENT


def test_errors_that_a_test_raises(doubles: build.Doubles) -> None:
    alone(doubles, raised_error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
