"""The scope of `Communicator.group`."""

from typing import Protocol

from pycomm.errors import CommError

__all__ = ["Grouping"]


class Grouper(Protocol):
    """What opens and closes groups: `pycomm.device.side.DeviceSide`."""

    def begin_group(self) -> None:
        """Open a group."""

    def end_group(self) -> None:
        """Close it: its work goes to its streams."""


class Grouping:
    """The scope of `Communicator.group`."""

    def __init__(self, side: Grouper) -> None:
        self._side = side

    def __enter__(self) -> None:
        self._side.begin_group()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._side.end_group()
        except CommError:
            if error is None:
                raise
