"""What is there: versions, libraries, their owners, cores, launcher. What is missing is no error.

One record is collected, printed as text or as JSON. Each part is asked for on its own, so that a
part that fails becomes a line that says why.
"""

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import pycomm
from pycomm.bindings import _memory
from pycomm.bindings._library import Library, find_cuda_driver, find_nccl
from pycomm.bootstrap.detect import Launch, detect
from pycomm.devices import Device, device_count, get_device
from pycomm.errors import CommError, LibraryNotFoundError
from pycomm.launch import INSTALL, find_mpirun, probe, usable_cores
from pycomm.units import format_bytes

__all__ = [
    "Info", "MPIInfo", "NUMANode", "collect", "numa_nodes", "peer_memory", "simd_levels",
    "to_json", "to_text",
]  # fmt: skip

_NODES = Path("/sys/devices/system/node")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class NUMANode:
    """Memory that is near to some cores: `cores` as the system lists them, `memory` in bytes."""

    number: int
    cores: str
    memory: int | None


@dataclass(frozen=True)
class MPIInfo:
    """The MPI of mpi4py: who made it, where it is, and the `mpirun` that belongs to it."""

    vendor: str
    version: str
    standard: str
    library: str
    mpirun: str | None
    mpirun_error: str | None


@dataclass(frozen=True)
class Info:
    """All that `pycomm info` says. What is missing is None, its `_error` says why."""

    pycomm: str
    pycomm_path: str
    python: str
    python_path: str
    numpy: str | None
    numkong: str | None
    simd: tuple[str, ...]
    mpi4py: str | None
    mpi: MPIInfo | None
    mpi_error: str | None
    cuda_driver: Library | None
    cuda_driver_error: str | None
    devices: tuple[Device, ...]
    devices_error: str | None
    nccl: Library | None
    nccl_error: str | None
    cuda_python: str | None
    host: str
    cores_usable: int
    cores: int
    numa: tuple[NUMANode, ...]
    peer_memory: str
    launcher: str | None


def _spelled(around: Launch) -> str:
    local = "" if around.local_rank is None else f", local rank {around.local_rank}"
    return f"{around.name}, rank {around.rank} of {around.size}{local} ({around.evidence})"


def collect() -> Info:
    """Look at this machine and this Python. Starts short child processes, never loads MPI here."""
    mpi, mpi_error = _mpi()
    driver, driver_error = _attempt(find_cuda_driver)
    devices, devices_error = _devices() if driver is not None else ((), None)
    nccl, nccl_error = _attempt(find_nccl)
    around = detect(os.environ)
    return Info(
        pycomm=pycomm.__version__,
        pycomm_path=str(Path(pycomm.__file__).parent),
        python=platform.python_version(),
        python_path=sys.executable,
        numpy=_version("numpy"),
        numkong=_version("numkong"),
        simd=_simd(),
        mpi4py=_version("mpi4py"),
        mpi=mpi,
        mpi_error=mpi_error,
        cuda_driver=driver,
        cuda_driver_error=driver_error,
        devices=devices,
        devices_error=devices_error,
        nccl=nccl,
        nccl_error=nccl_error,
        cuda_python=_version("cuda-python"),
        host=socket.gethostname(),
        cores_usable=usable_cores(),
        cores=os.cpu_count() or 1,
        numa=numa_nodes(),
        peer_memory=peer_memory(),
        launcher=None if around is None else _spelled(around),
    )


def simd_levels(capabilities: dict[str, bool]) -> tuple[str, ...]:
    """Return the levels in use from what NumKong reports, in its own order, lowest first."""
    return tuple(name for name, usable in capabilities.items() if usable and name != "serial")


def numa_nodes(root: Path = _NODES) -> tuple[NUMANode, ...]:
    """Return the NUMA nodes in the order of their numbers; none where the system does not say."""
    nodes = []
    for place in root.glob("node[0-9]*"):
        number = place.name.removeprefix("node")
        cores, memory = _read(place / "cpulist"), _read(place / "meminfo")
        if number.isdecimal() and cores is not None:
            total = re.search(r"MemTotal:\s*(\d+) kB", memory or "")
            nodes.append(NUMANode(int(number), cores, int(total[1]) << 10 if total else None))
    return tuple(sorted(nodes, key=lambda node: node.number))


