"""Places of devices from /sys, the links they have there, and who the host is."""

import errno
from pathlib import Path

import pytest
from support.sysfs import fail_reading, function, grow, node

from pycomm.topology.graph import Gpu, Host, LinkKind, Nic, NumaNode, State, Switch, Topology
from pycomm.topology.groups import nearest_nics, numa_groups, path_kind
from pycomm.topology.probes.pci import PciTree, Place, place, probe_pci, samples_of
from pycomm.topology.samples import Sample

ROOT = "pci0000:17/0000:17:00.0"
LINK = {
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "16 GT/s",
}
#: A GPU and a NIC below one switch, a NIC below the next, one without, one on the other socket.
DEVICES = {
    f"{ROOT}/0000:18:00.0/0000:19:00.0/0000:1a:00.0": "0",
    f"{ROOT}/0000:18:00.0/0000:19:01.0/0000:1b:00.0": "0",
    f"{ROOT}/0000:18:00.0/0000:19:02.0/0000:1c:00.0/0000:1d:00.0/0000:1e:00.0": "0",
    "pci0000:3a/0000:3a:00.0/0000:3b:00.0": "0",
    "pci0000:aa/0000:aa:00.0/0000:ab:00.0": "1",
}


def _machine(root: Path) -> Path:
    grow(root, {**node(0, "0-3,8"), **node(1, "4-7")})
    for path, numa in DEVICES.items():
        grow(root, function(path, numa_node=numa, **LINK))
    return root


def _probe(root: Path, *bus_ids: str) -> PciTree:
    return probe_pci(bus_ids, "h", 7.0, root)


def _link(root: Path, **said: str) -> tuple[Sample, tuple[str, ...]]:
    grow(root, {**node(0, "0"), **function(f"{ROOT}/0000:1a:00.0", **{**LINK, **said})})
    tree = _probe(root, "0000:1a:00.0")
    (sample,) = tree.samples
    assert (sample.subject, sample.probe, sample.at) == ("0000:1a:00.0", "pci", 7.0)
    return sample, tree.notes


def test_a_switch_is_one(tmp_path: Path) -> None:
    tree = _probe(_machine(tmp_path), "0000:1a:00.0", "0000:1e:00.0", "0000:3b:00.0")
    assert [(s.name, s.bus_id, s.parent, s.kind) for s in tree.switches] == [
        ("0000:18:00.0", "0000:18:00.0", "numa0", "pci"),
        ("0000:1c:00.0", "0000:1c:00.0", "0000:18:00.0", "pci"),
    ]
    assert tree.places == {
        "0000:1a:00.0": Place("0000:18:00.0", ("numa0",)),
        "0000:1e:00.0": Place("0000:1c:00.0", ("numa0",)),
        "0000:3b:00.0": Place("numa0", ("numa0",)),
    }
    assert tree.notes == ()


def test_a_controller_in_between_starts_a_tree_of_its_own(tmp_path: Path) -> None:
    path = "pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0/10000:01:00.0"
    grow(tmp_path, {**node(0, "0"), **function(path)})
    tree = _probe(tmp_path, "10000:01:00.0")
    assert (tree.switches, tree.places["10000:01:00.0"].parent) == ((), "numa0")


def test_devices_are_placed_whatever_the_spelling_of_their_bus_ids(tmp_path: Path) -> None:
    ids = ["00000000:1A:00.0", "0000:1b:00.0", "1e:00.0", "0000:3B:00.0", "0000:ab:00.0"]
    gpu = Gpu("gpu0", "h", 0, ids[0])
    nics = [Nic(f"mlx5_{n}", "h", bus_id=bus_id) for n, bus_id in enumerate(ids[1:])]
    bare = Topology((Host("h"),), gpus=(gpu,), nics=(*nics, Nic("eth0", "h")))
    tree = _probe(_machine(tmp_path), *ids)
    found = place(bare, tree)
    assert (found.gpus[0].parent, found.gpus[0].numa) == ("0000:18:00.0", ("numa0",))
    paths = [path_kind(found, "gpu0", nic.name) for nic in nics]
    assert paths == [LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.SYS]
    nearest = nearest_nics(found)["gpu0"]
    assert nearest is not None
    assert nearest.nics == ("mlx5_0", "mlx5_1")  # below the same switch
    assert numa_groups(found) == (("gpu0",),)
    assert (found.nics[-1].parent, found.nics[-1].numa) == (None, ())
    assert Topology.from_json(found.to_json()) == found
    assert place(found, tree) == found
    assert [sample.subject for sample in samples_of(found, tree)] == [
        "gpu0", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3",
    ]  # fmt: skip


