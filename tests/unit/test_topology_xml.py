"""NCCL's topology files: read as vendors write them, written so that they come back equal."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import ArgumentValueError
from pycomm.topology.graph import Gpu, Host, Link, LinkKind, Nic, NumaNode, State, Switch, Topology
from pycomm.topology.groups import (
    direct_pairs,
    nearest_nics,
    nvlink_counts,
    nvlink_islands,
    path_kind,
)
from pycomm.topology.nccl_xml import read_xml, write_xml
from pycomm.topology.smi import read_smi

WHAT = 'class="0x030200" vendor="0x10de" device="0x1" link_speed="32.0 GT/s PCIe" link_width="16"'
TWO = f"""<system version="1">
  <cpu host_hash="0x7" numaid="0" affinity="00000000,f0f" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0000:02:00.0" {WHAT}>
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:22:00.0" count="4" tclass="0x030200"/>
          <c2c bw="44712" count="5"/>
        </gpu>
      </pci>
      <!-- the near one -->
      <pci busid="0000:03:00.0" class="0x020700" vendor="0x15b3" link_speed="" link_width="0">
        <nic>
          <net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1"/>
          <net name="mlx5_1" dev="1" speed="400000" port="2" guid="0x1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu host_hash="0x7" numaid="1" affinity="0000000f,00000000">
    <pci busid="0000:22:00.0" {WHAT}>
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>
      </gpu>
    </pci>
    <nic>
      <net name="veth01" dev="2" speed="10000"/>
      <net name="eth0" dev="3" speed="10000"/>
    </nic>
  </cpu>
