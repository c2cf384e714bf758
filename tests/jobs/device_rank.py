"""One rank of a job without MPI: ``device_rank.py SCENARIO RANK SIZE FOLDER``.

The doubles stand in for libcuda and libnccl; ranks find each other by a unique id in a file. What a
rank returns, or what it raised, goes to a file that the test reads.
"""

import ctypes
import faulthandler
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from pycomm import Communicator
from pycomm.bindings.nccl import nccl
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.devices import get_device
from pycomm.dtypes import DTYPES

faulthandler.dump_traceback_later(60, exit=True)
DEADLINE = 3.0


def meet(folder: Path, rank: int, size: int, name: str = "id", timeout: float = 20) -> Communicator:
    file = folder / name
    if rank == 0:
        partial = folder / f"{name}.tmp"
        partial.write_bytes(pycomm.get_unique_id())
        partial.rename(file)
    while not file.exists():
        time.sleep(0.01)
    return Communicator.from_unique_id(file.read_bytes(), rank, size, rank, timeout=timeout)


def ones(comm: Communicator, count: int = 1000) -> DeviceArray:
    device = get_device(comm._side.choose_device())
    return allocate(device, (count,), DTYPES["float32"]).fill(1)


def works(comm: Communicator) -> int:
    """Return the sum of ones over the ranks, from a device array."""
    work = comm.all_reduce(ones(comm), async_op=True)
    found = work.wait().copy()
    assert (found == found[0]).all()
    return int(found[0])


def caught(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        function(*args, **options)
    except Exception as error:
        seconds = time.monotonic() - begin
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "text": str(error), "seconds": seconds}
    return {"kinds": [], "text": "nothing was raised", "seconds": 0}


