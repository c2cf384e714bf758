"""The device side of a communicator: device arrays go to NCCL, in the order of a stream.

A call returns once its work has been given to a stream, as every library on a GPU does. The result
is there for whatever comes later on that stream; `Work.wait` waits for it on the host.
"""

import time
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.call import Call
from pycomm.deadline import Deadline, as_timeout
from pycomm.device_buffers import DeviceArray, DeviceBuffer, allocate
from pycomm.device_choice import Bound, DeviceChoices
from pycomm.device_meeting import Gather, meet
from pycomm.device_plans import DevicePlan
from pycomm.device_quick import Launcher, Quick, launcher
from pycomm.devices import current_device, device_count, get_device
from pycomm.dtypes import DTYPES
from pycomm.engine import Engine
from pycomm.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    CommTimeoutError,
)
from pycomm.native_calls import Group, bind_native, native_name, prepared
from pycomm.stream_memory import StreamMemory
from pycomm.streams import PER_THREAD, Event, Stream, as_stream, capturing, order
from pycomm.transports.base import Tested
from pycomm.transports.nccl import NCCLComm
from pycomm.watchdog import Watch
from pycomm.work import Work

__all__ = ["DeviceSide"]

_QUICK_LOOKS = 200
_PAUSE = 5e-5  # seconds between looks at an event
_BYTE = 1


