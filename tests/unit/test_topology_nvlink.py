"""What `nvidia-smi nvlink` prints: every spelling, per GPU, and nothing taken for health."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import ArgumentValueError
from pycomm.topology.graph import Gpu, Host, Link, LinkKind, State, Switch, Topology
from pycomm.topology.groups import nvlink_islands
from pycomm.topology.nvlink import LinkReport, apply, built_in, listed, read_nvlink

BOARD = "NVIDIA A100-SXM4-40GB"
CARD = "NVIDIA RTX A6000"


def _gpu(index: int, product: str, *lines: str) -> str:
    uuid = f"GPU-{index:08x}-aaaa-bbbb-cccc-000000000000"
    return "\n".join([f"GPU {index}: {product} (UUID: {uuid})", *lines]) + "\n"


def _rates(count: int, *, down: tuple[int, ...] = (), rate: str = "25") -> list[str]:
    return [
        f"\t Link {number}: " + ("<inactive>" if number in down else f"{rate} GB/s")
        for number in range(count)
    ]


def _states(text: str) -> list[tuple[str, State]]:
    return [(name, report.state) for name, report in read_nvlink(text).items()]


def test_rates_are_read() -> None:
    text = _gpu(0, BOARD, *_rates(12)) + _gpu(1, BOARD, *_rates(12, down=(2, 7, 9)))
    reports = read_nvlink(text)
    first = reports["gpu0"]
    assert (first.index, first.product) == (0, BOARD)
    assert first.uuid == "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    assert (first.up, first.down) == (tuple(range(12)), ())
    assert (first.state, first.reason, first.rate) == (State.UP, "", 25e9)
    second = reports["gpu1"]
    assert second.down == (2, 7, 9)
    assert second.state is State.DEGRADED
    assert second.reason == "9 of 12 NVLinks are up: 2, 7 and 9 are down"


def test_words_for_numbers() -> None:
    assert listed([3]) == "3 is"
    assert listed([3, 5]) == "3 and 5 are"
    assert listed((1, 2, 3), verb=False) == "1, 2 and 3"
    assert listed([], verb=False) == "none"


@pytest.mark.parametrize(
    "line",
    [
        "NVML: Unable to retrieve NVLink information as all links are inActive",
        "NVML: Unable to retrieve NVLink information as all links are inactive",
        "NVML: Unable to retrieve Nvlink information as all links are INACTIVE",
        "\n".join(_rates(12, down=tuple(range(12)))),
        "\n".join(_rates(12, down=tuple(range(12)))).replace("<inactive>", "inActive"),
    ],
)
def test_all_links_down_is_a_fault_of_a_board_alone(line: str) -> None:
    (board,) = read_nvlink(_gpu(6, BOARD, line)).values()
    assert board.state is State.DEGRADED
    assert "NVLinks are down" in board.reason
    (card,) = read_nvlink(_gpu(6, CARD, line)).values()
    assert (card.state, card.up) == (State.UP, ())
    assert card.reason.startswith("no NVLink")


def test_each_gpu_is_judged_by_itself() -> None:
    dark = "NVML: Unable to retrieve NVLink information as all links are inActive"
    text = _gpu(0, BOARD, *_rates(12)) + _gpu(1, BOARD, dark) + _gpu(2, BOARD, *_rates(12))
    assert _states(text) == [
        ("gpu0", State.UP),
        ("gpu1", State.DEGRADED),
        ("gpu2", State.UP),
    ]


def test_gpus_without_nvlink_are_well() -> None:
    line = "NVML: Unable to retrieve Nvlink information as the GPU does not have or support Nvlink"
    (report,) = read_nvlink(_gpu(0, "NVIDIA L40S", line)).values()
    assert (report.state, report.reason) == (State.UP, "no NVLink")


def test_what_cannot_be_told_is_unknown() -> None:
    mig = "Nvlink queries are not supported for Devices in MIG mode"
    for lines, word in (
        ([mig], "MIG mode"),
        ([], "nothing is said"),
        ([*_rates(4), "Something new about NVLink"], "Something new"),
        (["\t Link 0: 25 GB/s", "\t Link 1: N/A"], "link 1 says 'N/A'"),
        (["\t Link 0: 25 GB/s", "\t Link 1: 0 GB/s"], "link 1 says"),
        (["\t Link 0: 25 GB/s", "\t Link 1: 25"], "link 1 says '25'"),
        (["\t Link 0: 25 GB/s", "\t Link 2: 25 GB/s"], "nothing is said of link 1"),
        (["\t Link 0: 25 GB/s", "\t Link 0: <inactive>"], "up in one line, down in another"),
        ([*_rates(2), "all links are inactive: NVLink"], "said not to be there"),
        ([*_rates(12), "..."], "cut off"),
    ):
        (report,) = read_nvlink(_gpu(0, BOARD, *lines)).values()
        assert report.state is State.UNKNOWN, lines
        assert word in report.reason


def test_a_text_that_is_cut_off_leaves_the_last_gpu_unknown() -> None:
    whole = _gpu(0, BOARD, *_rates(12)) + _gpu(1, BOARD, *_rates(12))
    for end in range(whole.index("GPU 1") + len("GPU 1:"), len(whole) - 1):
        reports = read_nvlink(whole[:end])
        assert reports["gpu0"].state is State.UP
        assert reports["gpu1"].state is State.UNKNOWN, whole[:end]
    fewer = _gpu(0, BOARD, *_rates(11)) + _gpu(1, BOARD, *_rates(12))
    first = read_nvlink(fewer)["gpu0"]
    assert (first.state, first.reason) == (State.DEGRADED, "11 NVLinks, while GPU 1 has 12")


def test_two_gpus_of_one_number() -> None:
    text = _gpu(0, BOARD, *_rates(12)) + _gpu(0, BOARD, *_rates(12)).replace("aaaa", "dddd")
    (report,) = read_nvlink(text).values()
    assert report.state is State.UNKNOWN
    assert "two GPUs" in report.reason


def test_remote_ends() -> None:
    lines = [
        "\t Link 0: Remote Device 00000000:0A:00.0: Link 46",
        "\t Link 1: Remote Device 00000000:0B:00.0: Link 2",
        "\t Link 2: <inactive>",
    ]
    (report,) = read_nvlink(_gpu(0, BOARD, *lines)).values()
    assert report.remotes == ((0, "00000000:0a:00.0"), (1, "00000000:0b:00.0"))
    assert (report.up, report.down, report.rate) == ((0, 1), (2,), None)
    assert report.state is State.DEGRADED
    both = _gpu(0, BOARD, *_rates(3, down=(2,))) + _gpu(0, BOARD, *lines)
    (report,) = read_nvlink(both).values()
    assert (report.up, report.rate, len(report.remotes)) == ((0, 1), 25e9, 2)


def test_a_listing_names_mig_devices() -> None:
    text = _gpu(
        0,
        BOARD,
        "  MIG 3g.20gb     Device  0: (UUID: MIG-11111111-2222-3333-4444-555555555555)",
        "  MIG 1g.5gb      Device  1: (UUID: MIG-66666666-2222-3333-4444-555555555555)",
    )
    (report,) = read_nvlink(text).values()
    assert len(report.mig) == 2
    assert report.mig[0].startswith("MIG-11111111")
    assert report.state is State.UNKNOWN


DCGM = """+----------------------+
|  NvLink Link Status  |
+----------------------+
GPUs:
    gpuId 0:
        {0}
    gpuId 1:
        D D D D _ _
