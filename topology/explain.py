"""Why a snapshot is what it is, in sentences."""

from typing import TYPE_CHECKING

from pycomm.topology.snapshot import Groups, Snapshot

if TYPE_CHECKING:
    from pycomm.topology.graph import Gpu, Nic

__all__ = ["explain", "format_groups"]


def explain(snapshot: Snapshot) -> str:
    """Return the reason of every decision of a snapshot, a sentence a line."""
    lines = [f"epoch {snapshot.epoch}, hash {snapshot.hash}"]
    lines += [
        f"{one.name}: {format_groups(one.groups)}: {one.reason}" for one in snapshot.decisions
    ]
    lines.append(f"order of hosts: {format_groups(snapshot.order)}")
    lines.append(f"roads: {snapshot.roads_reason}")
    topology = snapshot.topology
    devices: list[Gpu | Nic] = [*topology.gpus]
    devices += [nic for nic in topology.nics if not nic.virtual]
    for device in devices:
        reason = f": {device.reason}" if device.reason else ""
        lines.append(f"{device.name} is {device.state}{reason}")
    lines += [
        f"link {link.a} - {link.b} is {link.state}: {link.reason}"
        for link in topology.links
        if link.reason
    ]
    lines += [f"unknown: {one.what} of {one.name}: {one.reason}" for one in topology.unknown]
    lines += [f"note: {note}" for note in topology.notes]
    return "\n".join(lines)


def format_groups(groups: Groups | None) -> str:
    """Return groups of ranks as text: ``{0, 1} {2, 3}``."""
    if groups is None:
        return "unknown"
    return " ".join("{" + ", ".join(map(str, group)) + "}" for group in groups) or "none"
