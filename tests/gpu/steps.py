"""The checks that ranks make together on one GPU: ``steps.py STEP RANK SIZE FOLDER``."""

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.gpu import Interfaced, Packed, graph_of, to_device, write_late

from gpu.meeting import DOUBLES, Meeting, SkipStep, main
from pycomm import CommError, CommTimeoutError, Communicator, LibraryNotFoundError
from pycomm.algorithms.compression import ErrorFeedback
from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.device_arrays import allocate
from pycomm.devices import get_device
from pycomm.dtypes import DTYPES, DType, Kind, ReduceOp
from pycomm.kernels.cuda import NAMES, kernels_of
from pycomm.streams import LEGACY, Stream

Array = np.ndarray[Any, Any]

_OPS = {
    Kind.BOOL: ("sum",),
    Kind.INT: ("sum", "prod", "min", "max", "avg"),
    Kind.HALF: ("sum", "prod", "min", "max", "avg"),
    Kind.FLOAT: ("sum", "prod", "min", "max", "avg"),
    Kind.COMPLEX: ("sum", "avg"),
}
_REDUCED = (
    "bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64",
)  # fmt: skip
_MOVED = ("uint8", "int32", "bfloat16", "float64", "complex128", "float8_e4m3")
_PART = 1003  # elements of a part: neither even nor a multiple of what kernels take at a time
_LATE = 200 if not DOUBLES else 3  # rounds of work that make a producer late


def values(row: DType, count: int, rank: int) -> Array:
    """Return small whole numbers, whose sums and products are exact in every dtype."""
    generator = np.random.default_rng([rank, count])
    numbers = generator.integers(0 if row.kind is Kind.BOOL else 1, 2 + (rank > 0), count)
    if row.kind is Kind.COMPLEX:
        return (numbers + 1j * generator.integers(-3, 4, count)).astype(row.numpy)
    return numbers.astype(row.numpy)


def combined(inputs: list[Array], row: DType, op: str) -> Array:
    """Return what a reduction has to give."""
    wide = {Kind.COMPLEX: np.complex128, Kind.BOOL: np.bool_, Kind.INT: np.int64}
    given = [one.astype(wide.get(row.kind, np.float64)) for one in inputs]
    if row.kind is Kind.BOOL:
        return np.logical_or.reduce(given)
    step = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum}
    total = step.get(op, np.maximum).reduce(given)
    if op == "avg":
        total = total // len(inputs) if row.kind is Kind.INT else total / len(inputs)
    return total.astype(row.numpy)


def same(found: Array, expected: Array, what: object) -> None:
    """Raise unless both have the same bits."""
    a, b = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (found, expected))
    if a.size != b.size or not (a == b).all():
        raise AssertionError(f"{what}: {found.reshape(-1)[:8]} and not {expected.reshape(-1)[:8]}")


