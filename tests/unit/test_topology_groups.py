"""Groups from links: islands, pairs, rails, near NICs; and None where nobody can tell."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.topology.graph import (
    Gpu,
    Host,
    Link,
    LinkKind,
    Nic,
    NumaNode,
    State,
    Switch,
    Topology,
    Unknown,
)
from pycomm.topology.groups import (
    Nearest,
    direct_pairs,
    host_groups,
    nearest_nics,
    numa_groups,
    nvlink_counts,
    nvlink_islands,
    path_kind,
    rails,
)
from pycomm.topology.merge import merge


def _gpus(count: int, *links: Link, **rest: tuple) -> Topology:
    gpus = tuple(Gpu(f"g{n}", "h", n) for n in range(count))
    return Topology((Host("h"),), gpus=gpus, links=links, **rest)


def _nv(a: int, b: int, state: State = State.UNKNOWN) -> Link:
    return Link(f"g{a}", f"g{b}", LinkKind.NVLINK, state=state, count=2)


def _lost(*numbers: int) -> tuple[Unknown, ...]:
    return tuple(Unknown("row", f"g{n}", "its row is missing") for n in numbers)


def test_a_mesh_is_one_island_of_direct_pairs() -> None:
    topology = _gpus(4, *(_nv(a, b) for a, b in combinations(range(4), 2)))
    assert nvlink_islands(topology) == (("g0", "g1", "g2", "g3"),)
    assert direct_pairs(topology) is True
    assert nvlink_counts(topology) == {f"g{n}": 6 for n in range(4)}


def test_a_ring_is_one_island_without_all_pairs() -> None:
    topology = _gpus(4, _nv(0, 1), _nv(1, 2), _nv(2, 3), _nv(3, 0))
    assert nvlink_islands(topology) == (("g0", "g1", "g2", "g3"),)
    assert direct_pairs(topology) is False


def test_pairs_and_singles_are_islands_of_their_own() -> None:
    topology = _gpus(5, _nv(2, 0), _nv(1, 4), Link("g0", "g1", LinkKind.PIX))
    assert nvlink_islands(topology) == (("g0", "g2"), ("g1", "g4"), ("g3",))
    assert direct_pairs(topology) is True


def test_a_switch_joins_and_only_its_own_gpus_are_direct() -> None:
    switches = (Switch("s", None, "nvswitch"), Switch("t", None, "nvswitch"))
    ends = [("g0", "s"), ("g1", "s"), ("g1", "t"), ("g2", "t")]
    links = [Link(a, b, LinkKind.NVSWITCH) for a, b in ends]
    topology = _gpus(3, *links, switches=switches)
    assert nvlink_islands(topology) == (("g0", "g1", "g2"),)
    assert direct_pairs(topology) is False
    assert direct_pairs(_gpus(2, *links[:2], switches=switches)) is True


def test_links_that_are_down_join_nothing() -> None:
    topology = _gpus(3, _nv(0, 1, State.DOWN), _nv(1, 2, State.DEGRADED))
    assert nvlink_islands(topology) == (("g0",), ("g1", "g2"))
    assert nvlink_counts(topology) == {"g1": 2, "g2": 2}


def test_a_gpu_that_lost_its_links_is_in_no_island() -> None:
    topology = _gpus(3, _nv(0, 1))
    broken = replace(topology.gpus[2], state=State.DEGRADED, reason="no link")
    assert nvlink_islands(replace(topology, gpus=(*topology.gpus[:2], broken))) == (("g0", "g1"),)
    hot = replace(topology.gpus[1], state=State.DEGRADED, reason="ECC")
    topology = replace(topology, gpus=(topology.gpus[0], hot, topology.gpus[2]))
    assert nvlink_islands(topology) == (("g0", "g1"), ("g2",))


def test_what_cannot_be_told_is_none() -> None:
    assert nvlink_islands(Topology()) is None
    assert direct_pairs(Topology()) is None
    assert numa_groups(Topology()) is None
    topology = _gpus(2, unknown=(Unknown("nvlink", "g1", "by hand"),))
    assert nvlink_islands(topology) is None
    assert direct_pairs(topology) is None
    assert numa_groups(topology) is None


def test_missing_rows_leave_islands_only_where_the_others_decide() -> None:
    mesh = [_nv(0, b) for b in range(1, 4)]
    assert nvlink_islands(_gpus(4, *mesh, unknown=_lost(1, 2, 3))) == (("g0", "g1", "g2", "g3"),)
    assert direct_pairs(_gpus(4, *mesh, unknown=_lost(1, 2, 3))) is None
    one = _gpus(4, _nv(0, 1), _nv(2, 3), unknown=_lost(3))
    assert nvlink_islands(one) == (("g0", "g1"), ("g2", "g3"))
    two = _gpus(4, _nv(0, 1), _nv(2, 3), unknown=_lost(1, 3))
    assert nvlink_islands(two) is None


def test_groups_of_hosts_and_numa_nodes() -> None:
    topology = Topology(
        hosts=(Host("a"), Host("b")),
        numa_nodes=(NumaNode("a0", "a", 0), NumaNode("a1", "a", 1), NumaNode("b0", "b", 0)),
        gpus=(
            Gpu("x", "a", numa=("a0",)),
            Gpu("y", "b", numa=("b0",)),
            Gpu("z", "a", numa=("a1",)),
            Gpu("w", "b", numa=("b0",)),
        ),
    )
    assert host_groups(topology) == (("x", "z"), ("y", "w"))
    assert numa_groups(topology) == (("x",), ("y", "w"), ("z",))


def _nics(*nics: Nic) -> Topology:
    return Topology((Host("a"), Host("b")), nics=nics)


def test_rails_are_nics_of_the_same_index() -> None:
    topology = _nics(
        Nic("a1", "a", 1), Nic("a0", "a", 0), Nic("b0", "b", 4), Nic("b1", "b", 7),
        Nic("veth", "b", 0, virtual=True),
    )  # fmt: skip
    assert rails(topology) == (("a0", "b0"), ("a1", "b1"))
    down = replace(topology.nics[1], state=State.DOWN)
    assert rails(_nics(topology.nics[0], down, *topology.nics[2:])) == (("b0",), ("a1", "b1"))
    assert rails(_nics(*topology.nics[1:])) is None
    assert rails(_nics()) == ()
    assert rails(Topology()) is None


def _tree() -> Topology:
    """Two NUMA nodes: a switch with two switches and three GPUs; on the second only a NIC."""
    h = "h"
    return Topology(
        hosts=(Host(h),),
        numa_nodes=(NumaNode("n0", h, 0), NumaNode("n1", h, 1)),
        switches=(
            Switch("top", h, parent="n0"),
            Switch("left", h, parent="top"),
            Switch("right", h, parent="top"),
        ),
        gpus=(
            Gpu("g0", h, parent="left"),
            Gpu("g1", h, parent="right"),
            Gpu("g2", h, parent="n0"),
            Gpu("g3", h, parent="n1"),
            Gpu("g4", h),
        ),
        nics=(
            Nic("l0", h, parent="left"),
            Nic("l1", h, parent="left"),
            Nic("virt", h, parent="right", virtual=True),
            Nic("t0", h, parent="top"),
        ),
    )


def test_the_nearest_nics_are_below_the_deepest_common_switch() -> None:
    found = nearest_nics(_tree())
    assert found["g0"] == Nearest(LinkKind.PIX, ("l0", "l1"))
    assert found["g1"] == Nearest(LinkKind.PXB, ("l0", "l1", "t0"))
    assert found["g2"] == Nearest(LinkKind.PHB, ("l0", "l1", "t0"))
    assert found["g3"] == Nearest(LinkKind.SYS, ("l0", "l1", "t0"))
    assert found["g4"] is None
    assert found["g2"].near
    assert not found["g3"].near
    assert path_kind(_tree(), "g0", "g1") is LinkKind.PXB
    assert path_kind(_tree(), "g0", "g3") is LinkKind.SYS
    assert path_kind(_tree(), "g0", "g4") is None


@pytest.mark.parametrize("kind", [LinkKind.PIX, LinkKind.NODE, LinkKind.SYS])
def test_links_that_say_so_come_before_the_tree(kind: LinkKind) -> None:
    topology = replace(_tree(), links=(Link("t0", "g4", kind),))
    found = nearest_nics(topology)["g4"]
    assert found == Nearest(kind, ("t0",), "nothing is known of l0, l1")


def test_no_nic_and_no_row_are_two_answers() -> None:
    assert nearest_nics(_gpus(1)) == {"g0": Nearest(None, (), "no NIC is known")}
    assert nearest_nics(_gpus(1, unknown=_lost(0))) == {"g0": None}
    assert not Nearest(None, ()).near


@given(st.integers(1, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_islands_part_the_gpus(count: int, pairs: set[tuple[int, int]]) -> None:
    links = [_nv(a, b) for a, b in pairs if a < b < count]
    islands = nvlink_islands(_gpus(count, *links))
    assert islands is not None
    assert sorted(name for island in islands for name in island) == [f"g{n}" for n in range(count)]
    of = {name: island for island in islands for name in island}
    assert all(of[link.a] is of[link.b] for link in links)
    assert nvlink_islands(_gpus(count, *reversed(links))) == islands


def test_an_nvlink_fabric_spans_hosts() -> None:
    def tray(host: str, clique: str, state: State = State.UP) -> Topology:
        fabric = (("fabric_cluster", "0a0b"), ("fabric_clique", clique))
        gpus = tuple(Gpu(f"gpu{n}", host, n, state=state, attributes=fabric) for n in range(2))
        links = tuple(Link(gpu.name, "nvs", LinkKind.NVSWITCH, state=State.UP) for gpu in gpus)
        return Topology((Host(host),), (), (Switch("nvs", host, "nvswitch"),), gpus, links=links)

    rack = merge([tray("a", "1"), tray("b", "1"), tray("c", "2")])
    assert nvlink_islands(rack) == (
        ("a:gpu0", "a:gpu1", "b:gpu0", "b:gpu1"), ("c:gpu0", "c:gpu1")
    )  # fmt: skip
    assert direct_pairs(rack) is True


def test_gpus_that_nothing_is_routed_to_are_in_no_island() -> None:
    def gpu(number: int, *fabric: tuple[str, str], state: State = State.UP) -> Gpu:
        return Gpu(f"gpu{number}", "a", number, state=state, attributes=fabric)

    whole = [("fabric_cluster", "0a0b"), ("fabric_clique", "1")]
    gpus = (
        gpu(0, *whole), gpu(1, *whole), gpu(2, ("fabric", "broken"), state=State.DEGRADED),
        gpu(3, whole[0], ("fabric_clique", "2")),
    )  # fmt: skip
    links = tuple(Link(one.name, "nvs", LinkKind.NVSWITCH, state=State.UP) for one in gpus)
    node = Topology((Host("a"),), (), (Switch("nvs", "a", "nvswitch"),), gpus, links=links)
    assert nvlink_islands(node) == (("gpu0", "gpu1"), ("gpu3",))


def test_a_rail_keeps_the_place_of_a_nic_that_is_down() -> None:
    def host(name: str, down: int) -> Topology:
        nics = tuple(
            Nic(f"mlx5_{n}", name, n, state=State.DOWN if n == down else State.UP) for n in range(2)
        )
        return Topology((Host(name),), nics=nics)

    assert rails(merge([host("a", 0), host("b", 1)])) == (("b:mlx5_0",), ("a:mlx5_1",))
