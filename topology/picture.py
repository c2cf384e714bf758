"""Where everything is in the picture of a topology: boxes and lines, in inches from lower left.

Pure; `plot` draws them. Hosts stand side by side. In each, from top to bottom: ranks that work on
no GPU; NVLink as a bar or as arcs; NUMA nodes, with GPUs above the NICs near them. Links between
hosts are arcs below. Arcs over things in a row have their tops at different points, so that labels
there never meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pycomm.topology.graph import Gpu, Link, LinkKind, Nic, State, Topology
from pycomm.topology.layout import (
    Cluster,
    NumaPart,
    bars,
    gravest,
    measured_inside,
    numa_parts,
    remarks,
)
from pycomm.topology.matrix import (
    bundles,
    describe_parts,
    host_part,
    labels,
    number_of,
    ranges,
    short_name,
)
from pycomm.topology.snapshot import Snapshot
from pycomm.units import format_rate, format_seconds

__all__ = ["Box", "Line", "Picture", "arrange"]

_SLOT, _GAP, _PAD = 1.02, 0.16, 0.18  # from one GPU to the next; between; inside of frames
_GPU, _NIC, _MID = 0.52, 0.33, 0.62  # heights: GPU, NIC, and what is between their rows
_TITLE = 0.3
_ARC, _STEP, _BAR = 0.30, 0.23, 0.34  # lowest arc; how much higher for each place; an NVSwitch
_BETWEEN = 0.9  # from one host to the next
_DEPTH, _DEEPER = 0.55, 0.5  # the lowest arc of hosts; how much lower for each host more
_MOST_CHIPS = 8  # ranks of a host that are drawn one by one
_MOST_WIDTH = 30.0  # a picture that would be wider shows hosts as boxes with numbers
_PCI = {
    LinkKind.PIX: "at most one PCIe bridge",
    LinkKind.PXB: "several PCIe bridges",
    LinkKind.PHB: "PCIe host bridge",
    LinkKind.NODE: "within a NUMA node",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: `kind` is "host", "numa", "gpu", "nic", "nvswitch", "pci" or "rank"."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str
    details: tuple[str, ...] = ()
    state: State = State.UP


@dataclass(frozen=True, slots=True)
class Line:
    """A link from one point to another; an arc whose top is `rise` above, or below, its ends."""

    x0: float
    y0: float
    x1: float
    y1: float
    state: State
    weight: float = 1.0
    rise: float = 0.0
    label: str = ""


@dataclass(slots=True)
class Picture:
    """All of it; `meanings` explains labels, `remarks` says what is not well."""

    title: str
    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def _weight(bandwidth: float | None) -> float:
    """Return how wide a line is, in points: it grows with each power of ten from 1 GB/s on."""
    if bandwidth is None or bandwidth <= 0:
        return 1.4
    steps = ((1e11, 4.5), (3e10, 3.4), (8e9, 2.6), (1e9, 1.9))
    return next((weight for least, weight in steps if bandwidth >= least), 1.4)


def arrange(shown: Topology | Snapshot) -> Picture:
    """Return the picture of a topology or snapshot."""
    snapshot = shown if isinstance(shown, Snapshot) else None
    topology = shown.topology if isinstance(shown, Snapshot) else shown
    picture = Picture(_title(topology, snapshot))
    full = [_Host(topology, host.name, snapshot, compact=False) for host in topology.hosts]
    wide = sum(one.width for one in full) + _BETWEEN * len(full) > _MOST_WIDTH
    if wide:
        full = [_Host(topology, host.name, snapshot, compact=True) for host in topology.hosts]
    between = [link for link in topology.links if {link.a, link.b} <= {one.name for one in full}]
    order = {one.name: at for at, one in enumerate(full)}
    reach = max((abs(order[link.a] - order[link.b]) for link in between), default=0)
    floor = _DEPTH + _DEEPER * reach if between else 0.0
    top = max((one.height for one in full), default=0.0)
    x, middles = 0.0, {}
    for one in full:
        one.put(picture, x, floor + (top - one.height) / 2)
        middles[one.name] = (x + one.width / 2, floor + (top - one.height) / 2)
        x += one.width + _BETWEEN
    picture.width = max(x - _BETWEEN, 0.0)
    picture.height = floor + top
    _join_hosts(picture, between, order, middles)
    picture.remarks = remarks(topology)
    return picture


def _title(topology: Topology, snapshot: Snapshot | None) -> str:
    parts = describe_parts(topology).split(", ")
    parts = [part for part in parts if not part.startswith("0 ")]
    if len(topology.hosts) == 1:
        parts.insert(0, topology.hosts[0].name)
    else:
        parts.insert(0, number_of(len(topology.hosts), "host"))
    if snapshot is not None:
        parts.insert(1, number_of(len(snapshot.places), "rank"))
    return " · ".join(parts)


def _join_hosts(
    picture: Picture,
    between: Sequence[Link],
    order: dict[str, int],
    middles: dict[str, tuple[float, float]],
) -> None:
    """Add an arc for each link between hosts; a host's links leave it side by side."""
    ends: dict[str, list[str]] = {name: [] for name in order}
    for link in between:
        ends[link.a].append(link.b)
        ends[link.b].append(link.a)
    for others in ends.values():
        others.sort(key=lambda other: order[other])
    labelled = len(between) <= 28

    def start(name: str, other: str) -> tuple[float, float]:
        """Return where the arc to `other` leaves: on its side, those to the nearest outermost."""
        x, y = middles[name]
        left = [one for one in ends[name][::-1] if order[one] < order[name]]
        side = left if other in left else [one for one in ends[name] if one not in left]
        place = 0.68 - 0.5 * side.index(other) / max(len(side) - 1, 1)
        return x + (-place if other in left else place), y

    for link in between:
        (x0, y0), (x1, y1) = start(link.a, link.b), start(link.b, link.a)
        told = [link.kind.upper().replace("_", " ")]
        told += [] if link.bandwidth is None else [format_rate(link.bandwidth)]
        told += [] if link.latency is None else [format_seconds(link.latency)]
        if link.state in (State.DOWN, State.DEGRADED):
            told.append(link.state.upper())
        depth = _DEPTH + _DEEPER * (abs(order[link.a] - order[link.b]) - 1)
        label = " · ".join(told) if labelled or link.state in (State.DOWN, State.DEGRADED) else ""
        picture.lines.append(
            Line(x0, y0, x1, y1, link.state, _weight(link.bandwidth), -depth, label)
        )


