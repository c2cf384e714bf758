"""What belongs side by side in the picture of a host: NUMA nodes, what shares a PCI switch, NVLink.

Pure, and without any length: `picture` gives places to it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pycomm.topology.graph import (
    MOST_NVLINKS,
    Gpu,
    Link,
    LinkKind,
    Nic,
    State,
    Switch,
    Topology,
)
from pycomm.topology.groups import nearest_nics, path_kind
from pycomm.topology.matrix import Bundle, bundle_of, number_of, ranges
from pycomm.topology.snapshot import MeasuredPair

__all__ = [
    "Bar",
    "Cluster",
    "NumaPart",
    "bars",
    "gravest",
    "measured_inside",
    "numa_parts",
    "remarks",
]

#: So many NICs at most below each other.
_ROWS = 4
_FEW = 4
_LONG = 32  # letters
_SWITCHED = (LinkKind.PIX, LinkKind.PXB)
_BRIDGED = (LinkKind.PHB, LinkKind.NODE)


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs and the NICs near them; `nics` are columns of NICs below each other.

    `kind` is the path between them, None if there is nothing to be drawn.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[tuple[Nic, ...], ...]
    kind: LinkKind | None = None

    @property
    def columns(self) -> int:
        """How many things stand beside each other."""
        return max(len(self.gpus), len(self.nics))


@dataclass(frozen=True, slots=True)
class NumaPart:
    """A NUMA node, or several that a source does not tell apart."""

    title: str
    cpus: str
    clusters: tuple[Cluster, ...]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs, from left to right."""
        return tuple(gpu for cluster in self.clusters for gpu in cluster.gpus)

    @property
    def columns(self) -> int:
        """How many things stand beside each other."""
        return sum(cluster.columns for cluster in self.clusters)

    @property
    def rows(self) -> int:
        """How many NICs stand below each other at most."""
        return max((len(stack) for one in self.clusters for stack in one.nics), default=0)


@dataclass(frozen=True, slots=True)
class Bar:
    """NVLinks that lead to switches, or join too many pairs to be drawn one by one."""

    title: str
    ends: Mapping[str, Bundle]
    pairs: frozenset[frozenset[str]]


def gravest(states: Iterable[State]) -> State:
    """Return the worst of some states; unknown if there are none."""
    found = set(states)
    order = (State.DOWN, State.DEGRADED, State.UNKNOWN, State.UP)
    return next((state for state in order if state in found), State.UNKNOWN)


def numa_parts(topology: Topology) -> list[NumaPart]:
    """Return the NUMA nodes of one host that have GPUs or NICs, with what is near each other.

    A NIC of which no NUMA node is known belongs to that of the GPU it is near to.
    """
    groups: dict[tuple[str, ...], tuple[list[Gpu], list[Nic]]] = {}
    for gpu in topology.gpus:
        groups.setdefault(gpu.numa, ([], []))[0].append(gpu)
    for nic in topology.nics:
        if not nic.virtual:
            groups.setdefault(_numa_of(topology, nic), ([], []))[1].append(nic)
    near = nearest_nics(topology)
    nodes = {node.name: node for node in topology.numa_nodes}
    parts = []
    for key, (gpus, nics) in sorted(groups.items(), key=lambda item: not item[0]):
        indices = [nodes[name].index for name in key]
        known = [index for index in indices if index is not None]
        title = f"NUMA {ranges(known)}" if known else "NUMA node unknown"
        if key and not known:
            title = "NUMA nodes hidden"
        near_cpus = {cpu for name in key for cpu in nodes[name].cpus or ()}
        cpus = f"CPUs {ranges(near_cpus)}" if near_cpus else ""
        if len(cpus) > _LONG:
            cpus = number_of(len(near_cpus), "CPU")
        found = {gpu.name: near[gpu.name] for gpu in gpus}
        names = {nic.name for nic in nics}
        kinds = {name: one.kind for name, one in found.items() if one is not None}
        reach = {
            name: [nic for nic in one.nics if nic in names] for name, one in found.items() if one
        }
        parts.append(NumaPart(title, cpus, _clusters(gpus, nics, kinds, reach)))
    return parts


def _numa_of(topology: Topology, nic: Nic) -> tuple[str, ...]:
    if nic.numa:
        return nic.numa
    kinds = (*_SWITCHED, *_BRIDGED)
    for gpu in topology.gpus:
        if path_kind(topology, gpu.name, nic.name) in kinds:
            return gpu.numa
    return ()


