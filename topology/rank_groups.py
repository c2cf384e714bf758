"""From a topology and where ranks are in it to groups of ranks, each with its reason. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pycomm.topology import clusters
from pycomm.topology.graph import LinkKind, State, Topology
from pycomm.topology.groups import nearest_nics, numa_groups, nvlink_islands
from pycomm.topology.snapshot import Decision, Groups, MeasuredPair, Place
from pycomm.units import format_rate, format_seconds

__all__ = ["RankGroups", "ranks_of_hosts"]


@dataclass(frozen=True, slots=True)
class RankGroups:
    """What groups of ranks follow from.

    Attributes
    ----------
    topology : Topology
        All hosts, with states.
    places : tuple of Place
        Where each rank is, in rank order.
    pairs : mapping of (int, int) to MeasuredPair
        What was measured between ranks.
    """

    topology: Topology
    places: tuple[Place, ...]
    pairs: Mapping[tuple[int, int], MeasuredPair]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(place.host for place in self.places)

    @property
    def host_ranks(self) -> Groups:
        """The ranks of each host, in the order of their first ranks."""
        return ranks_of_hosts(self.hosts)

    def decisions(self) -> tuple[Decision, ...]:
        """Return all kinds of groups."""
        nvlink = self._nvlink()
        return (
            *self._by_host(),
            self._numa(),
            nvlink,
            self._gradient_sync(nvlink),
            self._rails(),
            *self._near(),
            self._healthy(),
        )

    def _by_host(self) -> tuple[Decision, ...]:
        hosts = self.host_ranks
        world = (tuple(range(len(self.hosts))),)
        told = f"{len(hosts)} host{'s' * (len(hosts) > 1)}, told apart by boot id and namespaces"
        return (
            Decision("world", world, "all ranks"),
            Decision("host", hosts, told),
            Decision("leaders", (clusters.leaders(hosts),), "the lowest rank of each host"),
        )

    def _numa(self) -> Decision:
        groups = _of_ranks(numa_groups(self.topology), self.places)
        if groups is None:
            return Decision("numa", None, _no_gpu(self.places, "the NUMA node of a GPU is unknown"))
        return Decision("numa", groups, "ranks whose GPUs are near the same NUMA node")

    def _nvlink(self) -> Decision:
        islands = nvlink_islands(self.topology)
        groups = _of_ranks(islands, self.places)
        if groups is None:
            blind = self.topology.unknown_names("nvlink")
            why = "; ".join(f"{name}: {reason}" for name, reason in blind.items())
            return Decision("nvlink", None, _no_gpu(self.places, why or "NVLink is unknown"))
        reason = "ranks whose GPUs reach each other over NVLink links that are up"
        out = [
            f"{gpu.name} is {gpu.state}: {gpu.reason}"
            for gpu in self.topology.gpus
            if gpu.state in (State.DEGRADED, State.DOWN)
        ]
        return Decision("nvlink", groups, "; ".join([reason, *out]))

    def _gradient_sync(self, nvlink: Decision) -> Decision:
        """Return NVLink islands of several ranks, and the other ranks of each host together."""
        islands = [one for one in nvlink.groups or () if len(one) > 1]
        covered = {rank for one in islands for rank in one}
        rest = (tuple(rank for rank in host if rank not in covered) for host in self.host_ranks)
        groups = (*islands, *filter(None, rest))
        why = "no ranks are known to share NVLink, so the ranks of each host"
        if islands:
            why = f"{nvlink.reason}; the other ranks of each host"
        return Decision("gradient_sync", tuple(sorted(groups)), why)

    def _rails(self) -> Decision:
        """Return the ranks of equal place across hosts, by NIC where their NICs are known."""
        hosts = self.host_ranks
        if len(hosts) == 1:
            return Decision("rail", None, "one host has no rails")
        if differ := self._different_nics():
            return Decision("rail", None, differ)
        by_nic = self._rails_by_nic()
        if by_nic is not None:
            return by_nic
        if len({len(host) for host in hosts}) > 1:
            return Decision("rail", None, "hosts have different numbers of ranks")
        why = "ranks of the same place in their host; no rank has a NIC of its own that is known"
        return Decision("rail", tuple(zip(*hosts, strict=True)), why)

    def _different_nics(self) -> str:
        """Return how the InfiniBand and RoCE ports of hosts differ that can be used, if they do."""
        ports: dict[str, list[str]] = {host: [] for host in self.hosts}
        for nic in self.topology.nics:
            if nic.fabric in (LinkKind.IB, LinkKind.ROCE) and nic.state is not State.DOWN:
                ports[nic.host].append(f"{nic.device or nic.name} ({nic.fabric})")
        kinds = {host: [port.rpartition("(")[2] for port in has] for host, has in ports.items()}
        if len({tuple(kind) for kind in kinds.values()}) == 1:
            return ""
        told = "; ".join(
            f"{host} (ranks {', '.join(str(r) for r, one in enumerate(self.hosts) if one == host)})"
            f" has {', '.join(has) or 'none'}"
            for host, has in ports.items()
        )
        return f"the hosts' InfiniBand and RoCE ports that are usable differ: {told}"

    def _rails_by_nic(self) -> Decision | None:
        """Return the ranks whose nearest NICs have the same number; None if that is unknown."""
        near = nearest_nics(self.topology)
        usable = {nic.name for nic in self.topology.nics if nic.state is not State.DOWN}
        index = {
            nic.name: number
            for host in dict.fromkeys(self.hosts)
            for number, nic in enumerate(
                one for one in self.topology.nics if one.host == host and not one.virtual
            )
        }
        rails: dict[int, list[int]] = {}
        for place in self.places:
            nearest = near.get(place.gpu or "")
            nics = [name for name in nearest.nics if name in usable] if nearest else []
            if not nics:
                return None
            rails.setdefault(index[nics[0]], []).append(place.rank)
        groups = tuple(tuple(rails[number]) for number in sorted(rails))
        return Decision("rail", groups, "ranks whose nearest NICs have the same number")

    def _near(self) -> tuple[Decision, ...]:
        ranks = range(len(self.hosts))
        if not self.pairs:
            why = "nothing was measured between ranks"
            return Decision("near", None, why), Decision("fast", None, why)
        latency = {key: pair.latency for key, pair in self.pairs.items()}
        seconds = {key: 1 / pair.bandwidth for key, pair in self.pairs.items()}
        return (
            Decision(
                "near",
                clusters.measured_clusters(ranks, latency),
                f"latencies from {format_seconds(min(latency.values()))} to "
                f"{format_seconds(max(latency.values()))}",
            ),
            Decision(
                "fast",
                clusters.measured_clusters(ranks, seconds),
                f"bandwidths from {format_rate(1 / max(seconds.values()))} to "
                f"{format_rate(1 / min(seconds.values()))}",
            ),
        )

    def _healthy(self) -> Decision:
        """Return the ranks without those whose GPU is down."""
        dead = {gpu.name: gpu.reason for gpu in self.topology.gpus if gpu.state is State.DOWN}
        lost = {
            place.rank: f"{place.gpu} is down: {dead[place.gpu]}"
            for place in self.places
            if place.gpu in dead
        }
        left = clusters.healthy(range(len(self.places)), lost)
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in lost.items())
        return Decision("healthy", (left,) if left else (), why or "no rank is known to be lost")


def ranks_of_hosts(hosts: Sequence[str]) -> Groups:
    """Return the ranks of each host, in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))


def _of_ranks(groups: tuple[tuple[str, ...], ...] | None, places: Sequence[Place]) -> Groups | None:
    """Return groups of GPUs as groups of the ranks that work on them; None if no rank does."""
    if groups is None or all(place.gpu is None for place in places):
        return None
    made = (
        tuple(place.rank for place in places if place.gpu is not None and place.gpu in group)
        for group in groups
    )
    return tuple(filter(None, made))


def _no_gpu(places: Sequence[Place], otherwise: str) -> str:
    if all(place.gpu is None for place in places):
        return "no rank works on a GPU that is known"
    return otherwise
