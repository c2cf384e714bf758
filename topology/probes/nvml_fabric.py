"""The fabric of NVSwitches a GPU belongs to, and whether NVML lets GPUs reach each other."""

import ctypes
import uuid
from dataclasses import replace
from itertools import combinations

from pycomm.topology.graph import Link, LinkKind, State
from pycomm.topology.probes.nvml_calls import (
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    NVML_ERROR_FUNCTION_NOT_FOUND,
    NVML_ERROR_NOT_SUPPORTED,
    Nvml,
    Refusal,
    Seen,
)

__all__ = ["ask_fabric", "ask_pairs"]

NVML_GPU_FABRIC_STATE_NOT_SUPPORTED = 0
NVML_GPU_FABRIC_STATE_NOT_STARTED = 1
NVML_GPU_FABRIC_STATE_IN_PROGRESS = 2
NVML_GPU_FABRIC_STATE_COMPLETED = 3

NVML_TOPOLOGY_INTERNAL = 0
NVML_TOPOLOGY_SINGLE = 10
NVML_TOPOLOGY_MULTIPLE = 20
NVML_TOPOLOGY_HOSTBRIDGE = 30
NVML_TOPOLOGY_NODE = 40
NVML_TOPOLOGY_SYSTEM = 50

NVML_P2P_CAPS_INDEX_READ = 0
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0

_ANCESTORS = {
    NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,  # two GPUs on one board, behind the switch of the board
    NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
    NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
    NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
    NVML_TOPOLOGY_NODE: LinkKind.NODE,
    NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
}
#: Status 6 is "unknown", which refuses nothing.
_STATUSES = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "it is switched off by a registry key",
    5: "not supported",
}
# Where fields of the health mask stand, how wide they are, from which value on they are bad.
_MASK = (
    (0, 0x3, (1,), "its NVLinks run at less than their bandwidth"),
    (2, 0x3, (1,), "a route is being recovered"),
    (4, 0x3, (1,), "a route is not healthy"),
    (6, 0x3, (1,), "it recovers from an access that timed out"),
    (8, 0xF, tuple(range(2, 16)), "it is configured wrongly"),
)


# In no NVLink group, whatever its links to NVSwitches say: nothing is routed.
_BROKEN = ("fabric", "broken")


def ask_fabric(seen: Seen) -> None:
    """Take the fabric of a GPU: which one, none, or one that is not ready or not well."""
    if seen.device.lost is not None:
        return
    info = _fabric(seen)
    if isinstance(info, Refusal):
        if info.code == NVML_ERROR_NOT_SUPPORTED:
            seen.attributes.append(("fabric", "none"))
        return
    state, cluster = int(info.state), bytes(info.clusterUuid)
    if state == NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        seen.attributes.append(("fabric", "none"))
        return
    seen.fabric = True
    if state != NVML_GPU_FABRIC_STATE_COMPLETED:
        # Asked before the cluster, which is all zeros until then.
        starting = (NVML_GPU_FABRIC_STATE_NOT_STARTED, NVML_GPU_FABRIC_STATE_IN_PROGRESS)
        why = "the fabric manager has not attached this GPU yet"
        seen.attributes.append(_BROKEN)
        seen.faults.append((State.DEGRADED, why if state in starting else f"fabric state {state}"))
        return
    if status := int(info.status):
        text = seen.device.nvml.ask("nvmlErrorString", status)
        text = f"code {status}" if isinstance(text, Refusal) else f"{text} (code {status})"
        seen.attributes.append(_BROKEN)
        seen.faults.append((State.DEGRADED, f"attaching this GPU to the fabric failed: {text}"))
        return
    if any(cluster):
        seen.attributes.append(("fabric_cluster", str(uuid.UUID(bytes=cluster))))
        seen.attributes.append(("fabric_clique", str(int(info.cliqueId))))
    else:
        seen.attributes.append(("fabric", "none"))
    mask = int(getattr(info, "healthMask", 0))
    for shift, width, bad, what in _MASK:
        if (mask >> shift) & width in bad:
            seen.faults.append((State.DEGRADED, f"fabric: {what}"))


