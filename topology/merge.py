"""The topologies of several hosts as one."""

from collections.abc import Iterable
from dataclasses import replace

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import Topology

__all__ = ["merge"]


def merge(parts: Iterable[Topology]) -> Topology:
    """Return the topologies of different hosts as one, names with their host in front.

    Switches stay apart, each with the part it came with: two hosts behind a switch of the same
    hidden bus id need not share it.

    Parameters
    ----------
    parts : iterable of Topology
        One of each host, or of each group of hosts; the first host of each names what is in it.

    Raises
    ------
    ArgumentValueError
        A part is without a host, or two have a host of the same name.
    """
    named = [_named(part) for part in parts]
    return Topology(
        tuple(host for part in named for host in part.hosts),
        tuple(node for part in named for node in part.numa_nodes),
        tuple(switch for part in named for switch in part.switches),
        tuple(gpu for part in named for gpu in part.gpus),
        tuple(nic for part in named for nic in part.nics),
        tuple(link for part in named for link in part.links),
        tuple(entry for part in named for entry in part.unknown),
        tuple(note for part in named for note in part.notes),
    )


def _named(part: Topology) -> Topology:
    """Return a topology whose names, those of its hosts apart, begin with its first host's."""
    if not part.hosts:
        raise ArgumentValueError("a topology without a host cannot be merged with others")
    hosts = {host.name for host in part.hosts}
    first = part.hosts[0].name

    def name(old: str) -> str:
        return old if old in hosts else f"{first}:{old}"

    def parent(old: str | None) -> str | None:
        return None if old is None else name(old)

    def near(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(name, old))

    return Topology(
        part.hosts,
        tuple(replace(node, name=name(node.name)) for node in part.numa_nodes),
        tuple(replace(s, name=name(s.name), parent=parent(s.parent)) for s in part.switches),
        tuple(
            replace(gpu, name=name(gpu.name), parent=parent(gpu.parent), numa=near(gpu.numa))
            for gpu in part.gpus
        ),
        tuple(
            replace(nic, name=name(nic.name), parent=parent(nic.parent), numa=near(nic.numa))
            for nic in part.nics
        ),
        tuple(replace(link, a=name(link.a), b=name(link.b)) for link in part.links),
        tuple(replace(entry, name=name(entry.name)) for entry in part.unknown),
        tuple(f"{first}: {note}" for note in part.notes),
    )
