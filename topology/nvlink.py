"""What `nvidia-smi nvlink` prints of the NVLinks of each GPU, as reports.

Reads ``-s`` (rates), ``-R`` (remote ends), the listing of ``nvidia-smi -L``, and the table of
``dcgmi nvlink --link-status``. The tools say the same thing in several spellings, and print errors
where data belong. Of each GPU the answer is which links are up, which are down, or why that is
unknown; a line that nobody here understands makes its GPU unknown, never well.

That no link is active is a fault of a GPU whose NVLinks are built into the board, and none of a
card that takes a bridge: there it says that there is no bridge.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import NVLINKS, Gpu, Link, State, Topology, Unknown

__all__ = ["LinkReport", "apply", "built_in", "listed", "read_nvlink"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_GPU = re.compile(r"GPU\s+(\d{1,9})\s*:\s*(?:(.*?)\s*\(UUID:\s*(.*?)\s*\)$)?", re.ASCII)
_MIG = re.compile(r"MIG\s.*\(UUID:\s*(MIG-[^)\s]+)\s*\)$")
_LINK = re.compile(r"Link\s+(\d{1,3})\s*:\s*(.*)", re.ASCII | re.IGNORECASE)
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*GB/s", re.ASCII | re.IGNORECASE)
_REMOTE = re.compile(
    r"Remote Device\s+([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])\s*:\s*Link\s+\d{1,3}",
    re.ASCII | re.IGNORECASE,
)
_INACTIVE = re.compile(r"<?\s*inactive\s*>?", re.IGNORECASE)
_DCGM_GPU = re.compile(r"gpuId\s+(\d{1,9}):", re.ASCII | re.IGNORECASE)
_DCGM_LINKS = re.compile(r"[UDX_](?:\s+[UDX_])*")
_DCGM_SWITCH = re.compile(r"(?:physicalId|switchId)\s+\d+:", re.ASCII | re.IGNORECASE)
#: Product names of GPUs that come on boards, where NVLink is wired, and of cards, where it is not.
_BOARD = re.compile(r"SXM|HGX|HBM3|\b(?:H20|H200|H800|B100|B200|B300|GB200|GB300)\b", re.IGNORECASE)
_CARD = re.compile(r"PCIE|\bNVL\b", re.IGNORECASE)
_SEVERITY = {State.UNKNOWN: 0, State.UP: 1, State.DEGRADED: 2, State.DOWN: 3}


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a tool says of the NVLinks of one GPU.

    Attributes
    ----------
    index : int
        The number the tool gives the GPU.
    up, down : tuple of int
        The numbers of its links, ascending; of a GPU without NVLink both are empty.
    state : State
        `UP` also of a GPU that has no NVLink and needs none; `UNKNOWN` where it cannot be told.
    reason : str
        Why, in words for an administrator.
    rate : float or None
        Bytes per second of one link in one direction, the smallest of those that are up.
    remotes : tuple of (int, str)
        The PCI bus id at the other end of each link, in lower case.
    mig : tuple of str
        The ids of its MIG devices.
    """

    index: int
    product: str = ""
    uuid: str = ""
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    state: State = State.UNKNOWN
    reason: str = ""
    rate: float | None = None
    remotes: tuple[tuple[int, str], ...] = ()
    mig: tuple[str, ...] = ()


@dataclass(slots=True)
class _Section:
    """The lines of one GPU."""

    index: int
    product: str = ""
    uuid: str = ""
    links: dict[int, bool] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    remotes: dict[int, str] = field(default_factory=dict)
    mig: list[str] = field(default_factory=list)
    dark: bool = False
    absent: bool = False
    unknown: str = ""


def built_in(product: str) -> bool:
    """Return whether the NVLinks of a product are wired on its board, as far as its name says."""
    return bool(_BOARD.search(product)) and not _CARD.search(product)


def listed(numbers: tuple[int, ...] | list[int], verb: bool = True) -> str:
    """Return numbers in words, as ``3 and 5 are``."""
    words = [str(number) for number in numbers]
    text = " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "none"
    return f"{text} {'are' if len(words) > 1 else 'is'}" if verb else text


