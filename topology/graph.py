"""What a machine is made of, as frozen records: hosts, NUMA nodes, GPUs, NICs, switches and links.

A `Topology` is a statement, never a handle: readers and probes make one, `groups` draws conclusions
from it, and it travels between ranks as JSON. Unknown is an answer: a number nobody told is None, a
state nobody measured is `State.UNKNOWN`, and what a source cannot tell is listed in `unknown`, with
the reason, so that nobody takes silence for "there is none".
"""

import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pycomm.errors import ArgumentValueError

__all__ = [
    "MOST_NVLINKS",
    "NVLINKS",
    "Attributes",
    "Gpu",
    "Host",
    "Link",
    "LinkKind",
    "Nic",
    "NumaNode",
    "State",
    "Switch",
    "Topology",
    "Unknown",
]

#: What a source says of an element and nothing here interprets, in the source's own words.
Attributes = tuple[tuple[str, str], ...]

#: No GPU has more NVLinks; rows that sum to more each count all of them.
MOST_NVLINKS = 36

_FORMAT = 1


class LinkKind(StrEnum):
    """How two things are joined; between devices on PCI, the farthest thing a transfer crosses."""

    NVLINK = "nvlink"
    NVSWITCH = "nvswitch"
    C2C = "c2c"
    PIX = "pix"
    PXB = "pxb"
    PHB = "phb"
    NODE = "node"
    SYS = "sys"
    IB = "ib"
    ROCE = "roce"
    TCP = "tcp"
    SHARED_MEMORY = "shared_memory"


#: The kinds that are NVLink, from GPU to GPU or by way of a switch.
NVLINKS = frozenset({LinkKind.NVLINK, LinkKind.NVSWITCH})


