"""From a topology to groups: who shares NVLink, a host, a NUMA node, a rail; which NIC is near.

Pure functions. A group is a tuple of names in the order of the topology. Where a topology cannot
tell, the answer is None, never a guess: two GPUs of which no row was readable may well be joined.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import combinations

from pycomm.topology.graph import MOST_NVLINKS, NVLINKS, Gpu, Link, LinkKind, Nic, State, Topology

__all__ = [
    "Nearest",
    "direct_pairs",
    "host_groups",
    "nearest_nics",
    "numa_groups",
    "nvlink_counts",
    "nvlink_islands",
    "path_kind",
    "path_kinds",
    "rails",
]

#: PCI paths, from near to far.
_PATHS = (LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS)
# What NVML says of a GPU that is attached to an NVLink fabric: GPUs that have both in common reach
# each other over NVLink, on whatever hosts of a rack they are.
_FABRIC = ("fabric_cluster", "fabric_clique")
_BROKEN_FABRIC = ("fabric", "broken")

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Nearest:
    """The NICs nearest to a GPU.

    Attributes
    ----------
    kind : LinkKind or None
        The path to them, `PIX` to `SYS`; None if there are none, or if nobody can tell.
    nics : tuple of str
        All that are equally near.
    reason : str
        What limits the answer.
    """

    kind: LinkKind | None
    nics: tuple[str, ...]
    reason: str = ""

    @property
    def near(self) -> bool:
        """Whether the path stays on the GPU's side of the link between sockets."""
        return self.kind is not None and self.kind is not LinkKind.SYS


def _up(topology: Topology) -> list[Link]:
    """Return the NVLinks that nobody found down, without those that nothing is routed over."""
    broken = {gpu.name for gpu in topology.gpus if _BROKEN_FABRIC in gpu.attributes}
    return [
        link
        for link in topology.links
        if link.kind in NVLINKS
        and link.state is not State.DOWN
        and not (link.kind is LinkKind.NVSWITCH and broken & {link.a, link.b})
    ]


def _unlinked(topology: Topology) -> set[str]:
    """Return the GPUs that lost their NVLink: degraded or down, and without any link that is up."""
    linked = {end for link in _up(topology) for end in (link.a, link.b)}
    broken = (State.DEGRADED, State.DOWN)
    return {gpu.name for gpu in topology.gpus if gpu.state in broken} - linked


def nvlink_islands(topology: Topology) -> Groups | None:
    """Return the groups of GPUs that reach each other over NVLink alone, single GPUs included.

    A GPU that should have NVLink and has lost it is in no island: it neither joins nor shrinks one
    silently.

    Returns
    -------
    tuple of tuple of str, or None
        None if the topology cannot tell: it knows no GPU, its source has no NVLink in it, or rows
        are missing and what is left does not decide.
    """
    if not topology.gpus or topology.unknown_names("nvlink"):
        return None
    parent = {device.name: device.name for device in topology.devices}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    fabrics = _fabrics(topology)
    routed = {gpu for members in fabrics.values() for gpu in members}
    for link in _up(topology):
        # Two cliques may hang on the same switches: what counts is who is routed to whom.
        through = link.kind is LinkKind.NVSWITCH and routed & {link.a, link.b}
        if link.a in parent and link.b in parent and not through:
            parent[root(link.a)] = root(link.b)
    for members in fabrics.values():
        for one in members[1:]:
            parent[root(one)] = root(members[0])
    blind = [gpu.name for gpu in topology.gpus if gpu.name in topology.unknown_names("row")]
    if len({root(name) for name in blind}) > 1:
        return None
    lost = _unlinked(topology)
    return _grouped((root(gpu.name), gpu.name) for gpu in topology.gpus if gpu.name not in lost)


def _fabrics(topology: Topology) -> dict[tuple[str, str], list[str]]:
    """Return the GPUs of each NVLink fabric, which may span hosts, by cluster and clique."""
    lost = _unlinked(topology)
    found: dict[tuple[str, str], list[str]] = {}
    for gpu in topology.gpus:
        told = dict(gpu.attributes)
        if _FABRIC[0] in told and _FABRIC[1] in told and gpu.name not in lost:
            found.setdefault((told[_FABRIC[0]], told[_FABRIC[1]]), []).append(gpu.name)
    return found


def direct_pairs(topology: Topology) -> bool | None:
    """Return whether the GPUs of each NVLink island are joined pair by pair, or by one switch.

    None if `nvlink_islands` is, or if a row of an island's GPU is missing.
    """
    islands = nvlink_islands(topology)
    if islands is None:
        return None
    reach: dict[str, set[str]] = {}
    for link in _up(topology):
        reach.setdefault(link.a, set()).add(link.b)
        reach.setdefault(link.b, set()).add(link.a)
    blind = topology.unknown_names("row")
    if any(name in blind for island in islands for name in island):
        return None
    switches = {switch.name for switch in topology.switches}
    # A fabric is one big switch.
    for fabric, members in _fabrics(topology).items():
        switches.add(str(fabric))
        for member in members:
            reach.setdefault(member, set()).add(str(fabric))
    return all(
        b in reach[a] or reach[a] & reach[b] & switches
        for island in islands
        for a, b in combinations(island, 2)
    )


def nvlink_counts(topology: Topology) -> dict[str, int]:
    """Return how many NVLinks each GPU has, of those whose links are known.

    Where a source gives each peer behind a switch as many links as there are in all, they are
    counted once.
    """
    counts: dict[str, list[int]] = {}
    gpus = {gpu.name for gpu in topology.gpus}
    for link in _up(topology):
        for end in {link.a, link.b} & gpus:
            if link.count is not None:
                counts.setdefault(end, []).append(link.count)
    return {
        gpu.name: sum(rows) if sum(rows) <= MOST_NVLINKS else max(rows)
        for gpu in topology.gpus
        if (rows := counts.get(gpu.name))
    }