def read_nvlink(text: str, *, source: str = "nvidia-smi nvlink") -> dict[str, LinkReport]:
    """Return a report of each GPU in the text of ``nvidia-smi nvlink -s``, or of its relatives.

    Parameters
    ----------
    text : str
        What the tool printed, or a paste of it.
    source : str
        What to call it in errors.

    Returns
    -------
    dict of str to LinkReport
        By the names ``gpu0``, ``gpu1`` and so on, in the order of the text.

    Raises
    ------
    ArgumentValueError
        No line names a GPU: it is empty, or an error message.
    """
    sections: dict[int, _Section] = {}
    current: _Section | None = None
    switches = False
    for line in map(str.strip, _ESCAPE.sub("", text).splitlines()):
        switches = switches or bool(_DCGM_SWITCH.match(line))
        if not line or line.startswith("#"):
            continue
        if found := _GPU.match(line) or _DCGM_GPU.match(line):
            current = sections.setdefault(int(found[1]), _Section(int(found[1])))
            _take_name(current, found)
        elif line.lower().startswith(("nvswitches", "key:")):
            current = None
        elif current is not None and set(line) == {"."}:
            current.unknown = current.unknown or "the text is cut off"
        elif current is not None:
            _take(current, line)
    if not sections:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ArgumentValueError(f"{source}: no line names a GPU; it says: {first[:80]}")
    found_all = list(sections.values())
    return {f"gpu{section.index}": _report(section, found_all, switches) for section in found_all}


def _take_name(section: _Section, found: re.Match[str]) -> None:
    """Take the line that begins the section of a GPU."""
    if found.re is _GPU:
        if found[2] is None:
            section.unknown = "the line that names it is cut off"
        elif section.uuid not in ("", found[3]):
            section.unknown = f"two GPUs have its number: {section.uuid} and {found[3]}"
        else:
            section.product, section.uuid = found[2], found[3]


def _take(section: _Section, line: str) -> None:
    """Take a line below the name of a GPU."""
    low = line.lower()
    if found := _LINK.fullmatch(line):
        _take_link(section, int(found[1]), found[2].strip())
    elif found := _MIG.match(line):
        section.mig.append(found[1])
    elif _DCGM_LINKS.fullmatch(line):
        for number, letter in enumerate(line.split()):
            if letter != "_":
                section.links[number] = letter == "U"
    elif "nvlink" in low and "all links are inactive" in low:
        section.dark = True
    elif "nvlink" in low and "does not have or support" in low:
        section.absent = True
    elif "nvlink" in low and "not supported" in low and "mig mode" in low:
        section.unknown = "it is in MIG mode, in which NVLinks cannot be queried"
    elif not section.unknown:
        section.unknown = f"a line that says nothing known: {line[:80]}"


def _take_link(section: _Section, number: int, said: str) -> None:
    """Take the line of one link."""
    up: bool | None = None
    if found := _RATE.fullmatch(said):
        up = float(found[1]) > 0 or None
        section.rates.append(float(found[1]) * 1e9)
    elif found := _REMOTE.fullmatch(said):
        up = True
        section.remotes[number] = found[1].lower()
    elif _INACTIVE.fullmatch(said):
        up = False
    if up is None:
        section.unknown = section.unknown or f"link {number} says {said[:40]!r}"
    elif section.links.setdefault(number, up) != up:
        section.unknown = section.unknown or f"link {number} is up in one line, down in another"


def _report(section: _Section, sections: list[_Section], switches: bool) -> LinkReport:
    """Return the report of a section."""
    up = tuple(sorted(number for number, is_up in section.links.items() if is_up))
    down = tuple(sorted(number for number, is_up in section.links.items() if not is_up))
    state, reason = _judged(section, sections, up, down, switches)
    return LinkReport(
        section.index,
        section.product,
        section.uuid,
        up,
        down,
        state,
        reason,
        min(section.rates, default=None),
        tuple(sorted(section.remotes.items())),
        tuple(section.mig),
    )


