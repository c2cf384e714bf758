"""The topology files of NCCL: what `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

The reader takes what vendors and virtual machines write: GPUs that are only a PCI class, flat
trees, NICs inside a GPU's element, NUMA node -1, speeds in several spellings, bus ids of odd
lengths. What it does not know it ignores with a note. Only a file that is cut off, or is something
else, is refused. Files written by hand leave NVLink out: then it is unknown, not absent.
"""

import re
from dataclasses import dataclass, field, replace

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import (
    MOST_NVLINKS,
    Attributes,
    Gpu,
    Host,
    Link,
    LinkKind,
    Nic,
    NumaNode,
    State,
    Switch,
    Topology,
    Unknown,
)
from pycomm.topology.xml_elements import Element, parse
from pycomm.topology.xml_writer import write_xml

__all__ = ["read_xml", "write_xml"]

_VIRTUAL = re.compile(r"(br-|veth|cali|tunl|docker|virbr|vnet|tap|cni|flannel|lo$)")
_SPEED = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*GT/s", re.ASCII)
_KNOWN = frozenset({"cpu", "pci", "gpu", "nic", "net", "nvlink", "c2c", "xgmi", "system"})
#: Bytes per second of one NVLink in one direction, by compute capability: as `nvidia-smi nvlink -s`
#: shows it, for 60 as published.
_NVLINK = {
    60: 20e9,
    70: 25.78125e9,
    80: 25e9,
    86: 14.0625e9,
    90: 26.5625e9,
    100: 53.125e9,
    103: 53.125e9,
}


@dataclass(slots=True)
class _Reading:
    """What has been found so far."""

    source: str
    hosts: dict[str, Host] = field(default_factory=dict)
    numa: list[NumaNode] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    rows: list[tuple[str, Element]] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)  # the last one of each name
    foreign: set[str] = field(default_factory=set)

    def note(self, element: Element, text: str) -> None:
        """Keep a remark on an element."""
        self.notes.append(f"{self.source}, line {element.line}: {text}")

    def named(self, element: Element, *choices: str) -> str:
        """Return the first of `choices` that is free as a name, the last with a number if none."""
        name = next((choice for choice in choices if choice not in self.names), "")
        while not name:
            number = self.numbers[choices[-1]] = self.numbers.get(choices[-1], 1) + 1
            name = f"{choices[-1]}#{number}"
            name = "" if name in self.names else name
        if name != choices[0]:
            self.note(element, f"a second {choices[0]}, called {name} here")
        self.names.add(name)
        return name


def _bus_key(bus_id: str) -> str:
    """Return a PCI bus id in the one spelling in which equal ones are equal."""
    parts = bus_id.strip().lower().split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    return ":".join([parts[0].lstrip("0") or "0", *parts[1:]])


def _is_virtual(name: str) -> bool:
    """Return whether an interface's name is one of a bridge, tunnel or container."""
    return _VIRTUAL.match(name) is not None


def read_xml(text: str, *, source: str = "topology XML", host: str = "host0") -> Topology:
    """Return the topology an XML file of NCCL describes.

    Parameters
    ----------
    text : str
        The text of the file.
    source : str
        What to call it in errors and notes.
    host : str
        The name of the host; if the file holds several, of the first one, the others by number.

    Raises
    ------
    ArgumentValueError
        The text is cut off, or is no topology.
    """
    root = parse(text, source)
    reading = _Reading(source)
    if root.tag == "system" and root.attributes.get("version", "1") != "1":
        reading.note(root, f"version {root.attributes['version']}, where NCCL reads only 1")
    if root.tag != "system":
        raise ArgumentValueError(
            f"{source}, line {root.line}: <{root.tag}>, where a topology starts with <system>"
        )
    for cpu in root.children:
        if cpu.tag == "cpu":
            _take_cpu(reading, cpu, host)
        else:
            reading.note(cpu, f"<{cpu.tag}> ignored")
    if not reading.hosts:
        raise ArgumentValueError(f"{source}, line {root.line}: <system> without a <cpu>")
    _take_nvlinks(reading)
    _judge_nvlink(reading)
    _compare_cpus(reading)
    return Topology(
        tuple(reading.hosts.values()),
        tuple(reading.numa),
        tuple(reading.switches),
        tuple(reading.gpus),
        tuple(reading.nics),
        tuple(reading.links),
        tuple(reading.unknown),
        tuple(reading.notes),
    )