def host_groups(topology: Topology) -> Groups:
    """Return the GPUs of each host that has any."""
    return _grouped((gpu.host, gpu.name) for gpu in topology.gpus)


def numa_groups(topology: Topology) -> Groups | None:
    """Return the GPUs near the same NUMA nodes; None if that is unknown of any GPU."""
    if not topology.gpus or any(not gpu.numa for gpu in topology.gpus):
        return None
    return _grouped((gpu.numa, gpu.name) for gpu in topology.gpus)


def rails(topology: Topology) -> Groups | None:
    """Return the NICs of the same place in the order of each host: one group for each place.

    NICs that are down keep their place, and are left out. None if hosts have different numbers of
    NICs: nobody can tell which of them belong together.
    """
    of_host: dict[str, list[Nic]] = {host.name: [] for host in topology.hosts}
    for nic in topology.nics:
        if not nic.virtual:
            of_host[nic.host].append(nic)
    if len(set(map(len, of_host.values()))) != 1:
        return None
    ordered = [
        sorted(nics, key=lambda nic: (nic.index is None, nic.index or 0))
        for nics in of_host.values()
    ]
    return tuple(
        tuple(nic.name for nic in rail if nic.state is not State.DOWN)
        for rail in zip(*ordered, strict=True)
    )


def nearest_nics(topology: Topology) -> dict[str, Nearest | None]:
    """Return the nearest NICs of each GPU, ties kept; None for a GPU of which nobody can tell."""
    paths = _Paths(topology)
    blind = topology.unknown_names("row")
    return {gpu.name: None if gpu.name in blind else _nearest(paths, gpu) for gpu in topology.gpus}


def _nearest(paths: "_Paths", gpu: Gpu) -> Nearest | None:
    """Return the nearest NICs of one GPU."""
    nics = [nic for nic in paths.topology.nics if nic.host == gpu.host and not nic.virtual]
    if not nics:
        return Nearest(None, (), "no NIC is known")
    found = {nic.name: paths.between(gpu.name, nic.name) for nic in nics}
    known = {name: path for name, path in found.items() if path is not None}
    if not known:
        return None
    best = min(path.rank for path in known.values())
    near = {name: path for name, path in known.items() if path.rank == best}
    reasons = [path.reason for path in near.values() if path.reason]
    if len(known) < len(found):
        reasons.append("nothing is known of " + ", ".join(sorted(found.keys() - known.keys())))
    # Equally deep below one switch, yet with another bridge in between: the farther is the promise.
    kind = max((path.kind for path in near.values()), key=_PATHS.index)
    return Nearest(kind, tuple(near), "; ".join(dict.fromkeys(reasons)))


def path_kind(topology: Topology, a: str, b: str) -> LinkKind | None:
    """Return the PCI path between two devices of a host, `PIX` to `SYS`, or None if unknown."""
    return path_kinds(topology)(a, b)


def path_kinds(topology: Topology) -> Callable[[str, str], LinkKind | None]:
    """Return `path_kind` for many pairs of one topology."""
    paths = _Paths(topology)

    def kind(a: str, b: str) -> LinkKind | None:
        path = paths.between(a, b)
        return path.kind if path else None

    return kind


@dataclass(frozen=True, slots=True)
class _Path:
    """A path between two devices; the smaller the rank, the nearer to the first one."""

    kind: LinkKind
    rank: tuple[int, int]
    reason: str = ""


class _Paths:
    """The PCI paths of a topology: from links that say so, or else from the tree."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._said = {
            frozenset((link.a, link.b)): link.kind for link in topology.links if link.kind in _PATHS
        }
        self._parent = {device.name: device.parent for device in topology.devices}
        self._numa = {node.name: node for node in topology.numa_nodes}

    def above(self, name: str) -> list[str]:
        """Return a device and all that is above it in the tree, upwards."""
        chain = [name]
        while (parent := self._parent.get(chain[-1])) is not None and parent not in chain:
            chain.append(parent)
        return chain

    def between(self, a: str, b: str) -> _Path | None:
        """Return the path from `a` to `b`."""
        if (said := self._said.get(frozenset((a, b)))) is not None:
            return _Path(said, (_PATHS.index(said), 0))
        up, down = self.above(a), self.above(b)
        common = next((name for name in up if name in down), None)
        if common is None:
            ends = self._numa.get(up[-1]), self._numa.get(down[-1])
            if ends[0] is None or ends[1] is None or ends[0].host != ends[1].host:
                return None
            return _Path(LinkKind.SYS, (_PATHS.index(LinkKind.SYS), 0))
        if common in self._numa:
            hidden = self._numa[common].index is None
            reason = "the machine hides NUMA nodes and with them what is near" if hidden else ""
            return _Path(LinkKind.PHB, (_PATHS.index(LinkKind.PHB), 0), reason)
        bridges = up.index(common) + down.index(common) - 1
        kind = LinkKind.PIX if bridges <= 1 else LinkKind.PXB
        return _Path(kind, (0, up.index(common)))  # the deepest common switch is the nearest


def _grouped(pairs: Iterable[tuple[Hashable, str]]) -> Groups:
    """Return the names of equal keys together, in the order of their first ones."""
    groups: dict[Hashable, list[str]] = {}
    for key, name in pairs:
        groups.setdefault(key, []).append(name)
    return tuple(map(tuple, groups.values()))
