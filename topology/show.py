"""A topology or snapshot as text for people, and as a dict for JSON; pure."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pycomm.topology.graph import Gpu, Link, LinkKind, Nic, State, Topology
from pycomm.topology.groups import (
    direct_pairs,
    host_groups,
    nearest_nics,
    numa_groups,
    nvlink_islands,
    rails,
)
from pycomm.topology.matrix import (
    Bundle,
    bundles,
    describe_parts,
    hosts_of,
    matrix,
    number_of,
)
from pycomm.topology.snapshot import Groups, Snapshot
from pycomm.units import format_rate, format_seconds

__all__ = ["changes", "snapshot_text", "to_dict", "to_text"]

_WIDTH = 110
#: More ranks than that make a table that nobody can read.
_MOST_RANKS = 32

Names = tuple[tuple[str, ...], ...] | None


def to_text(topology: Topology, parts: Sequence[Topology] | None = None) -> str:
    """Return a topology for people: a matrix a host, groups, near NICs, health, bandwidth.

    Parameters
    ----------
    topology : Topology
        What is known.
    parts : sequence of Topology, optional
        Its hosts one by one, as `host_part` makes them, where somebody has them already.
    """
    if parts is None:
        parts = hosts_of(topology)
    lines: list[str] = []
    for host, part in zip(topology.hosts, parts, strict=True):
        lines += [f"{host.name}: {describe_parts(part)}", ""]
        lines += [*table, ""] if (table := matrix(part)) else []
    if not topology.hosts:
        lines += ["nothing is known", ""]
    sections = {
        "Groups": _groups_lines(topology),
        "Nearest NIC": _nearest_lines(topology),
        "Health": _health_lines(topology),
        "Expected bandwidth, in each direction": _bandwidth_lines(topology, parts),
        "Unknown": _unknown_lines(topology),
        "Notes": [_wrapped(f"- {note}") for note in topology.notes],
    }
    for title, body in sections.items():
        if body:
            lines += [title, *body, ""]
    return "\n".join(lines).rstrip("\n")


def _wrapped(text: str, indent: int = 4) -> str:
    """Return a line of a section, broken where it is long, but not inside of ``a - b``."""
    broken = textwrap.fill(
        text.replace(" - ", "\0-\0"),
        _WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return broken.replace("\0", " ")


def _braces(groups: Iterable[Iterable[object]]) -> str:
    return " ".join("{" + ", ".join(map(str, group)) + "}" for group in groups)


# ---------------------------------------------------------------------------------------- groups


def _groups(topology: Topology) -> dict[str, tuple[Names, str]]:
    """Return the groups of each kind, and a reason or remark."""
    no_gpu = "no GPU is known"
    nvlink, numa, rail = nvlink_islands(topology), numa_groups(topology), rails(topology)
    pairs = direct_pairs(topology)
    said = {None: "", True: "every pair is joined", False: "not every pair is joined"}[pairs]
    if nvlink is None:
        said = no_gpu if not topology.gpus else _blind(topology, "nvlink") or (
            f"{_blind(topology, 'row')}; what is left does not decide"
        )  # fmt: skip
    elif not any(len(island) > 1 for island in nvlink):
        said = "no GPU is joined with another"
    why = ""
    if numa is None:
        why = no_gpu if not topology.gpus else _blind(topology, "numa") or "no NUMA node is known"
    counts = {host.name: 0 for host in topology.hosts}
    for nic in topology.nics:
        counts[nic.host] += not nic.virtual and nic.state is not State.DOWN
    told = ", ".join(f"{host} {count}" for host, count in counts.items())
    uneven = "" if rail is not None else f"hosts have different numbers of NICs: {told or 'none'}"
    return {
        "nvlink": (nvlink, said),
        "host": (host_groups(topology), "" if topology.gpus else no_gpu),
        "numa": (numa, why),
        "rail": (rail, "no NIC is known" if rail == () else uneven),
    }


def _blind(topology: Topology, what: str) -> str:
    """Return of which devices something is unknown, and why."""
    return "; ".join(
        f"{', '.join(names)}: {reason}" for names, reason in _by_reason(topology, what)
    )


def _by_reason(topology: Topology, what: str) -> list[tuple[list[str], str]]:
    found: dict[str, list[str]] = {}
    for name, reason in topology.unknown_names(what).items():
        found.setdefault(reason, []).append(name)
    return [(names, reason) for reason, names in found.items()]


def _groups_lines(topology: Topology) -> list[str]:
    lines = []
    for name, (groups, why) in _groups(topology).items():
        title = f"{name + ':':<8}"
        if groups is None:
            lines.append(_wrapped(f"{title} unknown: {why}", 11))
        else:
            told = _braces(groups) or "none"
            lines.append(_wrapped(f"{title} {told}{', ' if why else ''}{why}", 11))
    return lines


def _nearest_lines(topology: Topology) -> list[str]:
    lines = []
    blind = topology.unknown_names("row")
    for name, nearest in nearest_nics(topology).items():
        if nearest is None:
            said = f"unknown: {blind.get(name) or 'nobody knows its place on PCI'}"
        elif nearest.kind is None:
            said = nearest.reason or "none"
        else:
            # The kind behind the names: a line must never look like a row of the matrix.
            far = "" if nearest.near else ", of another NUMA node"
            reason = f"; {nearest.reason}" if nearest.reason else ""
            said = f"{', '.join(nearest.nics)} ({nearest.kind.name}{far}{reason})"
        lines.append(_wrapped(f"{name}: {said}"))
    return lines


# ---------------------------------------------------------------------------------------- health


def _things(topology: Topology) -> list[tuple[str, str, State, str]]:
    """Return what has a state: what it is, its name, the state, and why."""
    found = [("GPU", gpu.name, gpu.state, gpu.reason) for gpu in topology.gpus]
    found += [("NIC", one.name, one.state, one.reason) for one in topology.nics if not one.virtual]
    found += [("link", _link_name(link), link.state, link.reason) for link in topology.links]
    return found


def _link_name(link: Link) -> str:
    return f"{link.a} - {link.b} ({link.kind})"


def _health_lines(topology: Topology) -> list[str]:
    """Return what is not up, with its reason; how much is up; of how much nothing is said."""
    silent: dict[State, dict[str, int]] = {}
    alike: dict[tuple[State, str, str], list[str]] = {}
    for what, name, state, reason in _things(topology):
        if state is State.UP or (state is State.UNKNOWN and not reason):
            kinds = silent.setdefault(state, {})
            kinds[what] = kinds.get(what, 0) + 1
        else:
            kind = "link " if what == "link" else ""
            alike.setdefault((state, kind, reason or "no reason given"), []).append(name)
    lines = [
        _wrapped(f"{state:<9} {kind}{', '.join(names)}: {reason}", 12)
        for (state, kind, reason), names in alike.items()
    ]
    for state, kinds in silent.items():
        told = ", ".join(number_of(count, what) for what, count in kinds.items())
        why = "" if state is State.UP else ": nothing is said of their state"
        lines.append(_wrapped(f"{state:<9} {told}{why}", 12))
    return lines


def changes(before: Topology, after: Topology) -> list[str]:
    """Return what is different in a later look: things that came, went, or changed state."""
    old = {(what, name): (state, why) for what, name, state, why in _things(before)}
    new = {(what, name): (state, why) for what, name, state, why in _things(after)}
    lines = []
    for (what, name), (state, why) in new.items():
        was = old.get((what, name))
        reason = f": {why}" if why else ""
        if was is None:
            lines.append(f"{what} {name} is there, {state}{reason}")
        elif was[0] is not state:
            lines.append(f"{what} {name}: {was[0]} -> {state}{reason}")
    lines += [f"{what} {name} is gone" for what, name in old if (what, name) not in new]
    lines += [f"note: {note}" for note in after.notes if note not in before.notes]
    return lines


# ------------------------------------------------------------------------------------- bandwidth


def _bandwidth_lines(topology: Topology, parts: Iterable[Topology]) -> list[str]:
    """Return what links should carry; equal ones in one line, what nobody knows left out."""
    lines: list[str] = []
    for part in parts:
        pairs = bundles(part)
        order = [gpu.name for gpu in part.gpus]
        alike: dict[Bundle, list[frozenset[str]]] = {}
        for pair, bundle in pairs.items():
            alike.setdefault(bundle, []).append(pair)
        for bundle, found in alike.items():
            if bundle.count != 0:
                lines.append(_wrapped(f"{_bundle_rate(bundle)} {_pairs(found, order)}", 15))
    gpus = {gpu.name for gpu in topology.gpus}
    above = {one.name: one.parent for one in topology.devices}
    rows: dict[tuple[float, str], list[str]] = {}
    for link in topology.links:
        if link.bandwidth is None or gpus.issuperset((link.a, link.b)):
            continue
        name, other = link.a, link.b
        if above.get(other) == name:
            name, other = other, name
        if above.get(name) == other and link.kind is not LinkKind.C2C:
            kind = f"{_kind(link)} to what is above it on PCI"
        elif link.kind is LinkKind.NVSWITCH:
            kind = f"{_kind(link)} to {other}"
        else:
            kind, name = _kind(link), f"{name} - {other}"
        rows.setdefault((link.bandwidth, kind), []).append(name)
    for nic in topology.nics:
        if nic.bandwidth is not None and not nic.virtual:
            fabric = "" if nic.fabric is None else f" {nic.fabric.upper()}"
            rows.setdefault((nic.bandwidth, f"NIC{fabric}"), []).append(nic.name)
    for (rate, kind), names in rows.items():
        lines.append(_wrapped(f"{format_rate(rate):<12} {kind}: {', '.join(names)}", 15))
    return lines


def _bundle_rate(bundle: Bundle) -> str:
    rate = "rate unknown" if bundle.bandwidth is None else format_rate(bundle.bandwidth)
    count = "NVLinks" if bundle.count is None else number_of(bundle.count, "NVLink")
    return f"{rate:<12} {count}{' by NVSwitch' * bundle.switched}:"


def _pairs(pairs: Sequence[frozenset[str]], order: Sequence[str]) -> str:
    """Return pairs of GPUs in words; those of which every pair is there as one."""
    names = [name for name in order if any(name in pair for pair in pairs)]
    if len(names) > 2 and len(pairs) == len(names) * (len(names) - 1) // 2:
        return f"any two of {', '.join(names)}"
    ordered = sorted(tuple(sorted(pair, key=order.index)) for pair in pairs)
    return ", ".join("-".join(pair) for pair in ordered)


def _kind(link: Link) -> str:
    count = "" if link.count is None else f" x{link.count}"
    return f"{link.kind.upper()}{count}".replace("_", " ")


def _unknown_lines(topology: Topology) -> list[str]:
    kinds = dict.fromkeys(one.what for one in topology.unknown)
    return [
        _wrapped(f"{what} of {', '.join(names)}: {reason}")
        for what in kinds
        for names, reason in _by_reason(topology, what)
    ]


# -------------------------------------------------------------------------------------- snapshot


def snapshot_text(snapshot: Snapshot) -> str:
    """Return a snapshot for people: ranks, their groups, what was measured, links of hosts."""
    hosts = number_of(len({place.host for place in snapshot.places}), "host")
    ranks = number_of(len(snapshot.places), "rank")
    lines = [f"{ranks} on {hosts}, epoch {snapshot.epoch}, hash {snapshot.hash}", "", "Ranks"]
    for host in dict.fromkeys(place.host for place in snapshot.places):
        told = [
            f"{place.rank}{f' ({place.gpu})' if place.gpu else ''}"
            for place in snapshot.places
            if place.host == host
        ]
        lines.append(_wrapped(f"{host}: {', '.join(told)}"))
    if snapshot.lost:
        lines.append(_wrapped(f"lost: {', '.join(map(str, snapshot.lost))}"))
    lines += ["", "Groups of ranks"]
    wide = max([len(one.name) + 1 for one in snapshot.decisions] + [9])
    for one in snapshot.decisions:
        groups = "unknown" if one.groups is None else _braces(one.groups) or "none"
        lines.append(_wrapped(f"{one.name + ':':<{wide}} {groups}: {one.reason}", wide + 3))
    lines.append(_wrapped(f"{'order:':<{wide}} {_braces(snapshot.order) or 'none'}", wide + 3))
    if snapshot.roads_reason:
        lines.append(_wrapped(f"{'roads:':<{wide}} {snapshot.roads_reason}", wide + 3))
    lines += _measured_lines(snapshot)
    names = {host.name for host in snapshot.topology.hosts}
    between = [link for link in snapshot.topology.links if names.issuperset((link.a, link.b))]
    if between:
        lines += ["", "Between hosts"]
    for link in between:
        known = [] if link.bandwidth is None else [format_rate(link.bandwidth)]
        known += [] if link.latency is None else [format_seconds(link.latency)]
        measured = f" {', '.join(known)}" if known else ""
        reason = f": {link.reason}" if link.reason else ""
        lines.append(_wrapped(f"{link.a} - {link.b} ({link.kind}) {link.state}{measured}{reason}"))
    return "\n".join(lines)


def _measured_lines(snapshot: Snapshot) -> list[str]:
    """Return the tables of what was measured between ranks."""
    if not snapshot.pairs:
        return []
    ranks = [place.rank for place in snapshot.places]
    if len(ranks) > _MOST_RANKS:
        return ["", f"{len(snapshot.pairs)} pairs were measured: see --json"]
    latency = {(pair.a, pair.b): 1e6 * pair.latency for pair in snapshot.pairs}
    rate = {(pair.a, pair.b): pair.bandwidth / 1e9 for pair in snapshot.pairs}
    return [
        *("", "Latency of a message in one direction, µs", *_table(ranks, latency)),
        *("", "Bandwidth in one direction, GB/s", *_table(ranks, rate)),
    ]


def _table(ranks: Sequence[int], values: Mapping[tuple[int, int], float]) -> list[str]:
    """Return a table of ranks by ranks; `-` for a pair that was not measured."""

    def cell(a: int, b: int) -> str:
        value = values.get((min(a, b), max(a, b)))
        return "X" if a == b else "-" if value is None else f"{value:.3g}"

    table = [["rank", *map(str, ranks)]]
    table += [[str(a), *(cell(a, b) for b in ranks)] for a in ranks]
    width = max(len(text) for row in table for text in row[1:])
    return [
        "  " + "  ".join([row[0].rjust(4), *(t.rjust(width) for t in row[1:])]) for row in table
    ]


# ------------------------------------------------------------------------------------------ JSON


def to_dict(shown: Topology | Snapshot) -> dict[str, Any]:
    """Return what `to_text` tells as what `json.dumps` takes, with names as in the topology.

    Unknown groups are None and stand in ``reasons``. Under ``topology`` is the whole as
    `Topology.from_json` reads it.
    """
    topology = shown if isinstance(shown, Topology) else shown.topology
    whole = json.loads(topology.to_json())
    found = _groups(topology)
    nearest = nearest_nics(topology)
    devices: list[Gpu | Nic] = [*topology.gpus, *topology.nics]
    told: dict[str, Any] = {
        "groups": {name: _lists(groups) for name, (groups, _) in found.items()},
        "reasons": {name: why for name, (groups, why) in found.items() if groups is None},
        "direct_pairs": direct_pairs(topology),
        "nearest_nic": {
            name: None
            if one is None
            else {"kind": one.kind, "nics": list(one.nics), "reason": one.reason}
            for name, one in nearest.items()
        },
        "health": {one.name: {"state": one.state, "reason": one.reason} for one in devices},
    }
    told |= {name: whole[name] for name in ("gpus", "nics", "links", "unknown", "notes")}
    if isinstance(shown, Snapshot):
        whole = json.loads(shown.to_json())
        told |= {"epoch": shown.epoch, "hash": shown.hash, "ranks": whole["places"]}
        names = ("pairs", "decisions", "order", "roads", "roads_reason", "lost", "topology")
        return told | {name: whole[name] for name in names}
    return told | {"topology": whole}


def _lists(groups: Names | Groups) -> list[list[Any]] | None:
    return None if groups is None else [list(group) for group in groups]
