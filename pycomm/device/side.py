"""The device side of a communicator: device arrays go to NCCL, in the order of a stream.

A call returns once its work has been given to a stream, as every library on a GPU does. The result
is there for whatever comes later on that stream; `Work.wait` waits for it on the host.
"""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.call import Call
from pycomm.deadline import Deadline, as_timeout
from pycomm.device.choice import Bound, DeviceChoices
from pycomm.device.groups import Grouping
from pycomm.device.meeting import Gather, meet
from pycomm.device.native import bind_native, native_name, prepared
from pycomm.device.plans import DevicePlan
from pycomm.device.quick import Launcher, Quick, launcher
from pycomm.device.routes import Route, route_of
from pycomm.device.together import check_outside, close_group, open_group, send_receive
from pycomm.device.watchdog import Watch
from pycomm.device.works import Works
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.device_buffers import DeviceBuffer
from pycomm.devices import current_context, current_device, device_count, get_device, restore
from pycomm.dtypes import DTYPES
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError, describe
from pycomm.stream_memory import StreamMemory
from pycomm.streams import PER_THREAD, Stream, order
from pycomm.transports.nccl import NCCLComm

__all__ = ["DeviceSide"]

_IN_PROGRESS = 7

#: What was given to an open group: its route, operation, sequence number and seconds.
_Given = tuple[Route, str, int | None, float]


