"""The NVLinks of GPUs by NVML: which are up, where they end, and whether any are missing.

How many a GPU should have nobody says, so it is compared with GPUs of the same product on the
host. None anywhere is no fault; none on one, where the others have some, is one, unless it is a
card that takes a bridge. Where all links of all GPUs are down on boards on which they are wired,
it is a fault if there is a fabric to be seen, and unknown if there is not: a virtual machine may
have been given one GPU of eight.
"""

from itertools import combinations

from pycomm.topology.graph import Link, LinkKind, State, Switch
from pycomm.topology.nvlink import built_in, listed
from pycomm.topology.probes.nvml_calls import NVML_ERROR_INVALID_ARGUMENT, Port, Refusal, Seen

__all__ = ["Joined", "ask_ports", "bus_of", "join", "judge_ports"]

NVML_NVLINK_MAX_LINKS = 36
NVML_NVLINK_STATE_INACTIVE = 0
NVML_NVLINK_STATE_ACTIVE = 1
NVML_NVLINK_STATE_SLEEP = 2
NVML_NVLINK_DEVICE_TYPE_GPU = 0
NVML_NVLINK_DEVICE_TYPE_IBMNPU = 1
NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
NVML_NVLINK_ERROR_DL_REPLAY = 0
NVML_NVLINK_ERROR_DL_RECOVERY = 1
NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
NVML_NVLINK_ERROR_DL_CRC_DATA = 3
NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY = 161
NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY = 162
NVML_FI_DEV_NVLINK_ERROR_DL_CRC = 163
NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS = 208
NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 214

_COUNTERS = (
    (NVML_NVLINK_ERROR_DL_REPLAY, "replay"),
    (NVML_NVLINK_ERROR_DL_RECOVERY, "recovery"),
    (NVML_NVLINK_ERROR_DL_CRC_FLIT, "crc_flit"),
    (NVML_NVLINK_ERROR_DL_CRC_DATA, "crc_data"),
)
#: The same as fields, which newer GPUs have instead.
_FIELDS = (
    (NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, "replay"),
    (NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, "recovery"),
    (NVML_FI_DEV_NVLINK_ERROR_DL_CRC, "crc"),
    (NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, "receive_errors"),
    (NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, "failed_recovery"),
)
#: Which member of the union a field's value is, by the number of its type.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
#: Bytes per second of one link in one direction, by the NVLink version that NVML tells.
_RATES = {1: 20e9, 2: 25.78125e9, 3: 25.78125e9, 4: 25e9, 6: 26.5625e9, 7: 53.125e9}
#: MB/s no NVLink is below or above.
_SLOWEST, _FASTEST = 1_000, 1_000_000


def bus_of(text: object) -> str | None:
    """Return a PCI bus id as the kernel writes it, or None for none: ``0000:1b:00.0``."""
    said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    domain, _, rest = said.strip().lower().partition(":")
    try:
        bus_id = f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return None
    return bus_id if rest.strip("0:.") or int(domain, 16) else None


def ask_ports(seen: Seen) -> None:
    """Take the NVLinks of a GPU, their ends, their rate and their counts of errors."""
    device = seen.device
    if device.lost is not None:
        return
    for number in range(NVML_NVLINK_MAX_LINKS):
        state = device.nvml.ask("nvmlDeviceGetNvLinkState", device.handle, number)
        if isinstance(state, Refusal):
            if state.code == NVML_ERROR_INVALID_ARGUMENT:
                break  # the GPU has no link of this number
            if state.absent:
                if not number and "not in this version" in state.text:
                    seen.blind = str(state)
                break
            device.blame(state)
            if state.lost:
                return
            seen.ports.append(Port(number, None))
            continue
        known = state in (
            NVML_NVLINK_STATE_INACTIVE, NVML_NVLINK_STATE_ACTIVE, NVML_NVLINK_STATE_SLEEP,
        )  # fmt: skip
        up = state != NVML_NVLINK_STATE_INACTIVE
        port = Port(number, up if known else None)
        if not known:
            device.failed.append(Refusal("nvmlDeviceGetNvLinkState", None, f"state {state}"))
        elif up:
            _ask_end(seen, port)
        seen.ports.append(port)
    if seen.ports and all(port.up is None for port in seen.ports):
        seen.blind = "NVML tells of none of its NVLinks whether it is up"
    if seen.up:
        seen.rate = _rate(seen, seen.up[0].number)
    if seen.ports:
        _count_errors(seen)


