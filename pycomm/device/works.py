"""Works of device calls: what waits on the host until a stream has come so far."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pycomm.deadline import Deadline, as_timeout
from pycomm.errors import CommError, NCCLTimeoutError
from pycomm.streams import Event
from pycomm.transports.base import Tested
from pycomm.transports.nccl import NCCLComm
from pycomm.work import Work

__all__ = ["Works"]

_QUICK_LOOKS = 200
_PAUSE = 5e-5  # seconds between looks at an event


class Works:
    """The works of one communicator, as their driver.

    Parameters
    ----------
    comm : NCCLComm
        The ranks.
    label : str
        What the communicator is called.
    failed : callable
        Gets the error, and the operation, of a work that cannot end well.
    """

    def __init__(
        self, comm: NCCLComm, label: str, failed: Callable[[CommError, str], CommError]
    ) -> None:
        self._comm, self._label, self._failed = comm, label, failed
        # They hold what is in flight, also if nobody holds them any more.
        self._flying: deque[Work] = deque()

    def start(
        self,
        handle: int,
        operation: str,
        sequence: int | None,
        timeout: float,
        result: Callable[[], Any],
    ) -> Work:
        """Return a work that ends when the stream has done what it has been given so far."""
        event = Event(self._comm.device)
        event.record(handle)

        def ended() -> bool:
            if not event.done():
                return False
            error = self._comm.look()
            if error is not None:  # the stream went on, but without the result
                raise error
            return True

        steps = iter((Tested(ended),))
        work = Work(self, operation, sequence, None, steps, result, Deadline(timeout))
        flying = self._flying
        while flying and self._ended(flying[0]):
            flying.popleft()
        flying.append(work)
        return work

    @staticmethod
    def _ended(work: Work) -> bool:
        """Return whether a work has ended, well or badly."""
        try:
            return work.advance()
        except CommError as error:
            work.fail(error)
            return True

    def finish(self, work: Work, timeout: float | None) -> None:
        """Wait on the host for a work."""
        comm = self._comm
        deadline = work.deadline if timeout is None else Deadline(as_timeout(timeout, 0.0))
        looks = 0
        while not self._ended(work):
            error = comm.error
            if error is None and deadline.passed:
                error = self._late(work, deadline)
            if error is not None:
                work.fail(error)
                break
            looks += 1
            time.sleep(0 if looks < _QUICK_LOOKS else _PAUSE)
        found = work.exception()
        if isinstance(found, CommError):
            self.fail(found)
            self._failed(found, work.operation)

    def poll(self, work: Work) -> bool:
        """Return whether a work has ended."""
        error = self._comm.look()
        if error is not None:
            work.fail(error)
        return self._ended(work)

    def fail(self, error: CommError) -> None:
        """End all of them with an error."""
        while self._flying:
            self._flying.popleft().fail(error)

    def close(self, deadline: Deadline) -> None:
        """Wait for all of them."""
        while self._flying:
            self.finish(self._flying[0], max(deadline.left, 1e-3))
            self._flying.popleft()

    def _late(self, work: Work, deadline: Deadline) -> CommError:
        comm = self._comm
        error = NCCLTimeoutError(
            f"{work.operation} #{work.sequence} on rank {comm.rank} of {comm.size} "
            f"({self._label}): no end on its stream within {deadline.timeout:g} s. The "
            "communicator is broken now: call abort() or shrink()",
            operation=work.operation,
            sequence=work.sequence,
            rank=comm.rank,
        )
        error.timeout = deadline.timeout
        comm.fail(error)
        return error
