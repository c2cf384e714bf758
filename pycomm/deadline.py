"""Deadlines: a moment on the monotonic clock after which a wait gives up."""

import math
import time
from typing import Any

import numpy as np

from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["DEFAULT", "Deadline", "as_timeout"]

#: Seconds an operation may take where nobody says otherwise.
DEFAULT = 300.0


def as_timeout(timeout: Any, default: float) -> float:
    """Return `timeout` in seconds, `default` for None.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is not a number, not positive, or not finite: every wait has a deadline.
    """
    if timeout is None:
        return default
    known = int | float | np.integer | np.floating
    if isinstance(timeout, bool) or not isinstance(timeout, known):
        raise ArgumentTypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf
    if not seconds > 0 or math.isinf(seconds):
        raise ArgumentValueError(f"timeout must be positive and finite, not {seconds}")
    return seconds


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
    def left(self) -> float:
        """Seconds until then, 0 after it."""
        return max(0.0, self.moment - time.monotonic())