def peer_memory(scope: Path = _PTRACE_SCOPE) -> str:
    """Return what memory of each other the ranks of one host may reach here, and by what."""
    if not hasattr(os, "memfd_create"):
        return "none: this system has no memory without a name (memfd)"
    level = _read(scope) or "0"
    if not _memory.available():
        why = "this system has no process_vm_readv"
    elif level in ("0", "1"):
        limit = " of ranks that one launcher has started" if level == "1" else ""
        return f"registered (memfd) and any other{limit} (process_vm_readv)"
    else:
        why = f"kernel.yama.ptrace_scope is {level}"
    return f"registered (memfd) only: {why}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def to_json(info: Info) -> str:
    """Return the record as JSON."""
    return json.dumps(asdict(info), indent=2)


def to_text(info: Info) -> str:
    """Return the record as lines for people."""
    # The highest levels say it all: the lower ones are what every such machine has.
    simd = ", ".join(info.simd[-3:]) or "none (serial code)"
    lines = [
        ("pycomm", f"{info.pycomm}  {info.pycomm_path}"),
        ("Python", f"{info.python}  {info.python_path}"),
        ("NumPy", info.numpy or "not installed"),
        ("NumKong", f"{info.numkong}  SIMD: {simd}" if info.numkong else "not installed"),
        ("mpi4py", info.mpi4py or f"not installed: {INSTALL}"),
    ]
    if info.mpi is None:
        lines.append(("MPI", info.mpi_error or "none"))
    else:
        lines += [
            ("MPI", f"{info.mpi.vendor} {info.mpi.version}  (MPI {info.mpi.standard})"),
            ("libmpi", info.mpi.library),
            ("mpirun", info.mpi.mpirun or f"none: {info.mpi.mpirun_error}"),
        ]
    lines += [
        ("CUDA driver", _library_text(info.cuda_driver, info.cuda_driver_error)),
        *[("devices", _devices_text(info))] * (info.cuda_driver is not None),
        ("NCCL", _library_text(info.nccl, info.nccl_error)),
        ("cuda-python", info.cuda_python or "not installed: no reductions in steps on devices"),
        ("host", f"{info.host}, {info.cores_usable} of {info.cores} cores usable"),
        ("NUMA", "\n".join(map(_node_text, info.numa)) or "the system does not say"),
        ("ranks reach", info.peer_memory),
        ("launcher", info.launcher or "none"),
    ]
    indent = "\n" + " " * 13
    return "\n".join(f"{name:<12} {text.replace(chr(10), indent)}" for name, text in lines)


def _node_text(node: NUMANode) -> str:
    memory = "" if node.memory is None else f", {format_bytes(node.memory)}"
    return f"node {node.number}: cores {node.cores or 'none'}{memory}"


def _devices() -> tuple[tuple[Device, ...], str | None]:
    try:
        return tuple(get_device(number) for number in range(device_count())), None
    except CommError as error:
        return (), str(error)


def _devices_text(info: Info) -> str:
    if info.devices_error is not None:
        return f"none: {info.devices_error}"
    lines = [
        f"{one.ordinal}: {one.name}, sm_{''.join(map(str, one.capability))}, {one.pci}, {one.uuid}"
        for one in info.devices
    ]
    return "\n".join(lines) or "none that this process sees"


def _library_text(library: Library | None, error: str | None) -> str:
    if library is None:
        return f"none: {error}"
    return f"{library.version}  {library.path}  ({library.owner})"


def _attempt(find: Callable[[], Library]) -> tuple[Library | None, str | None]:
    try:
        return find(), None
    except LibraryNotFoundError as error:
        return None, str(error)


def _mpi() -> tuple[MPIInfo | None, str | None]:
    try:
        found = probe()
    except LibraryNotFoundError as error:
        return None, str(error)
    mpirun, mpirun_error = None, None
    try:
        mpirun = find_mpirun(found).path
    except LibraryNotFoundError as error:
        mpirun_error = str(error)
    version, standard = (".".join(map(str, part)) for part in (found.version, found.standard))
    return MPIInfo(found.vendor, version, standard, found.library, mpirun, mpirun_error), None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _simd() -> tuple[str, ...]:
    try:
        import numkong
    except ImportError:
        return ()
    return simd_levels(numkong.get_capabilities())
