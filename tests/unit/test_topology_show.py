"""Topologies and snapshots as text and as JSON."""

import json
from dataclasses import replace

import pytest
from support.topologies import (
    SHAPES,
    bare_hosts,
    cube_mesh,
    gpu_snapshot,
    ill_node,
    nvswitch_node,
    one_gpu,
    three_hosts,
)

from pycomm.topology import read_smi
from pycomm.topology.graph import Gpu, Host, Link, LinkKind, Nic, State, Topology, Unknown
from pycomm.topology.groups import nearest_nics, numa_groups, nvlink_islands
from pycomm.topology.matrix import bundles, host_part, labels, matrix, ranges, short_name
from pycomm.topology.show import changes, snapshot_text, to_dict, to_text
from pycomm.topology.snapshot import Snapshot

SMALL = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\tX\tNV4\tPIX\t0-3,8\t0
GPU1\tNV4\tX\tSYS\t4-7\t1
NIC0\tPIX\tSYS\tX

NIC Legend:

  NIC0: mlx5_0
"""

SMALL_TEXT = """\
box: 2 GPUs, 1 NIC, 2 NUMA nodes

      GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity
GPU0  X     NV4   PIX   0-3,8         0
GPU1  NV4   X     SYS   4-7           1
NIC0  PIX   SYS   X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0

Groups
  nvlink:  {GPU0, GPU1}, every pair is joined
  host:    {GPU0, GPU1}
  numa:    {GPU0} {GPU1}
  rail:    {NIC0}

Nearest NIC
  GPU0: NIC0 (PIX)
  GPU1: NIC0 (SYS, of another NUMA node)

Health
  unknown   2 GPUs, 1 NIC, 3 links: nothing is said of their state