def _fabric(seen: Seen) -> "ctypes.Structure | Refusal":
    """Return the fabric of a GPU, in the newest form that module and driver have."""
    module = seen.device.nvml.module
    answer = Refusal(
        "nvmlDeviceGetGpuFabricInfo", NVML_ERROR_FUNCTION_NOT_FOUND, "not in this module"
    )
    for call, name in (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        if not hasattr(module, call) or not hasattr(module, name):
            continue
        info: ctypes.Structure = getattr(module, name)()
        said = seen.device.nvml.ask(call, seen.device.handle, ctypes.byref(info))
        if not isinstance(said, Refusal):
            return info
        answer = said
        if not said.absent and said.code != NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            break
    seen.device.blame(answer)
    return answer


def ask_pairs(
    nvml: Nvml, gpus: list[Seen], joined: dict[frozenset[str], Link | None]
) -> tuple[list[Link], list[str]]:
    """Return the PCI paths between GPUs, and notes; judge where NVLink is there and not allowed.

    `joined` has the pairs that NVLinks join: the link between them, or None through a switch. A
    direct link that is refused is replaced there.
    """
    links: list[Link] = []
    notes: list[str] = []
    allowed: dict[str, list[str]] = {seen.name: [] for seen in gpus}
    present = [seen for seen in gpus if seen.device.handle is not None and not seen.device.lost]
    for a, b in combinations(present, 2):
        pair = (a.device.handle, b.device.handle)
        level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *pair)
        read = nvml.ask("nvmlDeviceGetP2PStatus", *pair, NVML_P2P_CAPS_INDEX_READ)
        over = nvml.ask("nvmlDeviceGetP2PStatus", *pair, NVML_P2P_CAPS_INDEX_NVLINK)
        key = frozenset((a.name, b.name))
        notes += _doubts(a, b, (level, read), False) + _doubts(a, b, (over,), key in joined)
        if (kind := _ANCESTORS.get(level) if isinstance(level, int) else None) is not None:
            why = f"no peer access: {_STATUSES[read]}" if _known(read) else ""
            links.append(Link(a.name, b.name, kind, reason=why))
        if key in joined and (over == NVML_P2P_STATUS_OK or _known(over)):
            why = _STATUSES.get(over, "")
            for one, other in ((a, b), (b, a)):
                allowed[one.name].append(f"{other.name}: {why}" if why else "")
            if why and (link := joined[key]) is not None:
                why = f"NVML does not allow peer access over it: {why}"
                joined[key] = replace(link, state=State.DEGRADED, reason=why)
    for seen in gpus:
        said = allowed[seen.name]
        if said and all(said):
            why = "NVML allows it no peer access over NVLink at all: " + ", ".join(said)
            seen.faults.append((State.DEGRADED, why))
    return links, notes


def _known(status: object) -> bool:
    """Return whether a status says that access is refused."""
    return isinstance(status, int) and status in _STATUSES


def _doubts(a: Seen, b: Seen, answers: tuple[object, ...], needed: bool) -> list[str]:
    """Return notes on what NVML did not tell of a pair.

    Paths on PCI cannot be found on many a virtual machine, which says nothing of its GPUs. What is
    needed, and that one of the two is lost, leaves both unknown: nobody can tell which it was.
    """
    notes = []
    for answer in answers:
        if isinstance(answer, Refusal) and not answer.absent:
            notes.append(f"{a.name} and {b.name}: {answer}")
            if needed or answer.lost:
                doubt = Refusal(f"{answer.call} of {a.name} and {b.name}", None, answer.text)
                a.device.failed.append(doubt)
                b.device.failed.append(doubt)
    return notes
