"""What one rank does in the jobs that test_jobs.py starts: ``rank.py SCENARIO``."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

import pycomm

VICTIM = 1
DEADLINE = 4.0


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def go_on_until_it_fails(comm: pycomm.Communicator) -> None:
    """Reduce for ever; report the error and let it end the process."""
    x = np.ones(1000)
    while True:
        began = time.monotonic()
        try:
            comm.all_reduce(x, op="max")
        except BaseException as error:
            seconds = time.monotonic() - began
            missing = getattr(error, "missing", ())
            say(f"rank {comm.rank}: {type(error).__name__} after {seconds:.2f} s missing {missing}")
            raise


def dies(how: str) -> None:
    comm = pycomm.init("mpi", timeout=DEADLINE)
    comm.barrier()
    if comm.rank == VICTIM:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    go_on_until_it_fails(comm)


def killed_sharing() -> None:
    """A rank dies; the others wait for it in shared memory, with a long deadline."""
    comm = pycomm.init("mpi", timeout=30)
    x = comm.empty(100_000)
    comm.all_reduce(x)
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            comm.all_reduce(x)
    except pycomm.CommError as error:
        seconds = time.monotonic() - began
        say(f"rank {comm.rank}: {type(error).__name__} after {seconds:.2f} s: {error}")
        comm.abort()


def shares() -> None:
    """A rank ends in some way while all have memory in common; the others end because of it."""
    how = sys.argv[2]
    with pycomm.init("mpi", timeout=DEADLINE) as comm:
        x = comm.empty(100_000)
        y = comm.empty(10)
        comm.all_reduce(x, algorithm="shared")
        comm.all_reduce(y, algorithm="shared")
        if comm.rank == VICTIM and how == "raise":
            raise ValueError("enough")
        if comm.rank == VICTIM and how != "end":
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(DEADLINE)
        while how != "end":
            comm.all_reduce(x, algorithm="shared")


def killed() -> None:
    dies("killed")


def exits() -> None:
    dies("exits")


def raises() -> None:
    """One rank raises before the collective, outside of any with statement."""
    comm = pycomm.init("mpi", timeout=60)
    comm.barrier()
    if comm.rank == VICTIM:
        raise ValueError("bad input on one rank")
    go_on_until_it_fails(comm)


def interrupted() -> None:
    """One rank gets Ctrl-C while it waits for a message that does not come."""
    comm = pycomm.init("mpi", timeout=60)
    comm.barrier()
    if comm.rank == VICTIM:
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        try:
            comm.recv(np.empty(3), 0)
        except KeyboardInterrupt:
            say(f"rank {comm.rank}: KeyboardInterrupt after {time.monotonic() - began:.2f} s")
            raise
    go_on_until_it_fails(comm)


def recovers() -> None:
    """A timeout is caught, the process lives, and says so with exit status 0."""
    comm = pycomm.init("mpi", timeout=60)
    comm.barrier()
    if comm.rank != VICTIM:
        try:
            comm.recv(np.empty(3), VICTIM, timeout=0.3)
        except pycomm.CommTimeoutError as error:
            say(f"rank {comm.rank}: {type(error).__name__}")
        comm.abort()
        say(f"rank {comm.rank}: lives")
        time.sleep(0.5)
    else:
        time.sleep(2)
        comm.abort()


def starts_no_process() -> None:
    """After MPI is up, a fork may break its network: pycomm starts none."""
    started: list[str] = []

    def record(name: str) -> Any:
        def recorder(*_: Any, **__: Any) -> None:
            started.append(name)
            raise AssertionError(name)

        return recorder

    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"):
        setattr(os, name, record(name))
    subprocess.Popen = record("Popen")  # type: ignore[misc]
    with pycomm.init("mpi", timeout=20) as comm:
        comm.all_reduce(np.ones(1000), op="avg")
        comm.all_gather_object({"a": 1})
        comm.host.barrier()
        assert comm.split(0) is not None
    assert started == []
    say("no process")


def crowded() -> None:
    """More ranks than cores: waiting gives the core away."""
    with pycomm.init("mpi", timeout=60) as comm:
        began = time.monotonic()
        for _ in range(100):
            comm.all_reduce(np.ones(4))
            comm.all_reduce(np.ones(4), op="max")
        say(f"seconds {time.monotonic() - began:.2f}")


def local_ranks() -> None:
    with pycomm.init("mpi", timeout=20) as comm:
        assert comm.local_rank == comm.host.rank == comm.rank
        say(f"local rank {comm.local_rank} of {comm.local_size}")


def forks() -> None:
    """A child of one rank ends with a clean exit, inside of the with statement."""
    with pycomm.init("mpi", timeout=20) as comm:
        child = os.fork() if comm.rank == 0 else -1
        if child == 0:
            try:
                comm.barrier()
            except pycomm.CommError:
                say("child: lost")
            comm.close()
            comm.leave(ValueError())
            sys.stdout.flush()
            os._exit(0)
        if child > 0:
            os.waitpid(child, 0)
        say(f"sum {comm.all_reduce(np.ones(300_000))[-1]}")


def comes_late_to_init() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        time.sleep(15)
    pycomm.init("mpi", timeout=1)


def drops() -> None:
    """A receive in flight is dropped with its communicator; the message comes afterwards."""
    import gc

    from mpi4py import MPI

    count, rank = 4_000_000, MPI.COMM_WORLD.Get_rank()
    world = pycomm.init("mpi", timeout=20)

    def start() -> pycomm.Communicator | None:
        comm = pycomm.Communicator.from_mpi(MPI.COMM_WORLD, timeout=20)
        if rank == 0:
            comm.recv(np.zeros(count, np.uint8), 1, async_op=True)
            return None
        return comm

    comm = start()
    gc.collect()
    other = np.full(count, 7, np.uint8)
    if comm is not None:
        comm.send(np.ones(count, np.uint8), 0)
        comm.abort()
    for _ in range(50):
        world.barrier()
    if rank == 0 and (other == 7).all():
        say("untouched")
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