def _take_cpu(reading: _Reading, cpu: Element, host: str) -> None:
    """Take a NUMA node and all below it."""
    hash_ = cpu.attributes.get("host_hash", "")
    if hash_ not in reading.hosts:
        number = len(reading.hosts)
        name = host if number == 0 else f"{host}#{number + 1}"
        reading.names.add(name)
        reading.hosts[hash_] = Host(name, (("host_hash", hash_),) if hash_ else ())
    on = reading.hosts[hash_].name
    index = _integer(cpu.attributes.get("numaid"))
    index = None if index is None or index < 0 else index
    shown = "?" if index is None else str(index)
    name = reading.named(cpu, f"numa{shown}", f"{on}:numa{shown}")
    cpus = _mask(cpu.attributes.get("affinity", ""))
    if cpus is None and cpu.attributes.get("affinity"):
        reading.note(cpu, f"affinity {cpu.attributes['affinity']!r} is no mask")
    rest = tuple(item for item in cpu.attributes.items() if item[0] != "host_hash")
    node = NumaNode(name, on, index, cpus, rest)
    reading.numa.append(node)
    todo = [(child, name) for child in reversed(cpu.children)]
    while todo:
        element, parent = todo.pop()
        if element.tag == "pci":
            below = _take_pci(reading, element, parent, node)
            todo += [(child, below) for child in reversed(element.children) if child.tag == "pci"]
        elif element.tag == "nic":
            _take_nets(reading, element, parent, node, None, None)
        elif element.tag not in _KNOWN:
            reading.note(element, f"<{element.tag}> ignored")


def _take_pci(reading: _Reading, pci: Element, parent: str, node: NumaNode) -> str:
    """Take a PCI function, and return the name of what those inside it are below."""
    bus_id = pci.attributes.get("busid", "")
    if not bus_id:
        reading.note(pci, "<pci> without a busid")
    said: Attributes = tuple(item for item in pci.attributes.items() if item[0] != "busid")
    kind = pci.attributes.get("class", "").lower()
    nics = [*pci.all("nic"), *(nic for gpu in pci.all("gpu") for nic in gpu.all("nic"))]
    gpu = next(pci.all("gpu"), None)
    for child in pci.children:
        if child.tag not in _KNOWN:
            reading.note(child, f"<{child.tag}> ignored")
    if gpu is not None or (_is_gpu(pci) and not nics and not any(pci.all("pci"))):
        name = _take_gpu(reading, pci, gpu, parent, node)
    elif (nics or kind.startswith("0x02")) and not any(pci.all("pci")):
        for nic in nics or [Element("nic", {}, pci.line)]:
            _take_nets(reading, nic, parent, node, bus_id or None, said)
        return parent
    else:
        bridge = any(pci.all("pci")) or kind.startswith("0x06")
        name = reading.named(pci, bus_id or "pci", f"{node.host}:{bus_id}")
        reading.switches.append(
            Switch(name, node.host, "pci" if bridge else "device", bus_id or None, parent, said)
        )
        if not bridge:
            reading.note(pci, f"{bus_id}: nothing says what it is")
    for nic in nics:
        _take_nets(reading, nic, name, node, bus_id or None, None)
    _take_uplink(reading, name, parent, node, pci.attributes)
    return name


def _is_gpu(pci: Element) -> bool:
    """Return whether a PCI function without a <gpu> is an NVIDIA GPU by its class and vendor."""
    kind, vendor = (pci.attributes.get(key, "").lower() for key in ("class", "vendor"))
    return (kind.startswith("0x0302") and vendor in ("", "0x10de")) or (
        kind.startswith("0x0300") and vendor == "0x10de"
    )


