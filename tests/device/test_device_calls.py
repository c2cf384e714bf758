"""Device arrays on several ranks: plans, graphs, groups, hints, compression, meeting, failing."""

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import Interfaced, graph_of, read_back, to_device

import pycomm
from pycomm import ArgumentTypeError, ArgumentValueError, CommError, Communicator, MismatchError
from pycomm.algorithms import names
from pycomm.algorithms.compression import Cast, ErrorFeedback
from pycomm.devices import get_device
from pycomm.streams import Stream

pytestmark = pytest.mark.mpi
Together = Callable[..., None]


def array(comm: Communicator, values: Any, stream: Stream | None = None) -> Interfaced:
    handle = 1 if stream is None else stream.handle
    return Interfaced(np.asarray(values, np.float32), comm.local_rank, handle)


# ---------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
def test_plans_run_again_and_again(together: Together, algorithm: str) -> None:
    def run(comm: Communicator) -> None:
        stream = Stream(comm.local_rank)
        x, out = (array(comm, np.full(1000, comm.rank + 1), stream) for _ in range(2))
        plan = comm.plan("all_reduce", x, out, op="avg", algorithm=algorithm)
        for factor in (1, 2, 3):
            x.base.fill(factor * (comm.rank + 1))
            assert plan() is out
            np.testing.assert_allclose(out.numpy(), factor * (comm.size + 1) / 2, rtol=1e-6)
        assert plan(async_op=True).wait() is out
        text = str(plan)
        assert "all_reduce of 1,000 float32" in text
        assert plan.algorithm in text
        if algorithm == "auto":
            assert plan.steps is None
        elif comm.size > 1:
            assert plan.steps > 0
            assert plan.bytes_sent > 0

    together(run)


@pytest.mark.parametrize("what", ["auto", "ring", "fp8_e4m3"])
def test_a_plan_is_captured_as_a_graph(together: Together, what: str) -> None:
    def run(comm: Communicator) -> None:
        device = get_device(comm.local_rank)
        stream = Stream(device)
        x, out = array(comm, np.zeros(500), stream), array(comm, np.zeros(500), stream)
        options = {"compression": what} if what.startswith("fp8") else {"algorithm": what}
        plan = comm.plan("all_reduce", x, out, **options)
        plan()
        stream.synchronize()
        with graph_of(plan, stream) as launch:
            for value in (1, 2, 4):
                x.base.fill(value)
                launch()
                assert (out.numpy() == value * comm.size).all()

    together(run)


# --------------------------------------------------------------------------------------- groups


def test_a_group_starts_together(together: Together) -> None:
    def run(comm: Communicator) -> None:
        x, y, got = (array(comm, np.full(10, comm.rank)) for _ in range(3))
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with comm.group():
            comm.send(x, ahead)
            comm.recv(got, behind)
            comm.all_reduce(y)
        assert (got.numpy() == behind).all()
        assert (y.numpy() == sum(range(comm.size))).all()
        with pytest.raises(ZeroDivisionError), comm.group():
            1 / 0  # noqa: B018
        with pytest.raises(ArgumentValueError, match="several steps"), comm.group():
            comm.all_reduce(y, algorithm="ring")
        comm.all_reduce(y)  # all is well

    together(run)


def test_messages(together: Together) -> None:
    def run(comm: Communicator) -> None:
        x, out = array(comm, np.full(5000, comm.rank)), array(comm, np.zeros(5000))
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        assert comm.send_recv(x, out, dest=ahead, source=behind) is out
        assert (out.numpy() == behind).all()
        work = comm.send_recv(x, out, dest=ahead, source=behind, async_op=True)
        assert work.wait() is out
        with pytest.raises(ArgumentValueError, match="no tags"):
            comm.send(x, 0, tag=3)
        with pytest.raises(ArgumentTypeError, match="host"):
            comm.send_recv(x, np.zeros(5000), dest=ahead, source=behind)

    together(run)


# ------------------------------------------------------------------------ algorithms and codecs


