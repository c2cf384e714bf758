"""One host of a topology as the matrix that everyone reads from `nvidia-smi topo -m`.

Pure. Cells are those of the tool, and say one thing more: `?` where nobody can tell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from pycomm.topology.graph import NVLINKS, Gpu, Link, Nic, State, Switch, Topology
from pycomm.topology.groups import path_kinds
from pycomm.units import format_rate

__all__ = [
    "Bundle",
    "bundle_of",
    "bundles",
    "describe_parts",
    "host_part",
    "hosts_of",
    "labels",
    "matrix",
    "number_of",
    "ranges",
    "short_name",
]

_MEANING = {
    "X": "Self",
    "SYS": "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes",
    "NODE": "Connection traversing PCIe and the interconnect between host bridges of a NUMA node",
    "PHB": "Connection traversing PCIe as well as a PCIe host bridge (typically the CPU)",
    "PXB": "Connection traversing multiple PCIe bridges (without the PCIe host bridge)",
    "PIX": "Connection traversing at most a single PCIe bridge",
    "NV#": "Connection traversing a bonded set of # NVLinks",
    "NV": "Connection traversing NVLinks, nobody says how many",
    "NVS": "Connection traversing an NVSwitch, nobody says by how many NVLinks",
    "?": "Unknown",
    "..?": "The path on PCIe; whether there is NVLink is unknown",
    "..!": "NVLinks there are degraded or down: see Health",
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """All NVLinks between two GPUs, those that are down left out.

    Attributes
    ----------
    count : int or None
        How many; 0 if all are down.
    bandwidth : float or None
        Bytes per second in one direction, of all of them together.
    state : State
        `DEGRADED` also if some of several are down.
    switched : bool
        Whether they pass a switch.
    """

    count: int | None
    bandwidth: float | None
    state: State
    switched: bool = False

    @property
    def label(self) -> str:
        """What stands at a line: ``NV18``."""
        return "down" if self.count == 0 else "NV" if self.count is None else f"NV{self.count}"

    @property
    def meaning(self) -> str:
        """What the label says, with the bandwidth: ``18 NVLinks, 450 GB/s``."""
        rate = "" if self.bandwidth is None else f", {format_rate(self.bandwidth)}"
        return ("NVLinks" if self.count is None else number_of(self.count, "NVLink")) + rate


def host_part(topology: Topology, host: str) -> Topology:
    """Return what a topology has of one host, and of switches that hosts share what it reaches.

    Its notes are left out where there are other hosts: nobody can tell whose they are.
    """
    if [one.name for one in topology.hosts] == [host]:
        return topology
    numa = tuple(node for node in topology.numa_nodes if node.host == host)
    gpus = tuple(gpu for gpu in topology.gpus if gpu.host == host)
    nics = tuple(nic for nic in topology.nics if nic.host == host)
    own = {gpu.name for gpu in gpus} | {nic.name for nic in nics}
    reached = {link.other(name) for link in topology.links for name in _ends(link) if name in own}
    switches = tuple(
        one
        for one in topology.switches
        if one.host == host or (one.host is None and one.name in reached)
    )
    names = own | {host} | {node.name for node in numa} | {one.name for one in switches}

    def parent(name: str | None) -> str | None:
        return name if name in names else None

    def near(nodes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node in names)

    return Topology(
        tuple(one for one in topology.hosts if one.name == host),
        numa,
        tuple(replace(one, parent=parent(one.parent)) for one in switches),
        tuple(replace(one, parent=parent(one.parent), numa=near(one.numa)) for one in gpus),
        tuple(replace(one, parent=parent(one.parent), numa=near(one.numa)) for one in nics),
        tuple(link for link in topology.links if names.issuperset(_ends(link))),
        tuple(one for one in topology.unknown if one.name in names),
    )


def hosts_of(topology: Topology) -> list[Topology]:
    """Return the hosts of a topology one by one."""
    return [host_part(topology, host.name) for host in topology.hosts]


def number_of(count: int, what: str) -> str:
    """Return ``1 GPU``, ``2 GPUs``, ``2 switches``."""
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{ending}"


def describe_parts(topology: Topology) -> str:
    """Return how many of which there are."""
    switches = [one for one in topology.switches if one.kind == "nvswitch"]
    parts = [
        number_of(len(topology.gpus), "GPU"),
        number_of(len([nic for nic in topology.nics if not nic.virtual]), "NIC"),
        number_of(len(topology.numa_nodes), "NUMA node"),
    ]
    if switches:
        parts.append(number_of(len(switches), "NVSwitch"))
    return ", ".join(parts)


def _ends(link: Link) -> tuple[str, str]:
    return link.a, link.b


def short_name(topology: Topology, name: str) -> str:
    """Return a name without the host that `merge` has put in front."""
    host, colon, rest = name.partition(":")
    return rest if colon and any(one.name == host for one in topology.hosts) else name


def labels(topology: Topology) -> dict[str, str]:
    """Return what GPUs and NICs are called in the matrix of one host: GPU0, NIC0 and so on.

    Interfaces that are virtual have no label. A number is that of the source if it gives every
    device one of its own, or else the place in the order.
    """
    real = [nic for nic in topology.nics if not nic.virtual]
    return {**_labels("GPU", topology.gpus), **_labels("NIC", real)}


def _labels(word: str, devices: Sequence[Gpu | Nic]) -> dict[str, str]:
    numbers = [device.index for device in devices]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(devices)))
    return {device.name: f"{word}{number}" for device, number in zip(devices, numbers, strict=True)}


def bundles(topology: Topology) -> dict[frozenset[str], Bundle]:
    """Return the NVLinks of each two GPUs that have any, straight or by switches both reach."""
    gpus = {gpu.name for gpu in topology.gpus}
    switches = {switch.name for switch in topology.switches}
    direct: dict[frozenset[str], list[Link]] = {}
    to_switch: dict[str, dict[str, list[Link]]] = {name: {} for name in gpus}
    for link in topology.links:
        if link.kind not in NVLINKS or link.a == link.b:
            continue
        if gpus.issuperset(_ends(link)):
            direct.setdefault(frozenset(_ends(link)), []).append(link)
        for end in _ends(link):
            if end in gpus and link.other(end) in switches:
                to_switch[end].setdefault(link.other(end), []).append(link)
    found = {pair: bundle_of([links]) for pair, links in direct.items()}
    for a, b in combinations([gpu.name for gpu in topology.gpus], 2):
        common = to_switch[a].keys() & to_switch[b].keys()
        if common and frozenset((a, b)) not in found:
            sides = [
                [link for name in sorted(common) for link in to_switch[end][name]] for end in (a, b)
            ]
            found[frozenset((a, b))] = replace(bundle_of(sides), switched=True)
    return found


def bundle_of(sides: Sequence[Sequence[Link]]) -> Bundle:
    """Return what NVLinks carry together: of two sides, as much as the weaker one."""
    states = {link.state for side in sides for link in side}
    alive = [[link for link in side if link.state is not State.DOWN] for side in sides]
    if not all(alive):
        return Bundle(0, None, State.DOWN)
    counts = [[link.count for link in side] for side in alive]
    rates = [[link.bandwidth for link in side] for side in alive]
    state = next(one for one in (*_GRAVE, State.UNKNOWN, State.UP) if one in states)
    return Bundle(
        None if any(None in side for side in counts) else min(sum(filter(None, s)) for s in counts),
        None if any(None in side for side in rates) else min(sum(filter(None, s)) for s in rates),
        State.DEGRADED if state in _GRAVE else state,
    )


_GRAVE = (State.DOWN, State.DEGRADED)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def matrix(topology: Topology) -> list[str]:
    """Return the lines of the matrix of one host, and its legend; none without any device.

    Where nothing is unknown or broken, `read_smi` reads them.
    """
    names = labels(topology)
    if not names:
        return []
    cells = _Cells(topology)
    table = [["", *names.values()]]
    table += [[names[a], *(cells.between(a, b) for b in names)] for a in names]
    for title, known in (("CPU Affinity", cells.cpus), ("NUMA Affinity", cells.numa)):
        column = [known(name) for name in names]
        if any(column):
            table[0].append(title)
            for row, text in zip(table[1:], column, strict=True):
                row.append(text or ("?" if row[0].startswith("GPU") else ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    seen = {_meaning(cell) for row in table[1:] for cell in row[1 : len(names) + 1]}
    lines += ["", "Legend:", ""]
    lines += [f"  {cell:<4} = {text}" for cell, text in _MEANING.items() if cell in seen]
    return [*lines, *_names(topology, names)]


def _names(topology: Topology, names: dict[str, str]) -> list[str]:
    """Return which device is behind a label, of those whose label does not say so."""
    devices = {one.name: one for one in topology.devices}
    lines: list[str] = []
    for word in ("GPU", "NIC"):
        told = []
        for name, label in names.items():
            device = devices[name]
            known = device.device if isinstance(device, Nic) and device.device else name
            known = short_name(topology, known)
            if label.startswith(word) and known.lower() != label.lower():
                told.append(f"  {label}: {known}")
        if told:
            lines += ["", f"{word} Legend:", "", *told]
    return lines


def _meaning(cell: str) -> str:
    """Return the entry of the legend that explains a cell."""
    if cell[-1] in "?!" and len(cell) > 1:
        return ".." + cell[-1]
    return "NV#" if cell[:2] == "NV" and cell[2:].isdecimal() else cell


class _Cells:
    """The cells of one host's matrix."""

    def __init__(self, topology: Topology) -> None:
        self._path = path_kinds(topology)
        self._bundles = bundles(topology)
        self._near: dict[str, tuple[str, ...]] = {
            device.name: device.numa
            for device in topology.devices
            if not isinstance(device, Switch)
        }
        self._nodes = {node.name: node for node in topology.numa_nodes}
        self._gpus = {gpu.name for gpu in topology.gpus}
        self._blind = topology.unknown_names("nvlink").keys()

    def between(self, a: str, b: str) -> str:
        """Return the cell of two devices."""
        if a == b:
            return "X"
        bundle = self._bundles.get(frozenset((a, b)))
        path = self._path(a, b)
        cell = "?" if path is None else path.name
        if bundle is None:
            blind = {a, b} <= self._gpus and {a, b} & self._blind
            return f"{cell}?" if blind and path is not None else cell
        if bundle.count != 0:
            letter = "NVS" if bundle.switched else "NV"
            cell = letter if bundle.count is None else f"NV{bundle.count}"
        return f"{cell}!" if bundle.state in _GRAVE else cell

    def cpus(self, name: str) -> str:
        """Return the CPUs near a device."""
        known = [self._nodes[node].cpus for node in self._near[name]]
        return ranges({cpu for cpus in known for cpu in cpus or ()})

    def numa(self, name: str) -> str:
        """Return the numbers of the NUMA nodes near a device."""
        found = [self._nodes[node].index for node in self._near[name]]
        return ranges({index for index in found if index is not None})
