"""Topologies that are made up: the shapes that a text and a picture have to cope with."""

from dataclasses import replace
from itertools import combinations

from pycomm.topology.graph import (
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
from pycomm.topology.merge import merge
from pycomm.topology.smi import read_smi
from pycomm.topology.snapshot import Decision, MeasuredPair, Place, Snapshot

GIGABIT = 1e9 / 8


def nvswitch_node(gpus: int = 8, host: str = "node1", state: State = State.UP) -> Topology:
    """A node of two NUMA nodes: GPUs at four NVSwitches, each below a PCI switch with its NIC."""
    numa = tuple(NumaNode(f"numa{n}", host, n, tuple(range(n * 56, n * 56 + 56))) for n in (0, 1))
    near = [numa[n * 2 // gpus].name for n in range(gpus)]
    switches = [Switch(f"nvswitch {n}", host, "nvswitch") for n in range(4)]
    switches += [Switch(f"bridge {n}", host, parent=near[n]) for n in range(gpus)]
    links = []
    for n in range(gpus):
        links.append(Link(f"bridge {n}", near[n], LinkKind.PHB, 63e9, state=state))
        links += [
            Link(end, f"bridge {n}", LinkKind.PIX, 63e9, state=state, count=16)
            for end in (f"gpu{n}", f"mlx5_{n}")
        ]
        links += [
            Link(f"gpu{n}", f"nvswitch {s}", LinkKind.NVSWITCH, 26.6e9 * c, state=state, count=c)
            for s, c in enumerate((4, 5, 5, 4))
        ]
    return Topology(
        hosts=(Host(host),),
        numa_nodes=numa,
        switches=tuple(switches),
        gpus=tuple(
            Gpu(f"gpu{n}", host, n, f"0000:{n + 16:02x}:00.0", (near[n],), f"bridge {n}", state)
            for n in range(gpus)
        ),
        nics=tuple(
            Nic(
                f"mlx5_{n}", host, n, f"mlx5_{n}", f"0000:{n + 64:02x}:00.0", (near[n],),
                f"bridge {n}", LinkKind.IB, 50e9, state=state,
            )
            for n in range(gpus)
        ),
        links=tuple(links),
    )  # fmt: skip


def ill_node() -> Topology:
    """A node with one of each state: a GPU degraded, one down, a NIC down, NVLinks lost."""
    whole = nvswitch_node()
    gpus, nics, links = list(whole.gpus), list(whole.nics), list(whole.links)
    gpus[2] = replace(gpus[2], state=State.DEGRADED, reason="2 of 18 NVLinks are down")
    gpus[5] = replace(gpus[5], state=State.DOWN, reason="fell off the bus (Xid 79)")
    gpus[7] = replace(gpus[7], state=State.UNKNOWN, reason="nvml: no permission")
    nics[3] = replace(nics[3], state=State.DOWN, reason="port is Down, physically Polling")
    for at, link in enumerate(links):
        if link.a == "gpu2" and link.b == "nvswitch 1":
            links[at] = replace(link, state=State.DOWN, reason="NVML says inactive")
        if link.a == "gpu5":
            links[at] = replace(link, state=State.DOWN, reason="fell off the bus (Xid 79)")
        if "mlx5_6" in (link.a, link.b):
            links[at] = replace(link, state=State.DEGRADED, reason="8 lanes of 16")
    return replace(
        whole,
        gpus=tuple(gpus),
        nics=(*nics, Nic("docker0", "node1", virtual=True, state=State.DOWN)),
        links=tuple(links),
        unknown=(Unknown("numa", "gpu7", "the machine hides it"),),
        notes=("nvml: gpu7: no permission",),
    )


def cube_mesh() -> Topology:
    """Eight V100 of one node, joined as a cube mesh; from a matrix with rates put in."""
    names = [f"GPU{n}" for n in range(8)]
    twice = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
    once = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}

    def cell(a: int, b: int) -> str:
        pair = min(a, b), max(a, b)
        if a == b:
            return "X"
        return "NV2" if pair in twice else "NV1" if pair in once else "SYS"

    rows = ["\t".join(["", *names, "NIC0", "CPU Affinity", "NUMA Affinity"])]
    for a, name in enumerate(names):
        cpus, near = (("0-19", "NODE"), ("20-39", "SYS"))[a // 4]
        cells = [cell(a, b) for b in range(8)]
        rows.append("\t".join([name, *cells, near, cpus, str(a // 4)]))
    topology = read_smi("\n".join(rows), host="dgx1")
    links = tuple(
        replace(link, bandwidth=25e9 * link.count, state=State.UP) if link.count else link
        for link in topology.links
    )
    return replace(topology, links=links)


def one_gpu() -> Topology:
    return read_smi("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\tX\t0-7\t0\n", host="desktop")


def sixteen_gpus() -> Topology:
    return nvswitch_node(16, "dgx2", State.UNKNOWN)


def bare_host(name: str) -> Topology:
    """A host with NICs only."""
    return Topology(
        hosts=(Host(name),),
        numa_nodes=(NumaNode("numa0", name, 0, tuple(range(16))),),
        nics=(
            Nic("eth0", name, device="eth0", bus_id="0000:01:00.0", numa=("numa0",),
                parent="numa0", fabric=LinkKind.TCP, bandwidth=GIGABIT, state=State.UP),
        ),
    )  # fmt: skip


def bare_hosts() -> Topology:
    return merge([bare_host(name) for name in ("alpha", "beta")])


def three_hosts() -> Snapshot:
    """Three hosts of two ranks each, with measured links: one up, one degraded, one down."""
    names = ("node1", "node2", "node3")
    topology = merge([bare_host(name) for name in names])
    states = {
        ("node1", "node2"): (117e6, 45e-6, State.UP, ""),
        ("node1", "node3"): (31e6, 48e-6, State.DEGRADED, "measured 31 MB/s, 26% of the best"),
        ("node2", "node3"): (None, None, State.DOWN, "ranks 4, 5 do not answer"),
    }
    links = tuple(
        Link(a, b, LinkKind.TCP, rate, latency, state, reason)
        for (a, b), (rate, latency, state, reason) in states.items()
    )
    pairs = []
    for a, b in combinations(range(6), 2):
        rate, latency, _, _ = states.get((names[a // 2], names[b // 2]), (6.2e9, 0.9e-6, None, ""))
        if rate is not None:
            pairs.append(MeasuredPair(a, b, latency, rate))
    hosts = ((0, 1), (2, 3), (4, 5))
    return Snapshot(
        epoch=2,
        topology=replace(topology, links=links),
        places=tuple(Place(rank, names[rank // 2]) for rank in range(6)),
        pairs=tuple(pairs),
        decisions=(
            Decision("host", hosts, "3 hosts, told apart by boot id"),
            Decision("nvlink", None, "no rank works on a GPU that is known"),
        ),
        order=hosts,
        roads_reason="the ranks of each host reach others alike (117 MB/s)",
    )


def gpu_snapshot() -> Snapshot:
    """Two nodes with eight GPUs each, a rank on every GPU."""
    parts = [nvswitch_node(host=name) for name in ("node1", "node2")]
    topology = merge(parts)
    link = Link("node1", "node2", LinkKind.IB, 47e9, 2.1e-6, State.UP)
    places = tuple(
        Place(rank, f"node{rank // 8 + 1}", f"node{rank // 8 + 1}:gpu{rank % 8}")
        for rank in range(16)
    )
    return Snapshot(1, replace(topology, links=(*topology.links, link)), places)


SHAPES = {
    "nvswitch_node": nvswitch_node,
    "ill_node": ill_node,
    "cube_mesh": cube_mesh,
    "one_gpu": one_gpu,
    "sixteen_gpus": sixteen_gpus,
    "bare_hosts": bare_hosts,
    "three_hosts": three_hosts,
    "gpu_snapshot": gpu_snapshot,
    "nothing": Topology,
}