def test_all_algorithms_agree(together: Together) -> None:
    def run(comm: Communicator) -> None:
        for count in (0, 1, 7, 1000):
            values = [
                np.random.default_rng(rank).integers(-9, 9, count) for rank in range(comm.size)
            ]
            expected = np.sum(values, axis=0)
            for name in ("auto", "native", *names("all_reduce")):
                x, stream = array(comm, values[comm.rank]), Stream(comm.local_rank)
                comm.all_reduce(x, algorithm=name, stream=stream)
                np.testing.assert_array_equal(read_back(x.base, stream.handle), expected)

    together(run)


def test_registered_memory_is_freed_with_its_communicator(libcuda: ctypes.CDLL) -> None:
    kept = []
    for _ in range(3):
        with pycomm.init("mpi", timeout=20) as comm:
            for _ in range(5):
                comm.empty(100_000, device="cuda")
        gc.collect()
        time.sleep(0.2)
        kept.append(libcuda.double_allocated())
    assert kept[-1] <= kept[0]


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1)])
def test_hierarchies_over_hosts(hosts: tuple[int, ...]) -> None:
    from mpi4py import MPI

    from pycomm.bootstrap.mpi import mpi_transport

    transport: Any = mpi_transport(MPI.COMM_WORLD, 20)
    transport.hosts = hosts[: transport.size]
    with Communicator.over(transport, timeout=20, check=False) as comm:
        device = transport.rank
        for count in (1, 5, 1000):
            values = np.random.default_rng(comm.rank).integers(-9, 9, comm.size * count)
            host = comm.all_reduce(values.astype(np.float32), algorithm="direct")
            for op in ("sum", "avg"):
                x = Interfaced(values.astype(np.float32), device)
                comm.all_reduce(x, op=op, algorithm="hierarchical")
                expected = host if op == "sum" else host / np.float32(comm.size)
                np.testing.assert_array_equal(x.numpy(), expected)
            for name in ("reduce_scatter", "all_gather"):
                x = Interfaced(values.astype(np.float32), device)
                size = count if name == "reduce_scatter" else comm.size**2 * count
                out = Interfaced(np.zeros(size, np.float32), device)
                own = np.zeros(size, np.float32)
                getattr(comm, name)(x, out, algorithm="hierarchical")
                getattr(comm, name)(values.astype(np.float32), own, algorithm="direct")
                np.testing.assert_array_equal(out.numpy(), own)


def test_hints_to_nccl(together: Together, libnccl: ctypes.CDLL, libcuda: ctypes.CDLL) -> None:
    def run(comm: Communicator) -> None:
        libcuda.double_calls.restype = ctypes.c_ulonglong
        functions = {
            "all_reduce": b"ncclAllReduceConfig",
            "reduce": b"ncclReduceConfig",
            "reduce_scatter": b"ncclReduceScatterConfig",
            "all_gather": b"ncclAllGatherConfig",
            "broadcast": b"ncclBroadcastConfig",
            "all_to_all": b"ncclAlltoAllConfig",
            "gather": b"ncclGatherConfig",
        }
        for name, function in functions.items():
            before = libcuda.double_calls(function)
            size = 6 * comm.size
            x, out = array(comm, np.ones(size)), array(comm, np.zeros(size))
            if name in ("all_gather", "gather"):
                x = array(comm, np.ones(6))
            elif name == "reduce_scatter":
                out = array(comm, np.zeros(6))
            getattr(comm, name)(x, out, algorithm="nccl:ring")
            if name not in ("reduce", "gather") or comm.rank == 0:
                expected = comm.size if "reduce" in name else 1
                assert (out.numpy() == expected).all(), name
            assert libcuda.double_calls(function) == before + 1, name
        x = array(comm, np.ones(10))
        for wrong in ("nccl:", "nonsense", "shared", "registered"):
            with pytest.raises(ArgumentValueError):
                comm.all_reduce(x, algorithm=wrong)
        with pytest.raises(ArgumentValueError, match="order"):
            comm.all_reduce(x, algorithm="nccl:ring", deterministic=True)

    together(run)


def test_deterministic_sums_have_the_bits_of_hosts(together: Together) -> None:
    def run(comm: Communicator) -> None:
        values = np.random.default_rng(comm.rank).normal(0, 1, 1001).astype(np.float32)
        x, host = array(comm, values), values.copy()
        comm.all_reduce(x, deterministic=True)
        comm.all_reduce(host, algorithm="direct")
        assert (x.numpy() == host).all()

    together(run)


