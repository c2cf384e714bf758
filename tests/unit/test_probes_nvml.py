"""The probe of NVML: who the GPUs are, their NVLinks, and where these lead."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_nvml import FakeGpu, FakeNvml, bridged, gpu, probed, refuse, switched

import pycomm.topology.probes.nvml as probe_module
from pycomm.topology.graph import LinkKind, State
from pycomm.topology.groups import nvlink_counts, nvlink_islands, path_kind
from pycomm.topology.probes.nvml import gpu_of, probe_nvml
from pycomm.topology.probes.nvml_links import bus_of

PARTS = ("nvml", "nvml_calls", "nvml_fabric", "nvml_links", "nvml_xids")
CLUSTER = bytes(range(16))


def test_the_double_says_what_the_module_says() -> None:
    pynvml = importlib.import_module("pynvml")
    folder = Path(probe_module.__file__).parent
    text = "".join((folder / f"{part}.py").read_text() for part in PARTS)
    functions = set(re.findall(r'"(nvml[A-Z]\w+)"', text))
    assert len(functions) > 20
    structures = set(re.findall(r'"(c_nvml\w+)"', text))
    for name in functions | structures:
        assert hasattr(pynvml, name), name
        assert hasattr(FakeNvml(), name), name
    constants = {
        name: value
        for part in PARTS
        for name, value in vars(importlib.import_module(f"pycomm.topology.probes.{part}")).items()
        if name.startswith(("NVML_", "nvmlEventType"))
    }
    assert len(constants) > 20
    for name, value in constants.items():
        # pynvml has a comma too many behind one, which makes it a tuple.
        real = getattr(pynvml, name)
        assert (real[0] if isinstance(real, tuple) else real) == value, name
    for name in structures:
        fields = [one[0] for one in getattr(pynvml, name)._fields_]
        assert [one[0] for one in getattr(FakeNvml, name)._fields_] == fields


def test_a_board_with_switches() -> None:
    findings = probed(switched(), ancestor=20)
    topology = findings.topology
    first = gpu(findings, 0)
    assert (first.name, first.index, first.bus_id) == ("gpu0", 0, "0000:10:00.0")
    assert (first.state, first.reason) == (State.UP, "")
    assert dict(first.attributes) == {
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "fabric": "none",
    }
    assert [(s.name, s.kind, s.bus_id) for s in topology.switches] == [
        ("nvswitch 0000:05:00.0", "nvswitch", "0000:05:00.0"),
        ("nvswitch 0000:06:00.0", "nvswitch", "0000:06:00.0"),
    ]
    link = next(link for link in topology.links if link.kind is LinkKind.NVSWITCH)
    assert (link.count, link.bandwidth, link.state) == (9, 9 * 26562e6, State.UP)
    assert nvlink_islands(topology) == (("gpu0", "gpu1", "gpu2", "gpu3"),)
    assert nvlink_counts(topology) == dict.fromkeys(("gpu0", "gpu1", "gpu2", "gpu3"), 18)
    assert path_kind(topology, "gpu0", "gpu3") is LinkKind.PXB
    counters = dict(findings.samples[0].counters)
    assert counters == {
        "ecc.uncorrected": 0,
        **{f"nvlink.{name}": 0 for name in ("crc_data", "crc_flit", "recovery", "replay")},
    }
    assert topology.notes == topology.unknown == ()


def test_without_nvml_there_are_no_gpus_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (9, 12, 999):
        findings = probed([FakeGpu()], refuse("nvmlInit", code))
        assert findings.topology.gpus == ()
        assert "nvmlInit" in findings.topology.notes[0]
    findings = probed([FakeGpu()], refuse("nvmlDeviceGetCount", 999))
    assert "nvmlDeviceGetCount" in findings.topology.notes[0]
    assert probed([]).topology.gpus == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    findings = probe_nvml("node1", 0.0)
    assert "cannot be imported" in findings.topology.notes[0]
    assert findings.topology.hosts[0].name == "node1"


def test_this_machine_is_probed_without_an_error() -> None:
    assert probe_nvml("here", 0.0).topology.hosts[0].name == "here"


def test_a_module_that_answers_nonsense() -> None:
    nvml = FakeNvml([FakeGpu()])
    nvml.nvmlDeviceGetCount = lambda: "two"  # type: ignore[method-assign,return-value,assignment]
    findings = probe_nvml("node1", 0.0, nvml)
    assert findings.topology.gpus == ()
    assert "the probe failed: TypeError" in findings.topology.notes[0]
    assert nvml.opened == 0


def test_the_loop_over_links_ends_at_two_codes_only() -> None:
    assert gpu(probed(switched(2)), 0).state is State.UP  # Invalid Argument at 18
    plain = probed([FakeGpu(name="NVIDIA L40S"), FakeGpu(name="NVIDIA L40S")])
    assert [(one.state, one.reason) for one in plain.topology.gpus] == [(State.UP, "no NVLink")] * 2
    assert nvlink_islands(plain.topology) == (("gpu0",), ("gpu1",))
    odd = probed(switched(2), refuse("nvmlDeviceGetNvLinkState", 999, 1, 5))
    assert gpu(odd, 0).state is State.UP
    assert gpu(odd, 1).state is State.UNKNOWN
    assert "nvmlDeviceGetNvLinkState" in gpu(odd, 1).reason
    assert nvlink_counts(odd.topology) == {"gpu0": 18, "gpu1": 17}
    assert nvlink_islands(odd.topology) == (("gpu0", "gpu1"),)
    none = probed(switched(2), refuse("nvmlDeviceGetNvLinkState", 999, 1))
    assert none.topology.unknown_names("nvlink") == {
        "gpu1": "NVML tells of none of its NVLinks whether it is up"
    }


def test_links_that_are_down_are_named() -> None:
    gpus = [FakeGpu(["switch 00000000:05:00.0"] * 6, "Tesla V100-SXM2-32GB") for _ in range(2)]
    gpus[1].links[3] = gpus[1].links[5] = None
    findings = probed(gpus)
    assert gpu(findings, 0).state is State.UP
    assert gpu(findings, 1).state is State.DEGRADED
    assert gpu(findings, 1).reason == "4 of 6 NVLinks are up: 3 and 5 are down"


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ([None] * 18, "all of its 18 NVLinks are down, while gpu0 has 18 that are up"),
        ([], "it has no NVLink, while gpu0 has 18 that are up"),
        (
            ["switch 00000000:05:00.0"] * 17,
            "17 NVLinks are up, while gpu0 has 18 that are up",
        ),
    ],
)
def test_one_gpu_with_fewer_than_its_equals(links: list[str | None], reason: str) -> None:
    gpus = switched(4)
    gpus[2].links = links
    findings = probed(gpus)
    assert [one.state for one in findings.topology.gpus] == [
        State.UP,
        State.UP,
        State.DEGRADED,
        State.UP,
    ]
    assert gpu(findings, 2).reason == reason
    if not any(links):
        assert nvlink_islands(findings.topology) == (("gpu0", "gpu1", "gpu3"),)


def test_a_card_without_a_bridge_is_well() -> None:
    findings = probed(bridged(3))
    assert [one.state for one in findings.topology.gpus] == [State.UP] * 3
    assert gpu(findings, 2).reason == "no NVLink: no bridge"
    assert nvlink_islands(findings.topology) == (("gpu0", "gpu1"), ("gpu2",))
    (link,) = [one for one in findings.topology.links if one.kind is LinkKind.NVLINK]
    assert (link.count, link.bandwidth, link.state) == (4, 4 * 14062e6, State.UP)
    none = probed(bridged(2, ()))
    assert [one.state for one in none.topology.gpus] == [State.UP] * 2
    assert nvlink_islands(none.topology) == (("gpu0",), ("gpu1",))
    half = bridged(2)
    half[0].links[1] = half[1].links[1] = None
    assert gpu(probed(half), 1).reason == "3 of 4 NVLinks are up: 1 is down"


def test_all_links_down_on_a_board() -> None:
    dark = [FakeGpu([None] * 18, "NVIDIA B200") for _ in range(2)]
    findings = probed(dark)
    assert [one.state for one in findings.topology.gpus] == [State.UNKNOWN] * 2
    assert nvlink_islands(findings.topology) is None
    for one in dark:
        one.fabric = (3, 0, 1, CLUSTER)
    findings = probed(dark)
    assert [one.state for one in findings.topology.gpus] == [State.DEGRADED] * 2
    assert "although there is a fabric" in gpu(findings, 0).reason
    cards = probed([FakeGpu([None] * 18, "NVIDIA H100 NVL") for _ in range(2)])
    assert [one.state for one in cards.topology.gpus] == [State.UP] * 2


def test_a_gpu_that_is_lost_is_down() -> None:
    for code in (15, 16):
        for call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
                     "nvmlDeviceGetNvLinkState", "nvmlDeviceGetRemappedRows"):  # fmt: skip
            findings = probed(switched(3), refuse(call, code, 1))
            assert gpu(findings, 1).state is State.DOWN, call
            assert call in gpu(findings, 1).reason
            assert [gpu(findings, other).state for other in (0, 2)] == [State.UP] * 2
            assert nvlink_islands(findings.topology) == (("gpu0", "gpu2"),)


def test_a_lost_peer_of_a_pair() -> None:
    findings = probed(bridged(2), refuse("nvmlDeviceGetNvLinkState", 15, 1))
    (link,) = [one for one in findings.topology.links if one.kind is LinkKind.NVLINK]
    assert link.state is State.UNKNOWN
    assert link.reason == "gpu1 cannot tell"
    assert gpu(findings, 0).state is State.UP


def test_a_gpu_that_may_not_be_used_is_left_out() -> None:
    findings = probed(switched(3), refuse("nvmlDeviceGetHandleByIndex", 4, 1))
    assert [one.name for one in findings.topology.gpus] == ["gpu0", "gpu2"]
    assert "gpu1 is left out" in findings.topology.notes[0]
    unknown = probed(switched(3), refuse("nvmlDeviceGetHandleByIndex", 999, 1))
    assert gpu(unknown, 1).state is State.UNKNOWN
    assert "gpu1" in unknown.topology.unknown_names("nvlink")


def test_ends_that_are_not_on_this_host() -> None:
    away = [FakeGpu(["00000000:77:00.0"] * 2 + ["npu"] * 2, "Tesla V100-SXM2-16GB")]
    findings = probed(away)
    assert findings.topology.notes == (
        "nvml: gpu0: 2 of its NVLinks end at 0000:77:00.0, a GPU that is not on this host, "
        "or hidden",
        "nvml: gpu0: 2 of its NVLinks end at the CPU",
    )
    assert gpu(findings, 0).state is State.UP
    assert findings.topology.links == ()
    loop = FakeGpu(["00000000:10:00.0"])
    assert "the GPU itself" in probed([loop]).topology.notes[0]


def test_switches_without_a_bus_id() -> None:
    rack = [FakeGpu(["switch ?"] * 18, "NVIDIA GB200") for _ in range(2)]
    findings = probed(rack)
    assert [switch.name for switch in findings.topology.switches] == ["nvswitch"]
    assert nvlink_islands(findings.topology) == (("gpu0", "gpu1"),)
    one = probed(switched(3), refuse("nvmlDeviceGetNvLinkRemotePciInfo", 3, 1))
    assert gpu(one, 1).state is State.UNKNOWN
    assert nvlink_islands(one.topology) is None
    type_only = probed(switched(3), refuse("nvmlDeviceGetNvLinkRemoteDeviceType", 3, 1))
    assert nvlink_islands(type_only.topology) == (("gpu0", "gpu1", "gpu2"),)
    neither = [FakeGpu(["?"] * 4), FakeGpu(["?"] * 4)]
    blind = probed(neither, refuse("nvmlDeviceGetNvLinkRemotePciInfo", 3))
    assert [g.state for g in blind.topology.gpus] == [State.UNKNOWN] * 2
    assert "does not tell where" in blind.topology.unknown_names("nvlink")["gpu0"]


def test_two_gpus_that_count_differently() -> None:
    gpus = bridged(2)
    gpus[0].links[3] = "00000000:99:00.0"
    findings = probed(gpus)
    (link,) = [one for one in findings.topology.links if one.kind is LinkKind.NVLINK]
    assert (link.count, link.state) == (3, State.DEGRADED)
    assert link.reason == "gpu0 counts 3 links to gpu1, which counts 4 back"


def test_the_rate_of_a_link() -> None:
    def rate(**changes: Any) -> float | None:
        return probed(switched(1, 1, **changes)).topology.links[0].bandwidth

    assert rate() == 26562e6
    assert rate(speed=None) == 26.5625e9
    assert rate(speed=0, version=4) == 25e9
    assert rate(speed=None, version=99) is None


def test_counts_of_errors_are_by_kind_and_by_link() -> None:
    gpus = switched(1, 4)
    gpus[0].errors = {(3, 0): 7, (1, 0): 2, (3, 2): 1, (2, 161): 9, (2, 214): 1}
    counters = dict(probed(gpus).samples[0].counters)
    assert counters["nvlink.replay"] == 9
    assert (counters["nvlink3.replay"], counters["nvlink1.replay"]) == (7, 2)
    assert counters["nvlink3.crc_flit"] == 1
    assert "nvlink0.replay" not in counters
    fields = probed(gpus, refuse("nvmlDeviceGetNvLinkErrorCounter", 3))
    assert dict(fields.samples[0].counters) == {
        "ecc.uncorrected": 0,
        "nvlink.failed_recovery": 1,
        "nvlink.replay": 9,
        "nvlink2.failed_recovery": 1,
        "nvlink2.replay": 9,
    }
    assert gpu(fields, 0).state is State.UP


def test_a_gpu_in_mig_mode_is_alone() -> None:
    gpus = switched(3)
    gpus[0].mig = ["MIG-0000000a-0000-4000-8000-00000000000a", "MIG-GPU-0/3/0"]
    findings = probed(gpus)
    assert gpu(findings, 0).state is State.UP
    assert nvlink_islands(findings.topology) == (("gpu0",), ("gpu1", "gpu2"))
    attributes = dict(gpu(findings, 0).attributes)
    assert attributes["mig"] == "on"
    assert attributes["mig.0"].startswith("MIG-0000000a")
    found = gpu_of(findings.topology, uuid="GPU-0000000a-0000-4000-8000-00000000000a")
    assert found == gpu(findings, 0)


def test_a_cuda_device_is_found_by_what_does_not_change() -> None:
    topology = probed(switched(3)).topology
    uuid = "00000001000040008000000000000001"
    assert gpu_of(topology, uuid=uuid) == topology.gpus[1]
    assert gpu_of(topology, uuid="gpu-00000001-0000-4000-8000-000000000001") == topology.gpus[1]
    older = "MIG-GPU-00000002-0000-4000-8000-000000000002/1/0"
    assert gpu_of(topology, uuid=older) == topology.gpus[2]
    assert gpu_of(topology, uuid="GPU-none", bus_id="0000:12:00.0") == topology.gpus[2]
    assert gpu_of(topology, bus_id="00000000:10:00.0") == topology.gpus[0]
    assert gpu_of(topology, uuid="GPU-none") is None
    assert gpu_of(topology) is None
    assert gpu_of(topology, bus_id="nonsense") is None


def test_bus_ids() -> None:
    assert bus_of("00000000:3B:00.0") == "0000:3b:00.0"
    assert bus_of(b"0000A1B2:3B:00.0") == "a1b2:3b:00.0"
    assert bus_of("00010000:E1:00.0") == "10000:e1:00.0"
    assert bus_of("00000000:00:00.0") is None
    assert bus_of("") is None


def test_fewer_bridges_than_its_equals() -> None:
    gpus = bridged(4, ((0, 1), (2, 3)))
    gpus[2].links.pop()
    gpus[3].links.pop()
    findings = probed(gpus)
    assert [one.state for one in findings.topology.gpus[:2]] == [State.UP] * 2
    assert [one.state for one in findings.topology.gpus[2:]] == [State.DEGRADED] * 2
    assert gpu(findings, 3).reason == "3 NVLinks are up, while gpu0 has 4 that are up"
