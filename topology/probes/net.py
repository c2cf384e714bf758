"""The network interfaces that TCP goes through, as /sys/class/net shows them.

What has a device below it is an adapter; the rest are bridges, tunnels, pairs to containers and
their like. Bonds are the exception: no device, and still the interface that carries the traffic.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pycomm.topology.graph import Attributes, Host, LinkKind, Nic, State, Topology
from pycomm.topology.probes import sysfs
from pycomm.topology.samples import Findings, Sample

__all__ = ["probe_net"]

_UP_FLAG = 0x1
#: Faster than any port; a driver that does not know its speed may print 4294967295.
_MOST_MEGABITS = 10_000_000
#: Left out: rx_missed_errors and rx_dropped count what this host was too slow or not willing to
#: take, and collisions are of another age.
_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")
_HINTS = {
    "down": "no carrier is reported",
    "lowerlayerdown": "the interface it is built on is down",
    "notpresent": "its device is not there",
    "dormant": "it waits for something outside, such as to be let into the network",
    "testing": "it is being tested",
}


def probe_net(host: str, now: float, root: Path = Path("/sys")) -> Findings:
    """Return the network interfaces, each as a NIC, and how those that are real are.

    Parameters
    ----------
    host : str
        The name of this host.
    now : float
        The time of the samples, in seconds on a monotonic clock.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    Findings
        Without the loopback. An interface called like an InfiniBand adapter has `/ip` behind its
        name. Interfaces without a device are there as virtual ones, without samples, for they come
        and go with containers.
    """
    base = root / "class" / "net"
    names, notes = sysfs.folders(base)
    names = [name for name in names if name != "lo"]
    bonds = {name: found for name in names if (found := _slaves(base, name, names, notes))}
    adapters, _ = sysfs.folders(root / "class" / "infiniband")
    nics, samples = [], []
    for name in names:
        nic = _nic(base / name, host, bonds)
        if name in adapters:
            # Names that follow the PCI slot are the same for an adapter and the interface on it.
            nic = replace(nic, name=f"{name}/ip")
        nics.append(nic)
        if not nic.virtual:
            counters = _counters(base / name, notes)
            samples.append(
                Sample(nic.name, "net", now, nic.state, nic.reason, counters, nic.bandwidth)
            )
    return Findings(
        Topology(hosts=(Host(host),), nics=tuple(nics), notes=tuple(notes)), tuple(samples)
    )


def _slaves(base: Path, name: str, names: Collection[str], notes: list[str]) -> list[str]:
    """Return the interfaces a bond is made of; none if it is not one, or made of nothing."""
    said = sysfs.read(base / name / "bonding" / "slaves")
    if said.text is None:
        if not said.missing:
            notes.append(said.reason)
        return []
    found = said.text.split()
    if odd := [slave for slave in found if slave not in names]:
        notes.append(f"{said.path}: left out {sysfs.quoted(' '.join(odd))}: no such interface")
    return [slave for slave in found if slave in names]


def _nic(folder: Path, host: str, bonds: dict[str, list[str]]) -> Nic:
    """Return an interface."""
    device = folder.name
    below = folder / "device"
    real = sysfs.link_target(below) is not None or sysfs.is_folder(below)
    bus_id = None
    if real:
        paths = (sysfs.link_target(folder), sysfs.resolved(below))
        bus_id = next((found for path in paths if (found := sysfs.bus_id_in(path or ""))), None)
    state, reason = _judge(folder)
    if state is State.UP and (lost := _lost(folder.parent, bonds.get(device, ()))):
        state, reason = State.DEGRADED, lost
    megabits = sysfs.integer(sysfs.read(folder / "speed").text)
    known = megabits is not None and 0 < megabits <= _MOST_MEGABITS
    said: list[tuple[str, str]] = [("bond", bond) for bond in bonds if device in bonds[bond]]
    if device in bonds:
        said.append(("slaves", " ".join(bonds[device])))
    attributes: Attributes = tuple(said)
    return Nic(
        sysfs.free_name(device, host),
        host,
        device=device,
        bus_id=bus_id,
        fabric=LinkKind.TCP,
        bandwidth=megabits * 1e6 / 8 if megabits is not None and known else None,
        virtual=not real and device not in bonds,
        state=state,
        reason=reason,
        attributes=attributes,
    )


def _judge(folder: Path) -> tuple[State, str]:
    """Return the state of an interface, and why."""
    carrier = sysfs.read(folder / "carrier")
    flags = sysfs.integer(sysfs.read(folder / "flags").text)
    operstate = sysfs.read(folder / "operstate")
    word = (operstate.text or "").casefold()
    if flags is not None and flags >= 0 and not flags & _UP_FLAG:
        return State.DOWN, f"administratively down: {folder}/flags says {flags:#x}"
    if carrier.text == "0":
        return State.DOWN, f"no carrier: the cable or the peer is gone ({carrier.reason})"
    if carrier.error.startswith("EINVAL") and flags is None and word == "down":
        # The kernel refuses to tell the carrier of an interface that nobody has set up.
        return State.DOWN, f"administratively down: {carrier.reason}, {operstate.reason}"
    if carrier.text == "1":
        # Drivers that do not track their state leave it unknown, and are up all the same.
        if word in ("up", "unknown", ""):
            return State.UP, ""
        if word == "down":
            return State.UNKNOWN, f"{carrier.reason}, but {operstate.reason}"
    elif word == "up" and not carrier.error.startswith("EINVAL"):
        return State.UP, ""
    if word in _HINTS:
        return State.DOWN, f"{operstate.reason}: {_HINTS[word]}"
    return State.UNKNOWN, f"{carrier.reason}; {operstate.reason}"


def _lost(base: Path, slaves: Collection[str]) -> str:
    """Return which interfaces of a bond are down, and why, or nothing."""
    judged = {slave: _judge(base / slave) for slave in slaves}
    down = {slave: why for slave, (state, why) in judged.items() if state is State.DOWN}
    if not down:
        return ""
    each = "; ".join(f"{slave}: {why}" for slave, why in down.items())
    return f"{len(down)} of its {len(slaves)} interfaces cannot carry anything: {each}"


def _counters(folder: Path, notes: list[str]) -> tuple[tuple[str, int], ...]:
    """Return the errors of an interface, and how often its carrier has come or gone."""
    errors, error_notes = sysfs.read_counters((folder / "statistics",), _ERRORS)
    flaps, flap_notes = sysfs.read_counters((folder,), ("carrier_changes",))
    notes += error_notes + flap_notes
    return errors + flaps
