"""Bandwidth of all_reduce between ranks that share a GPU: ``bandwidth.py LIBRARY RANK SIZE DIR``.

Every library is measured in processes of its own, with its own way to name memory, on a stream of
its own: warm-up, then some calls in place, then the stream is awaited. Seconds are those of the
slowest rank; the bandwidths are defined as those of nccl-tests.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.meeting import DOUBLES, Meeting, SkipStep, main

Row = dict[str, Any]

SIZES = [8 << shift for shift in range(0, 26, 2)] if not DOUBLES else [8, 1 << 12, 1 << 16]
if not DOUBLES:
    SIZES[-1:] = [128 << 20, 256 << 20]


_WARM, _MOST, _SECONDS = (2, 5, 0.05) if DOUBLES else (5, 300, 1.0)


def measure(
    call: Callable[[int], Any],
    finish: Callable[[], Any],
    slowest: Callable[[float], float],
    size: int,
) -> Row:
    """Return one row for each number of bytes.

    Parameters
    ----------
    call : callable
        Gives one all_reduce of so many bytes to the stream.
    finish : callable
        Waits for the stream.
    slowest : callable
        Returns the largest number of all ranks; so it brings them together, too.
    size : int
        The number of ranks.
    """
    rows = []
    for nbytes in SIZES:
        call(nbytes)  # which may connect the ranks
        finish()
        slowest(0.0)
        begin = time.perf_counter()
        for _ in range(_WARM):
            call(nbytes)
        finish()
        # The same on all ranks: two processes that share a device in turns may need long.
        took = slowest(time.perf_counter() - begin) / _WARM
        count = max(3, min(_MOST, int(_SECONDS / max(took, 1e-9))))
        slowest(0.0)
        begin = time.perf_counter()
        for _ in range(count):
            call(nbytes)
        given = time.perf_counter() - begin
        finish()
        seconds = slowest(time.perf_counter() - begin) / count
        rows.append(
            {
                "bytes": nbytes,
                "calls": count,
                "us": round(seconds * 1e6, 2),
                "host_us": round(given / count * 1e6, 2),
                "algbw_GBps": round(nbytes / seconds / 1e9, 3),
                "busbw_GBps": round(nbytes / seconds / 1e9 * 2 * (size - 1) / size, 3),
            }
        )
    return {"rows": rows}


def _memory() -> Any:
    from pycomm.device_arrays import allocate
    from pycomm.devices import get_device
    from pycomm.dtypes import DTYPES

    return allocate(get_device(0), (SIZES[-1] // 4,), DTYPES["float32"]).fill(0)


def pycomm_calls(meeting: Meeting, planned: bool) -> Row:
    """The method of a communicator, or a plan of it."""
    from support.gpu import Interfaced

    from pycomm.streams import Stream

    with meeting.join() as comm:
        stream, memory = Stream(0), _memory()
        arrays = {n: Interfaced(memory[: n // 4], 0, stream.handle) for n in SIZES}
        plans = {n: comm.plan("all_reduce", arrays[n]) for n in SIZES} if planned else {}

        def slowest(seconds: float) -> float:
            return float(comm.all_reduce(np.array([seconds]), op="max")[0])

        def call(nbytes: int) -> None:
            if planned:
                plans[nbytes]()
            else:
                comm.all_reduce(arrays[nbytes])

        return measure(call, lambda: stream.synchronize(60), slowest, comm.size)


def _by_files(meeting: Meeting) -> Callable[[float], float]:
    """Return `slowest` for libraries that do not tell numbers: through files."""
    turn = 0

    def slowest(seconds: float) -> float:
        nonlocal turn
        turn += 1
        partial = meeting.folder / f"{turn}-{meeting.rank}.part"
        partial.write_text(repr(seconds))
        partial.rename(partial.with_suffix(".time"))
        files = [meeting.folder / f"{turn}-{rank}.time" for rank in range(meeting.size)]
        for file in files:
            meeting.await_file(file.name)
        return max(float(file.read_text()) for file in files)

    return slowest


def nccl4py_calls(meeting: Meeting) -> Row:
    """The public Communicator of nccl4py."""
    import nccl.core as peer
    from cuda.core import Device
    from support.gpu import Interfaced

    from pycomm.streams import Stream

    Device(0).set_current()
    stream, memory = Stream(0), _memory()
    arrays = {n: Interfaced(memory[: n // 4], 0, None) for n in SIZES}
    token = meeting.share("id", lambda: bytes(peer.get_unique_id().as_bytes))
    comm = peer.Communicator.init(meeting.size, meeting.rank, peer.UniqueId.from_bytes(token))

    def call(nbytes: int) -> None:
        x = arrays[nbytes]
        comm.allreduce(x, x, peer.SUM, stream=stream.handle)

    rows = measure(call, lambda: stream.synchronize(60), _by_files(meeting), meeting.size)
    comm.destroy()
    return rows


def cupy_calls(meeting: Meeting) -> Row:
    """The binding of NCCL in CuPy, which takes addresses."""
    import cupy
    from cupy.cuda import nccl

    if not getattr(nccl, "available", True):
        raise SkipStep("this CuPy has no NCCL")
    words = meeting.share("id", lambda: repr(nccl.get_unique_id()).encode())
    import ast

    comm = nccl.NcclCommunicator(meeting.size, ast.literal_eval(words.decode()), meeting.rank)
    memory = cupy.zeros(SIZES[-1] // 4, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()

    def call(nbytes: int) -> None:
        pointer = memory.data.ptr
        comm.allReduce(pointer, pointer, nbytes // 4, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)

    rows = measure(call, stream.synchronize, _by_files(meeting), meeting.size)
    comm.destroy()
    return rows


def torch_calls(meeting: Meeting) -> Row:
    """The process group of PyTorch."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise SkipStep("this PyTorch has no CUDA or no NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting.folder}/store", rank=meeting.rank,
        world_size=meeting.size,
    )  # fmt: skip
    memory = torch.zeros(SIZES[-1] // 4, device="cuda")
    arrays = {n: memory[: n // 4] for n in SIZES}

    def call(nbytes: int) -> None:
        dist.all_reduce(arrays[nbytes])

    rows = measure(call, torch.cuda.synchronize, _by_files(meeting), meeting.size)
    rows["torch"], rows["nccl"] = torch.__version__, str(torch.cuda.nccl.version())
    dist.destroy_process_group()
    return rows


LIBRARIES: dict[str, Callable[[Meeting], Any]] = {
    "pycomm": lambda meeting: pycomm_calls(meeting, False),
    "plan": lambda meeting: pycomm_calls(meeting, True),
    "nccl4py": nccl4py_calls,
    "cupy": cupy_calls,
    "torch": torch_calls,
}

if __name__ == "__main__":
    sys.exit(main(LIBRARIES))