def found(meeting: Meeting) -> Any:
    """What is here: the driver, NCCL, the device, the compiler."""
    device = get_device(0)
    try:
        from cuda.bindings import nvrtc

        compiler = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    except (ImportError, RuntimeError) as error:
        compiler = f"none: {error}"
    return {
        "device": str(device),
        "capability": device.capability,
        "driver": cuda.library.version,
        "nccl": nccl.library.version,
        "nccl_path": nccl.library.path,
        "nvrtc": compiler,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def no_kernels() -> str | None:
    """Return why there are no kernels here, None if there are."""
    try:
        kernels_of(0)
    except LibraryNotFoundError as error:
        return str(error)
    return None


def compile_all(meeting: Meeting) -> Any:
    """The kernels are compiled for this device, and one of them runs."""
    begin = time.monotonic()
    if why := no_kernels():
        raise SkipStep(why)
    kernels = kernels_of(0)
    seconds = time.monotonic() - begin
    one, two = (to_device(np.full(5, number, np.float32), 0) for number in (1, 2))
    with get_device(0).entered():
        row = DTYPES["float32"]
        pointers = [one.pointer, two.pointer]
        kernels.reduce(pointers, one.pointer, row, ReduceOp.SUM, 5, LEGACY)
    same(one.copy(), np.full(5, 3, np.float32), "a sum")
    return {"kernels": len(NAMES), "seconds": round(seconds, 1)}


def collectives(meeting: Meeting) -> Any:
    """Every collective in several dtypes, against NumPy, from both protocols."""
    checked, without = 0, no_kernels()
    with meeting.join() as comm:
        rank, size = comm.rank, comm.size
        mine = slice(rank * _PART, (rank + 1) * _PART)
        stream = Stream(0)
        kinds: tuple[Callable[[Array], Any], ...] = (
            lambda given: Interfaced(given, 0, stream.handle),
            lambda given: Packed(given, 0),
        )
        for number, name in enumerate(_REDUCED):
            row, make = DTYPES[name], kinds[number % 2]
            if without and row.nccl is None and row.kind is Kind.INT:
                continue  # which only kernels can add
            wholes = [values(row, size * _PART, peer) for peer in range(size)]
            inputs = [one[:_PART] for one in wholes]
            for op in _OPS[row.kind]:
                what = name, op
                x, out = make(inputs[rank]), make(np.zeros_like(inputs[rank]))
                expected = combined(inputs, row, op)
                assert comm.all_reduce(x, out, op=op) is out
                same(out.numpy(), expected, ("all_reduce", *what))
                assert comm.all_reduce(x, op=op) is x
                same(x.numpy(), expected, ("all_reduce in place", *what))
                x = make(inputs[rank])
                comm.reduce(x, op=op, root=size - 1)
                if rank == size - 1:
                    same(x.numpy(), expected, ("reduce", *what))
                comm.reduce_scatter(make(wholes[rank]), out, op=op)
                same(out.numpy(), combined(wholes, row, op)[mine], ("reduce_scatter", *what))
                checked += 4
        for number, name in enumerate(_MOVED):
            row, make = DTYPES[name], kinds[number % 2]
            wholes = [values(row, size * _PART, peer) for peer in range(size)]
            inputs = [one[:_PART] for one in wholes]
            part, whole = np.zeros(_PART, row.numpy), np.zeros(size * _PART, row.numpy)
            out = make(whole)
            comm.all_gather(make(inputs[rank]), out)
            same(out.numpy(), np.concatenate(inputs), ("all_gather", name))
            out = make(whole)
            comm.all_to_all(make(wholes[rank]), out)
            same(out.numpy(), np.concatenate([one[mine] for one in wholes]), ("all_to_all", name))
            for root in range(size):
                x = make(inputs[rank])
                comm.broadcast(x, root=root)
                same(x.numpy(), inputs[root], ("broadcast", name))
                out = make(whole) if rank == root else None
                comm.gather(make(inputs[rank]), out, root=root)
                if out is not None:
                    same(out.numpy(), np.concatenate(inputs), ("gather", name))
                out = make(part)
                comm.scatter(make(wholes[rank]) if rank == root else None, out, root=root)
                same(out.numpy(), wholes[root][mine], ("scatter", name))
            peer = (rank + 1) % size
            out = make(part)
            comm.send_recv(make(inputs[rank]), out, dest=peer, source=(rank - 1) % size)
            same(out.numpy(), inputs[(rank - 1) % size], ("send_recv", name))
            checked += 3 + 3 * size
        comm.barrier()
        assert comm.all_gather_object(rank) == list(range(size))
    return {"checked": checked, "without": without}


def algorithms(meeting: Meeting) -> Any:
    """All_reduce by NCCL, by NCCL's ring, and by schedules of pycomm, in place and not."""
    told = {}
    names = ["native"]
    if why := no_kernels():
        told["ring, direct"] = why
    else:
        names += ["ring", "direct"]
    with meeting.join() as comm:
        if nccl.has("ncclAllReduceConfig"):
            names.insert(1, "nccl:ring")
        else:
            told["nccl:ring"] = f"not in NCCL {nccl.library.version}"
        for name in names:
            for kind in ("float32", "bfloat16", "int64"):
                row = DTYPES[kind]
                for count in (1, 1001, 300_001 if DOUBLES else 3_000_001):
                    inputs = [values(row, count, peer) for peer in range(comm.size)]
                    x, out = (Interfaced(inputs[comm.rank], 0) for _ in range(2))
                    comm.all_reduce(x, out, algorithm=name)
                    expected = combined(inputs, row, "sum")
                    same(out.numpy(), expected, (name, kind, count))
                    comm.all_reduce(x, algorithm=name)
                    same(x.numpy(), expected, (name, kind, count, "in place"))
            told[name] = str(comm.plan("all_reduce", x, algorithm=name)).splitlines()[1].strip()
    return told


def compression(meeting: Meeting) -> Any:
    """Encoded sums have the bits that hosts get; error feedback makes up for what was lost."""
    told = {}
    if why := no_kernels():
        raise SkipStep(why)
    with meeting.join() as comm:
        count = 10_007  # hosts take longer messages in segments, with other owners of the parts
        for form in ("bf16", "fp8_e4m3"):
            feedback, own = ErrorFeedback(form), ErrorFeedback(form)
            for step in range(4):
                x, host, out = normal(comm, count, step), np.zeros(count, np.float32), room(count)
                for codecs in ((form, form), (feedback, own)):
                    key = None if codecs[0] is form else "w"
                    given = Interfaced(x[comm.rank], 0)
                    comm.all_reduce(given, out, compression=codecs[0], key=key)
                    options = {"compression": codecs[1], "key": key, "algorithm": "direct"}
                    comm.all_reduce(x[comm.rank], host, **options)
                    same(out.numpy(), host, (form, key, step))
            told[form] = {"steps": 4, "largest_error": drift(comm, form)}
    return told


def drift(comm: Communicator, form: str) -> float:
    """Return the largest error of what was summed over steps, with error feedback."""
    count, steps, feedback = 200_003 if DOUBLES else 5_000_003, 4, ErrorFeedback(form)
    total, exact, out = np.zeros(count), np.zeros(count), room(count)
    for step in range(steps):
        x = normal(comm, count, step)
        comm.all_reduce(Interfaced(x[comm.rank], 0), out, compression=feedback, key="w")
        total += out.numpy()
        exact += np.sum(x, axis=0, dtype=np.float64)
    error = float(np.abs(total - exact).max())
    # What one step loses, and not four: half a unit of the largest values, of each rank and sum.
    assert error < {"bf16": 0.1, "fp8_e4m3": 2.0}[form], (form, error)
    return error


def normal(comm: Communicator, count: int, step: int) -> list[Array]:
    """Return the inputs of all ranks."""
    return [
        np.random.default_rng([peer, step]).normal(0, 1, count).astype(np.float32)
        for peer in range(comm.size)
    ]


def room(count: int) -> Interfaced:
    """Return an array of zeros on the device."""
    return Interfaced(np.zeros(count, np.float32), 0)


def streams(meeting: Meeting) -> Any:
    """What is given to a stream waits for its producer, however late that is."""
    told = {}
    with meeting.join() as comm:
        device, count = get_device(0), 1 << 16
        scratch = allocate(device, ((1 << 20) if DOUBLES else (1 << 28),), DTYPES["uint8"])
        inputs = [values(DTYPES["float32"], count, peer) for peer in range(comm.size)]
        expected = combined(inputs, DTYPES["float32"], "sum")
        for where in ("its own", "another", "legacy"):
            producer, other = Stream(device), Stream(device)
            x = Interfaced(np.zeros(count, np.float32), 0, producer.handle)
            out = Interfaced(np.zeros(count, np.float32), 0, producer.handle)
            comm.barrier()
            for _ in range(_LATE):
                code = cuda.cuMemsetD8Async(scratch.pointer, 0, scratch.nbytes, producer.handle)
                cuda.check(code, "cuMemsetD8Async")
            held = write_late(x.base, inputs[comm.rank], producer.handle)
            begin = time.monotonic()
            stream = {"its own": None, "another": other, "legacy": LEGACY}[where]
            comm.all_reduce(x, out, stream=stream)
            given = time.monotonic() - begin
            {"its own": producer, "another": other}.get(where, producer).synchronize(30)
            if where == "legacy":
                with device.entered():
                    cuda.check(cuda.cuStreamSynchronize(LEGACY), "cuStreamSynchronize")
            waited = time.monotonic() - begin
            same(out.base.copy(), expected, where)
            told[where] = {"given_s": round(given, 6), "done_s": round(waited, 6)}
            del held
        work = comm.all_reduce(x, async_op=True)
        assert work.wait() is x
    return told


def graph(meeting: Meeting) -> Any:
    """A plan is captured as a CUDA graph, and launched three times."""
    told = {}
    with meeting.join() as comm:
        device = get_device(0)
        for what in ("native",) if no_kernels() else ("native", "ring", "direct", "fp8_e4m3"):
            stream = Stream(device)
            x, out = (Interfaced(np.zeros(5001, np.float32), 0, stream.handle) for _ in range(2))
            options = {"compression": what} if what.startswith("fp8") else {"algorithm": what}
            plan = comm.plan("all_reduce", x, out, **options)
            plan()
            stream.synchronize(20)
            with graph_of(plan, stream) as launch:
                for value in (1, 2, 4):
                    x.base.fill(value)
                    launch()
                    stream.synchronize(20)
                    total = np.full(5001, value * comm.size, np.float32)
                    same(out.base.copy(), total, (what, value))
            plan()
            told[what] = 3
    return {"launches": told}


def split(meeting: Meeting) -> Any:
    """Groups of ranks, in another order, and of one rank each."""
    with meeting.join() as comm:
        turned = comm.split(0, key=-comm.rank)
        assert turned is not None
        assert turned.rank == comm.size - 1 - comm.rank
        x = to_device(np.array([comm.rank + 1.0], np.float32), 0)
        out = to_device(np.zeros(comm.size, np.float32), 0)
        turned.all_gather(x, out)
        assert out.copy().tolist() == list(range(comm.size, 0, -1))
        alone = comm.split(comm.rank)
        assert alone is not None
        assert alone.size == 1
        assert alone.all_reduce(x).copy() == comm.rank + 1
        assert comm.all_reduce(x).copy() == comm.size * (comm.size + 1) / 2
    return {"groups": 2}


def deadline(meeting: Meeting) -> Any:
    """A rank that does not make a call: the others get an error, and their processes live."""
    comm = meeting.join()
    x = to_device(np.ones(1000, np.float32), 0)
    comm.all_reduce(x, async_op=True).wait()
    comm.barrier()
    told: dict[str, Any] = {}
    if meeting.rank == 0:
        begin = time.monotonic()
        try:
            comm.all_reduce(x, timeout=3, async_op=True).wait()
        except CommTimeoutError as error:
            told = {"seconds": round(time.monotonic() - begin, 2), "error": str(error)}
        assert told, "no CommTimeoutError"
        assert 2.5 < told["seconds"] < 12, told
        try:
            comm.all_reduce(x)
        except CommError as error:
            told["next"] = f"{type(error).__name__}: {error}"
        assert "next" in told
        (meeting.folder / "over").touch()
    else:
        meeting.await_file("over")
    comm.abort()
    # The process and its device are as good as new.
    again = meeting.join("second")
    found = again.all_reduce(to_device(np.ones(10, np.float32), 0), async_op=True).wait().copy()
    same(found, np.full(10, meeting.size, np.float32), "after that")
    again.close()
    return told


def missing(meeting: Meeting) -> Any:
    """A rank that never joins: the others get an error at their deadline, and live."""
    told: dict[str, Any] = {}
    if meeting.rank == 0:
        begin = time.monotonic()
        try:
            meeting.join("lonely", timeout=3)
        except CommTimeoutError as error:
            told = {"seconds": round(time.monotonic() - begin, 2), "error": str(error)}
        assert told, "no CommTimeoutError"
        assert 2.5 < told["seconds"] < 12, told
        (meeting.folder / "over").touch()
    else:
        meeting.await_file("over")
    with meeting.join("after") as comm:
        comm.barrier()
    return told


def hang(meeting: Meeting) -> Any:
    """What a hang looks like: a rank that waits for what never comes, outside of pycomm."""
    with meeting.join():
        meeting.await_file("nothing of this name", timeout=600)


STEPS: dict[str, Callable[[Meeting], Any]] = {
    "found": found,
    "compile": compile_all,
    "collectives": collectives,
    "algorithms": algorithms,
    "compression": compression,
    "streams": streams,
    "graph": graph,
    "split": split,
    "deadline": deadline,
    "missing": missing,
    "hang": hang,
}

if __name__ == "__main__":
    sys.exit(main(STEPS))
