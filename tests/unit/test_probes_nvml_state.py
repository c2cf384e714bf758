"""The probe of NVML: fabric, memory, peer access and Xids, and calls that are refused at random."""

import ctypes
import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_nvml import (
    ATTACHED,
    CODES,
    FakeGpu,
    FakeNvml,
    bridged,
    gpu,
    probed,
    refuse,
    switched,
)

from pycomm.topology.graph import LinkKind, State, Topology
from pycomm.topology.groups import nvlink_islands, path_kind
from pycomm.topology.probes.nvml import XidEvents, probe_nvml

CLUSTER = bytes(range(16))


@pytest.mark.parametrize(
    ("fabric", "health", "state", "word"),
    [
        ((0, 0, 0, b""), 0, State.UP, ""),
        (ATTACHED, 0, State.UP, ""),
        ((1, 0, 0, b""), 0, State.DEGRADED, "has not attached this GPU yet"),
        ((2, 0, 0, b""), 0, State.DEGRADED, "has not attached this GPU yet"),
        ((3, 999, 0, b""), 0, State.DEGRADED, "failed: NVML Error with code 999 (code 999)"),
        ((3, 0, 2, CLUSTER), 0x0AAA & 0xAA, State.UP, ""),
        ((3, 0, 2, CLUSTER), 0x1, State.DEGRADED, "less than their bandwidth"),
        ((3, 0, 2, CLUSTER), 0x10, State.DEGRADED, "a route is not healthy"),
        ((3, 0, 2, CLUSTER), 0x500, State.DEGRADED, "configured wrongly"),
        ((3, 0, 2, CLUSTER), 0x100, State.UP, ""),
    ],
)
def test_the_fabric(fabric: Any, health: int, state: State, word: str) -> None:
    gpus = switched(2)
    gpus[1].fabric, gpus[1].health = fabric, health
    findings = probed(gpus)
    assert gpu(findings, 1).state is state
    assert word in gpu(findings, 1).reason
    attributes = dict(gpu(findings, 1).attributes)
    if state is State.UP:
        assert ("fabric" in attributes) == (not fabric[3])
    if fabric[3]:
        assert attributes["fabric_cluster"] == "00010203-0405-0607-0809-0a0b0c0d0e0f"
        assert attributes["fabric_clique"] == "2"


def test_an_older_module_or_driver_tells_of_the_fabric_otherwise() -> None:
    gpus = switched(1, fabric=(3, 0, 7, CLUSTER))
    for options in (
        {"without": ["nvmlDeviceGetGpuFabricInfoV"]},
        {"without": ["c_nvmlGpuFabricInfoV_t"]},
        {"decide": refuse("nvmlDeviceGetGpuFabricInfoV", 25)},
        {"decide": refuse("nvmlDeviceGetGpuFabricInfoV", 13)},
    ):
        attributes = dict(gpu(probed(gpus, **options), 0).attributes)
        assert attributes["fabric_clique"] == "7"
    neither = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"]
    findings = probed(gpus, without=neither)
    assert "fabric" not in dict(gpu(findings, 0).attributes)
    assert gpu(findings, 0).state is State.UP
    failed = probed(gpus, refuse("nvmlDeviceGetGpuFabricInfoV", 999))
    assert gpu(failed, 0).state is State.UNKNOWN


def test_memory() -> None:
    gpus = [FakeGpu(ecc=3), FakeGpu(rows=(0, 1, 1, 0)), FakeGpu(rows=(0, 9, 0, 1)),
            FakeGpu(rows=None, pages=1), FakeGpu(rows=None, pages=0, ecc=None)]  # fmt: skip
    findings = probed(gpus)
    assert dict(findings.samples[0].counters)["ecc.uncorrected"] == 3
    assert [one.state for one in findings.topology.gpus] == [
        State.UP,
        State.DEGRADED,
        State.DEGRADED,
        State.DEGRADED,
        State.UP,
    ]
    assert "could not be remapped" in gpu(findings, 2).reason
    assert findings.samples[4].counters == ()


def test_peer_access_that_is_refused() -> None:
    def over_nvlink(a: int, b: int, index: int) -> int:
        return 3 if index == 2 else 2

    findings = probed(switched(3), p2p=over_nvlink)
    assert [one.state for one in findings.topology.gpus] == [State.DEGRADED] * 3
    assert "no peer access over NVLink at all" in gpu(findings, 0).reason
    path = next(link for link in findings.topology.links if link.kind is LinkKind.SYS)
    assert path.reason == "no peer access: the GPU does not support it"
    one = probed(switched(3), p2p=lambda a, b, index: 3 if (a, b) == (0, 1) else 0)
    assert [each.state for each in one.topology.gpus] == [State.UP] * 3
    pair = probed(bridged(2), p2p=over_nvlink)
    link = next(link for link in pair.topology.links if link.kind is LinkKind.NVLINK)
    assert (link.state, link.count) == (State.DEGRADED, 4)
    assert "does not allow peer access" in link.reason
    unknown = probed(bridged(2), p2p=lambda a, b, index: 6)
    assert gpu(unknown, 0).state is State.UP