def _clusters(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    kinds: Mapping[str, LinkKind | None],
    reach: Mapping[str, Sequence[str]],
) -> tuple[Cluster, ...]:
    """Return what is below one PCI switch each, and last whatever is left."""
    together: list[tuple[set[str], set[str], LinkKind]] = []
    for gpu in gpus:
        kind, mine = kinds.get(gpu.name), set(reach.get(gpu.name, ()))
        if kind not in _SWITCHED or not mine or kind is None:
            continue
        joined: tuple[set[str], set[str], LinkKind] = ({gpu.name}, mine, kind)
        for other in [one for one in together if one[1] & mine]:
            together.remove(other)
            # Of two kinds the farther one is the promise.
            farther = max(joined[2], other[2], key=_SWITCHED.index)
            joined = (joined[0] | other[0], joined[1] | other[1], farther)
        together.append(joined)
    made = [
        Cluster(
            tuple(gpu for gpu in gpus if gpu.name in names),
            _stacked([nic for nic in nics if nic.name in below], len(names)),
            kind,
        )
        for names, below, kind in together
    ]
    taken = {name for names, below, _ in together for name in names | below}
    rest = tuple(gpu for gpu in gpus if gpu.name not in taken)
    others = [nic for nic in nics if nic.name not in taken]
    bridged = {kinds.get(gpu.name) for gpu in rest} & set(_BRIDGED)
    left = {nic.name for nic in others}
    drawn = bool(rest) and all(left & set(reach.get(gpu.name, ())) for gpu in rest)
    kind = max(bridged, key=_BRIDGED.index) if bridged and drawn else None
    if rest or others:
        # NICs that are near to nothing: two below each other beside GPUs, or else in a row.
        columns = len(rest) or (-(-len(others) // 2) if gpus else min(len(others), _ROWS))
        made.append(Cluster(rest, _stacked(others, columns), kind))
    return tuple(made)


def _stacked(nics: Sequence[Nic], columns: int) -> tuple[tuple[Nic, ...], ...]:
    """Return NICs in so many columns at most, more if they would be too high."""
    columns = min(max(columns, -(-len(nics) // _ROWS)), len(nics))
    stacks, at = [], 0
    for column in range(columns):
        height = len(nics) // columns + (column < len(nics) % columns)
        stacks.append(tuple(nics[at : at + height]))
        at += height
    return tuple(stacks)


def bars(topology: Topology, bundles: Mapping[frozenset[str], Bundle]) -> list[Bar]:
    """Return bars in place of single lines: one for the switches that join the same GPUs each.

    Where a matrix gives each pair more NVLinks than a GPU can have, there are switches too.
    """
    gpus = [gpu.name for gpu in topology.gpus]
    reach: dict[frozenset[str], list[Switch]] = {}
    links: dict[tuple[str, str], list[Link]] = {}
    for switch in topology.switches:
        for link in topology.links:
            if switch.name in (link.a, link.b) and link.other(switch.name) in gpus:
                links.setdefault((link.other(switch.name), switch.name), []).append(link)
        ends = frozenset(gpu for gpu, name in links if name == switch.name)
        if switch.kind == "nvswitch" and ends:
            reach.setdefault(ends, []).append(switch)
    made = []
    for ends, switches in reach.items():
        title = number_of(len(switches), "NVSwitch") if len(switches) > 1 else "NVSwitch"
        mine = {
            name: bundle_of([[link for one in switches for link in links[name, one.name]]])
            for name in gpus
            if name in ends
        }
        made.append(Bar(title, mine, frozenset(pair for pair in bundles if pair <= ends)))
    return made + _meshes(gpus, {p: one for p, one in bundles.items() if not one.switched})


def _meshes(gpus: Sequence[str], bundles: Mapping[frozenset[str], Bundle]) -> list[Bar]:
    """Return a bar for each island whose pairs count more NVLinks than there can be."""
    made, left = [], dict(bundles)
    for name in gpus:
        island, grown = {name}, True
        while grown:
            more = {end for pair in left if pair & island for end in pair} - island
            island, grown = island | more, bool(more)
        pairs = {pair: one for pair, one in left.items() if pair <= island}
        left = {pair: one for pair, one in left.items() if pair not in pairs}
        of_each = {
            end: [one for pair, one in pairs.items() if end in pair]
            for end in gpus
            if end in island
        }
        total = max(sum(one.count or 0 for one in mine) for mine in of_each.values())
        if total > MOST_NVLINKS:
            ends = {
                end: Bundle(
                    max((one.count or 0 for one in mine), default=0),
                    max((one.bandwidth or 0.0 for one in mine), default=0.0) or None,
                    gravest(one.state for one in mine),
                )
                for end, mine in of_each.items()
            }
            made.append(Bar("NVLink between any two", ends, frozenset(pairs)))
    return made


def measured_inside(
    pairs: Iterable[MeasuredPair], ranks: Sequence[int]
) -> list[tuple[int, int, MeasuredPair]]:
    """Return what was measured between few ranks of a host, by their places in the row."""
    place = {rank: at for at, rank in enumerate(ranks)}
    found = []
    for pair in pairs:
        if pair.a in place and pair.b in place:
            a, b = sorted((place[pair.a], place[pair.b]))
            found.append((a, b, pair))
    return found if len(ranks) <= _FEW else []


def remarks(topology: Topology) -> list[str]:
    """Return what is not well, as far as a picture has room."""
    bad = (State.DOWN, State.DEGRADED)
    nics = [nic for nic in topology.nics if not nic.virtual]
    devices: list[Gpu | Nic] = [*topology.gpus, *nics]
    found = [f"{_named(one)} is {one.state}: {one.reason}" for one in devices if one.state in bad]
    found += [
        f"{link.a} - {link.b} is {link.state}: {link.reason}"
        for link in topology.links
        if link.state in bad
    ]
    more = [f"and {len(found) - _FEW} more that are not well"] if len(found) > _FEW else []
    return [text.removesuffix(": ") for text in found[:_FEW]] + more


def _named(device: Gpu | Nic) -> str:
    known = device.device if isinstance(device, Nic) else None
    return device.name if known is None or known in device.name else f"{device.name} ({known})"
