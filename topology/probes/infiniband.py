"""The ports of InfiniBand and RoCE adapters, as /sys/class/infiniband shows them.

A port can be used when its state is ACTIVE and its physical state LinkUp, and not otherwise: a port
that lost its link keeps old lids and prints a rate all the same.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from pycomm.topology.graph import Attributes, Host, LinkKind, Nic, State, Topology
from pycomm.topology.health import LIMITS
from pycomm.topology.probes import sysfs
from pycomm.topology.probes.sysfs import Reading
from pycomm.topology.samples import Findings, Sample

__all__ = ["probe_infiniband"]

_FABRICS = {"infiniband": LinkKind.IB, "ethernet": LinkKind.ROCE}
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_PHYSICAL = (
    "", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp",
    "LinkErrorRecovery", "Phy Test",
)  # fmt: skip
_HINTS = {
    "Sleep": "the port is asleep",
    "Polling": "the port looks for a peer; cable and peer should be looked at",
    "Disabled": "the port was disabled",
    "PortConfigurationTraining": "the link is being trained, or cannot be",
    "LinkErrorRecovery": "the link is recovering from errors",
    "Phy Test": "the port is being tested",
}

#: What grows when a link damages or loses packets. Left out: VL15_dropped and the constraint and
#: relay errors are about management and addressing, port_xmit_discards and port_xmit_wait grow
#: under congestion alone.
_LINK_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
#: The same as the adapter's transport sees it: packets that had to be sent again, or came damaged.
#: Left out: out_of_sequence grows wherever the fabric routes adaptively, rnr_nak_retry_err with
#: slow receivers, and the counts of completions with errors with programs that end.
_TRANSPORT_ERRORS = ("local_ack_timeout_err", "packet_seq_err", "rx_icrc_encapsulated")


@dataclass(slots=True)
class _Port:
    """One port, and what is compared with others of its kind."""

    nic: Nic
    counters: tuple[tuple[str, int], ...] = ()
    kind: tuple[str, str] | None = None
    lanes: int | None = None


def probe_infiniband(host: str, now: float, root: Path = Path("/sys")) -> Findings:
    """Return the ports of all adapters, each as a NIC, and how they are.

    Parameters
    ----------
    host : str
        The name of this host.
    now : float
        The time of the samples, in seconds on a monotonic clock.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    Findings
        Without NICs if this host has no such adapter. An adapter of which no port can be seen is
        one NIC whose state is unknown. RDMA in software is a virtual one, without a sample.
    """
    base = root / "class" / "infiniband"
    names, notes = sysfs.folders(base)
    ports = [port for name in names for port in _ports(base / name, host, notes)]
    _compare_lanes(ports)
    return Findings(
        Topology(hosts=(Host(host),), nics=tuple(port.nic for port in ports), notes=tuple(notes)),
        tuple(_sample(port, now) for port in ports if not port.nic.virtual),
    )


def _sample(port: _Port, now: float) -> Sample:
    """Return how a port is."""
    nic = port.nic
    return Sample(nic.name, "infiniband", now, nic.state, nic.reason, port.counters, nic.bandwidth)


def _ports(folder: Path, host: str, notes: list[str]) -> list[_Port]:
    """Return the ports of one adapter."""
    device = folder.name
    target = sysfs.link_target(folder) or ""
    bus_id = sysfs.bus_id_in(target) or sysfs.bus_id_in(sysfs.link_target(folder / "device") or "")
    readings = ((name, sysfs.read(folder / name).text) for name in ("hca_type", "board_id"))
    said: Attributes = tuple((name, text) for name, text in readings if text)
    plain = Nic(
        sysfs.free_name(device, host),
        host,
        device=device,
        bus_id=bus_id,
        # RDMA in software is no adapter: it goes through a NIC that is counted already.
        virtual="/devices/virtual/" in target,
        attributes=said,
    )
    numbers, unread = sysfs.folders(folder / "ports")
    numbers = [number for number in numbers if number.isdigit()]
    if not numbers:
        why = unread[0] if unread else f"{folder}/ports shows no port"
        return [_Port(replace(plain, reason=why))]
    found = []
    for number in numbers:
        name = f"{device}/{number}" if len(numbers) > 1 else device
        nic = replace(plain, name=sysfs.free_name(name, host))
        found.append(_port(folder / "ports" / number, nic, notes))
    return found


def _port(folder: Path, nic: Nic, notes: list[str]) -> _Port:
    """Return one port."""
    layer = sysfs.read(folder / "link_layer").text or ""
    fabric = _FABRICS.get(layer.casefold())
    physical = sysfs.read(folder / "phys_state")
    state, reason = _judge(sysfs.read(folder / "state"), physical, fabric)
    rate = sysfs.read(folder / "rate").text
    bandwidth, lanes = sysfs.port_rate(rate)
    if _word(physical, _PHYSICAL) not in (None, "LinkUp"):
        bandwidth = lanes = None  # without a link the rate is one that the driver makes up
    said = dict(nic.attributes)
    kind = None
    if fabric is LinkKind.IB and "hca_type" in said:
        kind = (said["hca_type"], said.get("board_id", ""))
    plain, plain_notes = sysfs.read_counters(
        (folder / "counters", folder / "counters_ext"), _LINK_ERRORS, LIMITS
    )
    transport, transport_notes = sysfs.read_counters((folder / "hw_counters",), _TRANSPORT_ERRORS)
    notes += plain_notes + transport_notes
    nic = replace(nic, fabric=fabric, bandwidth=bandwidth, state=state, reason=reason)
    return _Port(nic, plain + transport, kind, lanes)


def _judge(state: Reading, physical: Reading, fabric: LinkKind | None) -> tuple[State, str]:
    """Return the state of a port, and why."""
    logical, link = _word(state, _STATES), _word(physical, _PHYSICAL)
    if logical is None or logical == "NOP":
        odd = "" if state.text is None else ", which tells nothing"
        return State.UNKNOWN, state.reason + odd
    if logical == "ACTIVE" and link == "LinkUp":
        return State.UP, ""
    if logical == "ACTIVE" and link is None:
        odd = "" if physical.text is None else ", which is not a physical state"
        return State.UNKNOWN, physical.reason + odd
    said = state.reason
    if link is not None:
        said += f", phys_state {sysfs.quoted(physical.text or '')}"
    if logical in ("INIT", "ARMED") and link in (None, "LinkUp"):
        if fabric is not LinkKind.IB:
            return State.DOWN, f"{said}: the port is not set up yet"
        lid = sysfs.integer(sysfs.read(state.path.parent / "sm_lid").text)
        seen = " (sm_lid is 0)" if lid == 0 else ""
        return State.DOWN, f"{said}: no subnet manager has set up the port yet{seen}"
    hint = _HINTS.get(link or "", "")
    if link == "Disabled" and fabric is not LinkKind.IB:
        hint = "no link; cable and peer should be looked at"  # so drivers of Ethernet say it
    return State.DOWN, f"{said}: {hint}" if hint else said


def _word(reading: Reading, words: tuple[str, ...]) -> str | None:
    """Return which of `words` a file says, or None if it says none, or contradicts itself.

    The files say `4: ACTIVE`, number and word. Where both are there, both must be right.
    """
    found = re.fullmatch(r"(?:(\d{1,3})\b\s*:?)?\s*(.*)", reading.text or "", re.ASCII | re.DOTALL)
    if not found or not reading.text:
        return None
    number, said = found[1], _letters(found[2])
    named = next((word for word in words if word and _letters(word) == said), None)
    if number is None:
        return named
    counted = words[int(number)] if int(number) < len(words) else ""
    return counted if counted and (named == counted or not said) else None


def _letters(text: str) -> str:
    """Return the letters and digits of a word in lower case: spellings differ in the rest."""
    return "".join(filter(str.isalnum, text.casefold()))


def _compare_lanes(ports: list[_Port]) -> None:
    """Find ports that run on fewer lanes than others of the same adapter type.

    The number in `rate` is no check, since the driver computes it from the lanes. Ethernet is left
    out: its rates are only expressed in lanes, and do not lose any.
    """
    most: dict[tuple[str, str], tuple[int, str]] = {}
    up = [port for port in ports if port.nic.state is State.UP and port.kind and port.lanes]
    for port in up:
        if port.kind and port.lanes and port.lanes > most.get(port.kind, (0, ""))[0]:
            most[port.kind] = port.lanes, port.nic.name
    for port in up:
        lanes, other = most[port.kind] if port.kind else (0, "")
        if port.kind and port.lanes and port.lanes < lanes:
            why = (
                f"runs at {port.lanes}X where {other}, also {port.kind[0]}, runs at {lanes}X: "
                "lanes of its link are lost; cable and connectors should be looked at"
            )
            port.nic = replace(port.nic, state=State.DEGRADED, reason=why)
