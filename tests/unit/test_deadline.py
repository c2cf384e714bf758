"""Deadlines and what may be given as a timeout."""

import math
from typing import Any

import numpy as np
import pytest

from pycomm import ArgumentTypeError, ArgumentValueError
from pycomm.deadline import Deadline, as_timeout


def test_timeouts() -> None:
    assert as_timeout(None, 7.0) == 7.0
    assert as_timeout(2, 7.0) == 2.0
    assert as_timeout(np.float32(0.5), 7.0) == 0.5
    assert as_timeout(np.int64(3), 7.0) == 3.0


@pytest.mark.parametrize("timeout", [0, -1, -0.5, math.inf, math.nan, 10**400])
def test_values_without_a_deadline(timeout: float) -> None:
    with pytest.raises(ArgumentValueError):
        as_timeout(timeout, 1.0)


@pytest.mark.parametrize("timeout", ["3", True, [1]])
def test_what_is_no_number(timeout: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        as_timeout(timeout, 1.0)


def test_a_deadline_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    deadline = Deadline(5.0)
    assert not deadline.passed
    now = 104.0
    assert not deadline.passed
    now = 105.0
    assert deadline.passed
