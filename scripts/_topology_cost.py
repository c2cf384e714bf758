"""What a topology manager costs a loop of all_reduces; started by ``scripts/bench-topology``.

Two communicators of the same ranks, one with a manager, take turns: blocks of calls of one, then of
the other. The medians of their blocks are compared, and what the manager says that it has spent is
set against the time of the calls it served, looks included.
"""

import argparse
import sys
import time
from statistics import median

import numpy as np

import pycomm
from pycomm import TopologyManager

BLOCK = 0.25  # seconds


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each size")
    parser.add_argument("--interval", type=float, default=10.0, help="between looks")
    parser.add_argument("--bytes", type=int, nargs="+", default=[8, 64 << 10, 4 << 20])
    options = parser.parse_args()
    with pycomm.init(timeout=60) as comm:
        plain = comm.split(0)
        assert plain is not None
        with TopologyManager(comm, interval=options.interval) as manager:
            if comm.rank == 0:
                say(f"{comm.size} ranks, {len(manager.groups('host') or ())} hosts")
                say("    bytes   calls  time with/without (medians)  spent by the manager  looks")
            for nbytes in options.bytes:
                row = measured(comm, plain, manager, nbytes, options.seconds)
                if comm.rank == 0:
                    say(row)


def measured(
    comm: pycomm.Communicator,
    plain: pycomm.Communicator,
    manager: TopologyManager,
    nbytes: int,
    seconds: float,
) -> str:
    """Measure one size; return a row of the table."""
    x = np.zeros(nbytes // 4, np.float32)

    def block(which: pycomm.Communicator, calls: int) -> float:
        plain.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            which.all_reduce(x)
        return time.perf_counter() - began

    block(comm, 20)
    once = block(plain, 50) / 50
    calls = int(plain.broadcast_object(max(1, round(BLOCK / once))))
    blocks = int(plain.broadcast_object(max(3, round(seconds / 2 / (calls * once)))))
    spent, served = manager.seconds_spent, 0.0
    looks = 0
    seen = manager.snapshot
    times: tuple[list[float], list[float]] = [], []
    for _ in range(blocks):
        times[0].append(block(comm, calls))
        times[1].append(block(plain, calls))
        served += times[0][-1]
        looks, seen = looks + (manager.snapshot is not seen), manager.snapshot
    share = (manager.seconds_spent - spent) / served
    ratio = median(times[0]) / median(times[1])
    shares = plain.all_gather_object(share)
    return f"{nbytes:9} {blocks * calls:7} {ratio:28.4f} {max(shares):20.3%} {looks:6}"


if __name__ == "__main__":
    main()
