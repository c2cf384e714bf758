"""Where devices sit: NUMA nodes, PCI switches, and the width and speed of their links.

A switch is two bridges or more to /sys, one up and one down for each device. Here it is one, named
by the upper bridge, because that is what distances are counted in. Ports of the CPU itself are no
switches: what meets only there meets at the NUMA node.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pycomm.topology.graph import Gpu, Host, Nic, NumaNode, State, Switch, Topology, Unknown
from pycomm.topology.probes import sysfs
from pycomm.topology.samples import Sample

__all__ = ["PciTree", "Place", "place", "probe_pci", "samples_of"]

_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})
_NODE = re.compile(r"node(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits.

    Attributes
    ----------
    parent : str or None
        The switch above it, or else its NUMA node; None if neither is known.
    numa : tuple of str
        Its NUMA node; none if unknown.
    reason : str
        Why its NUMA node is unknown.
    """

    parent: str | None
    numa: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PciTree:
    """The places of some devices of a host.

    Attributes
    ----------
    numa_nodes : tuple of NumaNode
        Those with CPUs: others hold memory only, of GPUs for instance, and nothing can run there.
    places : dict
        By bus id, in the spelling of `pycomm.topology.probes.sysfs.bus_key`.
    samples : tuple of Sample
        The links of the devices; their subjects are bus ids too. `samples_of` names them.
    """

    host: str
    numa_nodes: tuple[NumaNode, ...] = ()
    switches: tuple[Switch, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()


def probe_pci(bus_ids: Iterable[str], host: str, now: float, root: Path = Path("/sys")) -> PciTree:
    """Return where devices sit, and how their links to there are.

    Parameters
    ----------
    bus_ids : iterable of str
        Of the devices; in any case, with domains of any length.
    host : str
        The name of this host.
    now : float
        The time of the samples, in seconds on a monotonic clock.
    root : Path
        Where sysfs is mounted.
    """
    notes: list[str] = []
    nodes = _numa_nodes(host, root, notes)
    switches: dict[str, Switch] = {}
    places: dict[str, Place] = {}
    samples = []
    seen: set[str] = set()
    for bus_id in bus_ids:
        key = sysfs.bus_key(bus_id)
        if key is None:
            notes.append(f"{sysfs.quoted(bus_id)} is no PCI bus id, left out")
        elif key not in seen:
            seen.add(key)
            folder = root / "bus" / "pci" / "devices" / key
            target = sysfs.link_target(folder)
            bridges = _bridges(target or "")
            if target is None:
                notes.append(f"{folder} is not there, or no link: the place of {key} is unknown")
            else:
                places[key] = _place(folder, bridges, host, nodes, switches)
            above = folder.parent / bridges[-1] if bridges else None
            samples.append(_link(folder, above, key, now, notes))
    return PciTree(
        host, tuple(nodes.values()), tuple(switches.values()), places, tuple(samples), tuple(notes)
    )


def _numa_nodes(host: str, root: Path, notes: list[str]) -> dict[int, NumaNode]:
    """Return the NUMA nodes that have CPUs, or may have, by their numbers."""
    base = root / "devices" / "system" / "node"
    names, unread = sysfs.folders(base)
    notes += unread
    nodes: dict[int, NumaNode] = {}
    owner: dict[int, str] = {}
    for name in names:
        number = _NODE.fullmatch(name)
        if not number:
            continue
        said = sysfs.read(base / name / "cpulist")
        cpus = sysfs.cpu_list(said.text)
        if cpus is None:
            notes.append(f"{said.reason}: the CPUs of {name} are unknown")
        if cpus == ():
            continue
        index = int(number[1])
        nodes[index] = NumaNode(sysfs.free_name(f"numa{index}", host), host, index, cpus)
        shared = [cpu for cpu in cpus or () if owner.setdefault(cpu, name) != name]
        if shared:
            notes.append(f"{said.path}: CPU {shared[0]} is on {owner[shared[0]]} as well")
    return nodes


def _bridges(target: str) -> list[str]:
    """Return the bridges above a device, from the CPU's own port downwards.

    A controller in between, such as one for disks, starts a tree of its own, with another root.
    """
    parts = target.split("/")[:-1]
    roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
    below = parts[roots[-1] + 1 :] if roots else parts
    return [key for part in below if (key := sysfs.bus_key(part))]


def _place(
    folder: Path,
    bridges: list[str],
    host: str,
    nodes: dict[int, NumaNode],
    switches: dict[str, Switch],
) -> Place:
    """Return the place of a device, and add the switches above it."""
    said = sysfs.read(folder / "numa_node")
    index = sysfs.integer(said.text)
    node, reason = nodes.get(-1 if index is None else index), ""
    if node is None and len(nodes) == 1:
        # Everything is near the one node to run on, be the answer -1, or a node of memory only.
        (node,) = nodes.values()
    elif node is None:
        reason = said.reason if said.text is None else f"{said.reason}: no NUMA node with CPUs"
    parent = node.name if node else None
    # The first is the port of the CPU, the second the upper side of a switch, the third a lower
    # side, and so on in pairs.
    for bus_id in bridges[1::2]:
        name = sysfs.free_name(bus_id, host)
        if name not in switches or switches[name].parent is None:
            switches[name] = Switch(name, host, "pci", bus_id, parent)
        parent = name
    return Place(parent, (node.name,) if node else (), reason)


def _link(folder: Path, above: Path | None, key: str, now: float, notes: list[str]) -> Sample:
    """Return how the link of a device is: degraded if lanes are missing.

    A lower speed is only noted: idle devices slow their links down.
    """
    width = sysfs.read(folder / "current_link_width")
    lanes, most = _lanes(width.text), _lanes(sysfs.read(folder / "max_link_width").text)
    slot = _lanes(sysfs.read(above / "max_link_width").text) if above else None
    speed = sysfs.read(folder / "current_link_speed")
    now_at, at_most = (
        sysfs.pci_speed(text) for text in (speed.text, sysfs.read(folder / "max_link_speed").text)
    )
    if now_at and at_most and now_at < at_most:
        notes.append(
            f"{key}: its link runs at {now_at:g} GT/s, {at_most:g} at most, as those of idle "
            "devices do"
        )
    # A slot that claims fewer lanes than are in use is made up by a virtual machine.
    if lanes and most and slot and lanes <= slot < most:
        notes.append(f"{key}: has {most} lanes, and its slot {slot}")
        most = slot
    rate = sysfs.pci_rate(at_most or now_at, most or lanes)
    if lanes is None:
        return Sample(key, "pci", now, State.UNKNOWN, width.reason, rate=rate)
    if most is None:
        why = f"{folder}/max_link_width does not tell how many lanes there should be"
        return Sample(key, "pci", now, State.UNKNOWN, why, rate=rate)
    if lanes < most:
        why = (
            f"its PCI link runs on {lanes} of {most} lanes ({width.path}): the card may not sit "
            "well in its slot"
        )
        return Sample(key, "pci", now, State.DEGRADED, why, rate=rate)
    return Sample(key, "pci", now, State.UP, rate=rate)


def _lanes(text: str | None) -> int | None:
    """Return a number of lanes; None for the 0, 63 and 255 of functions that cannot tell."""
    lanes = sysfs.integer(text)
    return lanes if lanes in _WIDTHS else None


def place(topology: Topology, tree: PciTree) -> Topology:
    """Return a topology of a host with the places of its devices.

    NUMA nodes and switches of the tree replace those of the same name; devices whose bus id the
    tree does not have stay where they are.

    Parameters
    ----------
    topology : Topology
        GPUs and NICs, with bus ids.
    tree : PciTree
        Of the same host.
    """
    taken = {host.name for host in topology.hosts}
    taken |= {device.name for device in _devices(topology)}
    taken |= {node.name for node in topology.numa_nodes if node.host != tree.host}
    taken |= {switch.name for switch in topology.switches if switch.host != tree.host}
    numa = {node.name: node for node in topology.numa_nodes}
    switches = {switch.name: switch for switch in topology.switches}
    names: dict[str | None, str | None] = {None: None}

    def named(old: str, others: Collection[str]) -> str:
        """Return the name for a part of the tree, with its host in front if it is taken."""
        name = old
        while name in taken or name in others:
            name = f"{tree.host}:{name}"
        names[old] = name
        return name

    for node in tree.numa_nodes:
        name = named(node.name, switches)
        numa[name] = replace(node, name=name)
    for switch in tree.switches:
        name = named(switch.name, numa)
        switches[name] = replace(switch, name=name, parent=names[switch.parent])
    hosts = topology.hosts
    if tree.host not in {host.name for host in hosts}:
        hosts = (*hosts, Host(tree.host))
    judged: set[str] = set()
    hidden: list[Unknown] = []

    def placed(device: Gpu | Nic) -> tuple[str | None, tuple[str, ...]]:
        """Return parent and NUMA nodes of a device, and remember whether they are hidden."""
        found = _found(device, tree)
        if found is None:
            return device.parent, device.numa
        near = tuple(name for old in found.numa if (name := names[old]))
        judged.add(device.name)
        if not near:
            hidden.append(Unknown("numa", device.name, found.reason))
        return names[found.parent], near

    gpus, nics = [], []
    for gpu in topology.gpus:
        parent, near = placed(gpu)
        gpus.append(replace(gpu, parent=parent, numa=near))
    for nic in topology.nics:
        parent, near = placed(nic)
        nics.append(replace(nic, parent=parent, numa=near))
    kept = [one for one in topology.unknown if one.what != "numa" or one.name not in judged]
    return replace(
        topology,
        hosts=hosts,
        numa_nodes=tuple(numa.values()),
        switches=tuple(switches.values()),
        gpus=tuple(gpus),
        nics=tuple(nics),
        unknown=(*kept, *hidden),
        notes=tuple(dict.fromkeys((*topology.notes, *tree.notes))),
    )


def _devices(topology: Topology) -> tuple[Gpu | Nic, ...]:
    """Return what may have a place in a tree."""
    return (*topology.gpus, *topology.nics)


def _found(device: Gpu | Nic, tree: PciTree) -> Place | None:
    """Return the place of a device, None if the tree does not have it."""
    if device.host != tree.host or device.bus_id is None:
        return None
    return tree.places.get(sysfs.bus_key(device.bus_id) or "")


def samples_of(topology: Topology, tree: PciTree) -> tuple[Sample, ...]:
    """Return the samples of a tree by the names that its devices have in a topology.

    A device with several ports has as many samples; what the topology does not have has none.
    """
    names: dict[str, list[str]] = {}
    for device in _devices(topology):
        if device.host == tree.host and device.bus_id is not None:
            names.setdefault(sysfs.bus_key(device.bus_id) or "", []).append(device.name)
    return tuple(
        replace(sample, subject=name)
        for sample in tree.samples
        for name in names.get(sample.subject, ())
    )
