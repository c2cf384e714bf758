"""The matrix of nvidia-smi: pastes of every kind, and rows refused by name."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import ArgumentValueError
from pycomm.topology.graph import Link, LinkKind, Topology
from pycomm.topology.groups import nearest_nics, nvlink_islands
from pycomm.topology.smi import read_smi

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ROWS = [
    ["", "GPU0", "GPU1", "NIC0", "NIC1", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"],
    ["GPU0", " X ", "NV4", "PIX", "SYS", "0-1,4", "0", "", "N/A"],
    ["GPU1", "NV4", " X ", "SYS", "NODE", "2-3", "1", "", "N/A"],
    ["NIC0", "PIX", "SYS", " X ", "SYS"],
    ["NIC1", "SYS", "NODE", "SYS", " X "],
]


def _text(rows: list[list[str]], between: str = "\t") -> str:
    return "\n".join(between.join(row) for row in rows) + "\n"


def _link(topology: Topology, a: str, b: str) -> Link:
    (found,) = [link for link in topology.links if {link.a, link.b} == {a, b}]
    return found


TABS = _text(ROWS)


def test_a_matrix_is_read() -> None:
    legend = LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n"
    topology = read_smi(TABS + legend, host="node7")
    assert [host.name for host in topology.hosts] == ["node7"]
    assert [gpu.name for gpu in topology.gpus] == ["GPU0", "GPU1"]
    assert [(nic.name, nic.device) for nic in topology.nics] == [
        ("NIC0", "mlx5_0"),
        ("NIC1", "mlx5_bond_0"),
    ]
    assert topology.gpus[0].numa == ("numa0",)
    assert topology.numa_nodes[0].cpus == (0, 1, 4)
    assert len(topology.links) == 6
    assert _link(topology, "GPU0", "GPU1") == Link("GPU0", "GPU1", LinkKind.NVLINK, count=4)
    assert _link(topology, "NIC1", "GPU1").kind is LinkKind.NODE
    assert topology.unknown == ()
    assert topology.notes == ()
    assert Topology.from_json(topology.to_json()) == topology


SPACES = _text(
    [
        [cell.strip() for index, cell in enumerate(row) if index == 0 or cell.strip()]
        for row in ROWS
    ],
    "    ",
)


@pytest.mark.parametrize(
    "text",
    [
        SPACES,
        TABS.replace("\n", "\r\n"),
        TABS.lstrip("\t"),
        "".join(f"    {line}\n" for line in TABS.splitlines()),
        TABS.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1").replace("ID\n", "ID\x1b[0m\n"),
        TABS.replace("NIC1\tCPU", "NIC1 CPU").replace("ty\tNUMA A", "ty NUMA A"),
        "see GPU0 here\n" + TABS,
        "+ nvidia-smi topo -m\n# a comment\n" + TABS,
    ],
)
def test_pastes_give_the_same(text: str) -> None:
    assert replace(read_smi(text), notes=()) == read_smi(TABS)


@pytest.mark.parametrize(
    ("said", "nodes"),
    [("0-2", ("numa0", "numa1", "numa2")), ("1,3", ("numa1", "numa3")), ("N/A", ()), ("", ())],
)
def test_numa_affinity_may_be_a_range_or_nothing(said: str, nodes: tuple[str, ...]) -> None:
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t{said}\n"
    topology = read_smi(text)
    assert topology.gpus[0].numa == nodes
    assert ("GPU0" in topology.unknown_names("numa")) == (not nodes)


@pytest.mark.parametrize("said", ["0-999999999", "3-1", "0-", "x"])
def test_affinities_that_are_no_list_are_unknown(said: str) -> None:
    topology = read_smi(f"\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t{said}\t{said}\n")
    assert topology.numa_nodes == ()
    assert topology.unknown_names("numa") == {"GPU0": f"NUMA affinity is {said!r}"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("GPU1\tNV4\t X \tSYSNODE\t2-3\t1\t\tN/A", "'SYSNODE' in column NIC0 is no link"),
        ("GPU1\tNV4\t X SYS\tNODE\t2-3\t1\t\tN/A", "'X SYS' in column GPU1 is no link"),
        ("GPU1\t X \tNV4\tSYS\tNODE\t2-3\t1\t\tN/A", "'X' in column GPU0: its cells have shifted"),
        ("GPU1\tNV4\t X \tSYS", "3 cells where the header has 4 devices"),
        ("GPU1\tNV4\t X \tSYS\tNODE\tSYS\t2-3\t1", "more links than the 4 devices"),
        ("GPU1\tNV4\t X \tSYS\tNODE\t2-3\t1\t\tN/A\t7", "9 cells where the header has 8"),
        ("", "its row is missing"),
    ],
)
def test_a_row_unlike_the_header_is_refused_and_nothing_shifts(row: str, reason: str) -> None:
    lines = TABS.splitlines()
    topology = read_smi("\n".join([*lines[:2], row, *lines[3:]]))
    assert reason in topology.unknown_names("row")["GPU1"]
    assert nearest_nics(topology)["GPU1"] is None
    assert topology.gpus[1].numa == ()
    link = _link(topology, "GPU0", "GPU1")
    assert (link.kind, link.count) == (LinkKind.NVLINK, 4)
    assert "seen from GPU0 only" in link.reason
    if row:
        assert "line 3: row GPU1 refused" in topology.notes[0]


@given(st.integers(1, 4), st.integers(1, 8))
def test_a_lost_separator_never_moves_a_cell(line: int, tab: int) -> None:
    lines = TABS.splitlines()
    cells = lines[line].split("\t")
    tab = min(tab, len(cells) - 1)
    lines[line] = "\t".join(cells[:tab]) + "\t".join(["", *cells[tab:]])[1:]
    whole = {frozenset((link.a, link.b)): link.kind for link in read_smi(TABS).links}
    for link in read_smi("\n".join(lines)).links:
        assert link.kind is whole[frozenset((link.a, link.b))]


def test_contradictions_keep_the_farther_path_and_say_so() -> None:
    topology = read_smi(TABS.replace("GPU1\tNV4", "GPU1\tSYS"))
    link = _link(topology, "GPU0", "GPU1")
    assert link.kind is LinkKind.SYS
    assert link.reason == "GPU0 says NV4; GPU1 says SYS"
    assert "contradict each other" in topology.notes[0]


def test_a_row_that_comes_twice_is_refused() -> None:
    topology = read_smi(TABS + TABS.splitlines()[1] + "\n")
    assert topology.unknown_names("row") == {"GPU0": "its row comes twice"}


def test_soc_is_what_sys_was_called() -> None:
    legend = "Legend:\n  X   = Self\n  SOC = Path traverses a socket-level link\n"
    topology = read_smi("\tGPU0\tGPU1\nGPU0\t X \tSOC\nGPU1\tSOC\t X \n" + legend)
    assert topology.links[0].kind is LinkKind.SYS
    assert nvlink_islands(topology) == (("GPU0",), ("GPU1",))


def test_the_view_of_pci_paths_knows_nothing_of_nvlink() -> None:
    text = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"
    assert nvlink_islands(read_smi(text + LEGEND)) == (("GPU0",), ("GPU1",))
    paths_only = LEGEND.replace("NV#", "   ").replace("  = Connection traversing a b", "a b")
    topology = read_smi(text + paths_only)
    assert "topo -mp" in topology.unknown_names("nvlink")["GPU0"]
    assert nvlink_islands(topology) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header row that names GPUs; it says: nothing"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "it says: NVIDIA-SMI has failed"),
        ("No devices were found\n", "it says: No devices were found"),
        ("[N/A], 24576, NVIDIA H100L-2-24C\n", "no header row"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", "no header row"),
        (TABS.split("\n", 1)[1], "line 1: row GPU0 comes before any header row"),
        (TABS.splitlines()[0], "no row of a GPU is readable: GPU0: its row is missing"),
        ("\tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n", "line 2: .*peer-to-peer"),
    ],
)
def test_what_is_no_matrix_is_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        read_smi(text)


@given(st.text(alphabet="GPUNIC01X \t\nV4PSY#=:/A-,\x1b[m", max_size=120))
def test_nonsense_is_read_or_refused_but_never_anything_else(text: str) -> None:
    with contextlib.suppress(ArgumentValueError):
        read_smi(text)