class _Tools(NamedTuple):
    """What a communicator works with on its device, made together."""

    tally: DeviceArray
    choices: DeviceChoices
    watch: Watch
    works: Works
    launcher: Launcher
    quick: Quick


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
        #: What was given to an open group; None without one.
        self.grouped: list[_Given] | None = None
        self.launcher: Launcher | None = None
        self._own: Stream | None = None
        self._made: _Tools | None = None

    # ------------------------------------------------------------------------------- making

    def ready(self, ordinal: int | None, timeout: float) -> NCCLComm:
        """Return the NCCL communicator; made on first use, which is collective."""
        comm = self.comm
        if comm is None:
            check_outside(self, "the first call on device arrays")
            transport = self._engine.transport
            comm = meet(
                lambda: get_device(self.choose_device(ordinal)), transport.rank, transport.size,
                self._gather, self._engine.label, Deadline(timeout), self.use,
            )  # fmt: skip
        if ordinal is not None and 0 <= ordinal != comm.device.ordinal:
            raise ArgumentValueError(
                f"the array is on device {ordinal}, and this communicator works on device "
                f"{comm.device.ordinal}: all arrays of a communicator are on one device"
            )
        return comm

    def use(self, comm: NCCLComm) -> None:
        """Work with a NCCL communicator that is there; if that fails, nothing has changed."""
        engine = self._engine
        tally = allocate(comm.device, (2,), DTYPES["uint64"]).fill(0)
        choices = DeviceChoices(comm, engine.choices, tally)
        watch = Watch(comm, engine.label)
        launch = launcher(self, engine, comm, watch)
        quick = Quick(launch, comm, engine.timeout)
        works = Works(comm, engine.label, self.fail)
        self._made = _Tools(tally, choices, watch, works, launch, quick)
        self.comm, self.launcher, engine.quick = comm, launch, quick

    @property
    def _tools(self) -> _Tools:
        assert self._made is not None
        return self._made

    @property
    def saturated(self) -> int:
        """How many values were too large for a codec so far; waits for the default stream."""
        return 0 if self.comm is None else int(self._tools.tally.copy()[0])

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
            self._tools.quick.remember(known, given, out, bound)
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
        if engine.state != "open":
            engine.enter(call.collective)  # which raises
        comm = self.ready(next(iter(places), None), timeout)
        fixed = engine.deterministic if call.deterministic is None else call.deterministic
        choice = self._tools.choices.choose(call, algorithm, deterministic=fixed)
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
        call, comm = bound.call, self.comm
        if comm is None:
            self._engine.enter(call.collective)  # which raises: it is closed
        assert comm is not None
        buffers = call.device_buffers
        target: object = call.target
        written = [one for one in buffers if one is target]
        route = route_of(buffers, written, stream, self._own_stream)
        self._check(bound, route, async_op, memory)

        def give(handle: int, deadline: Deadline) -> None:
            if bound.enqueue is not None:
                code = bound.enqueue(handle, deadline)
                if code and not (code == _IN_PROGRESS and self.grouped is not None):
                    comm.settle(code, call.collective, deadline)
                return
            scratch = StreamMemory(comm.device) if memory is None else memory
            runner = bound.choice.program or bound.choice.encoded
            assert runner is not None
            runner.enqueue(call, handle, scratch, deadline)

        def compare(deadline: Deadline) -> None:
            chosen = bound.choice.algorithm
            self._engine.compare(call, call.collective, algorithm, chosen, deadline)

        return self._perform(call.collective, route, timeout, async_op, give, call.result, compare)

    def _own_stream(self) -> int:
        comm = self.comm
        assert comm is not None
        if self._own is None:
            self._own = Stream(comm.device)
        return self._own.handle

    def _check(
        self, bound: Bound, route: Route, async_op: bool, memory: StreamMemory | None
    ) -> None:
        """Raise unless a call may go that way, now."""
        call = bound.call
        several = bound.enqueue is None or (call.collective == "all_to_all" and call.in_place)
        check_outside(self, call.collective)
        if self.grouped is not None and several:
            raise ArgumentValueError(
                f"{call.collective} by {bound.choice.algorithm!r} goes in several steps, which a "
                "group cannot hold together: only what NCCL does itself belongs there"
            )
        self._check_scope(route, async_op)
        if route.captured and memory is not None and memory.cold and bound.enqueue is None:
            raise ArgumentValueError(
                "a plan takes its memory when it runs for the first time, and none can be taken "
                "while a graph is captured: run it once before"
            )

    def _check_scope(self, route: Route, async_op: bool) -> None:
        """Raise where a group, or a capture, does not allow what is asked for."""
        if self.grouped is not None and async_op:
            raise ArgumentValueError("async_op inside a group: its work begins at the group's end")
        if self.grouped is not None and PER_THREAD in route.before:
            raise ArgumentValueError("a group cannot go to the default stream of a thread")
        if route.captured and async_op:
            raise ArgumentValueError(
                "async_op while a graph is captured: there is nothing to wait for until the graph "
                "is launched"
            )

    def _perform(
        self,
        operation: str,
        route: Route,
        timeout: float,
        async_op: bool,
        give: Callable[[int, Deadline], None],
        result: Callable[[], Any],
        compare: Callable[[Deadline], None] | None = None,
    ) -> Any:
        """Give something to a stream, ordered with others, and watch it.

        What has a comparison is a collective, and gets a sequence number.
        """
        engine, comm, tools = self._engine, self.comm, self._tools
        assert comm is not None
        if engine.state != "open" or engine.owner is not None:
            engine.enter(operation)
        engine.owner = get_ident()
        deadline, before = Deadline(timeout), current_context()
        sequence: int | None = None
        try:
            if comm.error is not None:
                raise comm.error
            if compare is not None:
                if engine.check:
                    compare(deadline)
                sequence = engine.sequence
                engine.sequence = sequence + 1
            with comm.inside():
                for stream in route.before:
                    order(stream, route.given, comm.device)
                give(route.given, deadline)
                if self.grouped is not None:
                    self.grouped.append((route, operation, sequence, timeout))
                    return result()
                for stream in route.after:
                    order(route.given, stream, comm.device)
                if route.captured:
                    return result()
                tools.watch.record(route.given, operation, sequence, timeout, route.keep)
                if not async_op:
                    return result()
                return tools.works.start(route.given, operation, sequence, timeout, result)
        except CommError as error:
            raise self.fail(error, operation) from error.__cause__
        except BaseException as error:
            self._interrupted(error, operation, before)
            raise
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
                sequence = self._engine.sequence - 1
                self._tools.watch.record(handle, operation, sequence, timeout, keep)
        except CommError as error:
            raise self.fail(error, operation) from error.__cause__

    def plan(self, call: Call, algorithm: str, timeout: float | None, stream: Any) -> DevicePlan:
        """Return a plan of a call; collective if it is the first use of a device."""
        allowed = self._allowed(timeout)
        return DevicePlan(self, self.bind(call, algorithm, allowed), algorithm, allowed, stream)

    # ------------------------------------------------------------------------------- failing

    def fail(self, error: CommError, operation: str) -> CommError:
        """Mark the communicator broken: its ranks do not know any more what is under way."""
        comm, made = self.comm, self._made
        self.grouped = None
        close_group(self)
        if comm is not None and comm.error is None:
            comm.fail(error)
        if made is not None:
            made.works.fail(error)
        self._engine.break_off(error, operation)
        return error

    def _interrupted(self, error: BaseException, operation: str, context: int) -> None:
        """Give up after Ctrl-C, say: what NCCL has been given, other ranks cannot know."""
        restore(context)
        self.fail(CommError(f"{operation} was interrupted by {describe(error)}"), operation)
        self._engine.waiter.leave(error)

    # ------------------------------------------------------------------------------- messages

    def message(
        self,
        operation: str,
        parts: Sequence[tuple[int, DeviceBuffer, bool]],
        result: Callable[[], Any],
        timeout: float | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        """Give sends and receives, each (peer, buffer, receive), to a stream, all at once."""
        allowed = self._allowed(timeout)
        if self._engine.state != "open":
            self._engine.enter(operation)  # which raises
        buffers = [buffer for _, buffer, _ in parts]
        comm = self.ready(next((one.device for one in buffers if one.device >= 0), None), allowed)
        written = [buffer for _, buffer, receive in parts if receive]
        route = route_of(buffers, written, stream, self._own_stream)
        check_outside(self, operation)
        self._check_scope(route, async_op)
        messages = [(peer, one.pointer, one.nbytes) for peer, one, _ in parts]
        sends, receives = (
            [message for message, (_, _, receives) in zip(messages, parts, strict=True)
             if receives is wanted]
            for wanted in (False, True)
        )  # fmt: skip

        def give(handle: int, deadline: Deadline) -> None:
            code = send_receive(sends, receives, comm.handle, handle)
            if code and not (code == _IN_PROGRESS and self.grouped is not None):
                comm.settle(code, operation, deadline)

        return self._perform(operation, route, allowed, async_op, give, result)

    # ------------------------------------------------------------------------------- groups

    def group(self) -> Grouping:
        """Return a scope whose calls NCCL starts together."""
        return Grouping(self)

    def begin_group(self) -> None:
        """Open a group."""
        check_outside(self, "a group")
        if self.grouped is not None:
            raise CommError("a group is open already; groups do not nest")
        engine = self._engine
        engine.enter("group")
        engine.owner = None
        self.ready(None, engine.timeout)  # NCCL makes no communicator within a group
        self.grouped = []
        try:
            nccl.check(open_group(self), "ncclGroupStart")
        except BaseException:
            self.grouped = None
            close_group(self)
            raise

    def end_group(self) -> None:
        """Close a group: its work goes to its streams now."""
        given, self.grouped = self.grouped or [], None
        code, comm, before = close_group(self), self.comm, current_context()
        if comm is None:
            return
        try:
            with comm.inside():
                comm.settle(code, "ncclGroupEnd", Deadline(self._engine.timeout))
                for route, operation, sequence, timeout in given:
                    for stream in route.after:
                        order(route.given, stream, comm.device)
                    if not route.captured:
                        self._tools.watch.record(
                            route.given, operation, sequence, timeout, route.keep
                        )
        except CommError as error:
            raise self.fail(error, "group") from error.__cause__
        except BaseException as error:
            self._interrupted(error, "group", before)
            raise

    # ------------------------------------------------------------------------------- memory

    def empty(self, shape: tuple[int, ...], dtype: Any, nbytes: int) -> DeviceArray:
        """Return a registered array; collective."""
        engine = self._engine
        if engine.state != "open":
            engine.enter("empty")  # which raises
        comm = self.ready(None, engine.timeout)
        check_outside(None, "empty")
        engine.enter("empty")
        before = current_context()
        try:
            with comm.inside():
                pointer = comm.allocate(max(nbytes, 1), Deadline(engine.timeout))
            return DeviceArray(pointer, shape, dtype, comm.device, comm).fill(0)
        except CommError as error:
            raise self.fail(error, "empty") from error.__cause__
        except BaseException as error:
            self._interrupted(error, "empty", before)
            raise
        finally:
            engine.owner = None

    # ------------------------------------------------------------------------------- its end

    def close(self, timeout: float) -> None:
        """Wait for what is under way, and free everything; collective."""
        comm = self.comm
        if comm is None:
            return
        deadline = Deadline(timeout)
        self._tools.works.close(deadline)
        self.comm = self.launcher = self._engine.quick = None
        self._tools.watch.stop()
        comm.close(deadline)

    def give_up(self, error: CommError) -> None:
        """End what is under way with an error: its ranks go on without this communicator."""
        comm, made = self.comm, self._made
        if comm is not None and comm.error is None:
            comm.error = error
        if made is not None:
            made.works.fail(error)

    def abort(self) -> None:
        """Give everything up."""
        comm = self.comm
        self.grouped = None
        close_group(self)
        self.comm = self.launcher = self._engine.quick = None
        if comm is not None:
            self._tools.watch.stop()
            error = CommError(f"{self._engine.label} was aborted", rank=comm.rank)
            self._tools.works.fail(error)
            comm.error = comm.error or error
            comm.abort()
