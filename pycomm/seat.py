"""What looks after a communicator from outside, such as a topology manager, has a seat in it."""

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pycomm.algorithms.cost import Model
from pycomm.algorithms.hierarchical import Groups
from pycomm.buffers import Buffer
from pycomm.communicator import Communicator
from pycomm.deadline import Deadline
from pycomm.devices import current_device, device_count, get_device, usable
from pycomm.dtypes import DTYPES
from pycomm.errors import ArgumentValueError, CommError, CommTimeoutError
from pycomm.fabric import has_fabric
from pycomm.meeting import meeting
from pycomm.transports.base import Array, Transport, await_transport

if TYPE_CHECKING:
    from pycomm.engine import Engine

__all__ = ["Seat"]

# With messages that may still land in their memory: that lives as long as the process.
_given_up: list["Seat"] = []

_NAP = 2e-4  # seconds that a patient wait sleeps between looks


class Seat:
    """A place beside a communicator; collective over its ranks.

    Attributes
    ----------
    comm : Communicator
        A communicator of the same ranks, for the one who sits here. While a call on it waits, works
        in flight on the other one go on.
    reserve : Transport
        A road of the same ranks on which nothing has been sent, for when all else has failed.
    """

    def __init__(self, comm: Communicator) -> None:
        self._engine: Engine = comm._engine
        if self._engine.seated:
            label = self._engine.label
            raise ArgumentValueError(f"{label} has a topology manager already: close it first")
        own = comm.split(0, comm.rank)
        assert own is not None
        self.comm = own
        self._own: Engine = own._engine
        self._own.waiter.beside = self._engine.advance
        self._wanted = comm._wanted
        # What has been started last: it holds the memory that is sent from, or into.
        self._sending: Callable[[], bool] | None = None
        pending = self._own.transport.split(range(comm.size))
        self.reserve: Transport = await_transport(pending, Deadline(self.timeout), "split")
        self._engine.seated = True

    @property
    def timeout(self) -> float:
        """Seconds an operation may take."""
        return self._engine.timeout

    @property
    def transport(self) -> Transport:
        """The road of `comm`."""
        return self._own.transport

    @property
    def ethernet(self) -> bool:
        """Whether this host has no better network than Ethernet."""
        return not has_fabric()

    @property
    def label(self) -> str:
        """The name of the communicator, for messages."""
        return self._engine.label

    @property
    def sequence(self) -> int:
        """How many numbered calls there were, the same on all ranks between two of them."""
        return self._engine.sequence

    @property
    def busy(self) -> bool:
        """Whether works are in flight."""
        return self._engine.busy

    @property
    def open(self) -> bool:
        """Whether the communicator and the own one can be used."""
        return self._engine.state == self._own.state == "open"

    @property
    def lost(self) -> bool:
        """Whether the communicator or the own one was given up, and not closed."""
        states = {self._engine.state, self._own.state}
        return bool(states & {"broken", "aborted"}) and "closed" not in states

    @property
    def alive(self) -> bool:
        """Whether anybody may still want to know anything."""
        return self._engine.state in ("open", "broken")

    def device_bus_id(self) -> str | None:
        """Return the PCI bus id of the device that this rank works on, from the driver.

        None if it has none, or if there is no driver.
        """
        try:
            if not usable():
                return None
            ordinal = current_device() if self._wanted is None else self._wanted
            if ordinal is None:
                ordinal = self.comm.local_rank % max(device_count(), 1)
            return get_device(ordinal).pci
        except CommError:
            return None

    # ----------------------------------------------------------------------------- boundaries

    def at_boundary(self, function: Callable[[], None], sequence: int) -> None:
        """Have `function` called before the numbered call `sequence`, which is equal on all ranks.

        What it raises breaks the communicator.
        """

        def guarded() -> None:
            number = self._engine.sequence
            try:
                function()
            except BaseException as error:
                cause = error.__cause__
                raise self._engine.fail(error, "topology check-in", number) from cause

        self._engine.boundary = guarded
        self._engine.boundary_at = sequence

    def leave(self) -> None:
        """Have nothing called any more."""
        self._engine.boundary = None
        self._engine.boundary_at = sys.maxsize
        self._engine.seated = False

    def close(self) -> None:
        """Close the own communicator and road, or abort them if anything has broken."""
        if self.open:
            self.comm.close()
            self.reserve.close()
        else:
            self.abort()

    def abort(self) -> None:
        """Give up the own communicator and road."""
        _given_up.append(self)
        self.comm.abort()
        self.reserve.abort()

    def follow(
        self, groups: Groups, roads: tuple[float, ...] | None, model: Model | None, source: str
    ) -> None:
        """Have the choices of the communicator follow a topology; the same on all ranks."""
        self._engine.choices.follow(groups, roads, model, source)

    @property
    def roads(self) -> tuple[float, ...] | None:
        """How fast the way of each rank to other hosts is, as choices have it."""
        return self._engine.choices.bandwidths

    @property
    def model(self) -> Model:
        """What predictions go by."""
        return self._engine.choices.model

    # ------------------------------------------------------------------------------- on the road

    def start_broadcast(self, numbers: Array) -> Callable[[], bool]:
        """Start to send whole numbers of rank 0 to all; return the test whether that is done.

        By a shorter way than a call, which is what a program waits for when its caches are cold.
        The array must be left alone until then.
        """
        transport, row = self.transport, DTYPES["int64"]
        native = transport.native("broadcast", row, None, numbers.size)
        if native is not None:
            self._sending = native(Buffer(numbers, row, numbers), None, 0, True)
            return self._sending
        octets = numbers.view(np.uint8)
        tag = self._own.meeting_tag
        peers = range(1, self.comm.size) if self.comm.rank == 0 else ()
        sources = () if self.comm.rank == 0 else (0,)
        posted = transport.post([(p, octets) for p in peers], [(p, octets) for p in sources], tag)
        self._sending = posted.test
        return self._sending

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        *,
        patient: bool = False,
    ) -> None:
        """Wait on the road of `comm`, asleep if `patient`; an error breaks it."""
        if patient:
            looked = ready

            def ready() -> bool:
                done = looked()
                if not done:
                    time.sleep(_NAP)
                return done

        try:
            self._own.waiter.wait(ready, deadline, operation)
        except BaseException as error:
            raise self._own.fail(error, operation, None) from error.__cause__

    def idle_wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait on the reserve until `ready`, or the deadline passes; return which."""
        spins = 0
        while not ready():
            if deadline.passed:
                return False
            spins += 1
            self.reserve.idle(spins)
            if spins % 100 == 0:
                self._own.waiter.answer("looking for survivors")
        return True

    def gone(self) -> set[int]:
        """Return the ranks that have said that they leave, this one among them if it has."""
        waiters = self._engine.waiter, self._own.waiter
        own = {self.comm.rank} if any(waiter.has_left for waiter in waiters) else set()
        return own.union(*(waiter.left for waiter in waiters))

    def survivors(self, members: Sequence[int], timeout: float, tag: int) -> Communicator:
        """Return a communicator of the ranks that are left; collective over those.

        Raises
        ------
        CommTimeoutError
            If not all of them come; nobody gets one then.
        """
        deadline = Deadline(timeout)
        span = np.full(2, zlib.crc32(repr(tuple(members)).encode()), np.uint64)
        # Twice, as before every group: MPI makes it only when all have met, and nobody gave up.
        for _ in range(2):
            for pending in meeting(self.reserve, members, tag, span):
                if not self.idle_wait(pending.test, deadline):
                    raise CommTimeoutError(
                        f"group: not all of the ranks {list(members)} that are left have come "
                        f"within {timeout:g} s",
                        operation="group",
                        rank=self.comm.rank,
                    )
        if span[0] != span[1]:
            raise CommError(
                "group: the ranks that are left do not agree on who is", rank=self.comm.rank
            )
        transport = await_transport(self.reserve.split(members), deadline, "group")
        return self.comm.over_transport(transport)
