"""Whether this host has a network beyond Ethernet."""

from collections.abc import Iterable
from pathlib import Path

__all__ = ["has_fabric"]

_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")


def has_fabric(folders: Iterable[str] = _FABRICS) -> bool:
    """Return whether this host has a high-speed network that MPI should look for."""
    return any(Path(folder).is_dir() and any(Path(folder).iterdir()) for folder in folders)