def test_ports_of_one_adapter_have_a_sample_each(tmp_path: Path) -> None:
    nics = tuple(Nic(f"mlx4_0/{n}", "h", bus_id="0000:1b:00.0") for n in (1, 2))
    tree = _probe(_machine(tmp_path), "0000:1b:00.0", "0000:1B:00.0", "0000:3b:00.0")
    assert len(tree.samples) == 2
    samples = samples_of(Topology((Host("h"),), nics=nics), tree)
    assert [sample.subject for sample in samples] == ["mlx4_0/1", "mlx4_0/2"]


def test_names_that_are_taken_already(tmp_path: Path) -> None:
    names = ("numa0", "0000:18:00.0")
    gpus = tuple(Gpu(name, "h", bus_id="0000:1a:00.0") for name in names)
    other = NumaNode("numa1", "other", 1)
    bare = Topology((Host("other"),), (other,), (Switch("sw", None, "nvswitch"),))
    tree = _probe(_machine(tmp_path), "0000:1a:00.0")
    assert [host.name for host in place(bare, tree).hosts] == ["other", "h"]
    assert other in place(bare, tree).numa_nodes
    found = place(Topology((Host("h"),), gpus=gpus), tree)
    assert found.gpus[0].parent == "h:0000:18:00.0"
    assert found.gpus[0].numa == ("h:numa0",)
    assert found.switches[0].parent == "h:numa0"


def test_devices_of_other_hosts_stay_where_they_are(tmp_path: Path) -> None:
    bare = Topology((Host("other"),), gpus=(Gpu("gpu0", "other", bus_id="0000:1a:00.0"),))
    tree = _probe(_machine(tmp_path), "0000:1a:00.0")
    assert place(bare, tree).gpus == bare.gpus
    assert samples_of(bare, tree) == ()


@pytest.mark.parametrize("said", ["-1", "7", "N/A", "0-1", ""])
def test_a_hidden_numa_node_is_unknown(tmp_path: Path, said: str) -> None:
    grow(_machine(tmp_path), function("pci0000:00/0000:00:04.0", numa_node=said))
    tree = _probe(tmp_path, "0000:00:04.0")
    bare = Topology((Host("h"),), gpus=(Gpu("gpu0", "h", bus_id="0000:00:04.0"),))
    found = place(bare, tree)
    assert (found.gpus[0].parent, found.gpus[0].numa) == (None, ())
    (unknown,) = found.unknown
    assert (unknown.what, unknown.name) == ("numa", "gpu0")
    assert unknown.reason.endswith(f'numa_node says "{said}": no NUMA node with CPUs')
    (tmp_path / "devices/pci0000:00/0000:00:04.0/numa_node").write_text("1\n")
    known = place(found, _probe(tmp_path, "0000:00:04.0"))
    assert (known.gpus[0].numa, known.unknown) == (("numa1",), ())


def test_a_switch_whose_first_device_hides_its_node(tmp_path: Path) -> None:
    first, second, *_ = DEVICES
    grow(_machine(tmp_path), {f"devices/{first}/numa_node": "-1"})
    tree = _probe(tmp_path, first[-12:], second[-12:])
    assert [(s.name, s.parent) for s in tree.switches] == [("0000:18:00.0", "numa0")]


@pytest.mark.parametrize("said", ["-1", "0", "5"])
def test_one_node_with_cpus_is_near_everything(tmp_path: Path, said: str) -> None:
    # As Grace machines have it: eight nodes are memory of GPUs.
    grow(tmp_path, {name: text for n in range(1, 9) for name, text in node(n, "").items()})
    grow(tmp_path, {**node(0, "0-71"), **function(f"{ROOT}/0000:1a:00.0", numa_node=said)})
    tree = _probe(tmp_path, "0000:1a:00.0")
    assert tree.numa_nodes == (NumaNode("numa0", "h", 0, tuple(range(72))),)
    assert tree.places["0000:1a:00.0"] == Place("numa0", ("numa0",))