@pytest.mark.parametrize("form", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_compression_has_the_bits_of_hosts(together: Together, form: str, collective: str) -> None:
    def run(comm: Communicator) -> None:
        options: list[dict[str, Any]] = [{}] if collective == "all_gather" else [{}, {"op": "avg"}]
        for given in options:
            feedback, own = ErrorFeedback(form), ErrorFeedback(form)
            for step in range(3):
                values = np.random.default_rng([comm.rank, step]).normal(0, 1, comm.size * 300)
                values = values.astype(np.float32)
                x, call = array(comm, values), getattr(comm, collective)
                size = {"all_gather": comm.size * values.size, "all_reduce": values.size}.get(
                    collective, values.size // comm.size
                )
                out, host = array(comm, np.zeros(size)), np.zeros(size, np.float32)
                call(x, out, compression=feedback, key="w", **given)
                call(values, host, compression=own, key="w", algorithm="direct", **given)
                np.testing.assert_array_equal(out.numpy(), host)
            if comm.size > 1:
                mine, theirs = (one.state_dict()["residuals"] for one in (feedback, own))
                for a, b in zip(mine[0]["arrays"], theirs[0]["arrays"], strict=True):
                    np.testing.assert_array_equal(a, b)
                restored = ErrorFeedback(form)
                restored.load_state_dict(feedback.state_dict())
                call(x, out, compression=restored, key="w", **given)
                call(values, host, compression=own, key="w", algorithm="direct", **given)
                np.testing.assert_array_equal(out.numpy(), host)

    together(run)


def test_what_compression_cannot_do(together: Together) -> None:
    class Own(Cast):
        pass

    def run(comm: Communicator) -> None:
        x = array(comm, np.full(10, 1e6))
        if comm.size > 1:
            with pytest.raises(ArgumentTypeError, match="no kernels"):
                comm.all_reduce(x, compression=Own("bf16"))
            with pytest.raises(ArgumentValueError, match="no seat"):
                comm.all_reduce(x, compression="bf16", algorithm="ring")
            comm.all_reduce(x, compression=Cast("fp16"))
            assert comm.saturated > 0
        comm.all_reduce(x)

    together(run)


# ------------------------------------------------------------------------------- other members


def test_registered_memory(together: Together, libcuda: ctypes.CDLL) -> None:
    def run(comm: Communicator) -> None:
        x = comm.empty((100, 3), "float16", device="cuda")
        assert (x.shape, x.dtype, x.device) == ((100, 3), np.float16, comm.local_rank)
        assert (x.copy() == 0).all()
        x.fill(comm.rank)
        comm.all_reduce(x)
        assert (x.copy() == sum(range(comm.size))).all()
        with pytest.raises(ArgumentValueError, match="'host' or 'cuda'"):
            comm.empty(3, device="tpu")

    together(run)


def test_groups_of_ranks(together: Together) -> None:
    def run(comm: Communicator) -> None:
        x = array(comm, np.ones(10))
        comm.all_reduce(x)
        half = comm.split(comm.rank % 2)
        assert half is not None
        y = array(comm, np.ones(10))
        half.all_reduce(y)
        assert (y.numpy() == half.size).all()
        if comm.size > 1:
            left = comm.shrink([0]) if comm.rank else None
            if left is not None:
                z = array(comm, np.ones(10))
                left.all_reduce(z)
                assert (z.numpy() == comm.size - 1).all()
                left.close()
        half.close()

    together(run)


def test_ranks_compare_their_calls() -> None:
    with pycomm.init("mpi", timeout=20, check=True) as comm:
        x = array(comm, np.ones(10))
        comm.all_reduce(x)
        assert (x.numpy() == comm.size).all()
        if comm.size == 1:
            return
    comm = pycomm.init("mpi", timeout=20, check=True)
    with pytest.raises(MismatchError, match="disagree"):
        comm.all_reduce(array(comm, np.ones(10 + comm.rank)))
    comm.abort()


# --------------------------------------------------------------------------------------- failing


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_what_fails_on_rank_0_fails_on_all(libcuda: ctypes.CDLL, function: str) -> None:
    with pycomm.init("mpi", timeout=20) as comm:
        x = array(comm, np.ones(10))
        if comm.rank == 0:
            libcuda.double_fail_next(function.encode(), 2, 1)
        with pytest.raises(CommError) as caught:
            comm.all_reduce(x)
        told = comm.all_gather_object((type(caught.value).__name__, str(caught.value)))
        assert {kind for kind, _ in told} == {"NCCLSystemError"}
        assert all(function in text for _, text in told)
        assert comm.rank == 0 or "rank 0" in str(caught.value)
        # The host side is as it was, and so is the device side.
        comm.barrier()
        y = array(comm, np.ones(10))
        comm.all_reduce(y)
        assert (y.numpy() == comm.size).all()


def test_the_environment_chooses_for_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_ALGORITHM", "all_reduce=ring")
    with pycomm.init("mpi", timeout=20) as comm:
        plan = comm.plan("all_reduce", array(comm, np.ones(10)))
        assert (plan.algorithm, plan.why) == ("ring", "PYCOMM_ALGORITHM says ring")


def test_a_device_that_fails_leaves_the_hosts(libnccl: ctypes.CDLL) -> None:
    comm = pycomm.init("mpi", timeout=2)
    x = array(comm, np.ones(10))
    comm.all_reduce(x)
    x.numpy()
    if comm.rank == 0:
        libnccl.double_mute(ctypes.c_void_p(comm._side.comm.handle), 1)
    with pytest.raises(CommError) as caught:
        comm.all_reduce(x, async_op=True).wait()
    assert isinstance(caught.value, pycomm.NCCLTimeoutError | pycomm.NCCLRemoteError)
    with pytest.raises(CommError, match="broken"):
        comm.barrier()
    if comm.rank or comm.size == 1:
        left = comm.shrink([0] if comm.size > 1 else [], timeout=20)
        y = array(left, np.ones(10))
        left.all_reduce(y, timeout=20)
        assert (y.numpy() == left.size).all()
        left.close()
    comm.abort()


def test_the_watchdog_sees_what_nccl_reports(libnccl: ctypes.CDLL) -> None:
    comm = pycomm.init("mpi", timeout=20)
    x = array(comm, np.ones(10))
    comm.all_reduce(x)
    x.numpy()
    comm.barrier()
    libnccl.double_async_error(ctypes.c_void_p(comm._side.comm.handle), 2)
    moment = time.monotonic() + 5
    while comm._side.comm.error is None and time.monotonic() < moment:
        time.sleep(0.01)
    with pytest.raises(pycomm.NCCLSystemError, match=r"all_reduce|AsyncError"):
        comm.all_reduce(x)
    comm.abort()


def test_two_ranks_on_one_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pycomm.init("mpi", timeout=20, device=0) as comm:
        if comm.size == 1:
            return
        with pytest.raises(CommError, match=r"ranks 0 and 1 are on the same device.*GPU-"):
            comm.all_reduce(Interfaced(np.ones(10), 0))
        comm.barrier()
        if comm.size == 2:
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            x = Interfaced(np.ones(10), 0)
            comm.all_reduce(x)
            assert (x.numpy() == 2).all()


def test_a_handle_that_is_null_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    from pycomm.bindings.nccl import nccl
    from pycomm.transports import joining

    with pycomm.init("mpi", timeout=3) as comm:
        if comm.rank == 0:
            monkeypatch.setitem(nccl.__dict__, "ncclCommInitRankConfig", lambda *_: 0)
            monkeypatch.setattr(joining, "state_of", lambda handle: 0 if not handle else 7)
        with pytest.raises(CommError) as caught:
            comm.all_reduce(array(comm, np.ones(10)))
        told = comm.all_gather_object(str(caught.value))
        assert "gives no communicator" in told[0]
        assert comm.size == 1 or all(
            "no end within" in text or "rank 0" in text for text in told[1:]
        )


def test_leaving_by_an_exception_ends_what_is_under_way() -> None:
    comm = pycomm.init("mpi", timeout=20)
    x = array(comm, np.ones(10))

    def fails() -> None:
        with comm:
            comm.all_reduce(x)
            read_back(x.base, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(CommError, match="aborted"):
        comm.all_reduce(x)
    assert to_device(np.ones(3), 0).copy().sum() == 3
