"""Plans of collectives on device arrays."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pycomm.algorithms.schedule import Schedule, data_count
from pycomm.bindings.nccl import nccl
from pycomm.deadline import as_timeout
from pycomm.device.choice import Bound
from pycomm.device.quick import Launcher
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.dtypes import DTYPES
from pycomm.stream_memory import FixedMemory, StreamMemory
from pycomm.streams import PER_THREAD
from pycomm.transports.nccl import NCCLComm
from pycomm.units import format_bytes

__all__ = ["DevicePlan"]


class Starter(Protocol):
    """What gives bound calls to streams: `pycomm.device.side.DeviceSide`."""

    comm: NCCLComm | None
    launcher: Launcher | None

    def start(
        self,
        bound: Bound,
        timeout: float,
        async_op: bool,
        stream: Any,
        algorithm: str,
        memory: StreamMemory | None = None,
    ) -> Any:
        """Give a bound call to a stream."""


class DevicePlan:
    """A collective on given device arrays, made by `Communicator.plan`; calling it runs it.

    Its scratch is its own, so that a call can be captured into a CUDA graph: capture on the stream
    that the plan goes to, and launch the graph on all ranks. It holds the arrays.
    """

    def __init__(
        self, side: Starter, bound: Bound, algorithm: str, timeout: float, stream: Any
    ) -> None:
        self._side, self._bound, self._asked = side, bound, algorithm
        self._timeout, self._stream = timeout, stream
        assert side.comm is not None
        self._comm = side.comm
        device = side.comm.device

        def block(nbytes: int) -> DeviceArray:
            return allocate(device, (nbytes,), DTYPES["uint8"])

        fixed = FixedMemory(block)
        self._memory = StreamMemory(device, fixed)
        self._result: Any = None
        self._quick = self._prepare()

    def _prepare(self) -> Callable[[], bool] | None:
        """Return what runs this plan the short way, None where there is none."""
        bound, handle = self._bound, self._bound.stream
        if bound.prepared is None or self._stream is not None or bound.mixed:
            return None
        if handle == PER_THREAD or self._side.launcher is None:
            return None
        call: Any = bound.call
        function, rest = bound.prepared
        target = call.target if call.collective == "broadcast" else call.out
        pointer = ctypes.c_void_p.from_param
        source = pointer(0 if call.x is None else call.x.pointer)
        written, stream = pointer(0 if target is None else target.pointer), pointer(handle)
        given = (source, written, *rest, stream)
        if call.target is not None:
            if call.target.wrap is not None:
                return None
            self._result = call.target.owner
        launch = self._side.launcher
        return partial(launch, function, given, handle, stream, call.collective, self._timeout)

    def __call__(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Give the collective to its stream; collective over all ranks.

        Parameters
        ----------
        timeout : float, optional
            Seconds until `CommTimeoutError`; by default as the plan was made.
        async_op : bool
            Return a `Work`.

        Returns
        -------
        array, None or Work
            What the communicator's method returns: the same output array each time.
        """
        if timeout is None and not async_op and self._quick is not None and self._quick():
            return self._result
        allowed = self._timeout if timeout is None else as_timeout(timeout, self._timeout)
        return self._side.start(
            self._bound, allowed, async_op, self._stream, self._asked, self._memory
        )

    @property
    def collective(self) -> str:
        """The collective."""
        return self._bound.call.collective

    @property
    def algorithm(self) -> str:
        """The algorithm that runs."""
        return self._bound.choice.algorithm

    @property
    def why(self) -> str:
        """Why it is that one."""
        return self._bound.choice.why

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of this rank; None where NCCL does it, or messages are encoded."""
        program = self._bound.choice.program
        return None if program is None else program.program.schedule

    @property
    def steps(self) -> int | None:
        """Rounds of this rank that communicate; None where NCCL does it."""
        if self._bound.choice.encoded is not None:
            return self._bound.choice.encoded.rounds
        return None if self.schedule is None else self.schedule.steps

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that this rank sends in messages; None where NCCL does it."""
        choice = self._bound.choice
        if choice.encoded is not None:
            return choice.encoded.bytes_sent
        if choice.program is None:
            return None
        program, call = choice.program.program, self._bound.call
        count = data_count(call.collective, call.count, self._comm.size)
        return program.schedule.elements_sent(count) * program.itemsize

    def __str__(self) -> str:
        call, choice, comm = self._bound.call, self._bound.choice, self._comm
        op = "" if call.op is None else f", {call.asked or call.op}"
        count = data_count(call.collective, call.count, comm.size)
        nbytes = format_bytes(count * call.dtype.itemsize)
        lines = [
            f"{call.collective} of {count:,} {call.dtype.name} ({nbytes}){op}, rank {comm.rank} of "
            f"{comm.size} on {comm.device.name}",
            f"  algorithm  {choice.algorithm}: {choice.why}",
        ]
        if choice.encoded is not None:
            lines += choice.encoded.describe()
        elif choice.program is None:
            lines.append(f"  steps      those of NCCL {nccl.library.version}")
        else:
            sent = format_bytes(self.bytes_sent or 0)
            lines.append(f"  steps      {self.steps}")
            lines.append(f"  sends      {sent} from this rank")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<pycomm.DevicePlan {self.collective} by {self.algorithm}>"