class State(StrEnum):
    """Whether something can be used."""

    UP = "up"
    DEGRADED = "degraded"
    DOWN = "down"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Host:
    """One operating system."""

    name: str
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node; `index` None where a machine hides it, `cpus` None where nobody says.

    Attributes
    ----------
    cpus : tuple of int or None
        Its logical CPUs, ascending; they need not be a range.
    """

    name: str
    host: str
    index: int | None = None
    cpus: tuple[int, ...] | None = None
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCI bridge or switch, an NVSwitch, or a PCI device of which nobody says what it is.

    Attributes
    ----------
    kind : str
        "pci", "nvswitch" or "device".
    host : str or None
        None for a switch that hosts may share.
    parent : str or None
        Name of the switch or NUMA node above it.
    """

    name: str
    host: str | None
    kind: str = "pci"
    bus_id: str | None = None
    parent: str | None = None
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes
    ----------
    index : int or None
        The number its source gives it.
    numa : tuple of str
        Names of the NUMA nodes near it: none if unknown, several where the source names several.
    parent : str or None
        Name of what is above it in the PCI tree; None if unknown.
    pci : Attributes
        What the source says of its PCI function, apart from the bus id.
    """

    name: str
    host: str
    index: int | None = None
    bus_id: str | None = None
    numa: tuple[str, ...] = ()
    parent: str | None = None
    state: State = State.UNKNOWN
    reason: str = ""
    pci: Attributes = ()
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network adapter.

    Attributes
    ----------
    device : str or None
        The name the operating system has for it, where the source numbers NICs itself.
    fabric : LinkKind or None
        `IB`, `ROCE` or `TCP`; None if unknown.
    bandwidth : float or None
        Its rate in bytes per second.
    virtual : bool
        A bridge, tunnel or container interface: it never counts as a NIC.
    """

    name: str
    host: str
    index: int | None = None
    device: str | None = None
    bus_id: str | None = None
    numa: tuple[str, ...] = ()
    parent: str | None = None
    fabric: LinkKind | None = None
    bandwidth: float | None = None
    virtual: bool = False
    state: State = State.UNKNOWN
    reason: str = ""
    pci: Attributes = ()
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two things, the same in both directions.

    Attributes
    ----------
    a, b : str
        Names of its ends.
    bandwidth : float or None
        Bytes per second in one direction, all lanes or bonded links together.
    latency : float or None
        Seconds.
    reason : str
        Why `state` is what it is, in words for an administrator.
    count : int or None
        Of how many equal links it is bonded.
    """

    a: str
    b: str
    kind: LinkKind
    bandwidth: float | None = None
    latency: float | None = None
    state: State = State.UNKNOWN
    reason: str = ""
    count: int | None = None

    def other(self, end: str) -> str:
        """Return the end that is not `end`."""
        return self.b if end == self.a else self.a


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something the source cannot tell.

    Attributes
    ----------
    what : str
        "nvlink", "numa" or "row".
    name : str
        Of which device.
    reason : str
        Why it cannot be told.
    """

    what: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything known of one or more hosts; links and parents refer to the others by name.

    Attributes
    ----------
    unknown : tuple of Unknown
        What the source cannot tell.
    notes : tuple of str
        What a reader ignored or found odd.

    Raises
    ------
    ArgumentValueError
        A name is used twice, or something is referred to that is not there.
    """

    hosts: tuple[Host, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    switches: tuple[Switch, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hosts = {host.name for host in self.hosts}
        numa = {node.name for node in self.numa_nodes}
        names = [*hosts, *numa, *(device.name for device in self.devices)]
        nodes = set(names)
        if len(nodes) != len(self.hosts) + len(self.numa_nodes) + len(self.devices):
            name = next((name for name in names if names.count(name) > 1), "the same")
            raise ArgumentValueError(f"two parts of the topology are named {name}")
        placed: tuple[NumaNode | Switch | Gpu | Nic, ...] = (*self.numa_nodes, *self.devices)
        for node in placed:
            if node.host not in hosts and not (isinstance(node, Switch) and node.host is None):
                raise ArgumentValueError(f"{node.name} is on host {node.host}, which is not there")
        above = nodes - hosts - {nic.name for nic in self.nics}
        for device in self.devices:
            if not isinstance(device, Switch) and not numa.issuperset(device.numa):
                raise ArgumentValueError(f"{device.name} is near a NUMA node that is not there")
            if device.parent is not None and device.parent not in above:
                raise ArgumentValueError(
                    f"{device.name} is below {device.parent}, which is not there"
                )
        for number in chain(
            (nic.bandwidth for nic in self.nics),
            *((link.bandwidth, link.latency) for link in self.links),
        ):
            if number is not None and not 0 <= number < math.inf:
                raise ArgumentValueError(f"{number} is no bandwidth or latency")
        if any(cpu < 0 for node in self.numa_nodes for cpu in node.cpus or ()):
            raise ArgumentValueError("CPUs have no negative numbers")
        try:
            "".join(names).encode()
        except UnicodeEncodeError:
            raise ArgumentValueError("a name that cannot be written as text") from None
        for link in self.links:
            for end in (link.a, link.b):
                if end not in nodes:
                    raise ArgumentValueError(
                        f"link {link.a} - {link.b} ends at {end}, which is not there"
                    )

    @property
    def devices(self) -> tuple[Switch | Gpu | Nic, ...]:
        """All that has a place in the PCI tree."""
        return (*self.switches, *self.gpus, *self.nics)

    def unknown_names(self, what: str) -> dict[str, str]:
        """Return the devices of which `what` is unknown, and why."""
        return {entry.name: entry.reason for entry in self.unknown if entry.what == what}

    def to_json(self) -> str:
        """Return it as JSON, which `from_json` reads."""
        return json.dumps({"format": _FORMAT, **_plain(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """Return the topology `to_json` wrote.

        Raises
        ------
        ArgumentValueError
            It is cut off, or a field is missing, of the wrong kind, or not one of this format.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ArgumentValueError(f"topology: not JSON, or cut off: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise ArgumentValueError(f"topology: not one of format {_FORMAT}")
        return _record(cls, data, "topology")


def _plain(value: Any) -> Any:
    """Return a record as dicts and lists, fields at their defaults included."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


_Record = TypeVar("_Record")


def _record(cls: type[_Record], data: Any, where: str) -> _Record:
    """Return a record of `cls` from a dict, each field checked against its annotation."""
    if not isinstance(data, dict):
        raise ArgumentValueError(f"{where}: {data!r} where a record belongs")
    hints = get_type_hints(cls)
    if data.keys() != hints.keys():
        odd = ", ".join(sorted(data.keys() ^ hints.keys()))
        raise ArgumentValueError(f"{where}: missing or unknown fields: {odd}")
    return cls(
        **{name: _value(hints[name], part, f"{where}.{name}") for name, part in data.items()}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return `value` as what `hint` annotates."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list):
            raise ArgumentValueError(f"{where}: {value!r} where a list belongs")
        if parts[-1] is Ellipsis:
            parts = (parts[0],) * len(value)
        if len(parts) != len(value):
            raise ArgumentValueError(f"{where}: {len(value)} values where {len(parts)} belong")
        return tuple(
            _value(part, item, f"{where}[{index}]")
            for index, (part, item) in enumerate(zip(parts, value, strict=True))
        )
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint, value, where)
    return _scalar(hint, value, where)


def _scalar(hint: Callable[[Any], Any], value: Any, where: str) -> Any:
    """Return a string, number, truth value or member of an enumeration."""
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ArgumentValueError(f"{where}: a number that is too large") from None
    if hint in (str, int, float, bool):
        if type(value) is not hint:
            raise ArgumentValueError(f"{where}: {value!r} is of the wrong kind")
        return value
    try:
        return hint(value)
    except ValueError:
        raise ArgumentValueError(f"{where}: {value!r} is not one of its values") from None
