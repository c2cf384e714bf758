"""The matrix `nvidia-smi topo -m` prints, as a topology.

The text is often a paste: coloured, indented, its tabs turned into spaces or lost, rows missing.
What can be read is read; a row that does not have a cell for each column of the header is refused
by name, because a cell in the wrong column pairs a GPU with a NIC of the other socket. Such a row,
and one that is not there at all, is listed in `Topology.unknown` as "row".
"""

import re
from dataclasses import dataclass, field

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import Gpu, Host, Link, LinkKind, Nic, NumaNode, Topology, Unknown

__all__ = ["read_smi"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CELL = re.compile(r"X|NV\d{1,6}|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII)
#: What `nvidia-smi topo -p2p` says instead.
_PEER_CELL = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U")
_GPU = re.compile(r"GPU(\d{1,9})", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}$", re.ASCII)
_LEGEND = re.compile(r"(\S+)\s+=\s+\S")
_NIC_LEGEND = re.compile(r"(NIC\d+):\s*(\S+)")
_MOST_NUMBERS = 1 << 16
#: From near to far; of two cells that contradict each other the farther one is kept.
_FAR = (
    LinkKind.NVLINK, LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS,
)  # fmt: skip


@dataclass(slots=True)
class _Row:
    """One row: a cell for each device of the header, and its affinities as they stand."""

    cells: list[str]
    cpus: str = ""
    numa: str = ""


@dataclass(slots=True)
class _Table:
    """All that the text says."""

    source: str
    devices: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    rows: dict[str, _Row] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    legend: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_smi(text: str, *, source: str = "nvidia-smi topo -m", host: str = "host0") -> Topology:
    """Return the topology the text of ``nvidia-smi topo -m`` describes.

    Parameters
    ----------
    text : str
        What the tool printed, or a paste of it.
    source : str
        What to call it in errors and notes.
    host : str
        The name of the host.

    Raises
    ------
    ArgumentValueError
        There is no header, or no row of a GPU is readable: an error message of the tool, another
        table of it, or a paste that lost its first line.
    """
    table = _Table(source)
    for number, line in enumerate(_ESCAPE.sub("", text).splitlines(), 1):
        _take(table, number, line)
    gpus = [name for name in table.devices if _GPU.fullmatch(name)]
    if not gpus:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ArgumentValueError(f"{source}: no header row that names GPUs; it says: {first[:80]}")
    for name in gpus:
        if name not in table.rows:
            table.refused.setdefault(name, "its row is missing")
    if not table.rows.keys() & set(gpus):
        raise ArgumentValueError(
            f"{source}: no row of a GPU is readable: {gpus[0]}: {table.refused[gpus[0]]}"
        )
    return _built(table, gpus, host)


def _take(table: _Table, number: int, line: str) -> None:
    """Take one line of the text into the table."""
    words = line.split()
    if not words or words[0] == "#":
        return
    if found := _NIC_LEGEND.fullmatch(line.strip()):
        table.names[found[1]] = found[2]
    elif found := _LEGEND.match(line.strip()):
        table.legend.add(found[1])
    elif not table.devices:
        _take_header(table, number, line)
    elif words[0] in table.devices:
        _take_row(table, number, line.strip(" "))
    elif len(words) > 2 and _CELL.fullmatch(words[1]):
        table.notes.append(f"{table.source}, line {number}: a row {words[0]} without a column")


def _take_header(table: _Table, number: int, line: str) -> None:
    """Take the first line that names GPUs as the header, unless it is a row already."""
    for title in _TITLES:
        line = line.replace(title, title.replace(" ", "_"))
    words = line.split()
    if not any(map(_GPU.fullmatch, words)):
        return
    if len(words) > 1 and (_CELL.fullmatch(words[1]) or words[1].startswith("NV")):
        raise ArgumentValueError(
            f"{table.source}, line {number}: row {words[0]} comes before any header row, so that "
            "nobody can tell what its columns are"
        )
    titles = {title.replace(" ", "_") for title in _TITLES}
    table.titles = [word.replace("_", " ") for word in words if word in titles]
    table.devices = [word for word in words if word not in titles]
    if not _GPU.fullmatch(table.devices[0]) or len(set(table.devices)) < len(table.devices):
        said = line.strip()[:80]
        table.devices, table.titles = [], []
        table.notes.append(f"{table.source}, line {number}: not a header: {said}")


def _take_row(table: _Table, number: int, line: str) -> None:
    """Take the row of a device, or refuse it by name."""
    name, devices = line.split()[0], table.devices
    if "\t" in line:
        cells = [cell.strip() for cell in line.split("\t")][1:]
        most = len(devices) + len(table.titles) + 1  # the tool itself prints one tab too many
    else:
        cells = line.split()[1:]
        most = len(devices) + len(table.titles)
    matrix, rest = cells[: len(devices)], cells[len(devices) :]
    refusal = _refusal(name, devices, matrix, rest)
    if not refusal and len(cells) > most:
        refusal = f"{len(cells)} cells where the header has {most}"
    if name in table.rows or name in table.refused:
        refusal = "its row comes twice"
        table.rows.pop(name, None)
    if refusal:
        peers = [cell for cell in cells if cell not in ("", "X")]
        if peers and all(map(_PEER_CELL.fullmatch, peers)):
            raise ArgumentValueError(
                f"{table.source}, line {number}: this is a matrix of peer-to-peer status "
                "(nvidia-smi topo -p2p), not of the topology (nvidia-smi topo -m)"
            )
        table.refused[name] = refusal
        table.notes.append(f"{table.source}, line {number}: row {name} refused: {refusal}")
        return
    said = dict(zip(table.titles, rest, strict=False))
    if "\t" not in line and len(rest) != len(table.titles):
        said = {}  # cells left empty: nobody can tell which
    table.rows[name] = _Row(matrix, said.get("CPU Affinity", ""), said.get("NUMA Affinity", ""))


def _refusal(name: str, devices: list[str], matrix: list[str], rest: list[str]) -> str:
    """Return why the cells of a row cannot be those of the header's columns, or nothing."""
    for column, cell in zip(devices, matrix, strict=False):
        if not _CELL.fullmatch(cell):
            return f"{cell!r} in column {column} is no link"
        if (cell == "X") != (column == name):
            return f"{cell!r} in column {column}: its cells have shifted"
    if len(matrix) < len(devices):
        return f"{len(matrix)} cells where the header has {len(devices)} devices"
    if rest and _CELL.fullmatch(rest[0]):
        return f"more links than the {len(devices)} devices of the header"
    return ""


def _built(table: _Table, gpus: list[str], host: str) -> Topology:
    """Return the topology of a table."""
    numa = {name: _numbers(row.numa) for name, row in table.rows.items()}
    indices = sorted({index for near in numa.values() for index in near or ()})
    cpus = _cpus_of_nodes(table, numa)
    unknown = [Unknown("row", name, table.refused[name]) for name in gpus if name in table.refused]
    for name in gpus:
        if not numa.get(name):
            said = table.rows[name].numa if name in table.rows else ""
            why = f"NUMA affinity is {said!r}" if said else "no NUMA affinity is given"
            unknown.append(Unknown("numa", name, why))
    if table.legend & {"SYS", "NODE"} and "NV#" not in table.legend:
        why = "the table is of PCI paths only (nvidia-smi topo -mp)"
        unknown += [Unknown("nvlink", name, why) for name in gpus]
    return Topology(
        hosts=(Host(host),),
        numa_nodes=tuple(NumaNode(f"numa{n}", host, n, cpus.get(n)) for n in indices),
        gpus=tuple(
            Gpu(name, host, int(name[3:]), numa=tuple(f"numa{n}" for n in numa.get(name) or ()))
            for name in gpus
        ),
        nics=tuple(
            _nic(table, name, index, host)
            for index, name in enumerate(name for name in table.devices if name not in gpus)
        ),
        links=tuple(_links(table)),
        unknown=tuple(unknown),
        notes=tuple(table.notes),
    )


def _nic(table: _Table, name: str, index: int, host: str) -> Nic:
    """Return a NIC of the header, by the number in its name if the tool itself gave it one."""
    number = _NUMBER.search(name)
    numbered = number is not None and name.startswith("NIC")
    device = table.names.get(name) if name.startswith("NIC") else name
    return Nic(name, host, int(number[0]) if number and numbered else index, device=device)


def _cpus_of_nodes(
    table: _Table, numa: dict[str, tuple[int, ...] | None]
) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each node: of rows near one node only, and only if they agree."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for name, row in table.rows.items():
        near, cpus = numa[name], _numbers(row.cpus)
        if near and len(near) == 1 and cpus:
            found.setdefault(near[0], set()).add(cpus)
    return {index: next(iter(cpus)) for index, cpus in found.items() if len(cpus) == 1}


def _numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a list such as ``0-3,8``, or None if it is not one."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        if not found:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= _MOST_NUMBERS:
            return None
        numbers.update(range(first, last + 1))
        if len(numbers) > _MOST_NUMBERS:
            return None
    return tuple(sorted(numbers))


def _links(table: _Table) -> list[Link]:
    """Return a link for each pair of devices that a readable row joins."""
    links = []
    for row, a in enumerate(table.devices):
        for column in range(row + 1, len(table.devices)):
            b = table.devices[column]
            said = {
                one: table.rows[one].cells[at]
                for one, at in ((a, column), (b, row))
                if one in table.rows
            }
            if said:
                links.append(_link(table, a, b, said))
    return links


def _link(table: _Table, a: str, b: str, said: dict[str, str]) -> Link:
    """Return the link between two devices from the cells of one or both rows."""
    kinds = {name: _kind(cell) for name, cell in said.items()}
    kind, count = max(kinds.values(), key=lambda one: (_FAR.index(one[0]), -(one[1] or 0)))
    reason = ""
    if len(set(kinds.values())) > 1:
        reason = "; ".join(f"{name} says {cell}" for name, cell in said.items())
        table.notes.append(f"{table.source}: {a} and {b} contradict each other: {reason}")
    elif len(said) == 1 and (other := b if a in said else a) in table.refused:
        reason = f"seen from {next(iter(said))} only: row {other}: {table.refused[other]}"
    return Link(a, b, kind, reason=reason, count=count)


def _kind(cell: str) -> tuple[LinkKind, int | None]:
    """Return the kind of a cell, and of how many links it is bonded."""
    if cell.startswith("NV"):
        return LinkKind.NVLINK, int(cell[2:])
    return LinkKind[{"SOC": "SYS"}.get(cell, cell)], None
