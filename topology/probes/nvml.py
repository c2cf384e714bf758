"""GPUs, their NVLinks and their health, as NVML tells them.

A GPU is called ``gpu`` and its number in NVML, which does not heed CUDA_VISIBLE_DEVICES. CUDA
numbers the GPUs of a process otherwise; `gpu_of` finds one by its UUID or PCI bus id.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pycomm.topology.graph import Gpu, Host, State, Topology, Unknown
from pycomm.topology.probes.nvml_calls import (
    NVML_ERROR_NO_PERMISSION,
    Device,
    Nvml,
    Refusal,
    Seen,
    open_nvml,
)
from pycomm.topology.probes.nvml_fabric import ask_fabric, ask_pairs
from pycomm.topology.probes.nvml_links import ask_ports, bus_of, join, judge_ports
from pycomm.topology.probes.nvml_xids import XidEvents, judge_xids
from pycomm.topology.samples import Findings, Sample

__all__ = ["XidEvents", "gpu_of", "probe_nvml"]

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_DEVICE_MIG_ENABLE = 1

_MIG = "mig."


def probe_nvml(
    host: str,
    now: float,
    nvml: Any = None,
    *,
    xids: Mapping[str, Sequence[int]] | None = None,
) -> Findings:
    """Return the GPUs of this host and how they are.

    Never raises. A GPU is up only if NVML answered all that was asked of it, "not supported"
    being an answer; it is down if it is lost or must be reset, degraded if NVLinks are missing,
    the fabric manager has not attached it, or its memory needs a reset.

    Parameters
    ----------
    host : str
        What to call this host.
    now : float
        The time of the samples.
    nvml : module, optional
        What has the functions of `pynvml`, which is the default.
    xids : mapping of str to sequence of int, optional
        Xids of each GPU by its name, as `XidEvents` collects them.

    Returns
    -------
    Findings
        Without GPUs, and with a note that says why, where there is no NVML.
    """
    opened, why = open_nvml(nvml)
    if opened is None:
        return _nothing(host, f"nvml: {why}")
    try:
        return _look(host, now, opened, xids or {})
    except Exception as error:
        # Answers of a kind that no NVML gives. A probe that raises would end all others too.
        return _nothing(host, f"nvml: the probe failed: {type(error).__name__}: {error}")
    finally:
        opened.ask("nvmlShutdown")  # it counts: whoever else uses NVML goes on


def gpu_of(topology: Topology, uuid: str | None = None, bus_id: str | None = None) -> Gpu | None:
    """Return the GPU of a CUDA device, by its UUID or else its PCI bus id; None if not there.

    Parameters
    ----------
    topology : Topology
        Of one host, as `probe_nvml` finds it.
    uuid : str, optional
        With or without ``GPU-`` or ``MIG-`` in front; that of a MIG device finds its GPU.
    bus_id : str, optional
        With a domain of any length.
    """
    wanted = _digits(uuid) if uuid else ""
    for gpu in topology.gpus if wanted else ():
        for name, value in gpu.attributes:
            if (name == "uuid" or name.startswith(_MIG)) and _digits(value) == wanted:
                return gpu
    bus = bus_of(bus_id) if bus_id else None
    return next((gpu for gpu in topology.gpus if bus and bus_of(gpu.bus_id or "") == bus), None)


def _digits(uuid: str) -> str:
    """Return a UUID without what stands around it; the older form of a MIG id has its GPU's."""
    return uuid.lower().replace("mig-", "").replace("gpu-", "").partition("/")[0].replace("-", "")


def _nothing(host: str, why: str) -> Findings:
    """Return the findings of a host of whose GPUs nothing is known."""
    return Findings(Topology(hosts=(Host(host),), notes=(why,)))


def _look(host: str, now: float, nvml: Nvml, xids: Mapping[str, Sequence[int]]) -> Findings:
    """Look at all GPUs."""
    count = nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Refusal):
        return _nothing(host, f"nvml: {count}")
    gpus: list[Seen] = []
    notes: list[str] = []
    for index in range(count):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if isinstance(handle, Refusal) and handle.code == NVML_ERROR_NO_PERMISSION:
            notes.append(f"nvml: gpu{index} is left out: this process may not use it")
            continue
        gpus.append(_seen(nvml, index, handle))
    judge_ports(gpus)
    joined = join(host, gpus)
    paths, odd = ask_pairs(nvml, gpus, joined.pairs)
    notes += [f"nvml: {note}" for note in joined.notes + odd]
    notes += _take_xids(gpus, xids)
    verdicts = {seen.name: seen.verdict() for seen in gpus}
    topology = Topology(
        hosts=(Host(host),),
        switches=tuple(joined.switches.values()),
        gpus=tuple(_gpu(host, seen, *verdicts[seen.name]) for seen in gpus),
        links=(*joined.links, *paths),
        # What cannot be asked in MIG mode is not unknown: MIG devices reach no other GPU.
        unknown=tuple(
            Unknown("nvlink", seen.name, seen.blind)
            for seen in gpus
            if seen.blind and ("mig", "on") not in seen.attributes
        ),
        notes=tuple(notes),
    )
    return Findings(
        topology,
        tuple(
            Sample(
                seen.name, "nvml", now, *verdicts[seen.name], tuple(sorted(seen.counters.items()))
            )
            for seen in gpus
        ),
    )


