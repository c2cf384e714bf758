"""How the ranks of a communicator meet on their devices: what fails on one, fails on all."""

import os
from collections.abc import Callable
from typing import Any

from pycomm.bindings.nccl import nccl
from pycomm.deadline import Deadline
from pycomm.devices import Device
from pycomm.errors import CommError, MismatchError, describe
from pycomm.transports.joining import Making, begin, unique_id
from pycomm.transports.nccl import NCCLComm

__all__ = ["Gather", "meet"]

#: Returns an object of each rank, in rank order, within so many seconds; collective.
Gather = Callable[[Any, float], list[Any]]

# The ranks' deadlines pass at different moments; who is ready waits for the last of them.
_SLACK = 10.0  # seconds

_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


def meet(
    choose: Callable[[], Device],
    rank: int,
    size: int,
    gather: Gather,
    label: str,
    deadline: Deadline,
    use: Callable[[NCCLComm], None],
) -> NCCLComm:
    """Make a NCCL communicator with all ranks; collective.

    Parameters
    ----------
    choose : callable
        Returns this rank's device.
    rank, size : int
        This rank's place.
    gather : callable
        The road on which ranks meet.
    label : str
        What the communicator is called.
    deadline : Deadline
        Until when all have to come.
    use : callable
        Gets the communicator, and prepares what it takes to work with it.

    Raises
    ------
    CommError
        On all ranks, if any has no device or no libnccl, if two are on one device, or if NCCL
        cannot connect them.
    """
    failure: BaseException | None = None
    device: Device | None = None
    facts: tuple[str, str, str] | None = None
    token: bytes | None = None
    try:
        device = choose()
        facts = (device.uuid, str(device), nccl.library.version)
        token = unique_id() if rank == 0 else None
    except Exception as error:
        failure = error
    told = _agree(failure, (facts, token), rank, gather, deadline.timeout)
    _check([one[0] for one in told])
    token = told[0][1]
    assert device is not None
    assert token is not None
    making: Making | None = None
    comm: NCCLComm | None = None
    try:
        # Twice: a rank where it does not even begin would let the others wait for their deadlines.
        try:
            making = begin(token, rank, size, device, label)
        except Exception as error:
            failure = error
        _agree(failure, None, rank, gather, deadline.timeout)
        assert making is not None
        try:
            comm = making.wait(deadline)
            use(comm)
        except Exception as error:
            failure = error
        _agree(failure, None, rank, gather, deadline.left + _SLACK)
    except BaseException:
        if making is not None:
            making.abandon()
        raise
    assert comm is not None
    return comm


def _agree(
    failure: BaseException | None, told: Any, rank: int, gather: Gather, seconds: float
) -> list[Any]:
    """Tell all ranks whether it went well; raise on all if it did not on any."""
    answers = gather((failure, told), seconds)
    if failure is not None:
        raise failure
    for peer, (error, _) in enumerate(answers):
        if error is not None:
            error.args = (f"rank {peer}, not this rank {rank}: {describe(error)}",)
            raise error
    return [answer for _, answer in answers]


def _check(facts: list[tuple[str, str, str]]) -> None:
    """Raise, on all ranks alike, if their devices or libraries do not go together."""
    versions = {version: rank for rank, (_, _, version) in enumerate(facts)}
    if len(versions) > 1:
        listed = ", ".join(f"{version} on rank {rank}" for version, rank in versions.items())
        raise MismatchError(f"the ranks have different versions of NCCL: {listed}")
    seen: dict[str, int] = {}
    for rank, (uuid, name, _) in enumerate(facts):
        if uuid in seen and os.environ.get(_SHARING, "0") != "1":
            raise CommError(
                f"ranks {seen[uuid]} and {rank} are on the same device, {name}: give each rank one "
                "of its own, by device= or CUDA_VISIBLE_DEVICES (NCCL 2.30 and newer share a "
                f"device if {_SHARING}=1)"
            )
        seen.setdefault(uuid, rank)
