"""A handle on an operation that has been started."""

import asyncio
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from pycomm.deadline import Deadline
from pycomm.transports.base import Pending

__all__ = ["Driver", "Work"]

# How often an awaiting task looks: a few times as fast as the event loop turns, then now and then.
_QUICK_LOOKS = 200
_LOOK_EVERY = 0.0005  # seconds


class Driver(Protocol):
    """Whoever drives works: waits for one while it makes progress with the others."""

    def finish(self, work: "Work", timeout: float | None) -> None:
        """Wait until `work` is done, under a deadline."""

    def poll(self, work: "Work") -> bool:
        """Make progress with everything; return whether `work` is done."""


class Work:
    """An operation in flight, returned by calls with ``async_op=True``.

    It holds input, output and scratch until the operation is done, also when the handle itself is
    dropped. Progress is made inside pycomm calls: `done`, `wait`, ``await``, and any other
    operation that waits on the same communicator.

    ``await work`` gives the result, as `wait` does, without blocking the event loop.
    """

    def __init__(
        self,
        driver: Driver,
        operation: str,
        sequence: int | None,
        peers: tuple[int, ...] | None,
        steps: Iterator[Pending],
        result: Callable[[], Any],
        deadline: Deadline,
    ) -> None:
        self.operation = operation
        self.sequence = sequence
        self.peers = peers
        self.deadline = deadline
        self._driver = driver
        self._steps = steps
        self._pending: Pending | None = None
        self._result: Callable[[], Any] | None = result
        self._value: Any = None
        self._error: BaseException | None = None
        self._abandoned: object = None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the operation is done and return its result, the output array.

        Parameters
        ----------
        timeout : float, optional
            Seconds from now; by default what is left of the operation's own deadline, which runs
            from its start.

        Raises
        ------
        CommTimeoutError
            If the deadline passes; the communicator is broken then, as after any deadline. To look
            without that risk, use `done`.
        CommError
            If the operation failed.
        """
        if not self.finished:
            self._driver.finish(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Make progress, and return whether the operation has ended, well or badly."""
        return self.finished or self._driver.poll(self)

    def exception(self) -> BaseException | None:
        """Return what the operation failed with; None while it runs and after it succeeded."""
        return self._error

    def __await__(self) -> Generator[Any, None, Any]:
        looks = 0
        while not self.done():
            if self.deadline.passed:
                return self.wait()  # raises, after asking the other ranks where they are
            looks += 1
            pause = 0 if looks < _QUICK_LOOKS else _LOOK_EVERY
            yield from asyncio.sleep(pause).__await__()
        return self.wait()

    def __repr__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        state = "running" if not self.finished else "failed" if self._error else "done"
        return f"<pycomm.Work {self.operation}{number}: {state}>"

    @property
    def finished(self) -> bool:
        """Whether it has ended, as far as is known without looking."""
        return self._result is None

    def advance(self) -> bool:
        """Go as far as is possible without waiting; return whether the operation has ended."""
        if self._result is None:
            return True
        while self._pending is None or self._pending.test():
            self._pending = next(self._steps, None)
            if self._pending is None:
                self._value = self._result()
                self._result = None
                return True
        return False

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        if self._result is not None:
            self._error = error
            self._abandoned = self._result  # messages may still land in what it holds
            self._result = None
