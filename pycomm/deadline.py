"""Deadlines: a moment on the monotonic clock after which a wait gives up."""

import math
import time
from typing import Any

from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Deadline", "as_timeout"]


def as_timeout(timeout: Any, default: float) -> float:
    """Return `timeout` in seconds, `default` for None.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is not a number, not positive, or not finite: every wait has a deadline.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentTypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0 or math.isinf(timeout):
        raise ArgumentValueError(f"timeout must be positive and finite, not {timeout}")
    return float(timeout)


class Deadline:
    """A deadline `timeout` seconds from now."""

    __slots__ = ("moment", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.moment = time.monotonic() + timeout

    @property
    def passed(self) -> bool:
        """Whether the deadline lies in the past."""
        return time.monotonic() >= self.moment

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.moment - time.monotonic())