</system>
"""


def _cpu(inside: str, said: str = 'numaid="0"') -> str:
    return f'<system version="1"><cpu {said}>{inside}</cpu></system>'


def _gpu(number: int, rows: str = "", what: str = WHAT, inside: str = "") -> str:
    return (
        f'<pci busid="0000:0{number}:00.0" {what}>'
        f'<gpu dev="{number}" sm="90">{rows}</gpu>{inside}</pci>'
    )


def _row(target: str, count: int = 18) -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="0x068000"/>'


def _nic(name: str) -> str:
    return f'<nic><net name="{name}" dev="0" speed="100000"/></nic>'


def _comes_back(topology: Topology) -> bool:
    return replace(read_xml(write_xml(topology)), notes=()) == replace(topology, notes=())


def test_a_file_is_read() -> None:
    topology = read_xml(TWO)
    assert topology.hosts == (Host("host0", (("host_hash", "0x7"),)),)
    assert [(node.index, node.cpus) for node in topology.numa_nodes] == [
        (0, (0, 1, 2, 3, 8, 9, 10, 11)),
        (1, (32, 33, 34, 35)),
    ]
    assert [gpu.name for gpu in topology.gpus] == ["gpu0", "gpu1"]
    assert topology.gpus[0].numa == ("numa0",)
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "veth01", "eth0"]
    assert [nic.virtual for nic in topology.nics] == [False, False, True, False]
    assert topology.nics[0].fabric is LinkKind.IB
    assert topology.nics[0].bandwidth == 50e9
    links = {(link.a, link.b): link for link in topology.links}
    assert links["gpu0", "gpu1"].kind is LinkKind.NVLINK
    assert links["gpu0", "gpu1"].bandwidth == 4 * 26.5625e9
    assert links["gpu0", "numa0"].bandwidth == 5 * 44712e6
    assert links["gpu0", "0000:01:00.0"].bandwidth == pytest.approx(63.0e9, rel=1e-2)
    assert links["mlx5_0", "0000:01:00.0"].bandwidth is None
    assert all(link.state is State.UNKNOWN for link in topology.links)
    assert topology.unknown == ()
    assert topology.notes == ()


def test_what_was_read_comes_back_equal() -> None:
    topology = read_xml(TWO)
    assert _comes_back(topology)
    text = write_xml(topology)
    assert "<?xml" not in text
    assert write_xml(read_xml(text)) == text
    assert Topology.from_json(topology.to_json()) == topology


def test_links_that_are_down_are_not_written() -> None:
    topology = read_xml(TWO)
    down = tuple(
        replace(link, state=State.DOWN) if link.kind is LinkKind.NVLINK else link
        for link in topology.links
    )
    topology = replace(topology, links=down)
    assert "nvlink" not in write_xml(topology)
    assert nvlink_islands(topology) == (("gpu0",), ("gpu1",))


@pytest.mark.parametrize("cut", [0, 20, 100, 400, 700, len(TWO) - 12])
def test_a_truncated_file_is_refused_with_its_line(cut: int) -> None:
    line = TWO[:cut].count("\n") + 1
    with pytest.raises(ArgumentValueError, match=rf"dump.xml, line {line}: ") as error:
        read_xml(TWO[:cut], source="dump.xml")
    assert cut <= 20 or "cut off?" in str(error.value)


@given(st.integers(0, len(TWO) - 3), st.characters())
def test_damage_is_refused_or_read(at: int, instead: str) -> None:
    with contextlib.suppress(ArgumentValueError):
        read_xml(TWO[:at] + instead + TWO[at + 1 :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology/>", "<topology>, where a topology starts with <system>"),
        ('<system version="1"/>', "<system> without a <cpu>"),
        ("# pasted\n" + TWO, "line 1: "),
        ("nvidia-smi: error", "line 1: "),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "a document type"),
        ("<pci>" * 100 + "</pci>" * 100, "nest deeper than 64"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        read_xml(text)


@pytest.mark.parametrize("place", ["inside", "in the gpu", "its own function"])
def test_a_nic_inside_a_gpu_is_the_near_one(place: str) -> None:
    own = f'<pci busid="0000:0a:00.0" class="0x020000">{_nic("a0")}</pci>'
    inside = {"inside": _nic("a0"), "in the gpu": "", "its own function": own}[place]
    first = _gpu(0, _nic("a0") if place == "in the gpu" else "", inside=inside)
    far = f'<pci busid="0000:0b:00.0" class="0x020000">{_nic("b0")}</pci>'
    topology = read_xml(_cpu(first + far))
    found = nearest_nics(topology)["gpu0"]
    assert found is not None
    assert (found.kind, found.nics) == (LinkKind.PIX, ("a0",))
    assert _comes_back(topology)


def test_a_flat_tree_of_a_machine_that_hides_numa() -> None:
    nic = f'<pci busid="0000:00:00.0" class="0x060000">{_nic("mlx5_0")}</pci>'
    topology = read_xml(_cpu(_gpu(0) + nic, 'numaid="-1"'))
    assert topology.numa_nodes[0].index is None
    assert topology.gpus[0].numa == ()
    assert topology.unknown_names("numa").keys() == {"gpu0"}
    found = nearest_nics(topology)["gpu0"]
    assert found is not None
    assert found.kind is LinkKind.PHB
    assert "hides NUMA nodes" in found.reason
    assert _comes_back(topology)


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [
        ("16 GT/s", "16", 16e9 * 128 / 130 * 2),
        ("16.0 GT/s PCIe", "8", 16e9 * 128 / 130),
        ("2.5 GT/s", "1", 2.5e8),
        ("64.0 GT/s PCIe", "16", 64e9 * 242 / 256 * 2),
        ("", "16", None),
        ("Unknown", "16", None),
        ("16 GT/s", "0", None),
        ("16 GT/s", "many", None),
    ],
)
def test_speeds_in_all_spellings(speed: str, width: str, rate: float | None) -> None:
    what = f'class="0x030200" link_speed="{speed}" link_width="{width}"'
    (link,) = read_xml(_cpu(_gpu(0, what=what))).links
    assert link.bandwidth == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("mask", "cpus"),
    [("fff0000", tuple(range(16, 28))), ("1,0,3", (0, 1, 64)), ("0", None), ("xyz", None)],
)
def test_masks_with_short_words(mask: str, cpus: tuple[int, ...] | None) -> None:
    topology = read_xml(_cpu("", f'numaid="0" affinity="{mask}"'))
    assert topology.numa_nodes[0].cpus == cpus
    assert ("is no mask" in "".join(topology.notes)) == (cpus is None)


def test_masks_that_overlap_are_reported() -> None:
    cpus = '<cpu numaid="0" affinity="ff"/><cpu numaid="1" affinity="f0f0"/>'
    topology = read_xml(f"<system>{cpus}</system>")
    assert topology.notes == ("topology XML: numa0 and numa1 both have CPU 4",)


def test_gpus_known_by_class_only_say_nothing_of_nvlink() -> None:
    inside = f'<pci busid="0001:00:00.0" {WHAT}/><pci busid="0101:00:00.0" class="0x020700"/>'
    bridge = f'<pci busid="ffff:ff:01.0" class="0x060400">{inside}</pci>'
    nothing = '<pci busid="0000:00:16.0"/>'
    topology = read_xml(_cpu(bridge + nothing))
    assert [gpu.name for gpu in topology.gpus] == ["0001:00:00.0"]
    assert nvlink_islands(topology) is None
    found = nearest_nics(topology)["0001:00:00.0"]
    assert found is not None
    assert (found.kind, found.nics) == (LinkKind.PIX, ("0101:00:00.0",))
    assert [switch.kind for switch in topology.switches] == ["pci", "device"]
    assert "0000:00:16.0: nothing says what it is" in topology.notes[0]
    assert _comes_back(topology)


def test_a_dump_without_nvlink_has_none_and_one_by_hand_does_not_say() -> None:
    assert nvlink_islands(read_xml(_cpu(_gpu(0) + _gpu(1)))) == (("gpu0",), ("gpu1",))
    by_hand = read_xml(_cpu(_gpu(0, what='class="0x030200"')))
    assert "written by hand" in by_hand.unknown_names("nvlink")["gpu0"]
    assert nvlink_islands(by_hand) is None
    amd = '<xgmi target="0000:02:00.0" count="1" tclass="0x038000"/>'
    foreign = read_xml(_cpu(_gpu(1, amd)))
    assert foreign.unknown_names("nvlink") == {"gpu1": "not an NVIDIA GPU"}


@pytest.mark.parametrize("target", ["fffffff:ff:ff.0", "0000:c1:00.0"])
def test_gpus_below_a_switch_are_one_island(target: str) -> None:
    topology = read_xml(_cpu("".join(_gpu(n, _row(target)) for n in range(8))))
    assert nvlink_islands(topology) == (tuple(f"gpu{n}" for n in range(8)),)
    assert direct_pairs(topology)
    assert nvlink_counts(topology) == {f"gpu{n}": 18 for n in range(8)}
    assert all(link.kind is LinkKind.NVSWITCH for link in topology.links if link.count == 18)
    assert _comes_back(topology)


def test_peers_that_each_count_all_links_are_counted_once() -> None:
    text = "".join(
        _gpu(n, "".join(_row(f"0:0{peer}:00.0") for peer in range(8) if peer != n))
        for n in range(8)
    )
    topology = read_xml(_cpu(text))
    assert nvlink_counts(topology)["gpu3"] == 18
    assert "gpu0 lists 126 NVLinks, more than any GPU has" in topology.notes[0]
    assert len(nvlink_islands(topology) or ()) == 1
    assert _comes_back(topology)


def test_a_gpu_that_lost_its_nvlink_is_named_and_in_no_island() -> None:
    rows = [_row("fffffff:ff:ff.0"), _row("fffffff:ff:ff.0"), ""]
    topology = read_xml(_cpu("".join(_gpu(n, row) for n, row in enumerate(rows))))
    assert nvlink_islands(topology) == (("gpu0", "gpu1"),)
    assert topology.gpus[2].state is State.DEGRADED
    assert "no NVLink row, while gpu0" in topology.gpus[2].reason
    assert _comes_back(topology)


def test_ends_that_count_differently_give_the_fewer_and_a_reason() -> None:
    first, second = _gpu(0, _row("0000:01:00.0", 4)), _gpu(1, _row("0000:00:00.0", 3))
    topology = read_xml(_cpu(first + second))
    (link,) = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert link.count == 3
    assert link.bandwidth == 3 * 26.5625e9
    assert link.reason == "gpu0 counts 4 links to gpu1, which counts 3 back"


def test_no_count_is_a_limit() -> None:
    nics = "".join(
        f'<pci busid="0000:{n // 32:02x}:{n % 32:02x}.0" class="0x020000">{_nic(f"n{n}")}</pci>'
        for n in range(1000)
    )
    gpus = "".join(
        f'<pci busid="{n:04x}:00:00.0" {WHAT}><gpu dev="{n}"/></pci>' for n in range(1, 300)
    )
    topology = read_xml(_cpu(nics + gpus))
    assert (len(topology.nics), len(topology.gpus)) == (1000, 299)
    assert _comes_back(topology)


def test_unknown_nesting_is_ignored_with_a_note() -> None:
    odd = '<pcilink target="0000:09:00.0"/><dpu/>'
    topology = read_xml(
        f"<system><rack/>{_cpu(_gpu(0, '<x/>', inside=odd) + '<y/>')[20:-9]}</system>"
    )
    assert [note.split(": ")[1] for note in topology.notes] == [
        f"<{tag}> ignored" for tag in ("pcilink", "dpu", "x", "y", "rack")
    ] or len(topology.notes) == 5
    assert [gpu.name for gpu in topology.gpus] == ["gpu0"]


def test_a_version_nccl_does_not_read_is_noted_and_not_written() -> None:
    topology = read_xml(TWO.replace('version="1"', 'version="2"'))
    assert topology.notes == ("topology XML, line 1: version 2, where NCCL reads only 1",)
    assert 'system version="1"' in write_xml(topology)
    assert _comes_back(topology)


def test_several_hosts_in_one_file() -> None:
    def host(key: str) -> str:
        return f'<cpu numaid="0" host_hash="{key}">{_gpu(0, _row("fffffff:ff:ff.0"))}</cpu>'

    topology = read_xml(f"<system>{host('0x1')}{host('0x2')}</system>", host="a")
    assert [host.name for host in topology.hosts] == ["a", "a#2"]
    assert [gpu.name for gpu in topology.gpus] == ["gpu0", "a#2:gpu0"]
    assert nvlink_islands(topology) == (("gpu0", "a#2:gpu0"),)
    assert path_kind(topology, "gpu0", "a#2:gpu0") is None


def test_a_topology_of_probes_can_be_written() -> None:
    topology = Topology(
        hosts=(Host("n"),),
        numa_nodes=(NumaNode("numa0", "n", 0, (0, 40)), NumaNode("numa1", "n", 1)),
        switches=(Switch("sw", "n", "pci", "0000:01:00.0", "numa0"), Switch("nvs", None)),
        gpus=(Gpu("g", "n", 3, "0000:02:00.0", ("numa0",), "sw"),),
        nics=(
            Nic("ib", "n", 0, "mlx5_0", "0000:03:00.0", (), "sw", LinkKind.IB, 5e10),
            Nic("eth", "n", None, "eth0", "0000:04:00.0", (), "numa1"),
        ),
        links=(Link("g", "nvs", LinkKind.NVSWITCH, count=18),),
    )
    again = read_xml(write_xml(topology))
    assert again.numa_nodes[0].cpus == (0, 40)
    assert [gpu.name for gpu in again.gpus] == ["gpu3"]
    assert again.nics[0].bandwidth == 5e10
    assert again.nics[0].fabric is LinkKind.IB
    assert nvlink_counts(again) == {"gpu3": 18}
    found = nearest_nics(again)["gpu3"]
    assert found is not None
    assert found.nics == ("mlx5_0",)


def test_without_places_on_pci_nothing_is_written() -> None:
    matrix = read_smi("\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tNV1\t X \n")
    with pytest.raises(ArgumentValueError, match="the place of GPU0 in the PCI tree is unknown"):
        write_xml(matrix)
    numa = NumaNode("numa0", "n", 0)
    nowhere = Topology((Host("n"),), (numa,), gpus=(Gpu("g", "n", parent="numa0"),))
    with pytest.raises(ArgumentValueError, match="g has no PCI bus id"):
        write_xml(nowhere)


def test_names_that_come_twice_are_told_apart() -> None:
    topology = read_xml(_cpu("".join(_gpu(0) for _ in range(5)) + _gpu(1).replace("0000:", "")))
    names = [gpu.name for gpu in topology.gpus]
    assert len(set(names)) == 6
    assert names[:3] == ["gpu0", "host0:gpu0", "0000:00:00.0"]
    assert names[4] == "host0:0000:00:00.0#2"
    assert "a second gpu0, called host0:gpu0 here" in topology.notes[0]


def test_bus_ids_are_equal_in_all_spellings() -> None:
    topology = read_xml(_cpu(_gpu(1, _row("02:00.0", 4)) + _gpu(2, _row("00000000:01:00.0", 4))))
    assert nvlink_counts(topology) == {"gpu1": 4, "gpu2": 4}
    assert topology.switches == ()


def test_text_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="not text"):
        read_xml("<system>\ud800</system>")
