"""Who this host is: what ranks compare to find out which of them share one."""

import hashlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from pycomm.topology.probes import sysfs

__all__ = ["Identity", "identity"]

#: What ranks must share to reach each other as on one host: addresses, shared memory, processes.
_NAMESPACES = ("net", "ipc", "pid")
_BOOT_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a host is.

    Attributes
    ----------
    key : str
        Equal for two processes if they run under one kernel in the same namespaces.
    name : str
        The name of the machine. Two machines, or two containers, may have the same.
    reason : str
        What makes the key less certain than that; empty if nothing does.
    """

    key: str
    name: str
    reason: str = ""


def identity(root: Path = Path("/")) -> Identity:
    """Return who this host is.

    Containers on one machine differ by their namespaces, machines of one name by the id that the
    kernel draws when it boots.

    Parameters
    ----------
    root : Path
        Where `proc` is.
    """
    try:
        name = socket.gethostname() or "localhost"
    except OSError:
        name = "localhost"
    reasons = []
    boot = sysfs.read(root / "proc" / "sys" / "kernel" / "random" / "boot_id")
    machine = f"boot {(boot.text or '').lower()}"
    if not _BOOT_ID.fullmatch(boot.text or "") or set(boot.text or "") <= {"0", "-"}:
        machine = f"name {name}"
        reasons.append(f"{boot.reason}: this host is told from others by its name only")
    spaces = []
    for space in _NAMESPACES:
        path = root / "proc" / "self" / "ns" / space
        target = sysfs.link_target(path)
        spaces.append(target or f"{space}:?")
        if target is None:
            reasons.append(f"{path} cannot be read: containers may not be told apart")
    said = "\n".join((machine, *spaces))
    key = hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return Identity(key, name, "; ".join(reasons))