def test_cpus_need_not_be_ranges_and_may_be_told_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(tmp_path, {**node(0, "0,2,4"), **node(1, "1,3-5"), **node(2, "6"), **node(10, "7")})
    grow(tmp_path, {"devices/system/node/possible": "0-10", "devices/system/node/power": None})
    fail_reading(monkeypatch, {"node2/cpulist": errno.EIO})
    tree = _probe(tmp_path)
    assert [(n.name, n.cpus) for n in tree.numa_nodes] == [
        ("numa0", (0, 2, 4)), ("numa1", (1, 3, 4, 5)), ("numa2", None), ("numa10", (7,)),
    ]  # fmt: skip
    assert [note.split("/")[-1] for note in tree.notes] == [
        "cpulist: CPU 4 is on node0 as well",
        "output error): the CPUs of node2 are unknown",
    ]


def test_nothing_is_there(tmp_path: Path) -> None:
    tree = _probe(tmp_path, "0000:1a:00.0", "GPU0", "0000:\0:00.0")
    assert (tree.numa_nodes, tree.switches, tree.places) == ((), (), {})
    assert [sample.state for sample in tree.samples] == [State.UNKNOWN]
    assert tree.notes[0].endswith("the place of 0000:1a:00.0 is unknown")
    assert '"GPU0" is no PCI bus id, left out' in tree.notes
    assert place(Topology(), tree).hosts == (Host("h"),)


def test_a_whole_link(tmp_path: Path) -> None:
    sample, notes = _link(tmp_path)
    assert (sample.state, sample.reason, notes) == (State.UP, "", ())
    assert sample.rate == pytest.approx(31.5e9, rel=1e-3)


def test_missing_lanes(tmp_path: Path) -> None:
    sample, _ = _link(tmp_path, current_link_width="8")
    assert sample.state is State.DEGRADED
    assert "its PCI link runs on 8 of 16 lanes" in sample.reason
    assert "0000:1a:00.0/current_link_width" in sample.reason
    assert sample.rate == pytest.approx(31.5e9, rel=1e-3)


@pytest.mark.parametrize(("slot", "state"), [("8", "up"), ("16", "degraded"), ("255", "degraded")])
def test_a_slot_with_fewer_lanes_than_the_card(tmp_path: Path, slot: str, state: str) -> None:
    grow(tmp_path, function(ROOT, max_link_width=slot))
    sample, notes = _link(tmp_path, current_link_width="8")
    assert sample.state == state
    assert notes == (("0000:1a:00.0: has 16 lanes, and its slot 8",) if slot == "8" else ())


def test_a_slot_made_up_by_a_virtual_machine(tmp_path: Path) -> None:
    grow(tmp_path, function(ROOT, max_link_width="1"))
    sample, notes = _link(tmp_path)
    assert (sample.state, notes) == (State.UP, ())
    assert sample.rate == pytest.approx(31.5e9, rel=1e-3)


def test_an_idle_device_slows_its_link_down(tmp_path: Path) -> None:
    sample, notes = _link(tmp_path, current_link_speed="2.5 GT/s")
    assert (sample.state, sample.rate) == (State.UP, pytest.approx(31.5e9, rel=1e-3))
    assert "its link runs at 2.5 GT/s, 16 at most, as those of idle devices do" in notes[0]


@pytest.mark.parametrize("speed", ["", "Unknown", "Unknown speed", "-3 GT/s", "\x00"])
def test_speeds_that_are_none(tmp_path: Path, speed: str) -> None:
    sample, notes = _link(tmp_path, current_link_speed=speed, max_link_speed=speed)
    assert (sample.state, sample.rate, notes) == (State.UP, None, ())


@pytest.mark.parametrize("width", ["0", "255", "63", "", "Unknown", "-1"])
def test_widths_that_are_none(tmp_path: Path, width: str) -> None:
    sample, _ = _link(tmp_path, current_link_width=width)
    assert sample.state is State.UNKNOWN
    assert sample.reason.endswith(f'current_link_width says "{width}"')
    grow(tmp_path, {f"devices/{ROOT}/0000:1a:00.0/current_link_width": "16"})
    grow(tmp_path, {f"devices/{ROOT}/0000:1a:00.0/max_link_width": width})
    (sample,) = _probe(tmp_path, "0000:1a:00.0").samples
    assert sample.state is State.UNKNOWN
    assert "max_link_width does not tell" in sample.reason