Expected bandwidth, in each direction
  rate unknown 4 NVLinks: GPU0-GPU1"""


def test_the_text_of_a_small_machine_word_by_word() -> None:
    assert to_text(read_smi(SMALL, host="box")) == SMALL_TEXT


@pytest.mark.parametrize("make", [cube_mesh, one_gpu, lambda: read_smi(SMALL)])
def test_what_is_printed_can_be_read_again(make) -> None:
    topology = make()
    again = read_smi(to_text(topology))
    assert nvlink_islands(again) == nvlink_islands(topology)
    assert numa_groups(again) == numa_groups(topology)
    assert nearest_nics(again) == nearest_nics(topology)
    assert again.notes == ()


def test_switches_make_pairs() -> None:
    lines = matrix(nvswitch_node())
    nics = ["PIX", *["PHB"] * 3, *["SYS"] * 4]
    assert lines[1].split() == ["GPU0", "X", *["NV18"] * 7, *nics, "0-55", "0"]
    text = to_text(nvswitch_node())
    assert "18 NVLinks by NVSwitch: any two of gpu0, gpu1" in text
    assert "  up        8 GPUs, 8 NICs, 56 links" in text
    assert "NIC IB: mlx5_0, " in text


def test_every_state_is_told_with_its_reason() -> None:
    text = to_text(ill_node())
    for line in (
        "  degraded  gpu2: 2 of 18 NVLinks are down",
        "  down      gpu5: fell off the bus (Xid 79)",
        "  unknown   gpu7: nvml: no permission",
        "  down      mlx5_3: port is Down, physically Polling",
        "  degraded  link mlx5_6 - bridge 6 (pix): 8 lanes of 16",
        "  up        5 GPUs, 7 NICs, 49 links",
        "  numa of gpu7: the machine hides it",
        "  - nvml: gpu7: no permission",
    ):
        assert f"\n{line}" in text, line
    assert "docker0" not in text
    cells = [line.split() for line in matrix(ill_node())]
    assert cells[1][3] == "NV13!"
    assert cells[1][6] == "SYS!"
    assert any(line.startswith("  ..! ") for line in matrix(ill_node()))


def test_cells_where_nobody_can_tell() -> None:
    gpus = tuple(Gpu(f"g{n}", "h", n) for n in range(3))
    links = (
        Link("g0", "g1", LinkKind.PHB),
        Link("g0", "g2", LinkKind.NVLINK),
    )
    unknown = tuple(Unknown("nvlink", name, "why not") for name in ("g0", "g1"))
    topology = Topology((Host("h"),), gpus=gpus, links=links, unknown=unknown)
    cells = [line.split() for line in matrix(topology)[1:4]]
    assert cells[0][1:4] == ["X", "PHB?", "NV"]
    assert cells[1][3] == "?"
    text = to_text(topology)
    assert "nvlink:  unknown: g0, g1: why not" in text
    assert "numa:    unknown: no NUMA node is known" in text
    assert "nvlink of g0, g1: why not" in text
    assert "rate unknown NVLinks: g0-g2" in text


def test_reasons_of_groups_that_are_unknown() -> None:
    told = to_dict(Topology())
    assert told["groups"] == {"nvlink": None, "host": [], "numa": None, "rail": None}
    assert told["reasons"]["nvlink"] == "no GPU is known"
    assert to_text(Topology()).startswith("nothing is known")
    lost = read_smi("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tSYS\tSYS\n")
    assert to_dict(lost)["reasons"]["nvlink"].endswith("what is left does not decide")
    assert "GPU1: unknown: its row is missing" in to_text(lost)
    uneven = Topology((Host("a"), Host("b")), nics=(Nic("n", "a"),))
    assert to_dict(uneven)["reasons"]["rail"].endswith("numbers of NICs: a 1, b 0")


def test_bundles_of_switches_that_not_all_reach() -> None:
    whole = nvswitch_node(4)
    found = bundles(whole)[frozenset(("gpu0", "gpu1"))]
    assert (found.count, found.switched, found.label) == (18, True, "NV18")
    assert found.meaning == "18 NVLinks, 478.8 GB/s"
    links = [one for one in whole.links if {one.a, one.b} != {"gpu1", "nvswitch 0"}]
    links = [replace(one, bandwidth=None, state=State.UNKNOWN) for one in links]
    found = bundles(replace(whole, links=tuple(links)))[frozenset(("gpu0", "gpu1"))]
    assert (found.count, found.bandwidth, found.state) == (14, None, State.UNKNOWN)


def test_labels_and_names() -> None:
    snapshot = gpu_snapshot()
    part = host_part(snapshot.topology, "node2")
    assert {name.partition(":")[0] for name in labels(part)} == {"node2"}
    assert labels(part)["node2:gpu3"] == "GPU3"
    assert len(part.links) == len(nvswitch_node().links)
    assert short_name(part, "node2:gpu3") == "gpu3"
    assert short_name(part, "0000:01:00.0") == "0000:01:00.0"
    twice = Topology((Host("h"),), gpus=(Gpu("a", "h", 1), Gpu("b", "h", 1)))
    assert labels(twice) == {"a": "GPU0", "b": "GPU1"}
    assert ranges([3, 1, 2, 8]) == "1-3,8"


def test_json_has_all_of_it() -> None:
    told = json.loads(json.dumps(to_dict(nvswitch_node())))
    assert set(told) == {
        "groups", "reasons", "direct_pairs", "nearest_nic", "health", "gpus", "nics", "links",
        "unknown", "notes", "topology",
    }  # fmt: skip
    assert told["groups"]["numa"] == [[f"gpu{n}" for n in half] for half in (range(4), range(4, 8))]
    assert told["nearest_nic"]["gpu1"] == {"kind": "pix", "nics": ["mlx5_1"], "reason": ""}
    assert told["direct_pairs"] is True
    assert told["health"]["gpu0"] == {"state": "up", "reason": ""}
    assert Topology.from_json(json.dumps(told["topology"])) == nvswitch_node()
    more = json.loads(json.dumps(to_dict(three_hosts())))
    assert set(more) - set(told) == {
        "epoch", "hash", "ranks", "pairs", "decisions", "order", "roads", "roads_reason", "lost",
    }  # fmt: skip
    assert more["ranks"][3] == {"rank": 3, "host": "node2", "gpu": None}
    assert more["decisions"][1]["groups"] is None


def test_the_text_of_a_snapshot() -> None:
    snapshot = three_hosts()
    text = snapshot_text(snapshot)
    for line in (
        f"6 ranks on 3 hosts, epoch 2, hash {snapshot.hash}",
        "  node2: 2, 3",
        "  host:     {0, 1} {2, 3} {4, 5}: 3 hosts, told apart by boot id",
        "  nvlink:   unknown: no rank works on a GPU that is known",
        "  order:    {0, 1} {2, 3} {4, 5}",
        "  roads:    the ranks of each host reach others alike (117 MB/s)",
        "  rank      0      1      2      3      4      5",
        "     0      X    6.2  0.117  0.117  0.031  0.031",
        "     2   45   45    X  0.9    -    -",
        "  node1 - node2 (tcp) up 117 MB/s, 45 µs",
        "  node2 - node3 (tcp) down: ranks 4, 5 do not answer",
    ):
        assert line in text.split("\n"), line
    assert "0 (node1:gpu0), 1 (node1:gpu1)" in snapshot_text(gpu_snapshot())
    assert "lost: 4" in snapshot_text(replace(snapshot, lost=(4,)))
    many = replace(snapshot, places=tuple(replace(snapshot.places[0], rank=n) for n in range(40)))
    assert "12 pairs were measured" not in text
    assert f"{len(many.pairs)} pairs were measured: see --json" in snapshot_text(many)


def test_changes_between_looks() -> None:
    before, after = nvswitch_node(), ill_node()
    lines = changes(before, after)
    assert "GPU gpu2: up -> degraded: 2 of 18 NVLinks are down" in lines
    assert "NIC mlx5_3: up -> down: port is Down, physically Polling" in lines
    assert "note: nvml: gpu7: no permission" in lines
    assert changes(before, before) == []
    fewer = replace(before, gpus=before.gpus[:-1], links=())
    assert "GPU gpu7 is gone" in changes(before, fewer)
    assert "GPU gpu7 is there, up" in changes(fewer, before)


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_every_shape_has_text_and_json(make) -> None:
    shown = make()
    topology = shown.topology if isinstance(shown, Snapshot) else shown
    text = to_text(topology)
    assert all(
        len(line) <= 112
        for line in text.split("\n")
        if line.startswith("  ") and "GPU0  " not in line
    )
    json.dumps(to_dict(shown), allow_nan=False)


def test_hosts_have_a_matrix_each() -> None:
    text = to_text(bare_hosts())
    assert text.count("NIC Legend:") == 2
    assert "\nbeta: 0 GPUs, 1 NIC, 1 NUMA node\n" in text
    assert "rail:    {alpha:eth0, beta:eth0}" in text
