"""What rank 0 concludes from reports: states, groups with reasons, roads, order, epochs."""

from dataclasses import replace
from itertools import combinations

import pytest

from pycomm.topology.decide import Decider, Presence
from pycomm.topology.graph import Gpu, Host, Link, LinkKind, Nic, NumaNode, State, Switch, Topology
from pycomm.topology.health import Rules
from pycomm.topology.samples import Findings, Sample
from pycomm.topology.snapshot import MeasuredPair, Snapshot

UP, DOWN = State.UP, State.DOWN


def node(
    host: str,
    gpus: int = 2,
    *,
    nics: tuple[str, ...] = ("mlx5_0", "mlx5_1"),
    kind: LinkKind = LinkKind.IB,
    linked: bool = True,
) -> Topology:
    """A host with GPUs on an NVSwitch, and as many NICs, each below the switch of one GPU."""
    switches = [Switch(f"pci{number}", host, parent="numa0") for number in range(gpus)]
    links = [
        Link(f"gpu{number}", "nvswitch", LinkKind.NVSWITCH, state=UP) for number in range(gpus)
    ]
    return Topology(
        hosts=(Host(host),),
        numa_nodes=(NumaNode("numa0", host, 0),),
        switches=(*switches, Switch("nvswitch", host, "nvswitch")),
        gpus=tuple(
            Gpu(f"gpu{n}", host, n, f"0000:0{n}:00.0", ("numa0",), f"pci{n}") for n in range(gpus)
        ),
        nics=tuple(
            Nic(name, host, n, name, numa=("numa0",), parent=f"pci{n}", fabric=kind)
            for n, name in enumerate(nics)
        ),
        links=tuple(links) if linked else (),
    )


def decider(
    hosts: str, gpus: list[str | None] | None = None, *, rules: Rules | None = None
) -> Decider:
    """One for ranks on hosts of one letter each."""
    devices = gpus or [None] * len(hosts)
    presences = [Presence(key, f"h{key}", gpu) for key, gpu in zip(hosts, devices, strict=True)]
    return Decider(presences, rules or Rules(), ethernet=True)


def groups(snapshot: Snapshot, name: str) -> object:
    decision = snapshot.decision(name)
    assert decision is not None
    assert decision.reason
    return decision.groups


def pairs(rates: dict[tuple[int, int], float]) -> list[MeasuredPair]:
    return [MeasuredPair(a, b, 1e-4, rate * 1e6) for (a, b), rate in rates.items()]


def test_hosts_whatever_the_order_of_ranks() -> None:
    one = decider("abab")
    for host in ("ha", "hb"):
        one.report(host, Findings(node(host)), 0.0)
    snapshot = one.decide(0.0)
    assert groups(snapshot, "host") == ((0, 2), (1, 3))
    assert groups(snapshot, "leaders") == ((0, 1),)
    assert groups(snapshot, "world") == ((0, 1, 2, 3),)
    assert groups(snapshot, "nvlink") is None
    assert groups(snapshot, "rail") == ((0, 1), (2, 3))
    assert groups(snapshot, "gradient_sync") == ((0, 2), (1, 3))


def test_hosts_of_one_name_are_told_apart() -> None:
    one = Decider([Presence("a", "pod"), Presence("b", "pod")], Rules(), ethernet=True)
    assert one.hosts == ("pod-0", "pod-1")
    assert one.host_ranks == ((0,), (1,))


def test_a_name_that_looks_like_a_number_of_another_host() -> None:
    presences = [Presence("1", "x"), Presence("2", "x"), Presence("3", "x-1"), Presence("1", "x")]
    names = Decider(presences, Rules(), ethernet=True).hosts
    assert len(set(names)) == 3
    assert names[0] == names[3]
    assert names[2] == "x-1"


def with_gpus(left: Topology, right: Topology) -> Snapshot:
    buses: list[str | None] = ["00000000:01:00.0", "0000:00:00.0", "0000:01:00.0", "0:00:00.0"]
    one = decider("aabb", buses)
    one.report("ha", Findings(left), 0.0)
    one.report("hb", Findings(right), 0.0)
    return one.decide(0.0)


def test_devices_are_found_by_bus_id() -> None:
    snapshot = with_gpus(node("ha"), node("hb"))
    assert [place.gpu for place in snapshot.places] == ["ha:gpu1", "ha:gpu0", "hb:gpu1", "hb:gpu0"]
    assert groups(snapshot, "nvlink") == ((0, 1), (2, 3))
    assert groups(snapshot, "gradient_sync") == ((0, 1), (2, 3))
    assert groups(snapshot, "numa") == ((0, 1), (2, 3))
    # By the NIC near each GPU, not by the rank.
    assert groups(snapshot, "rail") == ((1, 3), (0, 2))


def test_different_nics_make_no_rails() -> None:
    for right in (node("hb", nics=("mlx5_1",)), node("hb", kind=LinkKind.ROCE)):
        rail = with_gpus(node("ha"), right).decision("rail")
        assert rail is not None
        assert rail.groups is None
        assert "ha (ranks 0, 1) has mlx5_0 (ib)" in rail.reason
        assert "hb (ranks 2, 3) has mlx5_" in rail.reason


