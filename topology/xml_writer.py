"""A topology as the XML that NCCL reads from `NCCL_TOPO_FILE`."""

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import (
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
)
from pycomm.topology.xml_elements import Element, render

__all__ = ["write_xml"]

#: The target NCCL writes for a switch whose bus id a virtual machine hides.
_HIDDEN = "fffffff:ff:ff.0"
_GPU_CLASS, _SWITCH_CLASS, _BRIDGE_CLASS = "0x030200", "0x068000", "0x060400"

_Below = Switch | Gpu | Nic

# Of which a description by NCCL has one at least.
_NCCL_WORDS: dict[type[Gpu | Nic], frozenset[str]] = {
    Gpu: frozenset({"dev", "sm", "rank", "gdr"}),
    Nic: frozenset({"name", "dev", "speed", "port", "guid"}),
}


def write_xml(topology: Topology) -> str:
    """Return a topology as the XML that NCCL reads from `NCCL_TOPO_FILE`.

    Links that are down are left out, so that NCCL plans without them. What `read_xml` read comes
    back equal, but for what it ignored with a note.

    Raises
    ------
    ArgumentValueError
        It does not know the place of a GPU or NIC on PCI; one made of `nvidia-smi topo -m` does
        not.
    """
    return render(_Writer(topology).system())


class _Writer:
    """Writes one topology."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._hosts = {host.name: host for host in topology.hosts}
        self._gpus = {gpu.name: gpu for gpu in topology.gpus}
        self._bus_ids = {device.name: device.bus_id for device in topology.devices}
        self._links: dict[str, list[Link]] = {}
        order: dict[str, int] = {}
        parents = {device.name: device.parent for device in topology.devices}
        for at, link in enumerate(topology.links):
            for end in (link.a, link.b):
                self._links.setdefault(end, []).append(link)
                if parents.get(end) == link.other(end):
                    order.setdefault(end, at)
        self._below: dict[str, list[_Below]] = {}
        for node in topology.devices:
            if node.parent is not None:
                self._below.setdefault(node.parent, []).append(node)
        for below in self._below.values():
            below.sort(key=lambda node: order.get(node.name, len(topology.links)))
        self._written: set[str] = set()

    def system(self) -> Element:
        """Return the root element."""
        root = Element("system", {"version": "1"})
        for node in self._topology.numa_nodes:
            cpu = Element("cpu", _cpu_attributes(node, self._hosts[node.host]))
            self._fill(cpu, node.name, None)
            root.children.append(cpu)
        devices: list[Gpu | Nic] = [*self._topology.gpus]
        devices += self._topology.nics
        for device in devices:
            # NCCL finds Ethernet interfaces by itself, and what is made of software not at all.
            found = isinstance(device, Nic) and (device.virtual or device.fabric is LinkKind.TCP)
            if device.name not in self._written and not found:
                raise ArgumentValueError(
                    f"the place of {device.name} in the PCI tree is unknown: NCCL needs it"
                )
        return root

    def _fill(self, element: Element, name: str, bus_id: str | None) -> None:
        """Put into an element all that is below `name`."""
        adapter: tuple[str, Element] | None = None
        for node in self._below.get(name, ()):
            self._written.add(node.name)
            if isinstance(node, Nic) and node.virtual and not _told(node):
                continue
            if not isinstance(node, Nic):
                adapter = None
                element.children.append(self._place(node))
                continue
            if node.bus_id is None or node.bus_id == bus_id:
                _append_net(element, node)
                continue
            if adapter is None or adapter[0] != node.bus_id:
                kind = "0x020700" if node.fabric is LinkKind.IB else "0x020000"
                adapter = (node.bus_id, _pci(node.bus_id, node.pci or (("class", kind),)))
                element.children.append(adapter[1])
            if node.device is not None:
                _append_net(adapter[1], node)

    def _place(self, node: Switch | Gpu) -> Element:
        """Return the element of a switch or GPU with all below it."""
        if node.bus_id is None and isinstance(node, Gpu):
            raise ArgumentValueError(f"{node.name} has no PCI bus id: NCCL needs it")
        if isinstance(node, Gpu):
            pci = _pci(node.bus_id, node.pci or (("class", _GPU_CLASS),))
            if node.index is not None or node.attributes:
                pci.children.append(self._gpu(node))
        else:
            said = node.attributes
            if not said and node.kind != "device":
                said = (("class", _BRIDGE_CLASS),)
            pci = _pci(node.bus_id, said)
        self._fill(pci, node.name, node.bus_id)
        return pci

    def _gpu(self, gpu: Gpu) -> Element:
        """Return the <gpu> of a GPU, with its NVLinks."""
        element = Element("gpu", _told(gpu) or _gpu_attributes(gpu))
        for link in self._links.get(gpu.name, ()):
            if link.state is State.DOWN:
                continue
            count = {} if link.count is None else {"count": str(link.count)}
            if link.kind in (LinkKind.NVLINK, LinkKind.NVSWITCH):
                other = link.other(gpu.name)
                target = self._bus_ids.get(other) or _HIDDEN
                kind = _GPU_CLASS if other in self._gpus else _SWITCH_CLASS
                row = Element("nvlink", {"target": target, **count, "tclass": kind})
                element.children.append(row)
            elif link.kind is LinkKind.C2C:
                rate = round((link.bandwidth or 0) / 1e6 / (link.count or 1))
                bandwidth = {"bw": str(rate)} if rate else {}
                element.children.append(Element("c2c", {**bandwidth, **count}))
        return element


def _told(device: Gpu | Nic) -> dict[str, str]:
    """Return the attributes of a GPU or NIC in NCCL's words; nothing if its source was another."""
    said = dict(device.attributes)
    return said if said.keys() & _NCCL_WORDS[type(device)] else {}


def _gpu_attributes(gpu: Gpu) -> dict[str, str]:
    """Return what NCCL wants to know of a GPU."""
    said = {} if gpu.index is None else {"dev": str(gpu.index)}
    capability = dict(gpu.attributes).get("compute_capability")
    return said if capability is None else said | {"sm": capability.replace(".", "")}


def _pci(bus_id: str | None, said: Attributes) -> Element:
    """Return a <pci>."""
    return Element("pci", ({"busid": bus_id} if bus_id else {}) | dict(said))


def _append_net(element: Element, nic: Nic) -> None:
    """Put a port into the <nic> of an element."""
    adapter = next(element.all("nic"), None)
    if adapter is None:
        adapter = Element("nic", {})
        element.children.append(adapter)
    said = _told(nic)
    if not said and nic.device is not None:
        said = {"name": nic.device}
        if nic.index is not None:
            said["dev"] = str(nic.index)
        port = nic.name.rpartition("/")[2]
        if port != nic.name and port.isdecimal():
            said["port"] = port
        if nic.bandwidth is not None:
            said["speed"] = str(round(nic.bandwidth * 8 / 1e6))
    adapter.children.append(Element("net", said))


def _cpu_attributes(node: NumaNode, host: Host) -> dict[str, str]:
    """Return the attributes of a <cpu>."""
    said = {key: text for key, text in host.attributes if key == "host_hash"}
    if node.attributes:
        return said | dict(node.attributes)
    said["numaid"] = str(-1 if node.index is None else node.index)
    if node.cpus:
        bits = sum(1 << cpu for cpu in node.cpus)
        words = []
        while bits:
            words.append(f"{bits & 0xFFFFFFFF:08x}")
            bits >>= 32
        said["affinity"] = ",".join(reversed(words))
    return said
