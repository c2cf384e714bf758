"""What one rank does in the jobs of test_hosts.py: ``rank.py SCENARIO FOLDER LIMIT``.

Into FOLDER go, K being the rank: ``K.json``, what the scenario returns, and ``K.out``, what the
rank prints, its stack among it when it is not done after LIMIT seconds.
"""

import faulthandler
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER, RANK = Path(sys.argv[2]), os.environ["OMPI_COMM_WORLD_RANK"]
output = os.open(FOLDER / f"{RANK}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)
# Imports may hang too. It does not end then: mpirun would end the others before they have written.
faulthandler.dump_traceback_later(float(sys.argv[3]))

import numpy as np  # noqa: E402

import pycomm  # noqa: E402

MIB = 1 << 20


def data(rank: int, count: int, dtype: str) -> np.ndarray:
    """What a rank contributes: whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, count]).integers(-100, 100, count).astype(dtype)


def calls(
    comm: pycomm.Communicator, dtype: str, count: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield what was called, what came, and what should have."""
    size, rank = comm.size, comm.rank
    parts = [data(r, count, dtype) for r in range(size)]
    for algorithm in ("hierarchical", "ring"):
        came = comm.all_reduce(parts[rank].copy(), algorithm=algorithm)
        yield f"all_reduce {algorithm}", came, np.sum(parts, axis=0, dtype=dtype)
    came = comm.all_gather(parts[rank], algorithm="hierarchical")
    yield "all_gather", came, np.concatenate(parts)
    for root in {0, size - 1}:
        came = comm.broadcast(parts[rank].copy(), root=root, algorithm="hierarchical")
        yield f"broadcast from {root}", came, parts[root]
    part = -(-count // size)
    wholes = [data(r, part * size, dtype) for r in range(size)]
    came = comm.reduce_scatter(wholes[rank], algorithm="hierarchical")
    total = np.sum(wholes, axis=0, dtype=dtype)
    yield "reduce_scatter", came, total[rank * part : (rank + 1) * part]


def results(comm: pycomm.Communicator) -> dict[str, Any]:
    """All algorithms against NumPy, and where this rank is."""
    right, wrong = [], []
    for dtype in ("float32", "int64"):
        for count in (1, 1000, 300_001):
            for name, came, expected in calls(comm, dtype, count):
                same = came.dtype == expected.dtype and np.array_equal(came, expected)
                (right if same else wrong).append(f"{name}, {count} x {dtype}")
    return {
        "right": len(right),
        "wrong": wrong,
        "host": socket.gethostname(),
        "local": [comm.local_rank, comm.local_size],
    }


def plans(comm: pycomm.Communicator) -> dict[str, Any]:
    """What plans of all_reduce say, long enough to go through the memory of each host and not."""
    told = {}
    for name, count in (("short", 1000), ("long", MIB)):
        x = np.ones(count, np.float32)
        plan = comm.plan("all_reduce", x, algorithm="hierarchical")
        plan()  # the ranks of a host first tell each other where to meet
        x[:] = 1
        before = comm.bytes_sent
        plan()
        assert (x == comm.size).all()
        told[name] = [str(plan), comm.bytes_sent - before, plan.bytes_sent]
    return told


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def crossing(comm: pycomm.Communicator) -> dict[str, Any]:
    """How many bytes leave this host during one all_reduce of 4 MiB, on average of 20."""
    x = np.ones(4 * MIB, np.uint8)
    told: dict[str, Any] = {"host": socket.gethostname()}
    for algorithm in ("hierarchical", "ring"):
        comm.all_reduce(x, algorithm=algorithm)  # connections are made on first use
        comm.barrier()
        before = sent()
        comm.barrier()
        for _ in range(20):
            comm.all_reduce(x, algorithm=algorithm)
        comm.barrier()
        told[algorithm] = (sent() - before) / 20
    return told


def encoded(comm: pycomm.Communicator) -> dict[str, Any]:
    """Encoded collectives against NumPy, and what leaves this host, beside what plans say."""
    told: dict[str, Any] = {"wrong": []}
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for count in (1, 1000, MIB):
            many = comm.size if collective == "reduce_scatter" else 1
            parts = [data(r, count * many, "float32") % 3 for r in range(comm.size)]
            came = getattr(comm, collective)(parts[comm.rank].copy(), compression="bf16")
            expected = np.concatenate(parts)
            if collective != "all_gather":
                expected = np.sum(parts, axis=0)
                if many > 1:
                    expected = expected[comm.rank * count : (comm.rank + 1) * count]
            if not np.array_equal(came, expected):
                told["wrong"].append(f"{collective}, {count}")
    x = np.ones(4 * MIB, np.float32)
    for name in ("bf16", "fp8_e4m3"):
        plan = comm.plan("all_reduce", x, compression=name)
        plan()
        assert (x == comm.size).all()
        x[:] = 1
        assert f"as {name}" in str(plan)
        told[name] = [plan.algorithm, "two meetings" in str(plan)]
        comm.barrier()
        before = sent()
        comm.barrier()
        for _ in range(5):
            plan()
        comm.barrier()
        told[name].append((sent() - before) / 5)
        x[:] = 1
    return told


def timing(comm: pycomm.Communicator) -> dict[str, float]:
    """Seconds of the fastest of some all_reduces, of 8 MiB and of one element."""
    told = {}
    for name, count, times in (("large", 2 * MIB, 4), ("small", 1, 20)):
        x = np.ones(count, np.float32)
        fastest = float("inf")
        for _ in range(times):
            comm.barrier()
            began = time.monotonic()
            comm.all_reduce(x, algorithm="hierarchical")
            fastest = min(fastest, time.monotonic() - began)
        told[name] = fastest
    return told


def topology(comm: pycomm.Communicator) -> dict[str, Any]:
    """What a topology manager finds, and how it follows what the test does to the links meanwhile.

    The test sees ``event-K.json`` for each epoch, and ends this by ``stop``.
    """
    told: dict[str, Any] = {}
    began = time.monotonic()
    with pycomm.TopologyManager(comm, interval=3.0, overhead=0.5, good_probes=3) as manager:
        told["start"] = time.monotonic() - began
        told["groups"] = {name: manager.groups(name) for name in ("host", "rail", "near", "fast")}
        told["pairs"] = [[p.a, p.b, p.latency, p.bandwidth] for p in manager.snapshot.pairs]
        told["names"] = [place.host for place in manager.snapshot.places]

        def note(before: Any, after: Any) -> None:
            links = {f"{k.a} - {k.b}": [k.state, k.reason] for k in after.topology.links}
            event = {"at": time.monotonic(), "epoch": after.epoch, "links": links}
            if comm.rank == 0:
                path = FOLDER / f"event-{after.epoch}.json"
                path.with_suffix(".part").write_text(json.dumps(event))
                path.with_suffix(".part").rename(path)

        manager.on_change(note)
        x = np.zeros(100_000, np.float32)
        (FOLDER / f"ready-{comm.rank}").touch()
        hashes = []
        while x[0] == 0:
            x[:] = comm.rank == 0 and (FOLDER / "stop").exists()
            comm.all_reduce(x)
            hashes.append(manager.snapshot.hash)
        told["hashes"] = [len(hashes), zlib.crc32("".join(hashes).encode())]
    return told


def survivors(comm: pycomm.Communicator) -> dict[str, Any]:
    """The link of a host is cut: an error, and a group of those who are left."""
    manager = pycomm.TopologyManager(comm, background=False, measure=False)
    x = np.zeros(100_000, np.float32)
    told: dict[str, Any] = {}
    comm.all_reduce(x)
    (FOLDER / f"ready-{comm.rank}").touch()
    try:
        while True:
            comm.all_reduce(x, timeout=3)
    except pycomm.CommTimeoutError as error:
        told["error"], told["missing"] = str(error), error.missing
    told["at"] = time.monotonic()
    try:
        healthy = manager.group("healthy", timeout=2)
        assert healthy is not None
        told["sum"] = float(healthy.all_reduce(np.array([float(comm.rank)]))[0])
        told["size"] = healthy.size
        told["lost"] = manager.snapshot.lost
    except pycomm.CommError as error:
        told["refused"] = str(error)
    (FOLDER / f"done-{comm.rank}").touch()
    while not (FOLDER / "healed").exists():
        time.sleep(0.05)
    time.sleep(1)  # TCP notices, before MPI ends
    manager.close()
    comm.abort()
    return told


def hangs(comm: pycomm.Communicator) -> None:
    """The last rank does not come."""
    if comm.rank == comm.size - 1:
        time.sleep(100)
    comm.barrier()


def main() -> None:
    with pycomm.init(timeout=60) as comm:
        told = globals()[sys.argv[1]](comm)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