def test_paths_that_nobody_can_tell() -> None:
    for code in (3, 999):
        findings = probed(switched(2), refuse("nvmlDeviceGetTopologyCommonAncestor", code))
        assert path_kind(findings.topology, "gpu0", "gpu1") is None
        assert gpu(findings, 0).state is State.UP
        assert bool(findings.topology.notes) == (code == 999)
    lost = probed(switched(2), refuse("nvmlDeviceGetTopologyCommonAncestor", 15))
    assert [one.state for one in lost.topology.gpus] == [State.UNKNOWN] * 2
    doubt = probed(switched(2), refuse("nvmlDeviceGetP2PStatus", 999, 0))
    assert [one.state for one in doubt.topology.gpus] == [State.UNKNOWN] * 2


def test_xids_are_faults_of_the_gpu_or_of_programs() -> None:
    xids = {"gpu0": [13, 79, 74], "gpu1": [74, 74], "gpu2": [13, 31, 43, 45, 4711], "gpu9": [79]}
    findings = probed(switched(4), xids=xids)
    assert [one.state for one in findings.topology.gpus] == [
        State.DOWN,
        State.DEGRADED,
        State.UP,
        State.UP,
    ]
    assert gpu(findings, 0).reason.startswith("Xid 79: the GPU has fallen off the bus")
    assert gpu(findings, 1).reason == "Xid 74: an NVLink error"
    notes = "\n".join(findings.topology.notes)
    assert "gpu2: Xid 31" in notes
    assert "Xid 4711, of which nothing is known" in notes
    assert "gpu9: Xid 79: the GPU has fallen off the bus, of a GPU that is not there" in notes


def test_events_are_collected_without_waiting() -> None:
    nvml = FakeNvml(switched(3))
    events = XidEvents(nvml)
    assert events.poll() == []
    assert events.register()
    assert events.reason == ""
    assert nvml.opened == nvml.sets == 1
    nvml.events = [(2, 79), (0, 13)]
    assert events.poll() == [("gpu2", 79), ("gpu0", 13)]
    assert events.poll() == []
    assert events.register(), "again"
    nvml.events = [(7, 48)]
    assert events.poll() == [("gpu?", 48)]
    events.close()
    events.close()
    assert nvml.opened == nvml.sets == 0
    assert events.poll() == []


def test_events_that_cannot_be_had() -> None:
    for call in ("nvmlInit", "nvmlEventSetCreate", "nvmlDeviceGetCount",
                 "nvmlDeviceRegisterEvents", "nvmlDeviceGetHandleByIndex"):  # fmt: skip
        nvml = FakeNvml(switched(2), refuse(call, 3))
        events = XidEvents(nvml)
        assert not events.register()
        assert call in events.reason
        assert nvml.opened == nvml.sets == 0
    nvml = FakeNvml(switched(2), refuse("nvmlDeviceRegisterEvents", 3, 0))
    events = XidEvents(nvml)
    assert events.register(), "one GPU has events"
    nvml.refuse = refuse("nvmlEventSetWait", 15)
    nvml.events = [(1, 79)]
    assert events.poll() == []
    assert not XidEvents(FakeNvml([])).register()


def test_events_by_handles_of_ctypes() -> None:
    pointer = importlib.import_module("pynvml").c_nvmlDevice_t
    there = ctypes.create_string_buffer(16)

    class Pointers(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
            return ctypes.cast(there, pointer)

        def nvmlEventSetWait(self, events: str, milliseconds: int) -> Any:  # noqa: N802
            event = super().nvmlEventSetWait(events, milliseconds)
            event.device = ctypes.cast(there, pointer) if event.device.gpu == 0 else pointer()
            return event

    nvml = Pointers([FakeGpu()])
    events = XidEvents(nvml)
    assert events.register()
    nvml.events = [(0, 79), (1, 74)]
    assert events.poll() == [("gpu0", 79), ("gpu?", 74)]


MACHINES = st.sampled_from([lambda: switched(3, 4), lambda: bridged(3), lambda: [FakeGpu()] * 1])


@settings(max_examples=150, deadline=None)
@given(machine=MACHINES, data=st.data(), often=st.sampled_from([1, 5, 40]))
def test_any_call_may_be_refused_with_any_code(machine: Any, data: Any, often: int) -> None:
    chance = data.draw(st.randoms(use_true_random=False))

    def decide(name: str, of: int | None, rest: tuple[Any, ...]) -> int | None:
        return chance.choice(CODES) if chance.randrange(often) == 0 else None

    nvml = FakeNvml(machine(), decide)
    findings = probe_nvml("node1", 0.0, nvml, xids={"gpu0": [31]})
    Topology.from_json(findings.topology.to_json())
    nvlink_islands(findings.topology)
    failed = {gpu for name, gpu, code in nvml.refused if _is_failure(name, code)}
    for one in findings.topology.gpus:
        if one.state is State.UP:
            assert one.index not in failed, nvml.refused
        else:
            assert one.reason


def _is_failure(name: str, code: int) -> bool:
    if name in ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"):
        return code in (15, 16)  # others say nothing of a GPU, unless NVLink joins the two
    if name == "nvmlDeviceGetNvLinkState" and code == 2:
        return False
    if name == "nvmlDeviceGetGpuFabricInfoV" and code == 25:
        return False
    needed = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo",
              "nvmlDeviceGetName")  # fmt: skip
    return code not in (3, 13) or name in needed
