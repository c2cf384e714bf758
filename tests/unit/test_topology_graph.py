"""Topologies as records: JSON both ways, and nothing dangling."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import ArgumentValueError
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

WHOLE = Topology(
    hosts=(Host("n0", (("host_hash", "0x1"),)),),
    numa_nodes=(NumaNode("numa0", "n0", 0, (0, 2, 4)), NumaNode("numa?", "n0")),
    switches=(Switch("sw", "n0", parent="numa0"), Switch("nvs", None, "nvswitch")),
    gpus=(Gpu("gpu0", "n0", 0, "0000:01:00.0", ("numa0",), "sw", State.DEGRADED, "ECC"),),
    nics=(Nic("mlx5_0", "n0", 0, numa=("numa0",), fabric=LinkKind.IB, bandwidth=5e10),),
    links=(
        Link("gpu0", "nvs", LinkKind.NVSWITCH, 4.5e11, None, State.UP, "18 of 18", 18),
        Link("gpu0", "mlx5_0", LinkKind.PIX, latency=1e-6),
    ),
    unknown=(Unknown("nvlink", "gpu0", "not asked"),),
    notes=("odd",),
)


def test_json_gives_back_an_equal_topology() -> None:
    again = Topology.from_json(WHOLE.to_json())
    assert again == WHOLE
    assert again.links[0].state is State.UP
    assert again.nics[0].fabric is LinkKind.IB
    assert Topology.from_json(Topology().to_json()) == Topology()


@given(
    st.lists(st.sampled_from(LinkKind), max_size=6),
    st.one_of(st.none(), st.floats(0, 1e15)),
    st.sampled_from(State),
    st.text(),
)
def test_json_of_any_links(
    kinds: list[LinkKind], rate: float | None, state: State, why: str
) -> None:
    topology = Topology(
        hosts=(Host("a"), Host("b")),
        links=tuple(Link("a", "b", kind, rate, rate, state, why) for kind in kinds),
    )
    assert Topology.from_json(topology.to_json()) == topology


def test_a_link_knows_its_other_end() -> None:
    assert WHOLE.links[0].other("gpu0") == "nvs"
    assert WHOLE.links[0].other("nvs") == "gpu0"
    assert WHOLE.unknown_names("nvlink") == {"gpu0": "not asked"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"links": (Link("x", "n0", LinkKind.TCP),)}, "ends at x, which is not there"),
        ({"gpus": (Gpu("n0", "n0"),)}, "two parts of the topology are named n0"),
        ({"gpus": (Gpu("g", "m"),)}, "g is on host m, which is not there"),
        ({"gpus": (Gpu("g", "n0", parent="s"),)}, "g is below s, which is not there"),
        ({"nics": (Nic("g", "n0", numa=("s",)),)}, "near a NUMA node that is not there"),
    ],
)
def test_nothing_dangles(part: dict, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        Topology(hosts=(Host("n0"),), **part)


def _changed(**changes: object) -> str:
    return json.dumps(json.loads(WHOLE.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE.to_json()[:200], "not JSON, or cut off"),
        ("[]", "not one of format 1"),
        (_changed(format=2), "not one of format 1"),
        (_changed(gpus=None), "gpus: None where a list"),
        (_changed(gpus=[{}]), r"gpus\[0\]: missing or unknown fields"),
        (_changed(more=1), "unknown fields: more"),
        (_changed(notes=[1]), r"notes\[0\]: 1 is of the wrong kind"),
        (_changed(hosts=["n0"]), "'n0' where a record belongs"),
        (_changed(hosts=[{"name": "n0", "attributes": [["a"]]}]), "1 values where 2 belong"),
        (WHOLE.to_json().replace('"nvswitch", "bandwidth"', '"rope", "bandwidth"'), "'rope' is"),
    ],
)
def test_json_that_is_not_a_topology_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        Topology.from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1.0", "1" + "0" * 400])
def test_numbers_that_are_none(number: str) -> None:
    whole = Topology(hosts=(Host("a"),), nics=(Nic("n", "a", bandwidth=4321.0),)).to_json()
    assert "4321.0" in whole
    with pytest.raises(ArgumentValueError):
        Topology.from_json(whole.replace("4321.0", number))


def test_names_and_cpus_that_are_none() -> None:
    with pytest.raises(ArgumentValueError, match="written as text"):
        Topology(hosts=(Host("\ud800"),))
    with pytest.raises(ArgumentValueError, match="negative"):
        Topology(hosts=(Host("a"),), numa_nodes=(NumaNode("n", "a", 0, (-1,)),))