def _take_uplink(
    reading: _Reading, name: str, parent: str, node: NumaNode, said: dict[str, str]
) -> None:
    """Take the PCI link between a device and what is above it."""
    kind = LinkKind.PHB if parent == node.name else LinkKind.PIX
    width = _integer(said.get("link_width"))
    rate = _pci_rate(said.get("link_speed", ""), width or 0)
    reading.links.append(Link(name, parent, kind, rate, count=width or None))


def _take_gpu(
    reading: _Reading, pci: Element, gpu: Element | None, parent: str, node: NumaNode
) -> str:
    """Take a GPU; its NVLinks wait until all devices are known."""
    bus_id = pci.attributes.get("busid", "")
    dev = _integer(gpu.attributes.get("dev")) if gpu else None
    choices = [bus_id or "gpu", f"{node.host}:{bus_id}"]
    if dev is not None:
        choices = [f"gpu{dev}", f"{node.host}:gpu{dev}", *choices]
    name = reading.named(pci, *choices)
    near = () if node.index is None else (node.name,)
    if not near:
        reading.unknown.append(Unknown("numa", name, "the file gives NUMA node -1 or none"))
    said: Attributes = tuple(item for item in pci.attributes.items() if item[0] != "busid")
    own: Attributes = tuple(gpu.attributes.items()) if gpu else ()
    found = Gpu(name, node.host, dev, bus_id or None, near, parent, pci=said, attributes=own)
    reading.gpus.append(found)
    vendor = pci.attributes.get("vendor", "").lower()
    if vendor == "0x1002" or (gpu and ("gcn" in gpu.attributes or any(gpu.all("xgmi")))):
        reading.foreign.add(name)
    for row in gpu.children if gpu else ():
        if row.tag == "nvlink":
            reading.rows.append((name, row))
        elif row.tag == "c2c":
            count, rate = (_integer(row.attributes.get(key)) for key in ("count", "bw"))
            bandwidth = rate * 1e6 * (count or 1) if rate else None
            reading.links.append(Link(name, node.name, LinkKind.C2C, bandwidth, count=count))
        elif row.tag not in _KNOWN:
            reading.note(row, f"<{row.tag}> ignored")
    return name


def _take_nets(
    reading: _Reading,
    nic: Element,
    parent: str,
    node: NumaNode,
    bus_id: str | None,
    pci: Attributes | None,
) -> None:
    """Take the ports of a network adapter: `pci` says what it is, or is None inside another."""
    for net in list(nic.all("net")) or [Element("net", {}, nic.line)]:
        said = net.attributes
        given = said.get("name") or bus_id or "net"
        name = reading.named(net, given, f"{node.host}:{given}")
        speed = _integer(said.get("speed"))
        kind = dict(pci or ()).get("class", "").lower()
        reading.nics.append(
            Nic(
                name,
                node.host,
                _integer(said.get("dev")),
                said.get("name"),
                bus_id,
                () if node.index is None else (node.name,),
                parent,
                LinkKind.IB if kind.startswith("0x0207") else None,
                speed * 1e6 / 8 if speed else None,
                _is_virtual(given),
                pci=pci or (),
                attributes=tuple(said.items()),
            )
        )
        if pci is not None:
            _take_uplink(reading, name, parent, node, dict(pci))


def _take_nvlinks(reading: _Reading) -> None:
    """Make links of the <nvlink> rows, now that it is known what each target is."""
    gpus = {_bus_key(gpu.bus_id): gpu for gpu in reading.gpus if gpu.bus_id}
    switches = {_bus_key(s.bus_id): s for s in reading.switches if s.bus_id}
    seen: dict[tuple[str, str], int] = {}
    known = {gpu.name: gpu for gpu in reading.gpus}
    for name, row in reading.rows:
        target, count = row.attributes.get("target", ""), _integer(row.attributes.get("count"))
        sm = _integer(dict(known[name].attributes).get("sm")) or 0
        each = _NVLINK.get(sm)
        peer = gpus.get(_bus_key(target))
        if peer is None and _bus_key(target) not in switches:
            called = reading.named(row, f"nvswitch {target or '?'}")
            switches[_bus_key(target)] = Switch(called, None, "nvswitch", target or None)
            reading.switches.append(switches[_bus_key(target)])
        other = peer.name if peer else switches[_bus_key(target)].name
        if peer and (peer.name, name) in seen:
            at = seen[peer.name, name]
            link = reading.links[at]
            if link.count != count:
                why = f"{other} counts {link.count} links to {name}, which counts {count} back"
                fewer = min(n for n in (link.count, count) if n is not None)
                rate = each * fewer if each else None
                reading.links[at] = replace(link, bandwidth=rate, count=fewer, reason=why)
                reading.note(row, why)
            continue
        kind = LinkKind.NVLINK if peer else LinkKind.NVSWITCH
        rate = each * count if each and count else None
        seen[name, other] = len(reading.links)
        reading.links.append(Link(name, other, kind, rate, count=count))