def mixed(rank: int, size: int, folder: Path) -> Any:
    """Host arrays, device arrays and objects on one communicator; groups of its ranks."""
    with meet(folder, rank, size) as comm:
        assert works(comm) == size
        x = np.arange(10.0) + rank
        total = comm.all_reduce(x, op="max")
        assert (total == np.arange(10.0) + size - 1).all()
        gathered = comm.all_gather_object({"rank": rank})
        assert [one["rank"] for one in gathered] == list(range(size))
        assert comm.all_gather(np.array([rank])).tolist() == list(range(size))
        for name in ("ring", "direct"):
            summed = comm.all_reduce(np.full(7, rank + 1), algorithm=name)
            assert (summed == size * (size + 1) // 2).all(), name
        comm.barrier()
        if size > 1:
            peer = (rank + 1) % size
            got = np.empty(3, int)
            comm.send_recv(np.full(3, rank), got, dest=peer, source=(rank - 1) % size)
            assert (got == (rank - 1) % size).all()
        half = comm.split(rank % 2, key=-rank)
        assert half is not None
        assert half.size == len(range(rank % 2, size, 2))
        members = sorted(range(rank % 2, size, 2), reverse=True)
        assert half.rank == members.index(rank)
        assert works(half) == half.size
        assert half.broadcast_object(rank) == members[0]
        return [comm.local_rank, comm.local_size, len(set(comm._engine.transport.hosts))]


def old_library(rank: int, size: int, folder: Path) -> Any:
    """NCCL is older than what it is asked for."""
    with meet(folder, rank, size) as comm:
        device, found = get_device(rank), {}
        for name in ("bfloat16", "float32"):
            row = DTYPES[name]
            for algorithm in ("native", "auto", "ring", "direct", "hierarchical"):
                x = allocate(device, (300,), row).fill(1)
                key = f"{name} {algorithm}"
                error = caught(comm.all_reduce, x, algorithm=algorithm)
                comm.barrier()
                found[key] = float(x.copy()[0]), error["text"]
        x = allocate(device, (2 * size,), DTYPES["float32"]).fill(rank)
        found["all_to_all"] = comm.all_to_all(x, async_op=True).wait().copy().tolist()
        found["gather"] = [] if (got := comm.gather(x)) is None else got.copy().tolist()
        y = allocate(device, (2,), DTYPES["float32"])
        found["scatter"] = comm.scatter(x if rank == 0 else None, y).copy().tolist()
        found["hint"] = caught(comm.all_reduce, x, algorithm="nccl:ring")
        found["avg"] = caught(comm.all_reduce, x, op="avg")["text"], float(x.copy()[0])
        z = comm.empty(10, device="cuda").fill(1) if nccl.has("ncclMemAlloc") else None
        if z is not None:
            assert comm.all_reduce(z, async_op=True).wait().copy()[0] == size
        comm.barrier()
        found["shrink"] = caught(comm.shrink, [size - 1]) if rank < size - 1 else None
        comm.abort()
        return found


def never_joins(rank: int, size: int, folder: Path) -> Any:
    """The last rank never comes; the others give up, and go on without it."""
    if rank == size - 1:
        return None
    error = caught(meet, folder, rank, size, timeout=DEADLINE)
    with meet(folder, rank, size - 1, "second") as comm:
        return error, works(comm)


def dies(rank: int, size: int, folder: Path) -> Any:
    """The last rank dies in a collective; the others shrink."""
    comm = meet(folder, rank, size)
    works(comm)
    if rank == size - 1:
        time.sleep(0.3)
        os._exit(0)
    error = caught(lambda: comm.all_reduce(ones(comm), async_op=True).wait())
    again = caught(comm.all_reduce, ones(comm))
    smaller = comm.shrink([size - 1])
    total = works(smaller), smaller.rank, smaller.all_gather_object(rank)
    comm.abort()
    smaller_state = caught(smaller.barrier)["text"]
    return error, total, again, smaller_state


def stays_away(rank: int, size: int, folder: Path) -> Any:
    """The last rank does not make a call; a deadline passes, nobody waits on the host."""
    comm = meet(folder, rank, size, timeout=DEADLINE)
    works(comm)
    x = ones(comm)
    if rank != size - 1:
        comm.all_reduce(x)
    time.sleep(DEADLINE + 1)
    error = caught(comm.all_reduce, x)
    values = x.copy()  # the stream went on
    whole = comm.shrink([])
    return error, works(whole), float(values[0])


def async_error(rank: int, size: int, folder: Path) -> Any:
    """NCCL reports an error on rank 0."""
    comm = meet(folder, rank, size, timeout=10)
    works(comm)
    if rank == 0:
        library = ctypes.CDLL(nccl.library.path)
        library.double_async_error(ctypes.c_void_p(comm._side.comm.handle), 2)
    begin = time.monotonic()
    error: dict[str, Any] = {"kinds": []}
    while not error["kinds"] and time.monotonic() - begin < 8:
        error = caught(lambda: comm.all_reduce(ones(comm), async_op=True).wait())
    comm.abort()
    with meet(folder, rank, size, "second") as fresh:
        return error, works(fresh)


def stuck(comm: Communicator) -> Any:
    """Make a call that no peer joins; the array and its work."""
    x = ones(comm)
    return x, comm.all_reduce(x, async_op=True)


def collected(rank: int, size: int, folder: Path) -> Any:
    """The collector frees device memory while a deadline has to be watched."""
    comm = meet(folder, rank, size, timeout=DEADLINE)
    works(comm)
    if rank == size - 1:
        time.sleep(DEADLINE + 3)
        return None
    gc.disable()
    cycle = [ones(comm)]
    cycle.append(cycle)
    _, work = stuck(comm)
    del cycle
    gc.set_threshold(1, 1, 1)
    gc.enable()
    return caught(work.wait, timeout=DEADLINE + 3)


def dropped(rank: int, size: int, folder: Path) -> Any:
    """A communicator is dropped with something stuck, and then collected."""
    comm = meet(folder, rank, size, timeout=DEADLINE)
    works(comm)
    if rank == size - 1:
        time.sleep(DEADLINE + 3)
        return None
    begin = time.monotonic()
    comm.all_reduce(ones(comm))
    del comm
    gc.collect()
    seconds = time.monotonic() - begin
    x = allocate(get_device(rank), (10,), DTYPES["float32"])
    x.fill(1)  # on the default stream, which goes on once the call has been given up
    return seconds, time.monotonic() - begin


_kept: list[Any] = []  # until the interpreter ends


def leaves_stuck(rank: int, size: int, folder: Path) -> Any:
    """The process ends with something stuck, in a cycle and in the globals of a module."""
    comm = meet(folder, rank, size, timeout=30)
    works(comm)
    if rank != size - 1:
        _kept.append((comm, _kept, stuck(comm)))
    return True


def shrunk_in_flight(rank: int, size: int, folder: Path) -> Any:
    """Works of a communicator that is shrunk have failed."""
    comm = meet(folder, rank, size, timeout=10)
    works(comm)
    if rank == size - 1:
        time.sleep(2)
        os._exit(0)
    _, work = stuck(comm)
    smaller = comm.shrink([size - 1])
    total = works(smaller)
    comm.abort()
    return caught(work.wait), total


def grouped_hosts(rank: int, size: int, folder: Path) -> Any:
    """Host arrays that go by NCCL cannot be part of a group."""
    with meet(folder, rank, size) as comm:
        works(comm)
        x = np.full(10, rank + 1.0)
        with comm.group():
            error = caught(comm.all_reduce, x)
            messages = caught(comm.send_recv, x, np.empty(10), dest=rank, source=rank)
        comm.all_reduce(x)
        return error, messages, float(x[0])


def busy_default_stream(rank: int, size: int, folder: Path) -> Any:
    """What waits on the default stream of a device holds up no host array."""
    first = meet(folder, rank, size, timeout=6)
    second = meet(folder, rank, size, "second", timeout=20)
    works(first)
    works(second)
    if rank != size - 1:
        first.all_reduce(ones(first))
    begin = time.monotonic()
    second.all_reduce(np.ones(10))
    seconds = time.monotonic() - begin
    second.barrier()
    first.abort()
    second.close()
    return seconds


def slow_end(rank: int, size: int, folder: Path) -> Any:
    """NCCL takes its time to destroy and to abort."""
    comm = meet(folder, rank, size, timeout=2)
    works(comm)
    x = comm.empty(1000, device="cuda")
    library = ctypes.CDLL(nccl.library.path)
    library.double_mute(ctypes.c_void_p(comm._side.comm.handle), 1)
    comm.all_reduce(x)
    library.double_slow_destroy(30)
    library.double_stall_abort(30)
    begin = time.monotonic()
    error = caught(comm.close)
    return error, time.monotonic() - begin


def main() -> None:
    scenario, rank, size, folder = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    result = globals()[scenario](int(rank), int(size), Path(folder))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