def test_a_gpu_that_lost_its_nvlink_is_in_no_island() -> None:
    one = decider("aa", ["0000:00:00.0", "0000:01:00.0"])
    topology = node("ha", linked=False)
    link = Link("gpu0", "nvswitch", LinkKind.NVSWITCH, state=UP)
    seen = Findings(
        Topology(
            topology.hosts, topology.numa_nodes, topology.switches, topology.gpus, links=(link,)
        ),
        (Sample("gpu1", "nvml", 0.0, State.DEGRADED, "0 of 18 NVLinks are up"),),
    )
    one.report("ha", seen, 0.0)
    snapshot = one.decide(0.0)
    assert groups(snapshot, "nvlink") == ((0,),)
    nvlink = snapshot.decision("nvlink")
    assert nvlink is not None
    assert "ha:gpu1 is degraded: 0 of 18 NVLinks are up" in nvlink.reason


def test_two_ranks_on_one_gpu() -> None:
    one = decider("aa", ["0000:01:00.0", "00000000:01:00.0"])
    one.report("ha", Findings(node("ha")), 0.0)
    assert "ranks 0, 1 work on one GPU, ha:gpu1" in one.decide(0.0).topology.notes[-1]


def test_a_dead_gpu_takes_its_rank_out() -> None:
    one = decider("aa", ["0000:00:00.0", "0000:01:00.0"])
    fallen = Sample("gpu1", "nvml", 0.0, DOWN, "Xid 79: it has fallen off the bus")
    one.report("ha", Findings(node("ha"), (fallen,)), 0.0)
    healthy = one.decide(0.0).decision("healthy")
    assert healthy is not None
    assert healthy.groups == ((0,),)
    assert healthy.reason == "rank 1: ha:gpu1 is down: Xid 79: it has fallen off the bus"


def test_roads_follow_what_was_measured() -> None:
    one = decider("aabb")
    for host in ("ha", "hb"):
        one.report(host, Findings(Topology(hosts=(Host(host),))), 0.0)
    alike = {(0, 2): 100.0, (1, 3): 98.0, (0, 3): 60.0}
    one.measured(pairs(alike), 0.0)
    assert one.decide(0.0).roads is None
    one.measured(pairs({(0, 2): 100.0, (1, 3): 25.0, (0, 3): 25.0}), 1.0)
    snapshot = one.decide(1.0)
    assert snapshot.roads == (100e6, 25e6, 100e6, 25e6)
    assert snapshot.epoch == 2
    assert "rank 1 25 MB/s" in snapshot.roads_reason
    one.measured(pairs({(0, 2): 95.0, (1, 3): 27.0, (0, 3): 26.0}), 2.0)
    assert one.decide(2.0).roads == snapshot.roads  # noise
    assert one.decide(2.0).epoch == 2


def test_the_ring_of_hosts_goes_around_a_slow_link() -> None:
    one = decider("abcd")
    for host in "abcd":
        one.report(f"h{host}", Findings(Topology(hosts=(Host(f"h{host}"),))), 0.0)
    fine = dict.fromkeys(combinations(range(4), 2), 100.0)
    one.measured(pairs(fine), 0.0)
    before = one.decide(0.0)
    assert before.order == ((0,), (1,), (2,), (3,))
    one.measured(pairs(fine | {(0, 1): 10.0}), 1.0)
    after = one.decide(1.0)
    assert after.epoch == before.epoch + 1
    ring = [host[0] for host in after.order]
    hops = {frozenset(hop) for hop in zip(ring, ring[1:] + ring[:1], strict=True)}
    assert frozenset({0, 1}) not in hops
    slow = next(link for link in after.topology.links if (link.a, link.b) == ("ha", "hb"))
    assert slow.state is State.DEGRADED
    assert "10% of what it usually carries" in slow.reason


def test_states_come_back_after_good_looks_and_epochs_count_changes() -> None:
    one = decider("a", rules=Rules(good_probes=2))

    def look(state: State, now: float) -> Snapshot:
        sample = Sample("mlx5_0", "infiniband", now, state, "polling")
        one.report("ha", Findings(node("ha"), (sample,)), now)
        return one.decide(now)

    seen = [look(state, now) for now, state in enumerate((UP, UP, DOWN, UP, UP, UP))]
    assert [snapshot.topology.nics[0].state for snapshot in seen] == [UP, UP, DOWN, DOWN, UP, UP]
    assert [snapshot.epoch for snapshot in seen] == [1, 1, 2, 2, 3, 3]
    stale = one.decide(100.0)
    assert stale.topology.nics[0].state is State.UNKNOWN


def test_a_hash_of_all_and_one_of_what_plans_depend_on() -> None:
    one = decider("ab")
    for host in ("ha", "hb"):
        one.report(host, Findings(Topology(hosts=(Host(host),))), 0.0)
    one.measured(pairs({(0, 1): 100.0}), 0.0)
    first = one.decide(0.0)
    one.measured(pairs({(0, 1): 101.0}), 1.0)
    second = one.decide(1.0)
    assert first.hash != second.hash
    assert first.plan_hash == second.plan_hash
    assert first.to_json() != second.to_json()