def _judge_nvlink(reading: _Reading) -> None:
    """Say of which GPUs NVLink is unknown, and which have lost theirs."""
    linked = {name for name, _ in reading.rows}
    for name in dict.fromkeys(name for name, _ in reading.rows):
        counts = [link.count or 0 for link in reading.links if name in _nvlink_ends(link)]
        if sum(counts) > MOST_NVLINKS:
            reading.notes.append(
                f"{reading.source}: {name} lists {sum(counts)} NVLinks, more than any GPU has: "
                "each row seems to count all of them"
            )
    switched = {link.a for link in reading.links if link.kind is LinkKind.NVSWITCH}
    described = any("device" in dict(gpu.pci) for gpu in reading.gpus)
    for at, gpu in enumerate(reading.gpus):
        if gpu.name in reading.foreign:
            reading.unknown.append(Unknown("nvlink", gpu.name, "not an NVIDIA GPU"))
        elif linked:
            if switched and gpu.name not in linked and gpu.index is not None:
                why = f"no NVLink row, while {min(switched)} reaches an NVSwitch"
                reading.gpus[at] = replace(gpu, state=State.DEGRADED, reason=why)
        elif gpu.index is None:
            why = "known by its PCI class only: the file was not written by NCCL"
            reading.unknown.append(Unknown("nvlink", gpu.name, why))
        elif not described:
            why = "written by hand (no GPU has a device id) and without any NVLink row"
            reading.unknown.append(Unknown("nvlink", gpu.name, why))


def _nvlink_ends(link: Link) -> tuple[str, ...]:
    """Return the ends of an NVLink, of other links none."""
    return (link.a, link.b) if link.kind in (LinkKind.NVLINK, LinkKind.NVSWITCH) else ()


def _compare_cpus(reading: _Reading) -> None:
    """Report CPUs that belong to two NUMA nodes of a host."""
    owner: dict[tuple[str, int], str] = {}
    told: set[tuple[str, str]] = set()
    for node in reading.numa:
        for cpu in node.cpus or ():
            first = owner.setdefault((node.host, cpu), node.name)
            if first != node.name and (first, node.name) not in told:
                told.add((first, node.name))
                reading.notes.append(
                    f"{reading.source}: {first} and {node.name} both have CPU {cpu}"
                )


def _integer(text: str | None) -> int | None:
    """Return a number, or None if it is not one."""
    if text is None or not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII):
        return None
    return int(text)


def _mask(text: str) -> tuple[int, ...] | None:
    """Return the CPUs of a mask of 32-bit hexadecimal words, or None if it is not one or empty.

    Leading zeros of a word may be missing.
    """
    words = text.strip().split(",")
    if not all(re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,8}", word) for word in words):
        return None
    bits = 0
    for word in words:
        bits = bits << 32 | int(word, 16)
    return tuple(at for at, bit in enumerate(reversed(f"{bits:b}")) if bit == "1") or None


def _pci_rate(speed: str, width: int) -> float | None:
    """Return the bytes per second of a PCI link, after its line code, in one direction."""
    found = _SPEED.match(speed)
    if not found or width <= 0:
        return None
    transfers = float(found[1]) * 1e9
    code = 8 / 10 if transfers < 8e9 else 128 / 130 if transfers < 64e9 else 242 / 256
    return transfers * code * width / 8
