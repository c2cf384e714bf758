"""What one rank concludes from the reports of all hosts: states, groups, roads, and why.

Pure but for the memory of `Health`. Whatever follows from something measured is decided here, by
one rank, or ranks would disagree.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pycomm.topology import clusters
from pycomm.topology.graph import NVLINKS, Gpu, Link, LinkKind, State, Topology, Unknown
from pycomm.topology.health import Health, Rules
from pycomm.topology.merge import merge
from pycomm.topology.probes.sysfs import bus_key
from pycomm.topology.rank_groups import RankGroups, ranks_of_hosts
from pycomm.topology.samples import Findings, Sample
from pycomm.topology.snapshot import Groups, MeasuredPair, Place, Snapshot
from pycomm.units import format_rate

__all__ = ["Decider", "Presence"]

# Roads of the ranks of one host that differ by less count as alike: a measurement says no more.
_ALIKE = 1.3
_LATENCIES = 5
# Links that most hosts surpass by this factor are slow, whatever they were before.
_MUCH = 2.0
# What differs by more than this share from what is expected is measured again.
_CONFIRMED = 0.8


@dataclass(frozen=True, slots=True)
class Presence:
    """What a rank says of itself once.

    Attributes
    ----------
    key, name : str
        Its host: what is equal for ranks of one host only, and what people call it.
    gpu : str or None
        The PCI bus id of the device it works on, from the driver.
    """

    key: str
    name: str
    gpu: str | None = None


class Decider:
    """Reports in, snapshots out; on rank 0 only.

    Parameters
    ----------
    presences : sequence of Presence
        One a rank.
    rules : Rules
        When something is well.
    ethernet : bool
        Whether the ranks have no better network than Ethernet between hosts.
    """

    def __init__(self, presences: Sequence[Presence], rules: Rules, *, ethernet: bool) -> None:
        self._presences = tuple(presences)
        self._health = Health(rules)
        self._fabric = LinkKind.TCP if ethernet else LinkKind.IB
        self._parts: dict[str, Topology] = {}
        self._pairs: dict[tuple[int, int], MeasuredPair] = {}
        self._nvlinks: dict[str, set[str]] = {}
        self._latencies: dict[tuple[int, int], deque[float]] = {}
        self._avoided: set[tuple[str, str]] = set()
        # The most that any rank of a host was seen to exchange with another host.
        self._best: dict[str, float] = {}
        self._last: Snapshot | None = None
        self.hosts = host_names(self._presences)

    @property
    def host_ranks(self) -> Groups:
        """The ranks of each host, in the order of their first ranks."""
        return ranks_of_hosts(self.hosts)

    def report(self, host: str, findings: Findings, now: float) -> None:
        """Take in what was seen on a host."""
        self._parts[host] = findings.topology
        for sample in findings.samples:
            self._health.add(replace(sample, subject=f"{host}:{sample.subject}"), now)
        # NVLinks that are not reported any more are down; those that come back must prove it too.
        present = {
            f"{host}:{_between(link.a, link.b)}": link.state
            for link in findings.topology.links
            if link.kind in NVLINKS
        }
        known = self._nvlinks.setdefault(host, set())
        known.update(present)
        for subject in known:
            state = present.get(subject, State.DOWN)
            state = State.DOWN if state is State.DOWN else State.UP
            self._health.add(Sample(subject, "nvlink", now, state, "it was not there"), now)

    def measured(self, pairs: Iterable[MeasuredPair], now: float) -> None:
        """Take in what was measured between ranks."""
        crossing: dict[tuple[str, str], list[MeasuredPair]] = {}
        for pair in pairs:
            # Latency is the shortest of some looks: interrupts make it longer, nothing shorter.
            trips = self._latencies.setdefault((pair.a, pair.b), deque(maxlen=_LATENCIES))
            trips.append(pair.latency)
            pair = replace(pair, latency=min(trips))
            self._pairs[pair.a, pair.b] = pair
            a, b = self.hosts[pair.a], self.hosts[pair.b]
            if a != b:
                crossing.setdefault((a, b), []).append(pair)
        # One sample a link, whatever the number of its pairs: a look is a look.
        carried = {ends: median(pair.bandwidth for pair in own) for ends, own in crossing.items()}
        for ends, bandwidth in carried.items():
            for host in ends:
                self._best[host] = max(self._best.get(host, 0.0), bandwidth)
        typical = median(self._best.values()) if len(self._best) > 2 else 0.0
        for (a, b), own in crossing.items():
            link, bandwidth = _between(a, b), carried[a, b]
            usual = self._health.verdict(link, now).rate or 0.0
            self._health.add(
                Sample(
                    link, "peer", now, State.UP,
                    # A link that was slow from the start has no better past, but others have.
                    rate=typical if _MUCH * max(usual, bandwidth) < typical else None,
                    measured=bandwidth, latency=min(pair.latency for pair in own),
                ),
                now,
            )  # fmt: skip

    def doubtful(
        self, pairs: Mapping[tuple[int, int], MeasuredPair], now: float
    ) -> dict[tuple[int, int], float]:
        """Return the pairs across hosts that are far from what others between the same hosts are.

        With the bandwidth that was expected: what the link usually carries, or else the median of
        its pairs. Not those whose link is known to be slow: once is enough.
        """
        crossing: dict[str, list[float]] = {}
        for pair in pairs.values():
            a, b = self.hosts[pair.a], self.hosts[pair.b]
            if a != b:
                crossing.setdefault(_between(a, b), []).append(pair.bandwidth)
        expected = {}
        for link, found in crossing.items():
            verdict = self._health.verdict(link, now)
            if verdict.state is not State.DEGRADED:
                expected[link] = verdict.rate or median(found)
        doubts = {}
        for key, pair in pairs.items():
            usual = expected.get(_between(self.hosts[pair.a], self.hosts[pair.b]))
            if usual and not _CONFIRMED * usual <= pair.bandwidth <= usual / _CONFIRMED:
                doubts[key] = usual
        return doubts

    def decide(self, now: float) -> Snapshot:
        """Return the snapshot; its epoch is that of the last one if no plan need change."""
        topology = self._judged(now)
        places = self._places(topology)
        topology = replace(topology, notes=topology.notes + self._shared(places))
        roads, why = self._roads()
        decisions = RankGroups(topology, places, self._pairs).decisions()
        epoch = 1 if self._last is None else self._last.epoch
        pairs = tuple(self._pairs[pair] for pair in sorted(self._pairs))
        made = Snapshot(
            epoch, topology, places, pairs, decisions, self._order(topology), roads, why
        )
        if self._last is not None and made.plan_hash != self._last.plan_hash:
            made = replace(made, epoch=epoch + 1)
        self._last = made
        return made

    # -------------------------------------------------------------------------------- states

    def _judged(self, now: float) -> Topology:
        """Return all hosts as one topology, each thing in the state that is believed."""
        merged = merge([self._parts[host] for host in dict.fromkeys(self.hosts)])
        merged = self._health.judged(merged, now)
        links = [self._trusted(link, now) for link in merged.links]
        for number, a in enumerate(names := list(dict.fromkeys(self.hosts))):
            for b in names[number + 1 :]:
                verdict = self._health.verdict(_between(a, b), now)
                links.append(
                    Link(
                        a, b, self._fabric, verdict.measured, verdict.latency,
                        verdict.state, verdict.reason,
                    )
                )  # fmt: skip
        unknown = (*merged.unknown, *self._stale(merged.gpus))
        return replace(merged, links=tuple(links), unknown=unknown)

    def _trusted(self, link: Link, now: float) -> Link:
        """Return an NVLink as down until it was there for some looks, others as they are."""
        host, _, a = link.a.partition(":")
        verdict = self._health.verdict(f"{host}:{_between(a, link.b.partition(':')[2])}", now)
        if link.kind not in NVLINKS or verdict.state is not State.DOWN:
            return link
        return replace(link, state=State.DOWN, reason=verdict.reason)

    def _stale(self, gpus: Sequence[Gpu]) -> tuple[Unknown, ...]:
        """Return that the NVLinks are unknown of GPUs that nobody could look at lately."""
        return tuple(
            Unknown("nvlink", gpu.name, gpu.reason)
            for gpu in gpus
            if gpu.state is State.UNKNOWN and gpu.name in self._health.subjects
        )

    def _places(self, topology: Topology) -> tuple[Place, ...]:
        gpus = {
            (gpu.host, bus_key(gpu.bus_id)): gpu.name
            for gpu in topology.gpus
            if gpu.bus_id is not None
        }
        return tuple(
            Place(rank, host, gpus.get((host, bus_key(one.gpu))) if one.gpu else None)
            for rank, (host, one) in enumerate(zip(self.hosts, self._presences, strict=True))
        )

    def _shared(self, places: Sequence[Place]) -> tuple[str, ...]:
        """Return notes on GPUs that several ranks work on."""
        ranks: dict[str, list[int]] = {}
        for place in places:
            if place.gpu is not None:
                ranks.setdefault(place.gpu, []).append(place.rank)
        return tuple(
            f"ranks {', '.join(map(str, sharing))} work on one GPU, {gpu}: NCCL refuses that"
            for gpu, sharing in ranks.items()
            if len(sharing) > 1
        )

    # --------------------------------------------------------------------------------- roads

    def _order(self, topology: Topology) -> Groups:
        """Return the hosts in the order of a ring that passes by slow links if it can."""
        hosts = self.host_ranks
        names = list(dict.fromkeys(self.hosts))
        # Only links that are known to be worse than they should be move anybody: noise does not.
        costs: dict[tuple[int, int], float] = {}
        for link in topology.links:
            if link.a not in names or link.b not in names:
                continue
            if link.state in _BAD:
                self._avoided.add((link.a, link.b))
            elif link.state is State.UP:
                self._avoided.discard((link.a, link.b))
            # Of what is unknown now, the last that was known: silence is no recovery.
            bad = (link.a, link.b) in self._avoided
            costs[names.index(link.a), names.index(link.b)] = 10.0 if bad else 1.0
        if not any(cost > 1 for cost in costs.values()):
            return hosts
        order = clusters.ring_order([(number,) for number in range(len(names))], costs)
        return tuple(hosts[number] for number in order)

    def _roads(self) -> tuple[tuple[float, ...] | None, str]:
        """Return how fast each rank reaches other hosts, where ranks of one host differ."""
        crossing: dict[int, list[float]] = {}
        for (a, b), pair in self._pairs.items():
            if self.hosts[a] != self.hosts[b]:
                for rank in (a, b):
                    crossing.setdefault(rank, []).append(pair.bandwidth)
        if len(crossing) < len(self.hosts):
            return None, "not every rank was measured against another host"
        # The best pair of a rank: the others may be limited by their other end.
        roads = tuple(max(crossing[rank]) for rank in range(len(self.hosts)))
        last = None if self._last is None else self._last.roads
        worst = max(
            max(roads[r] for r in host) / min(roads[r] for r in host) for host in self.host_ranks
        )
        if worst < _ALIKE:
            return None, f"the ranks of each host reach others alike ({format_rate(median(roads))})"
        if last is not None and all(
            1 / _ALIKE < now / then < _ALIKE for now, then in zip(roads, last, strict=True)
        ):
            roads = last  # no other plan for what may be noise
        told = ", ".join(f"rank {rank} {format_rate(road)}" for rank, road in enumerate(roads))
        return roads, f"slices in proportion to the way to other hosts: {told}"


_BAD = (State.DEGRADED, State.DOWN)


def host_names(presences: Sequence[Presence]) -> tuple[str, ...]:
    """Return the host of each rank, numbered where different hosts call themselves alike."""
    keys: dict[str, list[str]] = {}
    for presence in presences:
        known = keys.setdefault(presence.name, [])
        if presence.key not in known:
            known.append(presence.key)
    named: dict[tuple[str, str], str] = {}
    for name, known in keys.items():
        number = 0
        for key in known:
            new = name if len(known) == 1 else f"{name}-{number}"
            while new in named.values() or (new != name and new in keys):
                number += 1
                new = f"{name}-{number}"
            named[name, key] = new
            number += 1
    return tuple(named[one.name, one.key] for one in presences)


def _between(a: str, b: str) -> str:
    return f"{a} - {b}"
