"""Two ways in: `init` for a process among processes, `run_local` for threads as ranks."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pycomm.arguments import as_ordinal
from pycomm.bootstrap.detect import Launch, detect
from pycomm.checking import as_check
from pycomm.communicator import Communicator
from pycomm.deadline import DEFAULT, as_timeout
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError, PeerError
from pycomm.transports.local import LocalTransport

__all__ = ["get_unique_id", "init", "run_local"]

_log = logging.getLogger("pycomm")
_METHODS = ("auto", "mpi", "local")


def init(
    method: str = "auto",
    *,
    device: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    deterministic: bool = False,
) -> Communicator:
    """Return the communicator of all processes that were started together.

    Collective over them. Use it in a ``with`` statement.

    Parameters
    ----------
    method : str
        ``"mpi"``: the ranks of MPI. ``"local"``: this process alone. ``"auto"``: MPI if a launcher
        has set its variables or MPI is in use already with several ranks, else alone; the reason
        is logged by the logger ``pycomm`` at level INFO.
    device : int, optional
        The number of the CUDA device, among those that this process sees, for device arrays. By
        default that of the first such array; for `Communicator.empty` the current one of this
        thread, or else the rank's number on its host, modulo the devices.
    timeout : float, optional
        Seconds that each operation may take by default, and this one; 300 if not given. The start
        of MPI itself, which waits for all processes, cannot be given a deadline.
    check : bool, optional
        Compare operation, dtype, count, op, root, algorithm and sequence number of all ranks
        before each collective, and raise the same `MismatchError` on every rank if they differ.
        Costs one small exchange a call. Default: the environment variable ``PYCOMM_CHECK``.
    deterministic : bool
        Reduce floats in a fixed order only: equal inputs give equal bits on every rank and in
        every run with the same ranks, hosts, algorithm and tuning. The library's own reductions,
        which promise no order, are not used then.

    Raises
    ------
    LibraryNotFoundError
        If MPI is needed and cannot be loaded.
    CommError
        If the launcher and MPI disagree about the number of ranks, or ranks cannot be reached.
    CommTimeoutError
        If the other ranks do not take part in time.

    Examples
    --------
    >>> import numpy as np
    >>> import pycomm
    >>> with pycomm.init("local") as comm:
    ...     comm.all_reduce(np.ones(3), op="sum")
    array([1., 1., 1.])
    """
    if method not in _METHODS:
        raise ArgumentValueError(
            f"unknown method {method!r}; known: {', '.join(map(repr, _METHODS))}"
        )
    allowed, checked = as_timeout(timeout, DEFAULT), as_check(check)
    device = as_ordinal(device)
    launch = detect(os.environ)
    chosen, reason = _choose(method, launch)
    _log.info("init uses %s: %s", chosen, reason)
    if chosen == "local":
        return Communicator.over(
            LocalTransport.create(1)[0],
            timeout=allowed,
            check=checked,
            deterministic=deterministic,
            device=device,
        ).tuned()
    from pycomm.bootstrap.mpi import world_transport

    transport = world_transport(launch, allowed)
    comm = Communicator.over(
        transport, timeout=allowed, check=checked, deterministic=deterministic, device=device
    )
    return comm.tuned()


def get_unique_id() -> bytes:
    """Return a new id for `Communicator.from_unique_id`: 128 bytes that all its ranks need.

    NCCL listens for the ranks from now on, in this process, which has to live until they have met.

    Raises
    ------
    LibraryNotFoundError
        If there is no libnccl.
    NCCLError
        If NCCL cannot make one: without a network interface, for instance.
    """
    from pycomm.transports.joining import unique_id

    return unique_id()


def _choose(method: str, launch: Launch | None) -> tuple[str, str]:
    if method != "auto":
        return method, "asked for"
    if launch is not None and launch.name == "torchrun":
        raise CommError(
            f"torchrun started {launch.size} processes, and pycomm has no road between them yet "
            "without MPI: start them with `pycomm run -n N script.py`, mpirun or srun"
        )
    if launch is not None and launch.size > 1:
        return "mpi", f"{launch.name} has set {launch.evidence}={launch.size}"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        size = mpi.COMM_WORLD.Get_size()
        if size > 1:
            return "mpi", f"MPI is in use with {size} ranks"
    if launch is not None:
        return "local", f"{launch.name} has started one process"
    return "local", "no launcher has set its variables"


def run_local(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    check: bool | None = None,
    deterministic: bool = False,
    hosts: Sequence[int] | None = None,
) -> list[Any]:
    """Run ``function(comm, *args)`` on `size` ranks that are threads of this process.

    For tests, notebooks, and code that has no MPI. Threads share the interpreter, so this is about
    convenience, not speed.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Gets its rank's `Communicator`, then `args`, which all ranks share.
    timeout, check, deterministic
        As in `init`.
    hosts : sequence of int, optional
        For each rank, the number of the host it pretends to be on, to try what hierarchical
        algorithms do. All on one by default.

    Returns
    -------
    list
        What each rank returned, in rank order.

    Raises
    ------
    BaseException
        What a rank raised, the first that was not a consequence of another rank's. The other ranks
        are told, and end with `PeerError` where they wait for it.

    Examples
    --------
    >>> import numpy as np
    >>> import pycomm
    >>> pycomm.run_local(3, lambda comm: int(comm.all_reduce(np.array([comm.rank]))[0]))
    [3, 3, 3]
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentTypeError(f"size is an int, not {type(size).__name__}")
    if size < 1:
        raise ArgumentValueError(f"size must be at least 1, not {size}")
    if hosts is not None:
        if not isinstance(hosts, Sequence) or not all(isinstance(host, int) for host in hosts):
            raise ArgumentTypeError("hosts are numbers, one for each rank")
        if len(hosts) != size:
            raise ArgumentValueError(f"hosts must name one host for each of {size} ranks")
    allowed, checked = as_timeout(timeout, DEFAULT), as_check(check)
    comms = [
        Communicator.over(transport, timeout=allowed, check=checked, deterministic=deterministic)
        for transport in LocalTransport.create(size, hosts)
    ]
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            with comms[rank] as comm:
                comm.tuned()
                results[rank] = function(comm, *args)
        except BaseException as error:
            failures.append((rank, error))

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)  # short, to see Ctrl-C
    except BaseException as error:
        for comm in comms:
            comm.leave(error)
        raise
    if failures:
        rank, cause = next(
            (failure for failure in failures if not isinstance(failure[1], PeerError)), failures[0]
        )
        cause.add_note(f"raised on rank {rank} of {size}")
        raise cause
    return results
