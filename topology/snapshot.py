"""What one rank has decided for all: the topology with states, the groups, and why.

A snapshot is a record. Rank 0 makes one from what all hosts reported, all ranks get the same, and
its hash says so. Its epoch grows when something changes that a plan may depend on: a state, a group
or a road, not each measured number.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from pycomm.algorithms.cost import Link, Model
from pycomm.topology.graph import State, Topology

__all__ = ["Decision", "Groups", "MeasuredPair", "Place", "Snapshot", "measured_model"]

Groups = tuple[tuple[int, ...], ...]
_MEASURED = ("near", "fast")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes
    ----------
    host : str
        The name of its host in the topology.
    gpu : str or None
        The name of its GPU, if it works on one that the topology has.
    """

    rank: int
    host: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """What was measured between two ranks: seconds in one direction, and bytes per second."""

    a: int
    b: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One kind of groups.

    Attributes
    ----------
    name : str
        The kind: "host", "numa", "nvlink", "rail", "leaders", "near", "fast", "healthy", "world".
    groups : tuple of tuple of int, or None
        Ranks together; a rank may be in none. None if nobody can tell.
    reason : str
        Why, in a sentence.
    """

    name: str
    groups: Groups | None
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """What is known and decided, the same on all ranks.

    Attributes
    ----------
    epoch : int
        Grows with each change of what plans depend on, from 1.
    topology : Topology
        All hosts, with the states that are believed.
    places : tuple of Place
        Where each rank is.
    pairs : tuple of MeasuredPair
        What was measured between ranks, the smaller rank first.
    decisions : tuple of Decision
        The groups.
    order : tuple of tuple of int
        The ranks host by host, in the order in which a ring passes the hosts.
    roads : tuple of float, or None
        How fast the way of each rank to other hosts is, in bytes per second; None if the ranks of
        each host are alike, or nobody knows.
    roads_reason : str
        Why, in a sentence.
    """

    epoch: int
    topology: Topology
    places: tuple[Place, ...]
    pairs: tuple[MeasuredPair, ...] = ()
    decisions: tuple[Decision, ...] = ()
    order: Groups = ()
    roads: tuple[float, ...] | None = None
    roads_reason: str = ""
    lost: tuple[int, ...] = field(default=())

    def decision(self, name: str) -> Decision | None:
        """Return the groups of a kind, or None if there is no such kind."""
        return next((one for one in self.decisions if one.name == name), None)

    @cached_property
    def hash(self) -> str:
        """A hash of all of it: equal on two ranks exactly if they have the same snapshot."""
        return _hash(self._told())

    @cached_property
    def plan_hash(self) -> str:
        """A hash of what plans may depend on; the epoch grows when it changes."""
        topology = self.topology
        states: list[tuple[Any, ...]] = [(gpu.name, gpu.state) for gpu in topology.gpus]
        states += [(nic.name, nic.state) for nic in topology.nics if not nic.virtual]
        # A link that nobody measured well or ill says nothing: as if it were not there.
        states += [
            (link.a, link.b, link.kind, link.state)
            for link in topology.links
            if link.state is not State.UNKNOWN
        ]
        # Clusters follow from each measured number, and no plan from them.
        groups = {one.name: one.groups for one in self.decisions if one.name not in _MEASURED}
        return _hash([states, groups, self.order, self.roads, self.lost])

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self._told(), allow_nan=False)

    def _told(self) -> Mapping[str, Any]:
        return {
            "epoch": self.epoch,
            "topology": json.loads(self.topology.to_json()),
            "places": [asdict(place) for place in self.places],
            "pairs": [asdict(pair) for pair in self.pairs],
            "decisions": [asdict(one) for one in self.decisions],
            "order": self.order,
            "roads": self.roads,
            "roads_reason": self.roads_reason,
            "lost": self.lost,
        }

    def without(self, lost: tuple[int, ...], reason: str) -> "Snapshot":
        """Return the snapshot of those who are left when ranks were lost."""
        there = {place.host for place in self.places if place.rank not in lost}
        links = tuple(
            replace(link, state=State.DOWN, reason=reason)
            if {link.a, link.b} & ({place.host for place in self.places} - there)
            else link
            for link in self.topology.links
        )

        def left(groups: Groups) -> Groups:
            there = (tuple(rank for rank in group if rank not in lost) for group in groups)
            return tuple(filter(None, there))

        everybody = (tuple(place.rank for place in self.places),)
        decisions = tuple(
            Decision(one.name, left(everybody), reason)
            if one.name == "healthy"
            else replace(one, groups=None if one.groups is None else left(one.groups))
            for one in self.decisions
        )
        topology = replace(self.topology, links=links)
        return replace(
            self,
            epoch=self.epoch + 1,
            topology=topology,
            lost=lost,
            decisions=decisions,
            order=left(self.order),
        )


def measured_model(snapshot: Snapshot, model: Model) -> Model | None:
    """Return a cost model with the links that were measured; None if nothing was.

    Half of a round trip through Python is latency and half what a rank does for a message, for want
    of a way to tell them apart.
    """
    if not snapshot.pairs:
        return None
    host = {place.rank: place.host for place in snapshot.places}
    inside = [pair for pair in snapshot.pairs if host[pair.a] == host[pair.b]]
    across = [pair for pair in snapshot.pairs if host[pair.a] != host[pair.b]]

    def link(pairs: list[MeasuredPair], known: Link) -> Link:
        if not pairs:
            return known
        latency = median(pair.latency for pair in pairs)
        return Link(latency / 2, median(pair.bandwidth for pair in pairs), latency / 2)

    return replace(model, inside=link(inside, model.inside), across=link(across, model.across))


def _hash(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
