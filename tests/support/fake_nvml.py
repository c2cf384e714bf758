"""A stand-in for `pynvml`, the module of nvidia-ml-py, over GPUs that are described in a few words.

It has the functions, constants, structures and errors of that name which the probe uses, and no
others. Any call may be refused: `refuse` is asked before each, with its name, the number of the GPU
and the other arguments, and returns a code or None.
"""

# ruff: noqa: N801, N802, N815 - the names are those of pynvml

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pycomm.topology.graph import Gpu, Topology
from pycomm.topology.probes.nvml import probe_nvml
from pycomm.topology.samples import Findings

CODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 25, 27, 28, 29, 999)
NO_FABRIC = (0, 0, 0, b"")
ATTACHED = (3, 0, 0, b"")

Refuse = Callable[[str, int | None, tuple[Any, ...]], int | None]


class NVMLError(Exception):
    """As the one of pynvml: the code is its value."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {2: "Invalid Argument", 3: "Not Supported", 15: "GPU is lost"}.get(
            self.value, f"NVML Error with code {self.value}"
        )


class c_nvmlGpuFabricInfo_t(ctypes.Structure):
    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    ]


class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    ]


@dataclass
class FakeGpu:
    """One GPU. Each link is the bus id of its other end, "switch <bus id>", or None if down."""

    links: list[str | None] = field(default_factory=list)
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = ""
    bus: str = ""
    capability: tuple[int, int] = (9, 0)
    mig: list[str] | None = None
    fabric: tuple[int, int, int, bytes] = NO_FABRIC
    health: int = 0
    errors: dict[tuple[int, int], int] = field(default_factory=dict)
    speed: int | None = 26562
    version: int = 6
    ecc: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    pages: int | None = None


@dataclass(frozen=True)
class Handle:
    """What NVML hands out for a GPU, or for a part of one."""

    gpu: int
    part: int | None = None


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_t = c_nvmlGpuFabricInfo_t
    c_nvmlGpuFabricInfoV_t = c_nvmlGpuFabricInfoV_t

    def __init__(
        self,
        gpus: Iterable[FakeGpu] = (),
        refuse: Refuse | None = None,
        *,
        p2p: Callable[[int, int, int], int] = lambda a, b, index: 0,
        ancestor: int = 50,
        without: Iterable[str] = (),
    ) -> None:
        self.gpus = list(gpus)
        for index, gpu in enumerate(self.gpus):
            gpu.uuid = gpu.uuid or f"GPU-{index:08x}-0000-4000-8000-{index:012x}"
            gpu.bus = gpu.bus or f"00000000:{index + 16:02X}:00.0"
        self.refuse = refuse
        self.p2p = p2p
        self.ancestor = ancestor
        self.without = set(without)
        self.opened = 0
        self.calls: list[tuple[str, int | None]] = []
        self.refused: list[tuple[str, int | None, int]] = []
        self.events: list[tuple[int, int]] = []
        self.sets = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("nvml", "c_nvml")) and name in self.without:
            raise AttributeError(name)
        found = super().__getattribute__(name)
        if not name.startswith("nvml"):
            return found

        def call(*arguments: Any) -> Any:
            of = [part.gpu for part in arguments if isinstance(part, Handle)]
            if name == "nvmlDeviceGetHandleByIndex":
                of = [arguments[0]]
            rest = tuple(part for part in arguments if not isinstance(part, Handle))
            self.calls.append((name, of[0] if of else None))
            code = self.refuse and self.refuse(name, of[0] if of else None, rest)
            if code:
                self.refused += [(name, gpu, code) for gpu in of or [None]]
                raise NVMLError(code)
            if name != "nvmlInit" and not self.opened:
                raise NVMLError(1)
            return found(*arguments)

        return call

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlErrorString(self, code: int) -> str:
        return str(NVMLError(code))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return Handle(index)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        gpu = self.gpus[handle.gpu]
        return gpu.uuid if handle.part is None else (gpu.mig or [])[handle.part]

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self.gpus[handle.gpu].name

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        return SimpleNamespace(busId=self.gpus[handle.gpu].bus)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return self.gpus[handle.gpu].capability

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        return [int(self.gpus[handle.gpu].mig is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        if index >= len(self.gpus[handle.gpu].mig or []):
            raise NVMLError(6)
        return Handle(handle.gpu, index)

    def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int:
        links = self.gpus[handle.gpu].links
        if self.gpus[handle.gpu].mig is not None or not links:
            raise NVMLError(3)
        if link >= len(links):
            raise NVMLError(2)
        return int(links[link] is not None)

    def _end(self, handle: Handle, link: int) -> str:
        end = self.gpus[handle.gpu].links[link]
        if end is None:
            raise NVMLError(2)
        return end

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Handle, link: int) -> int:
        end = self.gpus[handle.gpu].links[link] or "?"
        return {"switch": 2, "npu": 1, "?": 255}.get(end.split()[0], 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Handle, link: int) -> Any:
        bus = self._end(handle, link).split()[-1]
        if ":" not in bus:
            raise NVMLError(3)
        return SimpleNamespace(busId=bus.encode())

    def nvmlDeviceGetNvLinkVersion(self, handle: Handle, link: int) -> int:
        return self.gpus[handle.gpu].version

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: Handle, link: int, kind: int) -> int:
        return self.gpus[handle.gpu].errors.get((link, kind), 0)

    def nvmlDeviceGetFieldValues(self, handle: Handle, wanted: list[Any]) -> list[Any]:
        gpu = self.gpus[handle.gpu]
        values = []
        for entry in wanted:
            number, scope = entry if isinstance(entry, tuple) else (entry, 0)
            value = gpu.speed if number == 90 else gpu.errors.get((scope, number))
            there = value is not None
            values.append(
                SimpleNamespace(
                    nvmlReturn=0 if there else 3, valueType=3, value=SimpleNamespace(ullVal=value)
                )
            )
        return values

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Handle, info: Any) -> int:
        gpu = self.gpus[handle.gpu]
        if isinstance(info._obj, c_nvmlGpuFabricInfoV_t):
            info._obj.healthMask = gpu.health
        return self._fill_fabric(handle, info)

    def nvmlDeviceGetGpuFabricInfo(self, handle: Handle, info: Any) -> int:
        return self._fill_fabric(handle, info)

    def _fill_fabric(self, handle: Handle, info: Any) -> int:
        state, status, clique, cluster = self.gpus[handle.gpu].fabric
        filled = info._obj
        filled.state, filled.status, filled.cliqueId = state, status, clique
        for at, byte in enumerate(cluster):
            filled.clusterUuid[at] = byte
        return 0

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, kind: int, counter: int) -> int:
        return _or_unsupported(self.gpus[handle.gpu].ecc)

    def nvmlDeviceGetRemappedRows(self, handle: Handle) -> tuple[int, int, int, int]:
        return _or_unsupported(self.gpus[handle.gpu].rows)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Handle) -> int:
        return _or_unsupported(self.gpus[handle.gpu].pages)

    def nvmlDeviceGetP2PStatus(self, a: Handle, b: Handle, index: int) -> int:
        return self.p2p(a.gpu, b.gpu, index)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Handle, b: Handle) -> int:
        return self.ancestor

    def nvmlEventSetCreate(self) -> str:
        self.sets += 1
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: str) -> None:
        assert kinds == 8

    def nvmlEventSetWait(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0, "it must not block"
        if not self.events:
            raise NVMLError(10)
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(device=Handle(gpu), eventType=8, eventData=xid)

    def nvmlEventSetFree(self, events: str) -> None:
        self.sets -= 1


def _or_unsupported(value: Any) -> Any:
    """Return a value, or refuse for want of one."""
    if value is None:
        raise NVMLError(3)
    return value


def switched(count: int = 4, links: int = 18, **changes: Any) -> list[FakeGpu]:
    """Return GPUs with all links to two NVSwitches."""
    ends = ["switch 00000000:05:00.0", "switch 00000000:06:00.0"]
    return [FakeGpu([ends[at % 2] for at in range(links)], **changes) for _ in range(count)]


def bridged(count: int = 2, pairs: Iterable[tuple[int, int]] = ((0, 1),)) -> list[FakeGpu]:
    """Return cards, of which some pairs have a bridge."""
    cards = [
        FakeGpu([None] * 4, "NVIDIA RTX A6000", capability=(8, 6), speed=14062, version=5)
        for _ in range(count)
    ]
    for a, b in pairs:
        for one, other in ((a, b), (b, a)):
            cards[one].links = [f"00000000:{other + 16:02X}:00.0"] * 4
    return cards


def probed(gpus: list[FakeGpu], decide: Refuse | None = None, **options: Any) -> Findings:
    """Return what the probe finds on a host with these GPUs, and check what always holds."""
    xids = options.pop("xids", None)
    nvml = FakeNvml(gpus, decide, **options)
    findings = probe_nvml("node1", 5.0, nvml, xids=xids)
    assert nvml.opened == 0, "nvmlInit and nvmlShutdown are paired"
    assert Topology.from_json(findings.topology.to_json()) == findings.topology
    assert [sample.subject for sample in findings.samples] == [
        gpu.name for gpu in findings.topology.gpus
    ]
    for gpu, sample in zip(findings.topology.gpus, findings.samples, strict=True):
        assert (sample.probe, sample.at) == ("nvml", 5.0)
        assert (sample.state, sample.reason) == (gpu.state, gpu.reason)
    return findings


def gpu(findings: Findings, index: int) -> Gpu:
    """Return a GPU by its place."""
    return findings.topology.gpus[index]


def refuse(call: str, code: int, index: int | None = None, *arguments: Any) -> Refuse:
    """Return what refuses one call, of one GPU if said, with these arguments if said."""

    def decide(name: str, of: int | None, rest: tuple[Any, ...]) -> int | None:
        same = rest[: len(arguments)] == arguments
        return code if name == call and index in (None, of) and same else None

    return decide
