"""What a communicator has on its device, from its first use to its end."""

from typing import NamedTuple

from pycomm.deadline import Deadline
from pycomm.device.choice import DeviceChoices
from pycomm.device.meeting import Gather, meet
from pycomm.device.quick import Failing, Launcher, Quick, launcher
from pycomm.device.routes import Route
from pycomm.device.together import check_outside, close_group
from pycomm.device.watchdog import Watch
from pycomm.device.works import Works
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.devices import current_device, device_count, get_device, restore
from pycomm.dtypes import DTYPES
from pycomm.engine import Engine
from pycomm.errors import ArgumentValueError, CommError, describe
from pycomm.streams import Stream
from pycomm.transports.nccl import NCCLComm

__all__ = ["Equipment"]

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


class Equipment(Failing):
    """What a communicator has on its device.

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
        self.comm = comm
        if not engine.check:  # which compares each call
            self.launcher, engine.quick = launch, quick

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
            if self._wanted not in (None, ordinal):
                raise ArgumentValueError(
                    f"the array is on device {ordinal}, and device={self._wanted} was asked for"
                )
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

    def _own_stream(self) -> int:
        comm = self.comm
        assert comm is not None
        if self._own is None:
            self._own = Stream(comm.device)
        return self._own.handle

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

    def interrupted(self, error: BaseException, operation: str, context: int | None = None) -> None:
        """Give up after Ctrl-C, say: what NCCL has been given, other ranks cannot know."""
        if context is not None:
            restore(context)
        self.fail(CommError(f"{operation} was interrupted by {describe(error)}"), operation)
        self._engine.waiter.leave(error)

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