def _ask_end(seen: Seen, port: Port) -> None:
    """Take where a link ends that is up; one that is down ends nowhere, and NVML says type 255."""
    kind = seen.device.ask("nvmlDeviceGetNvLinkRemoteDeviceType", port.number)
    port.kind = None if isinstance(kind, Refusal) else int(kind)
    info = seen.device.ask("nvmlDeviceGetNvLinkRemotePciInfo", port.number)
    port.bus = None if isinstance(info, Refusal) else bus_of(info.busId)


def _rate(seen: Seen, number: int) -> float | None:
    """Return the rate of one NVLink: as the GPU tells it, or else by its version."""
    told = _fields(seen, [NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if told and told[0] is not None and _SLOWEST <= told[0] <= _FASTEST:
        return float(told[0]) * 1e6
    version = seen.device.ask("nvmlDeviceGetNvLinkVersion", number)
    return _RATES.get(version) if isinstance(version, int) else None


def _fields(seen: Seen, wanted: list[int] | list[tuple[int, int]]) -> list[int | None]:
    """Return the values of fields, None for those the GPU does not have."""
    answer = seen.device.ask("nvmlDeviceGetFieldValues", wanted)
    if isinstance(answer, Refusal):
        return []
    values: list[int | None] = []
    for field in answer:
        there = field.nvmlReturn == 0 and 0 <= field.valueType < len(_MEMBERS)
        values.append(int(getattr(field.value, _MEMBERS[field.valueType])) if there else None)
    return values


def _count_errors(seen: Seen) -> None:
    """Take the counts of errors of all links: each kind in all, and by link where there are any."""
    kinds = list(_COUNTERS)
    for port in seen.ports:
        for kind, name in tuple(kinds):
            count = seen.device.ask("nvmlDeviceGetNvLinkErrorCounter", port.number, kind)
            if not isinstance(count, Refusal):
                _count(seen, port.number, name, int(count))
            elif count.absent:
                kinds.remove((kind, name))
    if kinds:
        return
    for port in seen.ports:
        told = _fields(seen, [(field, port.number) for field, _ in _FIELDS])
        for (_, name), count in zip(_FIELDS, told, strict=False):
            if count is not None:
                _count(seen, port.number, name, count)


def _count(seen: Seen, number: int, name: str, count: int) -> None:
    """Add a count of one link."""
    total = f"nvlink.{name}"
    seen.counters[total] = seen.counters.get(total, 0) + count
    if count:
        seen.counters[f"nvlink{number}.{name}"] = count


def judge_ports(gpus: list[Seen]) -> None:
    """Say of each GPU whether NVLinks are missing, from what it has and from its equals."""
    asked = [seen for seen in gpus if not seen.blind and not seen.device.lost]
    fabric = any(seen.fabric for seen in gpus)
    fabric = fabric or any(_switched(seen) for seen in asked)
    for seen in asked:
        # Without a name there is nobody to compare with.
        same = [other for other in asked if other.product == seen.product and seen.product]
        fixed = built_in(seen.product) or any(map(_switched, [seen, *same]))
        _judge(seen, max(same, key=lambda one: len(one.up), default=seen), fixed, fabric)


def _switched(seen: Seen) -> bool:
    """Return whether a GPU reaches an NVSwitch."""
    return any(port.kind == NVML_NVLINK_DEVICE_TYPE_SWITCH for port in seen.up)


def _judge(seen: Seen, best: Seen, fixed: bool, fabric: bool) -> None:
    """Say of one GPU whether NVLinks are missing; `best` is the one of its kind with most."""
    total, up, most = len(seen.ports), len(seen.up), len(best.up)
    down = [port.number for port in seen.ports if port.up is False]
    vague = total - up - len(down)
    if vague and not down:
        return  # the refusal itself is a reason already
    if up and down:
        why = f"{up} of {total} NVLinks are up: {listed(down)} down"
        seen.faults.append((State.DEGRADED, why))
    elif up < most and (fixed or up):
        had = f"all of its {total} NVLinks are down" if total else "it has no NVLink"
        had = f"{up} {'NVLink is' if up == 1 else 'NVLinks are'} up" if up else had
        seen.faults.append((State.DEGRADED, f"{had}, while {best.name} has {most} that are up"))
    elif not up and total and fixed:
        every = f"all of its {total} NVLinks are down, and those of all GPUs of its kind"
        if fabric:
            seen.faults.append((State.DEGRADED, f"{every}, although there is a fabric"))
        else:
            seen.blind = f"{every}: nothing tells whether they are joined here"
            seen.faults.append((State.UNKNOWN, seen.blind))
    elif not up:
        seen.remark = "no NVLink" + (": no bridge" if total else "")


class Joined:
    """The links between GPUs, and to the NVSwitches among them, of one host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.switches: dict[str, Switch] = {}
        self.to_switches: list[Link] = []
        #: By the two GPUs that NVLinks join; None where that is through a switch.
        self.pairs: dict[frozenset[str], Link | None] = {}
        self.notes: list[str] = []

    @property
    def links(self) -> list[Link]:
        """All NVLinks."""
        return [link for link in self.pairs.values() if link is not None] + self.to_switches


def join(host: str, gpus: list[Seen]) -> Joined:
    """Return where the NVLinks of GPUs lead; ends that are not on this host are noted."""
    joined = Joined(host)
    there = [seen for seen in gpus if not seen.device.lost]
    by_bus = {seen.bus: seen for seen in gpus if seen.bus}
    switches = {port.bus for seen in there for port in seen.up if _to_switch(port)}
    counts: dict[tuple[str, str], int] = {}
    behind: dict[str, list[str]] = {}
    for seen in there:
        ends: dict[str | None, int] = {}
        outside: dict[str, int] = {}
        for port in seen.up:
            peer = by_bus.get(port.bus) if port.bus else None
            if peer is not None and peer is not seen:
                counts[seen.name, peer.name] = counts.get((seen.name, peer.name), 0) + 1
            elif _to_switch(port) or (port.bus and port.bus in switches):
                ends[port.bus] = ends.get(port.bus, 0) + 1
            else:
                what = _outside(seen, port)
                outside[what] = outside.get(what, 0) + 1
        joined.notes += [
            f"{seen.name}: {n} of its NVLinks end at {to}" for to, n in outside.items()
        ]
        _judge_ends(seen, set(ends), outside, named=bool(switches - {None}))
        for bus, count in ends.items():
            name = f"nvswitch {bus}" if bus else "nvswitch"
            joined.switches[name] = Switch(name, host, "nvswitch", bus)
            rate = seen.rate * count if seen.rate else None
            link = Link(seen.name, name, LinkKind.NVSWITCH, rate, state=State.UP, count=count)
            joined.to_switches.append(link)
            behind.setdefault(name, []).append(seen.name)
    for names in behind.values():
        joined.pairs.update({frozenset(pair): None for pair in combinations(names, 2)})
    seen_by = {seen.name: seen for seen in gpus}
    for a, b in counts:
        if frozenset((a, b)) not in joined.pairs:
            joined.pairs[frozenset((a, b))] = _direct(seen_by[a], seen_by[b], counts)
    return joined


def _to_switch(port: Port) -> bool:
    """Return whether a link ends at an NVSwitch."""
    return port.kind == NVML_NVLINK_DEVICE_TYPE_SWITCH


def _judge_ends(
    seen: Seen, switches: set[str | None], outside: dict[str, int], named: bool
) -> None:
    """Say that NVLinks are unknown of a GPU of which nobody can tell whom they join it with."""
    if seen.up and sum(outside.values()) == len(seen.up) and _NOWHERE in outside:
        seen.blind = seen.blind or "NVML does not tell where its NVLinks end"
    elif switches == {None} and named:
        seen.blind = seen.blind or "NVML does not tell at which of the NVSwitches its NVLinks end"
    else:
        return
    seen.faults.append((State.UNKNOWN, seen.blind))


_NOWHERE = "what NVML does not tell"


def _outside(seen: Seen, port: Port) -> str:
    """Return in words where a link leads that leads to nothing known here."""
    if port.bus is not None and port.bus == seen.bus:
        return "the GPU itself"
    if port.kind == NVML_NVLINK_DEVICE_TYPE_IBMNPU:
        return "the CPU"
    if port.kind == NVML_NVLINK_DEVICE_TYPE_GPU and port.bus:
        return f"{port.bus}, a GPU that is not on this host, or hidden"
    return f"{port.bus}, which is no GPU of this host" if port.bus else _NOWHERE


def _direct(a: Seen, b: Seen, counts: dict[tuple[str, str], int]) -> Link:
    """Return the link between two GPUs; where they disagree the smaller promise holds."""
    there, back = counts.get((a.name, b.name), 0), counts.get((b.name, a.name), 0)
    # A GPU that tells nothing of its links, or not of all, contradicts nobody.
    silent = [
        seen.name
        for seen in (a, b)
        if seen.device.lost or seen.blind or any(port.up is None for port in seen.ports)
    ]
    count, state, reason = max(there, back), State.UP, ""
    if silent:
        state, reason = State.UNKNOWN, f"{' and '.join(silent)} cannot tell"
    elif there != back:
        count, state = min(there, back), State.DEGRADED if there and back else State.DOWN
        reason = f"{a.name} counts {there} links to {b.name}, which counts {back} back"
    rate = min((seen.rate for seen in (a, b) if seen.rate), default=None)
    bandwidth = rate * count if rate and count else None
    return Link(a.name, b.name, LinkKind.NVLINK, bandwidth, None, state, reason, count)
