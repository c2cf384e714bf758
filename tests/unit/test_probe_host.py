"""All probes of one host together: a machine of files and a stand-in for NVML, and XML of it."""

from pathlib import Path

import pytest
from support.fake_nvml import FakeNvml, switched
from support.sysfs import function, grow, interface, node, port

from pycomm.errors import ArgumentValueError
from pycomm.topology import read_xml, write_xml
from pycomm.topology.graph import Gpu, Host, LinkKind, Nic, NumaNode, State, Topology
from pycomm.topology.groups import nearest_nics, nvlink_islands
from pycomm.topology.probes.local import HostProbe, Prober, probe_host
from pycomm.topology.probes.nvml import XidEvents
from pycomm.topology.samples import Findings


def machine(root: Path) -> Path:
    """Two GPUs, each with an adapter below one PCI switch, on two NUMA nodes; and an interface."""
    files: dict[str, str | None] = {**node(0, "0-3"), **node(1, "4-7")}
    for number in range(2):
        # fake_nvml's GPUs have bus ids 10 and 11.
        up = f"pci0000:0{number}/0000:0{number}:01.0/0000:a{number}:00.0"
        gpu = f"{up}/0000:a{number}:01.0/0000:1{number}:00.0"
        hca = f"{up}/0000:a{number}:02.0/0000:2{number}:00.0"
        files |= {**function(gpu, numa_node=str(number)), **function(hca, numa_node=str(number))}
        files |= port(f"mlx5_{number}")
        files[f"devices/{hca}/infiniband/mlx5_{number}"] = None
        files[f"class/infiniband/mlx5_{number}/device"] = f"-> ../../../devices/{hca}"
    return grow(root, {**files, **interface("eth0")})


def test_one_topology_of_all(tmp_path: Path) -> None:
    nvml = FakeNvml(switched(2))
    found = probe_host("node1", 1.0, machine(tmp_path), nvml, {"gpu1": [74]})
    topology = found.topology
    assert nvlink_islands(topology) == (("gpu0", "gpu1"),)
    near = nearest_nics(topology)
    assert {gpu: one and (one.kind, one.nics) for gpu, one in near.items()} == {
        "gpu0": (LinkKind.PIX, ("mlx5_0",)),
        "gpu1": (LinkKind.PIX, ("mlx5_1",)),
    }
    states = {(sample.subject, sample.probe): sample.state for sample in found.samples}
    assert states["gpu0", "nvml"] is State.UP
    assert states["gpu1", "nvml"] is State.DEGRADED  # Xid 74
    assert states["mlx5_0", "infiniband"] is State.UP
    assert states["eth0", "net"] is State.UP
    assert [numa.cpus for numa in topology.numa_nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_what_was_probed_can_be_written_for_nccl(tmp_path: Path) -> None:
    topology = probe_host("node1", 1.0, machine(tmp_path), FakeNvml(switched(2))).topology
    text = write_xml(topology)
    assert '<gpu dev="0" sm="90">' in text
    assert "uuid" not in text
    assert "eth0" not in text or "0000:00:03.0" in text
    again = read_xml(text)
    assert nvlink_islands(again) == (("gpu0", "gpu1"),)
    kinds = [one and one.kind for one in nearest_nics(again).values()]
    assert kinds == [LinkKind.PIX, LinkKind.PIX]


def test_a_gpu_without_a_place_cannot_be_written() -> None:
    gpu = Gpu("gpu0", "node1", 0, "0000:10:00.0")
    with pytest.raises(ArgumentValueError, match="place of gpu0"):
        write_xml(Topology(hosts=(Host("node1"),), gpus=(gpu,)))
    tunnel = Nic("veth1", "node1", virtual=True)
    assert "veth1" not in write_xml(Topology(hosts=(Host("node1"),), nics=(tunnel,)))


@pytest.mark.parametrize(
    "attributes",
    [(("dev", "0"), ("sm", "9" * 300)), (("dev", "0"), *((f"a{n}", "1") for n in range(16)))],
)
def test_what_nccl_has_no_room_for_is_refused(attributes: tuple[tuple[str, str], ...]) -> None:
    numa = NumaNode("numa0", "node1", 0)
    gpu = Gpu("gpu0", "node1", 0, "0000:10:00.0", parent="numa0", attributes=attributes)
    with pytest.raises(ArgumentValueError, match="NCCL reads"):
        write_xml(Topology((Host("node1"),), (numa,), gpus=(gpu,)))


def test_a_gpu_that_needs_a_reset_is_not_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = [[], [("gpu0", 95), ("gpu1", 74)], [], []]
    monkeypatch.setattr(XidEvents, "poll", lambda self: heard.pop(0))
    probe = HostProbe(machine(tmp_path), FakeNvml(switched(2)))
    states = [[gpu.state for gpu in probe("node1", 1.0).topology.gpus] for _ in range(4)]
    assert states == [
        [State.UP, State.UP], [State.DOWN, State.DEGRADED],
        [State.DOWN, State.UP], [State.DOWN, State.UP],
    ]  # fmt: skip
    probe.close()
    probe.close()


def test_a_prober_keeps_the_latest_looks() -> None:
    prober = Prober("node1", lambda host, now: Findings(), None)
    for _ in range(50):
        prober.look()
    taken = prober.take()
    assert len(taken) == 32
    assert taken[0].topology.hosts == (Host("node1"),)
    assert prober.take() == []
    prober.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returns Findings, not NoneType"),
        (Findings(Topology(hosts=(Host("node2"),))), "returns its topology, not that of others"),
    ],
)
def test_a_probe_that_answers_nonsense_is_a_note(answer: Findings, told: str) -> None:
    prober = Prober("node1", lambda host, now: answer, None)
    (findings,) = prober.take()
    assert told in findings.topology.notes[0]