def test_a_host_that_is_slow_from_the_start() -> None:
    one = decider("abc")
    for host in ("ha", "hb", "hc"):
        one.report(host, Findings(Topology(hosts=(Host(host),))), 0.0)
    one.measured(pairs({(0, 1): 110.0, (0, 2): 12.0, (1, 2): 13.0}), 0.0)
    states = [(link.b, link.state, link.reason) for link in one.decide(0.0).topology.links]
    assert [state for _, state, _ in states] == [UP, State.DEGRADED, State.DEGRADED]
    assert states[1][2] == "measured 12 MB/s, 11% of what it should carry, 110 MB/s"


def test_what_is_measured_again() -> None:
    one = decider("aabb")
    rates = {(0, 2): 100.0, (1, 3): 70.0, (0, 1): 5.0, (0, 3): 99.0, (1, 2): 180.0}
    found = {(pair.a, pair.b): pair for pair in pairs(rates)}
    assert one.doubtful(found, 0.0) == {(1, 3): 99.5e6, (1, 2): 99.5e6}
    one.report("ha", Findings(Topology(hosts=(Host("ha"),))), 0.0)
    one.report("hb", Findings(Topology(hosts=(Host("hb"),))), 0.0)
    one.measured(pairs({(0, 2): 100.0}), 0.0)
    assert list(one.doubtful({(0, 2): pairs({(0, 2): 10.0})[0]}, 0.0)) == [(0, 2)]
    one.measured(pairs({(0, 2): 10.0}), 1.0)  # known to be slow now
    assert one.doubtful({(0, 2): pairs({(0, 2): 10.0})[0]}, 1.0) == {}


def test_nvlinks_come_back_after_good_looks_too() -> None:
    buses: list[str | None] = ["0000:00:00.0", "0000:01:00.0"]
    one = decider("aa", buses, rules=Rules(good_probes=2, ttl=10))
    whole = node("ha")
    samples = [Sample(f"gpu{n}", "nvml", 0.0, UP) for n in range(2)]

    def look(linked: bool, now: float) -> object:
        links = whole.links if linked else whole.links[:1]
        broken = replace(samples[1], state=State.DEGRADED, reason="its links are down")
        seen = (samples[0], samples[1] if linked else broken)
        one.report("ha", Findings(replace(whole, links=links), seen), now)
        return groups(one.decide(now), "nvlink")

    came = [look(linked, now) for now, linked in enumerate((True, False, True, True, True))]
    assert came == [((0, 1),), ((0,),), ((0,),), ((0, 1),), ((0, 1),)]
    assert groups(one.decide(100.0), "nvlink") is None, "nobody has looked for long"


def test_a_link_that_is_not_measured_any_more_stays_avoided() -> None:
    one = decider("abcd", rules=Rules(ttl=5))
    for host in "abcd":
        one.report(f"h{host}", Findings(Topology(hosts=(Host(f"h{host}"),))), 0.0)
    fine = dict.fromkeys(combinations(range(4), 2), 100.0)
    one.measured(pairs(fine), 0.0)
    one.measured(pairs(fine | {(0, 1): 10.0}), 1.0)
    around = one.decide(1.0).order
    assert around != ((0,), (1,), (2,), (3,))
    late = one.decide(100.0)
    assert late.topology.links[0].state is State.UNKNOWN
    assert late.order == around


def test_a_container_that_starts_changes_no_plan() -> None:
    one = decider("a")
    one.report("ha", Findings(node("ha")), 0.0)
    assert one.decide(0.0).epoch == 1
    more = (*node("ha").nics, Nic("veth7", "ha", virtual=True, state=UP))
    one.report("ha", Findings(replace(node("ha"), nics=more)), 1.0)
    assert one.decide(1.0).epoch == 1


def test_ranks_without_nvlink_sync_with_those_of_their_host() -> None:
    buses: list[str | None] = ["0000:00:00.0", "0000:01:00.0", None, None]
    one = decider("aabb", buses)
    one.report("ha", Findings(node("ha")), 0.0)
    one.report("hb", Findings(Topology(hosts=(Host("hb"),))), 0.0)
    assert groups(one.decide(0.0), "gradient_sync") == ((0, 1), (2, 3))


def test_survivors() -> None:
    one = decider("ab")
    for host in ("ha", "hb"):
        one.report(host, Findings(Topology(hosts=(Host(host),))), 0.0)
    left = one.decide(0.0).without((1,), "rank 1 does not answer")
    assert left.epoch == 2
    assert groups(left, "healthy") == groups(left, "world") == groups(left, "host") == ((0,),)
    assert left.order == ((0,),)
    assert left.topology.links[0].state is DOWN


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_nothing_known_is_nothing_claimed(hosts: str) -> None:
    one = decider(hosts)
    for host in hosts:
        one.report(f"h{host}", Findings(Topology(hosts=(Host(f"h{host}"),))), 0.0)
    snapshot = one.decide(0.0)
    for name in ("numa", "nvlink", "near", "fast"):
        assert groups(snapshot, name) is None
    assert snapshot.roads is None