def _gpu(host: str, seen: Seen, state: State, reason: str) -> Gpu:
    """Return the record of a GPU."""
    attributes = tuple(seen.attributes)
    return Gpu(
        seen.name, host, seen.index, seen.bus, state=state, reason=reason, attributes=attributes
    )


def _seen(nvml: Nvml, index: int, handle: Any) -> Seen:
    """Look at one GPU: who it is, and how its memory, NVLinks and fabric are."""
    if isinstance(handle, Refusal):
        seen = Seen(f"gpu{index}", index, Device(nvml, None))
        seen.device.blame(handle, needed=True)
        # One that is lost is in no island; of any other nobody knows.
        seen.blind = "" if handle.lost else str(handle)
        return seen
    seen = Seen(f"gpu{index}", index, Device(nvml, handle))
    _identify(seen)
    if not _mig(seen):
        ask_ports(seen)
    ask_fabric(seen)
    _ask_memory(seen)
    return seen


def _identify(seen: Seen) -> None:
    """Take what a GPU is called."""
    uuid = seen.device.ask("nvmlDeviceGetUUID", needed=True)
    if not isinstance(uuid, Refusal):
        seen.attributes.append(("uuid", _words(uuid)))
    name = seen.device.ask("nvmlDeviceGetName", needed=True)
    if not isinstance(name, Refusal):
        seen.product = _words(name)
        seen.attributes.append(("name", seen.product))
    pci = seen.device.ask("nvmlDeviceGetPciInfo", needed=True)
    if not isinstance(pci, Refusal):
        seen.bus = bus_of(pci.busId)
    capability = seen.device.ask("nvmlDeviceGetCudaComputeCapability")
    if not isinstance(capability, Refusal):
        seen.attributes.append(("compute_capability", ".".join(map(str, capability))))


def _words(said: object) -> str:
    """Return text, which older modules give as bytes."""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _mig(seen: Seen) -> bool:
    """Return whether a GPU is in MIG mode, and take the ids of its MIG devices."""
    mode = seen.device.ask("nvmlDeviceGetMigMode")
    if isinstance(mode, Refusal) or mode[0] != NVML_DEVICE_MIG_ENABLE:
        return False
    seen.attributes.append(("mig", "on"))
    seen.blind = "it is in MIG mode, in which NVLinks cannot be queried"
    most = seen.device.ask("nvmlDeviceGetMaxMigDeviceCount")
    for number in range(0 if isinstance(most, Refusal) else most):
        nvml = seen.device.nvml
        part = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", seen.device.handle, number)
        # Numbers need not be used up from below.
        uuid = part if isinstance(part, Refusal) else nvml.ask("nvmlDeviceGetUUID", part)
        if not isinstance(uuid, Refusal):
            seen.attributes.append((f"{_MIG}{number}", _words(uuid)))
        elif uuid.lost:
            seen.device.blame(uuid)
            break
    return True


def _ask_memory(seen: Seen) -> None:
    """Take uncorrected errors, and memory that could not be put right while in use."""
    count = seen.device.ask(
        "nvmlDeviceGetTotalEccErrors", NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
    )
    if not isinstance(count, Refusal):
        seen.counters["ecc.uncorrected"] = int(count)
    rows = seen.device.ask("nvmlDeviceGetRemappedRows")
    if not isinstance(rows, Refusal):
        _, _, pending, failed = rows
        if failed:
            why = "a bad row of memory could not be remapped"
            seen.faults.append((State.DEGRADED, why))
        if pending:
            why = "a bad row of memory is remapped only when the GPU is reset"
            seen.faults.append((State.DEGRADED, why))
    elif rows.absent:  # before the A100
        pages = seen.device.ask("nvmlDeviceGetRetiredPagesPendingStatus")
        if not isinstance(pages, Refusal) and pages:
            why = "a bad page of memory is retired only when the GPU is reset"
            seen.faults.append((State.DEGRADED, why))


def _take_xids(gpus: list[Seen], xids: Mapping[str, Sequence[int]]) -> list[str]:
    """Take the faults that Xids stand for, and return notes."""
    by_name = {seen.name: seen for seen in gpus}
    notes = []
    for name, codes in xids.items():
        faults, odd = judge_xids(codes)
        if name in by_name:
            by_name[name].faults += faults
        else:
            odd = [f"{why}, of a GPU that is not there" for _, why in faults] + odd
        notes += [f"nvml: {name}: {note}" for note in odd]
    return notes
