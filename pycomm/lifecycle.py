"""The life of a communicator: open, broken, closed, aborted or lost, and what that means."""

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from pycomm.call import Call
from pycomm.choice import Choices
from pycomm.errors import CommError, CommTimeoutError, PeerError, describe
from pycomm.recent import Key
from pycomm.transports.base import Transport
from pycomm.waiting import Waiter

if TYPE_CHECKING:
    from pycomm.work import Work

__all__ = ["DeviceCalls", "Lifecycle"]

# What was in flight when a communicator broke. A message may still land in these arrays, so they
# live as long as the process.
_abandoned: list[object] = []


class DeviceCalls(Protocol):
    """What serves device arrays: `pycomm.device.side.DeviceSide`, which stands above this room."""

    @property
    def saturated(self) -> int:
        """How many values were too large for a codec."""

    def run(
        self,
        call: Call,
        algorithm: str,
        timeout: float | None,
        async_op: bool,
        stream: Any,
        known: Key | None,
    ) -> Any:
        """Give a call to a stream."""

    def plan(self, call: Call, algorithm: str, timeout: float | None, stream: Any) -> Any:
        """Return a plan of a call."""

    def message(
        self,
        operation: str,
        parts: Sequence[tuple[int, Any, bool]],
        result: Callable[[], Any],
        timeout: float | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        """Give messages to a stream."""

    def close(self, timeout: float) -> None:
        """Wait for what is under way, and free everything."""

    def abort(self) -> None:
        """Give everything up."""


class Lifecycle:
    """The state of one communicator on one rank.

    Attributes
    ----------
    state : str
        ``"open"``, ``"broken"``, ``"closed"``, ``"aborted"`` or ``"lost"``.
    severed : bool
        Of a broken one: whether its transport was given up, and not only what goes on devices.
    owner : int or None
        The thread that is in a call. Not a lock: a KeyboardInterrupt right after it was taken would
        leave it taken for good.
    device : DeviceCalls or None
        What serves device arrays, once there is one.
    """

    def __init__(self, transport: Transport, label: str, waiter: Waiter, choices: Choices) -> None:
        self.transport = transport
        self.label = label
        self.waiter = waiter
        self.choices = choices
        self.state = "open"
        self.severed = False
        self.owner: int | None = None
        self.device: DeviceCalls | None = None
        self._reason = ""
        self._active: list[Work] = []
        #: The number of the call before which `boundary` is called, the same on all ranks.
        self.boundary_at = sys.maxsize
        #: Whether somebody looks after this communicator from a seat.
        self.seated = False
        #: Where all ranks are between the same two calls: may change what calls are made of.
        self.boundary: Callable[[], None] | None = None

    def enter(self, operation: str) -> None:
        """Take the communicator for one call of this thread; the caller clears the owner."""
        if self.owner not in (None, get_ident()):
            raise CommError(
                f"{operation}: {self.label} is in use by another thread; a communicator serves "
                "one thread at a time, use split() for a second one",
                operation=operation,
                rank=self.transport.rank,
            )
        if self.state != "open":
            raise CommError(
                f"{operation}: {self.label} is {self.state}{self._reason}",
                operation=operation,
                rank=self.transport.rank,
            )
        self.owner = get_ident()

    def pass_boundary(self, operation: str) -> None:
        """Do what all ranks do before the call that is next."""
        self.enter(operation)
        self.owner = None  # what is done there may look after works in flight
        if self.boundary is not None:
            self.boundary()

    @property
    def busy(self) -> bool:
        """Whether works are in flight."""
        return bool(self._active)

    def fail(
        self,
        error: BaseException,
        operation: str,
        sequence: int | None,
        keep: object = None,
    ) -> BaseException:
        """Mark the communicator broken: what is in flight can neither be finished nor recalled.

        Returns
        -------
        BaseException
            What to raise: `error` in pycomm's terms.
        """
        error = self.transport.explain(error)
        if self.state != "open":
            return error
        rank = self.transport.rank
        if isinstance(error, CommError) and error.operation is None:
            error.operation, error.sequence, error.rank = operation, sequence, rank
        place = operation if sequence is None else f"{operation} #{sequence}"
        self.state = "broken"
        self.severed = True
        self._reason = f" since {place} ended with {type(error).__name__}; only abort() is possible"
        self._abandon(error, keep)
        self.choices.forget()  # remembered calls hold the caller's arrays
        if not isinstance(error, CommError):
            self.waiter.leave(error)  # Ctrl-C, for instance
        elif not isinstance(error, CommTimeoutError | PeerError):
            # Timeouts have told the peers already.
            self.waiter.give_up(f"{place}: {describe(error)}")
        self.transport.abort()
        return error

    def break_off(self, error: CommError, operation: str) -> None:
        """Mark the communicator broken by what went wrong on devices; the transport lives on."""
        if self.state == "open":
            self.state = "broken"
            self._reason = f" since {operation} ended with {describe(error)[:80]}"
            self._reason += "; only abort() and shrink() are possible"
            self.severed = False

    def leave(self, reason: BaseException) -> None:
        """Tell the peers that this rank leaves because of `reason`, then abort."""
        if self.state == "open":
            self.waiter.leave(reason)
        self.abort()

    def lose(self, why: str) -> None:
        """Refuse all further use because `why`."""
        self.state, self._reason = "lost", f": it {why}"

    def abort(self) -> None:
        """Give up at once, without talking to anybody."""
        if self.state in ("closed", "aborted", "lost"):
            return
        if self._active:
            error = CommError(f"{self.label} was aborted", rank=self.transport.rank)
            self._abandon(error, None)
        self.state = "aborted"
        self._reason = ""
        self.choices.forget()
        if self.device is not None:
            self.device.abort()
        self.transport.abort()
        self.waiter.forget()

    def _abandon(self, error: BaseException, keep: object) -> None:
        """End all works with `error`, and keep for good what messages may still land in."""
        _abandoned.append((self, self._active, keep))
        for work in self._active:
            work.fail(error)
        self._active = []