def _judged(
    section: _Section,
    sections: list[_Section],
    up: tuple[int, ...],
    down: tuple[int, ...],
    switches: bool,
) -> tuple[State, str]:
    """Return the state of a GPU's links, and why."""
    total = len(section.links)
    if section.unknown:
        return State.UNKNOWN, section.unknown
    if section.links and (section.dark or section.absent):
        return State.UNKNOWN, "its links are listed, and said not to be there"
    if section.absent:
        return State.UP, "no NVLink"
    if section.dark or (down and not up):
        if switches or built_in(section.product):
            return State.DEGRADED, f"all of its {f'{total} ' if total else ''}NVLinks are down"
        return State.UP, "no NVLink: all links are inactive, as on a card without a bridge"
    if not total:
        return State.UNKNOWN, "it is listed, and nothing is said of its NVLinks"
    if (last := max(section.links)) >= total:
        gaps = [number for number in range(last) if number not in section.links]
        return State.UNKNOWN, f"nothing is said of link {listed(gaps, verb=False)}"
    if down:
        return State.DEGRADED, f"{len(up)} of {total} NVLinks are up: {listed(down)} down"
    same = [other for other in sections if other.product == section.product]
    most = max(same, key=lambda other: len(other.links))
    if total < len(most.links):
        than = f"while GPU {most.index} has {len(most.links)}"
        if section is sections[-1]:
            return State.UNKNOWN, f"the text ends after its link {last}, {than}"
        return State.DEGRADED, f"{total} NVLinks, {than}"
    return State.UP, ""


def apply(topology: Topology, reports: Mapping[str, LinkReport]) -> Topology:
    """Return the topology of one host with what reports say of its GPUs.

    A GPU is found by its UUID if the topology has any, otherwise by its index. A fault that the
    topology knows of stays; a report that cannot tell lifts nothing and is listed in `unknown`.
    The NVLinks of a GPU whose links are all down are down.

    Raises
    ------
    ArgumentValueError
        The topology has several hosts: nobody can tell whose GPUs the reports are about.
    """
    if len(topology.hosts) > 1:
        raise ArgumentValueError("reports of NVLinks are of one host, and the topology has several")
    by_uuid = {dict(gpu.attributes).get("uuid"): gpu.name for gpu in topology.gpus}
    by_index = {gpu.index: gpu.name for gpu in topology.gpus}
    found: dict[str, LinkReport] = {}
    notes = list(topology.notes)
    for called, report in reports.items():
        known = by_uuid.keys() - {None}
        name = by_uuid.get(report.uuid) if known and report.uuid else by_index.get(report.index)
        if name is None:
            notes.append(f"{called} ({report.uuid or 'no UUID'}) has a report and is not there")
        else:
            found[name] = report
    blind = topology.unknown_names("nvlink")
    return replace(
        topology,
        gpus=tuple(_with_report(gpu, found.get(gpu.name)) for gpu in topology.gpus),
        links=tuple(_darkened(link, found) for link in topology.links),
        unknown=topology.unknown
        + tuple(
            Unknown("nvlink", name, report.reason)
            for name, report in found.items()
            if report.state is State.UNKNOWN and name not in blind
        ),
        notes=tuple(notes),
    )


def _with_report(gpu: Gpu, report: LinkReport | None) -> Gpu:
    """Return a GPU with the state of its report, unless it is known to be worse."""
    if report is None or _SEVERITY[report.state] < _SEVERITY[gpu.state]:
        return gpu
    return replace(gpu, state=report.state, reason=report.reason or gpu.reason)


def _darkened(link: Link, found: Mapping[str, LinkReport]) -> Link:
    """Return a link, down if it is an NVLink of a GPU that has none that is up."""
    if link.kind in NVLINKS:
        for end in (link.a, link.b):
            report = found.get(end)
            if report and not report.up and report.state is State.DEGRADED:
                return replace(link, state=State.DOWN, reason=f"{end}: {report.reason}")
    return link
