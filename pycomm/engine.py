"""What every call goes through: state, sequence numbers, choice of road, progress, failure."""

from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

import numpy as np

from pycomm.algorithms.compression.codec import name_of
from pycomm.algorithms.hierarchical import hosts_of
from pycomm.buffers import Buffer, as_buffer
from pycomm.call import Call
from pycomm.checking import differences, encode
from pycomm.choice import Choice, Choices, Request
from pycomm.deadline import Deadline, as_timeout
from pycomm.dtypes import DTYPES
from pycomm.errors import (
    ArgumentTypeError,
    CommError,
    MismatchError,
)
from pycomm.executor import WINDOW, Steps
from pycomm.lifecycle import DeviceCalls, Lifecycle
from pycomm.recent import Key
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Pending, Tested, Transport
from pycomm.tuning import Tuning
from pycomm.waiting import Waiter
from pycomm.work import Work

__all__ = ["Engine"]

# Looks before a wait sets up its deadline: a small message takes less than the setting up.
_QUICK_TESTS = (None,) * 20


# Engines with works in flight: MPI writes into their memory also when nobody holds them any more.
_in_flight: "set[Engine]" = set()


class Engine(Lifecycle):
    """The state of one communicator on one rank."""

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        check: bool,
        label: str,
        family: list[Waiter],
        deterministic: bool = False,
    ) -> None:
        waiter = Waiter(transport, label, family)
        super().__init__(transport, label, waiter, Choices(transport, ScratchPool()))
        family.append(waiter)
        self.timeout = timeout
        self.check = check
        self.deterministic = deterministic
        self.sequence = 0
        #: Raises where the transport cannot be used now, if there is such a place.
        self.guard: Callable[[str], None] | None = None
        #: The short way of calls on device arrays, once there is one:
        #: ``quick(known, x, out, stream)``.
        self.quick: Callable[[Key, Any, Any, Any], bool] | None = None
        #: What makes what serves device arrays, when the first of them comes.
        self.make_device: Callable[[], Callable[[], DeviceCalls] | None] | None = None
        # Tags come in sets, one for each segment under way. The last set is that of what belongs
        # to no numbered collective. Sequence numbers use the first half in turn, plans the rest.
        self._tag_sets = transport.tag_limit // WINDOW - 1
        self._numbered_sets = self._tag_sets // 2
        self._plans = 0
        #: What was measured on this machine, for groups that are split off.
        self.tuning: Tuning | None = None
        self._meeting_tags = range(self._tag_sets * WINDOW, (self._tag_sets + 1) * WINDOW)
        #: The first tag of the last set.
        self.meeting_tag = self._meeting_tags[0]

    def adopt(self, tuning: Tuning | None, overrides: Mapping[str, str]) -> None:
        """Go by what was measured for this layout, if it was; the same on all ranks."""
        self.tuning = tuning
        self.choices.overrides = overrides
        layout = tuple(len(host) for host in hosts_of(self.choices.groups))
        entry = None if tuning is None else tuning.entry(layout)
        if tuning is not None and entry is not None:
            self.choices.use(entry.tables, entry.model, entry.bandwidths, tuning.source)

    def known(self, key: Key | None) -> Call | None:
        """Return the call that `run` was given with this key, if it is remembered."""
        return None if key is None else self.choices.recent.get(key)

    def run(
        self,
        call: Call,
        algorithm: str,
        timeout: float | None,
        async_op: bool,
        key: Key | None = None,
        stream: Any = None,
    ) -> Any:
        """Start `call`; wait for it and return its result, or return a `Work`.

        Where a `key` of all its arguments is given, the call may be remembered under it. Device
        arrays go to `stream`.
        """
        if self.sequence >= self.boundary_at and not call.on_device:
            self.pass_boundary(call.operation or call.collective)
            call.choice = None
        choice = call.choice
        if choice is None and call.on_device:
            return self.on_device().run(call, algorithm, timeout, async_op, stream, key)
        if stream is not None:
            raise ArgumentTypeError("stream= is for device arrays; these are on the host")
        if choice is None:
            choice = self.choose(call, algorithm)
            if key is not None:
                call.choice = choice
                self.choices.recent.put(key, call)
        return self.start(call, choice, algorithm, timeout, async_op)

    def advance(self) -> None:
        """Make progress with works in flight, in a wait for something else."""
        if self._active and self.state == "open":
            self._advance_all()

    def on_device(self) -> "DeviceCalls":
        """Return what serves device arrays."""
        if self.device is None:
            make = None if self.make_device is None else self.make_device()
            assert make is not None
            self.device = make()
        return self.device

    def choose(self, call: Call, algorithm: str) -> Choice:
        """Return what runs `call`."""
        fixed = self.deterministic if call.deterministic is None else call.deterministic
        key = (
            call.collective, call.dtype, call.op, call.count, call.root, algorithm, fixed, call.wire
        )  # fmt: skip
        try:
            known = self.choices.known.get(key)
        except TypeError:  # not hashable
            raise ArgumentTypeError(f"algorithm is a name, not {algorithm!r}") from None
        return self.choices.choose(Request(*key)) if known is None else known

    def start(
        self,
        call: Call,
        choice: Choice,
        algorithm: str,
        timeout: float | None,
        async_op: bool,
        prepared: Callable[[], Steps] | None = None,
    ) -> Any:
        """Start `call` as `choice` says, by steps that were `prepared` for it if there are any.

        `prepared` is called when the communicator is known to be free.
        """
        allowed = self.timeout if timeout is None else as_timeout(timeout, self.timeout)
        operation = call.operation or call.collective
        if self.guard is not None:
            self.guard(operation)
        if self.state != "open" or self.owner is not None:
            self.enter(operation)
        self.owner = get_ident()
        try:
            sequence = self.sequence
            if self.check:
                if prepared is not None:
                    algorithm += ", planned"  # its messages have tags of their own
                self.compare(call, operation, algorithm, choice.algorithm, Deadline(allowed))
            test = None
            try:
                if call.prepare is not None:
                    call.prepare()
                self.sequence = sequence + 1
                if choice.native is not None:
                    test = choice.native(call.x, call.out, call.root, call.in_place)
                elif choice.shared is not None and not (async_op or self._active):
                    test = choice.shared.start(call)
                if test is None:
                    steps = choice.steps(call, self.tags()) if prepared is None else prepared()
                    deadline = Deadline(allowed)
                    if async_op:
                        return self._track(operation, sequence, None, steps, call.result, deadline)
                    self._drive(steps, deadline, operation, sequence, keep=call)
                    return call.result()
                if async_op or self._active:
                    deadline = Deadline(allowed)
                    once = iter((Tested(test),))
                    work = self._track(operation, sequence, None, once, call.result, deadline)
                    return work if async_op else self._finish(work, deadline)
                for _ in _QUICK_TESTS:
                    if test():
                        break
                else:
                    self.waiter.wait(test, Deadline(allowed), operation, sequence)
                # What call.result() does, spelled out for the shortest calls.
                if call.finish is None and call.target is not None:
                    return call.target.result()
                return call.result()
            except BaseException as error:
                raise self.fail(error, operation, sequence, keep=(call, test)) from error.__cause__
        finally:
            self.owner = None

    def tags(self) -> range:
        """Return the tags of the collective that has just been numbered."""
        first = (self.sequence - 1) % self._numbered_sets * WINDOW
        return range(first, first + WINDOW)

    def plan_tag(self) -> int | None:
        """Return a tag for the rounds of one plan and nothing else; None if there are no more.

        Plans first run in the same order on all ranks, so these are equal.
        """
        self._plans += 1
        tag = self._tag_sets * WINDOW - self._plans
        return tag if tag >= self._numbered_sets * WINDOW else None

    def _drive(
        self,
        steps: Iterator[Pending],
        deadline: Deadline,
        operation: str,
        sequence: int | None,
        keep: object = None,
    ) -> None:
        """Run `steps` to their end; works in flight make progress too."""
        try:
            if self._active:
                work = self._track(operation, sequence, None, steps, lambda: keep, deadline)
                self._finish(work, deadline)
                return
            for pending in steps:
                test = pending.test
                for _ in _QUICK_TESTS:
                    if test():
                        break
                else:
                    self.waiter.wait(test, deadline, operation, sequence)
        except BaseException as error:
            failure = self.fail(error, operation, sequence, keep=(keep, steps))
            raise failure from error.__cause__

    def message(
        self,
        operation: str,
        parts: list[tuple[int, Buffer, bool]],
        tag: int,
        result: Callable[[], Any],
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        """Start messages of the user's, each (peer, buffer, receive)."""
        if self.guard is not None:
            self.guard(operation)
        deadline = Deadline(as_timeout(timeout, self.timeout))
        self.enter(operation)
        try:
            started: list[Pending] = []
            try:
                for peer, buffer, receive in parts:
                    started.append(
                        self.transport.post_message(peer, buffer.octets, tag, receive=receive)
                    )
                peers = tuple({peer for peer, _, _ in parts})
                work = self._track(operation, None, peers, iter(started), result, deadline)
                return work if async_op else self._finish(work, deadline)
            except BaseException as error:
                # Also where an interrupt meets a message that is posted and not tracked yet.
                failure = self.fail(error, operation, None, keep=(parts, started))
                raise failure from error.__cause__
        finally:
            self.owner = None

    def meet(self, steps: Steps, operation: str, timeout: float | None) -> None:
        """Run steps of pycomm's own, such as meeting before a split, under a deadline."""
        if self.guard is not None:
            self.guard(operation)
        deadline = Deadline(as_timeout(timeout, self.timeout))
        broken = self.state == "broken" and not self.severed
        if broken:  # on its device; the transport still serves survivors who part from the others
            self.state = "open"
        try:
            self.enter(operation)
            self._drive(steps, deadline, operation, None)
        finally:
            self.owner = None
            if broken and self.state == "open":
                self.state = "broken"

    def compare(
        self, call: Call, operation: str, algorithm: str, chosen: str, deadline: Deadline
    ) -> None:
        """Compare the call with the other ranks' before anything is sent."""
        op = call.asked or call.op
        if self.deterministic if call.deterministic is None else call.deterministic:
            algorithm += ", deterministic"
        if call.codec is not None:
            algorithm += f", compression {name_of(call.codec)}"
        own = encode(
            (operation, call.dtype.name, str(op or ""), algorithm, chosen),
            (self.sequence, call.count, call.root),
        )
        records = np.empty((self.transport.size, own.size), np.uint8)
        gather = self.transport.native("all_gather", DTYPES["uint8"], None, own.size)

        def gathered() -> Steps:
            # A generator, so that also what fails at the start fails in _drive.
            if gather is not None:
                yield Tested(gather(as_buffer(own), as_buffer(records), -1, False))
            else:
                direct = self.choices.execution("all_gather", "direct", DTYPES["uint8"], own.size)
                yield from direct.steps(own, records.reshape(-1), self._meeting_tags)

        self._drive(gathered(), deadline, operation, self.sequence, keep=(own, records))
        if (records != own).any():
            raise MismatchError(differences(records), operation=operation, sequence=self.sequence)

    def _track(
        self,
        operation: str,
        sequence: int | None,
        peers: tuple[int, ...] | None,
        steps: Iterator[Pending],
        result: Callable[[], Any],
        deadline: Deadline,
    ) -> Work:
        """Return a work that has been started."""
        work = Work(self, operation, sequence, peers, steps, result, deadline)
        self._active.append(work)
        _in_flight.add(self)
        self._advance_all()
        return work

    def finish(self, work: Work, timeout: float | None) -> None:
        """Wait for `work` on behalf of `Work.wait`."""
        deadline = work.deadline if timeout is None else Deadline(as_timeout(timeout, 0.0))
        if self.state != "open":
            return
        self.enter(work.operation)
        try:
            self._finish(work, deadline)
        finally:
            self.owner = None

    def poll(self, work: Work) -> bool:
        """Make progress with all works on behalf of `Work.done`."""
        if self.state != "open" or self.owner not in (None, get_ident()):
            return work.finished
        self.owner = get_ident()
        try:
            self._advance_all()
        except CommError:
            pass  # the work carries the error, wait() raises it
        finally:
            self.owner = None
        return work.finished

    def _finish(self, work: Work, deadline: Deadline) -> Any:
        if not work.finished:

            def ready() -> bool:
                self._advance_all()
                return work.finished

            try:
                self.waiter.wait(ready, deadline, work.operation, work.sequence, work.peers)
            except BaseException as error:
                raise self.fail(error, work.operation, work.sequence) from error.__cause__
        return work.wait()

    def _advance_all(self) -> None:
        ended = False
        for work in self._active:
            try:
                ended |= work.advance()
            except BaseException as error:
                raise self.fail(error, work.operation, work.sequence) from error.__cause__
        if ended:
            self._active = [work for work in self._active if not work.finished]
            if not self._active:
                _in_flight.discard(self)

    def close(self) -> None:
        """Finish what was started, meet the other ranks, and free the transport."""
        if self.state == "broken":
            self.abort()
        if self.state != "open":
            return
        self.enter("close")
        deadline = Deadline(self.timeout)
        try:
            for work in list(self._active):
                self._finish(work, deadline)
            barrier = self.choices.execution("barrier", "dissemination", DTYPES["uint8"], 0)
            self._drive(barrier.steps(None, None, self._meeting_tags), deadline, "close", None)
            if self.device is not None:
                self.device.close(deadline.left)
            self.transport.close()
            self.state = "closed"
            self.choices.forget()
            self.waiter.forget()
        except BaseException as error:
            raise self.fail(error, "close", None) from error.__cause__
        finally:
            self.owner = None
