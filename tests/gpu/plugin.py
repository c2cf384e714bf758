"""Lets the tests of tests/device run on what is there: ``pytest --noconftest -p gpu.plugin``.

Without the conftest of that folder nothing loads the doubles. A test that turns one of their knobs
is skipped, unless what the knob does is only to make things slower.
"""

import faulthandler
import signal
from typing import Any

import pytest

_HARMLESS = {"double_set_delay_us": 0}


class _NoDouble:
    """In place of a double: has no knobs."""

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return lambda *_: _HARMLESS[name]
        pytest.skip(f"needs a double: {name}")


@pytest.fixture
def libcuda() -> _NoDouble:
    """The driver, which is no double."""
    return _NoDouble()


@pytest.fixture
def libnccl() -> _NoDouble:
    """NCCL, which is no double."""
    return _NoDouble()


def pytest_configure(config: pytest.Config) -> None:
    """Let a hang be seen."""
    config.addinivalue_line("markers", "mpi: of several ranks")
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only the doubles can show."""
    reasons = {
        "test_events": "needs a device that is slow when it is told to be",
        "test_devices_are_told_by_the_driver": "needs 4 devices, as the doubles have",
    }
    for item in items:
        name = item.name.partition("[")[0]
        if name in reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[name]))