class _Host:
    """One host: what is in it and how large that is, then where it goes."""

    def __init__(
        self, topology: Topology, name: str, snapshot: Snapshot | None, *, compact: bool
    ) -> None:
        self.name = name
        self._whole, self._part = topology, host_part(topology, name)
        places = () if snapshot is None else snapshot.places
        own = [place for place in places if place.host == name]
        gpus = {gpu.name for gpu in self._part.gpus}
        self._rank_of = {place.gpu: place.rank for place in own if place.gpu in gpus}
        self._ranks = [place.rank for place in own if place.gpu not in gpus]
        pairs = () if snapshot is None else snapshot.pairs
        self._compact, self._labels = compact, labels(self._part)
        self._numa = [] if compact else numa_parts(self._part)
        self._chips = 0 < len(self._ranks) <= _MOST_CHIPS and not compact
        self._shared = measured_inside(pairs, self._ranks) if self._chips else []
        self._nvlinks = {} if compact else bundles(self._part)
        self._bars = [] if compact else bars(self._part, self._nvlinks)
        covered = {pair for bar in self._bars for pair in bar.pairs}
        self._place = {gpu.name: at for at, gpu in enumerate(g for n in self._numa for g in n.gpus)}
        self._arcs = {
            tuple(sorted(pair, key=self._place.__getitem__)): bundle
            for pair, bundle in self._nvlinks.items()
            if pair not in covered
        }
        self._sizes()

    def _sizes(self) -> None:
        self._inner = inner = sum(map(_width, self._numa)) + _GAP * max(len(self._numa) - 1, 0)
        chips = _SLOT * len(self._ranks) if self._chips else 2 * _SLOT * bool(self._ranks)
        # A title of bold letters of 11 points, and what is below it.
        inner = max(inner, chips, 0.11 * len(self.name) + 0.4, 2.6 if self._compact else 1.9)
        self.width = inner + 2 * _PAD
        self._numa_height = max(map(_height, self._numa), default=0.0)
        reach = max((abs(self._place[a] - self._place[b]) for a, b in self._arcs), default=0)
        self._arc_height = _ARC + _STEP * reach + 0.12 if self._arcs else 0.0
        self._bar_height = (_BAR + 0.42) * len(self._bars)
        reach = max((b - a for a, b, _ in self._shared), default=0)
        self._chip_height = 0.36 + 0.2 if self._ranks else 0.0
        self._chip_height += _ARC + _STEP * reach + 0.12 if self._shared else 0.0
        content = self._numa_height + self._arc_height + self._bar_height + self._chip_height
        self.height = content + _TITLE + _PAD * 2 + (0.3 if self._compact else 0.0)

    def put(self, picture: Picture, x: float, y: float) -> None:
        """Add this host to a picture, its lower left corner at (x, y)."""
        details = (describe_parts(self._part),) if self._compact else ()
        picture.boxes.append(Box("host", x, y, self.width, self.height, self.name, details))
        left, floor = x + (self.width - self._inner) / 2, y + _PAD
        tops: dict[str, tuple[float, float]] = {}
        for node in self._numa:
            tops |= self._put_numa(picture, node, left, floor)
            left += _width(node) + _GAP
        ceiling = floor + self._numa_height
        self._put_nvlink(picture, tops, ceiling)
        self._put_ranks(picture, x, ceiling + self._arc_height + self._bar_height + 0.12)

    def _put_numa(
        self, picture: Picture, node: NumaPart, x: float, y: float
    ) -> dict[str, tuple[float, float]]:
        """Add a NUMA node; return the middle of the top of each GPU."""
        cpus = (node.cpus,) if node.cpus else ()
        picture.boxes.append(Box("numa", x, y, _width(node), self._numa_height, node.title, cpus))
        tops = {}
        left = x + (_width(node) - node.columns * _SLOT) / 2
        row = y + self._numa_height - _PAD - _GPU  # the bottom of the GPUs
        shelf = row - _MID if node.gpus else row + _GPU  # the top of the NICs
        for cluster in node.clusters:
            width = cluster.columns * _SLOT
            gpus = _spread(left, width, len(cluster.gpus))
            for middle, gpu in zip(gpus, cluster.gpus, strict=True):
                self._put_gpu(picture, gpu, middle, row)
                tops[gpu.name] = (middle, row + _GPU)
            columns = _spread(left, width, len(cluster.nics))
            for middle, stack in zip(columns, cluster.nics, strict=True):
                for at, nic in enumerate(stack):
                    self._put_nic(picture, nic, middle, shelf - _stack(at + 1))
            if cluster.kind is not None:
                self._put_paths(picture, cluster, gpus, columns, shelf, row)
            left += width
        return tops

    def _put_gpu(self, picture: Picture, gpu: Gpu, middle: float, y: float) -> None:
        details = []
        if (rank := self._rank_of.get(gpu.name)) is not None:
            details.append(f"rank {rank}")
        name = short_name(self._whole, gpu.name)
        label = self._labels[gpu.name]
        if name.lower() != label.lower():
            details.append(name)
        if gpu.state in (State.DOWN, State.DEGRADED):
            details.insert(0, gpu.state)
        width = _SLOT - 0.14
        box = Box("gpu", middle - width / 2, y, width, _GPU, label, tuple(details[:2]), gpu.state)
        picture.boxes.append(box)

    def _put_nic(self, picture: Picture, nic: Nic, middle: float, y: float) -> None:
        rate = "" if nic.bandwidth is None else format_rate(nic.bandwidth)
        fabric = "" if nic.fabric is None else nic.fabric.upper()
        told = nic.state if nic.state in (State.DOWN, State.DEGRADED) else f"{fabric} {rate}"
        title = nic.device or short_name(self._whole, nic.name)
        details = (told.strip(),) if told.strip() else ()
        width = _SLOT - 0.14
        picture.boxes.append(
            Box("nic", middle - width / 2, y, width, _NIC, title, details, nic.state)
        )

    def _put_paths(
        self,
        picture: Picture,
        cluster: Cluster,
        gpus: Sequence[float],
        columns: Sequence[float],
        shelf: float,
        row: float,
    ) -> None:
        """Add the way on PCI between GPUs and the NICs near them: up and down from a small box."""
        assert cluster.kind is not None
        points = [*gpus, *columns]
        wide = max(max(points) - min(points), 0.0) + 0.46
        middle, height = (max(points) + min(points)) / 2, 0.19
        y = (shelf + row - height) / 2
        title = cluster.kind.name
        for at, gpu in zip(gpus, cluster.gpus, strict=True):
            state, rate = self._up(gpu, [nic.name for stack in cluster.nics for nic in stack])
            picture.lines.append(Line(at, row, at, y + height, state, _weight(rate)))
        for at, stack in zip(columns, cluster.nics, strict=True):
            ways = [self._up(nic, [gpu.name for gpu in cluster.gpus]) for nic in stack]
            rate = max((rate for _, rate in ways if rate is not None), default=None)
            state = gravest(state for state, _ in ways)
            picture.lines.append(Line(at, y, at, shelf, state, _weight(rate)))
        picture.boxes.append(Box("pci", middle - wide / 2, y, wide, height, title))
        picture.meanings.setdefault(title, _PCI[cluster.kind])

    def _up(self, device: Gpu | Nic, others: Sequence[str]) -> tuple[State, float | None]:
        """Return state and rate of the link upwards on PCI, or else of the one to any of others."""
        links = [link for link in self._part.links if device.name in (link.a, link.b)]
        for ends in ([device.parent], others):
            for link in links:
                if link.other(device.name) in ends and link.kind in _PCI:
                    return link.state, link.bandwidth
        return State.UNKNOWN, None

    def _put_nvlink(
        self, picture: Picture, tops: dict[str, tuple[float, float]], ceiling: float
    ) -> None:
        """Add bars for switches, and arcs for links that are direct."""
        for (a, b), bundle in self._arcs.items():
            (x0, y0), (x1, y1) = tops[a], tops[b]
            x0, x1 = x0 + self._leaves(a, b), x1 + self._leaves(b, a)
            rise = ceiling - max(y0, y1) + _ARC + _STEP * (self._place[b] - self._place[a])
            label = bundle.label
            picture.lines.append(
                Line(x0, y0, x1, y1, bundle.state, _weight(bundle.bandwidth), rise, label)
            )
            picture.meanings.setdefault(label, bundle.meaning)
        for level, bar in enumerate(self._bars):
            y = ceiling + self._arc_height + (_BAR + 0.42) * level + 0.36
            points = [tops[name][0] for name in bar.ends]
            left, right = min(points) - 0.44, max(points) + 0.44
            picture.boxes.append(Box("nvswitch", left, y, right - left, _BAR, bar.title))
            for name, end in bar.ends.items():
                x, top = tops[name]
                label = end.label
                picture.lines.append(
                    Line(x, top, x, y, end.state, _weight(end.bandwidth), 0.0, label)
                )
                picture.meanings.setdefault(label, end.meaning)

    def _leaves(self, name: str, other: str) -> float:
        """Return where an arc leaves a GPU, from its middle: arcs to near ones lie outermost."""
        place = self._place
        ends = {end for pair in self._arcs if name in pair for end in pair} - {name}
        left = sorted((end for end in ends if place[end] < place[name]), key=place.__getitem__)
        right = sorted((end for end in ends if place[end] > place[name]), key=place.__getitem__)
        row = [*left[::-1], *right[::-1]]
        return 0.6 * ((row.index(other) + 0.5) / len(row) - 0.5)

    def _put_ranks(self, picture: Picture, x: float, y: float) -> None:
        """Add ranks that work on no GPU, and what was measured between them."""
        if not self._ranks:
            return
        middle = x + self.width / 2
        if not self._chips:
            title = f"ranks {ranges(self._ranks)}"
            picture.boxes.append(Box("rank", middle - 0.95, y, 1.9, 0.36, title))
            return
        points = _spread(x + _PAD, self.width - 2 * _PAD, len(self._ranks))
        for point, rank in zip(points, self._ranks, strict=True):
            picture.boxes.append(Box("rank", point - 0.38, y, 0.76, 0.36, f"rank {rank}"))
        for a, b, pair in self._shared:
            label = f"{format_rate(pair.bandwidth)} · {format_seconds(pair.latency)}"
            weight, rise = _weight(pair.bandwidth), _ARC + _STEP * (b - a)
            top = y + 0.36
            picture.lines.append(
                Line(points[a], top, points[b], top, State.UP, weight, rise, label)
            )


def _stack(rows: int) -> float:
    """Return the height of so many NICs below each other."""
    return rows * _NIC + max(rows - 1, 0) * 0.06


def _width(node: NumaPart) -> float:
    return max(node.columns * _SLOT, 1.7) + 0.1


def _height(node: NumaPart) -> float:
    between = _MID if node.rows and node.gpus else 0.0
    return _TITLE + _stack(node.rows) + between + _GPU * bool(node.gpus) + _PAD


def _spread(left: float, width: float, count: int) -> list[float]:
    """Return the middles of so many things side by side."""
    step = width / count if count else 0.0
    return [left + step * (at + 0.5) for at in range(count)]