NvSwitches:
    {1}

Key: Up=U, Down=D, Disabled=X, Not Supported=_
"""


def test_the_table_of_dcgm() -> None:
    none = read_nvlink(DCGM.format("D D D D _ _", "No NvSwitches found."))
    assert [report.state for report in none.values()] == [State.UP] * 2
    assert none["gpu0"].down == (0, 1, 2, 3)
    there = read_nvlink(DCGM.format("U U D U _ _", "physicalId 8:\n        U U U"))
    assert there["gpu0"].reason == "3 of 4 NVLinks are up: 2 is down"
    assert there["gpu1"].state is State.DEGRADED


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n \n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "No devices were found",
        "# a comment",
    ],
)
def test_errors_of_the_tool_are_refused(text: str) -> None:
    with pytest.raises(ArgumentValueError, match=r"nvlink: no line names a GPU; it says: "):
        read_nvlink(text)
    with pytest.raises(ArgumentValueError, match=r"paste: no line"):
        read_nvlink(text, source="paste")


def test_odd_signs_do_not_matter() -> None:
    text = _gpu(0, CARD, *_rates(4)).replace("aaaa", "\u7532-\u4e59")
    colour = "\x1b[4m# comment\x1b[0m\r\n" + text.replace("\n", "\x1b[0m\r\n")
    (report,) = read_nvlink(colour).values()
    assert report.state is State.UP
    assert "\u7532" in report.uuid


def test_names_of_boards_and_cards() -> None:
    for name in ("Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200",
                 "NVIDIA GB200", "NVIDIA H20-3e", "NVIDIA A800-SXM4-80GB"):  # fmt: skip
        assert built_in(name), name
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA RTX A6000",
                 "NVIDIA GeForce RTX 3090", "NVIDIA L40S", "NVIDIA A100-PCIE", ""):  # fmt: skip
        assert not built_in(name), name


def _board() -> Topology:
    gpus = tuple(Gpu(f"GPU{n}", "host0", n) for n in range(3))
    links = tuple(
        Link(a, b, LinkKind.NVLINK, count=12)
        for a, b in (("GPU0", "GPU1"), ("GPU0", "GPU2"), ("GPU1", "GPU2"))
    )
    return Topology((Host("host0"),), gpus=gpus, links=links)


def test_reports_are_applied() -> None:
    dark = "NVML: Unable to retrieve NVLink information as all links are inActive"
    text = _gpu(0, BOARD, *_rates(12)) + _gpu(1, BOARD, dark) + _gpu(2, BOARD, *_rates(12))
    topology = apply(_board(), read_nvlink(text))
    assert [gpu.state for gpu in topology.gpus] == [State.UP, State.DEGRADED, State.UP]
    assert topology.gpus[1].reason == "all of its NVLinks are down"
    assert nvlink_islands(topology) == (("GPU0", "GPU2"),)
    assert [link.state for link in topology.links] == [State.DOWN, State.UNKNOWN, State.DOWN]
    assert topology.links[0].reason == "GPU1: all of its NVLinks are down"


def test_unknown_stays_unknown_and_a_fault_a_fault() -> None:
    mig = "Nvlink queries are not supported for Devices in MIG mode"
    text = _gpu(0, BOARD, mig) + _gpu(1, BOARD, *_rates(12)) + _gpu(5, BOARD, *_rates(12))
    before = _board()
    bad = replace(before.gpus[1], state=State.DOWN, reason="it fell off the bus")
    before = replace(before, gpus=(before.gpus[0], bad, before.gpus[2]))
    topology = apply(before, read_nvlink(text))
    assert topology.gpus[0].state is State.UNKNOWN
    assert "MIG mode" in topology.unknown_names("nvlink")["GPU0"]
    assert topology.gpus[1] == bad
    assert topology.gpus[2] == before.gpus[2]
    assert topology.notes[0].startswith("gpu5 (GPU-00000005")
    assert apply(topology, read_nvlink(text)).unknown == topology.unknown


def test_a_gpu_is_found_by_its_uuid() -> None:
    board = _board()
    uuid = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    moved = replace(board.gpus[2], attributes=(("uuid", uuid),))
    switch = Switch("nvswitch", "host0", "nvswitch")
    board = replace(board, gpus=(*board.gpus[:2], moved), switches=(switch,))
    topology = apply(board, read_nvlink(_gpu(0, BOARD, *_rates(4, down=(1,)))))
    assert [gpu.state for gpu in topology.gpus] == [State.UNKNOWN, State.UNKNOWN, State.DEGRADED]


def test_several_hosts_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="several"):
        apply(Topology((Host("a"), Host("b"))), {})
    assert apply(_board(), {}) == _board()


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ArgumentValueError):
        read_nvlink(text)
    with contextlib.suppress(ArgumentValueError):
        apply(_board(), read_nvlink("GPU 0: x (UUID: y)\n" + text))


LINES = st.lists(
    st.sampled_from([*_rates(3), *_rates(3, down=(0, 1, 2)), "...", "GPU is lost", "\t Link 1:"]),
    max_size=5,
)


@given(LINES)
def test_nothing_unknown_is_taken_for_health(lines: list[str]) -> None:
    (report,) = read_nvlink(_gpu(0, BOARD, *lines)).values()
    assert isinstance(report, LinkReport)
    if report.state is State.UP:
        assert report.up
        assert not report.down
        assert all("GB/s" in line for line in lines)