class DeviceSide:
    """What a communicator does with device arrays.

    Parameters
    ----------
    engine : Engine
        The communicator's state.
    gather : callable
        Returns an object of each rank; collective.
    device : int, optional
        The number of the device to work on; by default that of the first array.
    local : tuple of int
        This rank's number among the ranks of its host, and theirs.
    """

    def __init__(
        self, engine: Engine, gather: Gather, device: int | None, local: tuple[int, int]
    ) -> None:
        self._engine, self._gather, self._wanted, self._local = engine, gather, device, local
        self.comm: NCCLComm | None = None
        self._works: list[Work] = []
        #: What was given to an open group; None without one.
        self.grouped: list[tuple[int, str, int | None, float]] | None = None
        self.launcher: Launcher | None = None
        self._own: Stream | None = None

    # ------------------------------------------------------------------------------- making

    def ready(self, ordinal: int | None, timeout: float) -> NCCLComm:
        """Return the NCCL communicator; made on first use, which is collective."""
        comm = self.comm
        if comm is None:
            transport = self._engine.transport
            comm = meet(
                lambda: get_device(self.choose_device(ordinal)), transport.rank, transport.size,
                self._gather, self._engine.label, Deadline(timeout),
            )  # fmt: skip
            self.use(comm)
        if ordinal is not None and 0 <= ordinal != comm.device.ordinal:
            raise ArgumentValueError(
                f"the array is on device {ordinal}, and this communicator works on device "
                f"{comm.device.ordinal}: all arrays of a communicator are on one device"
            )
        return comm

    def use(self, comm: NCCLComm) -> None:
        """Work with a NCCL communicator that is there."""
        self.comm = comm
        self._tally = allocate(comm.device, (2,), DTYPES["uint64"]).fill(0)
        self._choices = DeviceChoices(comm, self._engine.choices, self._engine.timeout, self._tally)
        self._watch = Watch(comm, self._engine.label)
        self.launcher = launcher(self, self._engine, comm, self._watch)
        self._engine.quick = self._quick = Quick(self.launcher, comm, self._engine.timeout)

    @property
    def saturated(self) -> int:
        """How many values were too large for a codec so far; waits for the default stream."""
        return 0 if self.comm is None else int(self._tally.copy()[0])

    def choose_device(self, ordinal: int | None = None) -> int:
        """Return the number of the device that this rank is to work on."""
        if ordinal is not None and ordinal >= 0:
            return ordinal
        if self.comm is not None:
            return self.comm.device.ordinal
        if self._wanted is not None:
            return self._wanted
        current = current_device()
        if current is not None:
            return current
        count = device_count()
        if not count:
            raise CommError("the CUDA driver shows this process no device")
        return self._local[0] % count

    # ------------------------------------------------------------------------------- calls

    def run(
        self,
        call: Call,
        algorithm: str,
        timeout: float | None,
        async_op: bool,
        stream: Any,
        known: tuple[Any, ...] | None = None,
    ) -> Any:
        """Give a call to a stream; return its result, or a `Work`."""
        allowed = self._allowed(timeout)
        bound = self.bind(call, algorithm, allowed)
        if known is not None and call.x is not None and call.target is not None:
            given = call.x.owner
            out = None if call.target is call.x else call.target.owner
            self._quick.remember(known, given, out, bound)
        return self.start(bound, allowed, async_op, stream, algorithm)

    def _allowed(self, timeout: float | None) -> float:
        default = self._engine.timeout
        return default if timeout is None else as_timeout(timeout, default)

    def bind(self, call: Call, algorithm: str, timeout: float) -> Bound:
        """Return a call bound to what runs it; may be collective, the first time."""
        engine = self._engine
        buffers = call.device_buffers
        if any(one.device is None for one in buffers):
            raise ArgumentTypeError(
                f"{call.collective}: one of x and out is on the host and the other on a device"
            )
        places = {one.device for one in buffers if one.device >= 0}
        if len(places) > 1:
            raise ArgumentValueError(f"{call.collective}: x and out are on different devices")
        comm = self.ready(next(iter(places), None), timeout)
        fixed = engine.deterministic if call.deterministic is None else call.deterministic
        choice = self._choices.choose(call, algorithm, deterministic=fixed)
        if not choice.native:
            return Bound(call, choice, None)
        simple = choice.hint is None and call.count and nccl.has(native_name(call.collective))
        ready = None
        if simple and not (call.collective == "all_to_all" and call.in_place):
            ready = prepared(call, comm)
        return Bound(call, choice, bind_native(call, comm, choice.hint, ready), ready)

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
        engine, call = self._engine, bound.call
        operation = call.collective
        if engine.state != "open" or engine.owner is not None:
            engine.enter(operation)
        engine.owner = get_ident()
        try:
            comm = self.comm
            assert comm is not None
            if comm.error is not None:
                raise comm.error
            if self.grouped is not None:
                self._check_group(bound, stream)
            if engine.check:
                chosen = bound.choice.algorithm
                engine.compare(call, operation, algorithm, chosen, Deadline(timeout))
            sequence = engine.sequence
            engine.sequence = sequence + 1
            handle = bound.stream if stream is None else as_stream(stream)
            if stream is not None or handle == PER_THREAD or bound.mixed:
                return self._elsewhere(bound, handle, timeout, async_op, sequence, memory)
            with comm.inside():
                self._give(bound, handle, timeout, memory)
                if self.grouped is not None:
                    self.grouped.append((handle, operation, sequence, timeout))
                    return call.result()
                self._watch.record(handle, operation, sequence, timeout)
                if not async_op:
                    return call.result()
                return self._work(handle, operation, sequence, timeout, call)
        except CommError as error:
            raise self.fail(error, operation) from error.__cause__
        finally:
            engine.owner = None

    def unusual(
        self,
        code: int,
        recorded: bool,
        handle: int,
        operation: str,
        timeout: float,
        keep: tuple[Any, ...],
    ) -> None:
        """Go on after a call that NCCL or the driver did not simply accept.

        Parameters
        ----------
        code : int
            NCCL's, or once the call is `recorded` that of the event behind it.
        recorded : bool
            Whether NCCL has accepted the call.
        handle, operation, timeout, keep
            Those of the call.
        """
        comm = self.comm
        assert comm is not None
        try:
            if recorded and code:
                raise cuda.error(code, "cuEventRecord")
            with comm.inside():
                comm.settle(code, operation, Deadline(timeout))
                self._watch.record(handle, operation, self._engine.sequence - 1, timeout, keep)
        except CommError as error:
            raise self.fail(error, operation) from error.__cause__

    @staticmethod
    def _check_group(bound: Bound, stream: Any) -> None:
        """Raise unless a call may be part of a group, which starts at its end."""
        call = bound.call
        if bound.enqueue is None or (call.collective == "all_to_all" and call.in_place):
            raise ArgumentValueError(
                f"{call.collective} by {bound.choice.algorithm!r} goes in several steps, which a "
                "group cannot hold together: only what NCCL does itself belongs there"
            )
        if PER_THREAD in (bound.stream, None if stream is None else as_stream(stream)):
            raise ArgumentValueError("a group cannot go to the default stream of a thread")

    def _give(self, bound: Bound, handle: int, timeout: float, memory: StreamMemory | None) -> None:
        """Give a call to a stream; in its context, alone with NCCL."""
        comm, call = self.comm, bound.call
        assert comm is not None
        if bound.enqueue is not None:
            code = bound.enqueue(handle)
            if code:
                comm.settle(code, call.collective, Deadline(timeout))
            return
        memory = StreamMemory(comm.device) if memory is None else memory
        runner = bound.choice.program or bound.choice.encoded
        assert runner is not None
        runner.enqueue(call, handle, memory)

    def _elsewhere(
        self,
        bound: Bound,
        handle: int,
        timeout: float,
        async_op: bool,
        sequence: int,
        memory: StreamMemory | None,
    ) -> Any:
        """Give a call to another stream than that of its arrays, ordered with that one."""
        comm, call = self.comm, bound.call
        assert comm is not None
        operation = call.collective
        given = handle
        if handle == PER_THREAD:
            # NCCL starts things from threads of its own, where this name means another stream.
            if self._own is None:
                self._own = Stream(comm.device)
            given = self._own.handle
        buffers = call.device_buffers
        with comm.inside():
            # What is captured has no past: a graph runs when it is launched.
            past = not capturing(given)
            for buffer in buffers:
                if past and buffer.produced and buffer.stream not in (handle, given):
                    order(buffer.stream, given, comm.device)
            if given != handle:
                order(handle, given, comm.device)
            self._give(bound, given, timeout, memory)
            if given != handle:
                order(given, handle, comm.device)
            # Their owners free memory in the order of their own stream, which may be ahead.
            keep = [buffer.owner for buffer in buffers]
            if self.grouped is not None:
                self.grouped.append((given, operation, sequence, timeout))
                return call.result()
            self._watch.record(given, operation, sequence, timeout, keep)
            if async_op:
                return self._work(given, operation, sequence, timeout, call)
        return call.result()

    def _work(
        self, handle: int, operation: str, sequence: int | None, timeout: float, call: Any
    ) -> Work:
        """Return a work that ends when the stream has come so far."""
        comm = self.comm
        assert comm is not None
        event = Event(comm.device)
        event.record(handle)
        steps = iter((Tested(event.done),))
        work = Work(self, operation, sequence, None, steps, call.result, Deadline(timeout))
        self._works = [one for one in self._works if not one.advance()]
        self._works.append(work)
        return work

    def plan(self, call: Call, algorithm: str, timeout: float | None, stream: Any) -> "DevicePlan":
        """Return a plan of a call; collective if it is the first use of a device."""
        allowed = self._allowed(timeout)
        return DevicePlan(self, self.bind(call, algorithm, allowed), algorithm, allowed, stream)

    # ------------------------------------------------------------------------------- waiting

    def finish(self, work: Work, timeout: float | None) -> None:
        """Wait on the host for a work."""
        comm = self.comm
        assert comm is not None
        deadline = work.deadline if timeout is None else Deadline(as_timeout(timeout, 0.0))
        looks = 0
        while not work.advance():
            if comm.error is not None or deadline.passed:
                error = comm.error or self._late(work, deadline)
                for one in self._works:
                    one.fail(error)
                self._works.clear()
                raise self.fail(error, work.operation)
            looks += 1
            time.sleep(0 if looks < _QUICK_LOOKS else _PAUSE)
        failure = comm.look()
        if failure is not None:  # the stream went on, but without the result
            raise self.fail(failure, work.operation)

    def poll(self, work: Work) -> bool:
        """Return whether a work has ended."""
        comm = self.comm
        error = None if comm is None else comm.look()
        if error is not None:
            work.fail(error)
        return work.advance()

    def _late(self, work: Work, deadline: Deadline) -> CommError:
        comm = self.comm
        assert comm is not None
        error = CommTimeoutError(
            f"{work.operation} #{work.sequence} on rank {comm.rank} of {comm.size} "
            f"({self._engine.label}): no end on its stream within {deadline.timeout:g} s. The "
            "communicator is broken now: call abort() or shrink()",
            operation=work.operation,
            sequence=work.sequence,
            rank=comm.rank,
        )
        error.timeout = deadline.timeout
        comm.fail(error)
        return error

    def fail(self, error: CommError, operation: str) -> CommError:
        """Mark the communicator broken: its ranks do not know any more what is under way."""
        comm = self.comm
        if comm is not None and comm.error is None:
            comm.fail(error)
        self._engine.break_off(error, operation)
        return error

    # ------------------------------------------------------------------------------- messages

    def message(
        self,
        operation: str,
        parts: Iterable[tuple[int, DeviceBuffer, bool]],
        result: Callable[[], Any],
        timeout: float | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        """Give sends and receives, each (peer, buffer, receive), to a stream, all at once."""
        allowed = self._allowed(timeout)
        parts = list(parts)
        buffer = parts[0][1]
        comm = self.ready(buffer.device, allowed)
        engine = self._engine
        engine.enter(operation)
        try:
            if comm.error is not None:
                raise comm.error
            handle = buffer.stream if stream is None else as_stream(stream)
            given = handle
            with comm.inside():
                for _, one, _ in parts:
                    if one.produced:
                        order(one.stream, given, comm.device)
                failed = 0
                with Group() as group:
                    for peer, one, receive in parts:
                        function = nccl.ncclRecv if receive else nccl.ncclSend
                        failed = failed or function(
                            one.pointer, one.nbytes, _BYTE, peer, comm.handle, given
                        )
                comm.settle(failed or group.code, operation, Deadline(allowed))
                keep = [one.owner for _, one, _ in parts]
                if self.grouped is not None:
                    self.grouped.append((given, operation, None, allowed))
                    return result()
                self._watch.record(given, operation, None, allowed, keep)
                if not async_op:
                    return result()
                call = _Result(result)
                return self._work(given, operation, None, allowed, call)
        except CommError as error:
            raise self.fail(error, operation) from error.__cause__
        finally:
            engine.owner = None

    # ------------------------------------------------------------------------------- groups

    def group(self) -> "_Grouping":
        """Return a scope whose calls NCCL starts together."""
        return _Grouping(self)

    def begin_group(self) -> Group:
        """Open a group."""
        if self.grouped is not None:
            raise CommError("a group is open already; groups do not nest")
        self.ready(None, self._engine.timeout)  # NCCL makes no communicator within a group
        opened = Group().__enter__()
        self.grouped = []
        return opened

    def end_group(self, group: Group) -> None:
        """Close a group: its work goes to its streams now."""
        comm = self.comm
        given, self.grouped = self.grouped or [], None
        group.__exit__(None, None, None)
        if comm is None:
            nccl.check(group.code, "ncclGroupEnd")
            return
        try:
            with comm.inside():
                comm.settle(group.code, "ncclGroupEnd", Deadline(self._engine.timeout))
                for handle, operation, sequence, timeout in given:
                    self._watch.record(handle, operation, sequence, timeout)
        except CommError as error:
            raise self.fail(error, "group") from error.__cause__

    # ------------------------------------------------------------------------------- memory

    def empty(self, shape: tuple[int, ...], dtype: Any, nbytes: int) -> DeviceArray:
        """Return a registered array; collective."""
        comm = self.ready(None, self._engine.timeout)
        self._engine.enter("empty")
        try:
            with comm.inside():
                pointer = comm.allocate(max(nbytes, 1), Deadline(self._engine.timeout))
        except CommError as error:
            raise self.fail(error, "empty") from error.__cause__
        finally:
            self._engine.owner = None
        return DeviceArray(pointer, shape, dtype, comm.device, comm).fill(0)

    # ------------------------------------------------------------------------------- its end

    def close(self, timeout: float) -> None:
        """Wait for what is under way, and free everything; collective."""
        comm, self.comm = self.comm, None
        self._engine.quick = None
        if comm is not None:
            self._watch.stop()
            comm.close(Deadline(timeout))

    def abort(self) -> None:
        """Give everything up."""
        comm, self.comm = self.comm, None
        self._engine.quick = None
        if comm is not None:
            self._watch.stop()
            error = CommError(f"{self._engine.label} was aborted", rank=comm.rank)
            for work in self._works:
                work.fail(error)
            self._works.clear()
            comm.error = comm.error or error
            comm.abort()


class _Result:
    """The result of messages, as a call has one."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result


class _Grouping:
    """The scope of `Communicator.group`."""

    def __init__(self, side: DeviceSide) -> None:
        self._side = side

    def __enter__(self) -> None:
        self._group = self._side.begin_group()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._side.end_group(self._group)
        except CommError:
            if error is None:
                raise
