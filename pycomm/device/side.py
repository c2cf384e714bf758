"""The device side of a communicator: device arrays go to NCCL, in the order of a stream.

A call returns once its work has been given to a stream, as every library on a GPU does. The result
is there for whatever comes later on that stream; `Work.wait` waits for it on the host.
"""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.call import Call
from pycomm.deadline import Deadline, as_timeout
from pycomm.device.choice import Bound
from pycomm.device.equipment import Equipment
from pycomm.device.groups import Grouping
from pycomm.device.native import bind_native, native_name, prepared
from pycomm.device.plans import DevicePlan
from pycomm.device.routes import Route, route_of
from pycomm.device.together import check_outside, close_group, open_group, send_receive
from pycomm.device_arrays import DeviceArray
from pycomm.device_buffers import DeviceBuffer
from pycomm.devices import current_context
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError
from pycomm.stream_memory import StreamMemory
from pycomm.streams import PER_THREAD, order
from pycomm.transports.nccl import IN_PROGRESS

__all__ = ["DeviceSide"]


class DeviceSide(Equipment):
    """What a communicator does with device arrays; see `Equipment` for what it is made of."""

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
                if code and not (code == IN_PROGRESS and self.grouped is not None):
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
            self.interrupted(error, operation, before)
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
            if code and not (code == IN_PROGRESS and self.grouped is not None):
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
            self.interrupted(error, "group", before)
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
            self.interrupted(error, "empty", before)
            raise
        finally:
            engine.owner = None
