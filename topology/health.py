"""From samples over time to a state: quick to see a fault, slow to trust again.

One look says little. A port that comes and goes is up in every second one; a counter of errors says
something by its growth only; a rate measured once may have met another program. `Health` keeps
what it needs of the past for each thing and each probe, and gives a verdict with a reason.

Pure but for that memory: times are arguments. One rank decides for all, so its clock is the only
one that counts.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import Gpu, Nic, State, Topology
from pycomm.topology.samples import Sample
from pycomm.units import format_rate

__all__ = ["LIMITS", "Health", "Rules", "Verdict"]

#: Where a counter sticks: the widths of PortCounters in the InfiniBand specification (volume 1,
#: 16.1.3.5), which drivers keep for the counters they have from there.
LIMITS = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_rcv_switch_relay_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_constraint_errors": 0xFF,
    "port_rcv_constraint_errors": 0xFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
    "VL15_dropped": 0xFFFF,
}

# Of these a single one matters: the link was gone, or data were wrong. Others happen now and then
# on links that are well: bits flip, and are sent again.
_GRAVE = ("link_downed", "link_error_recovery", "carrier_changes", "recovery", "uncorrected")
# Of so many good looks the median counts as usual: one look may be too good, as any may be bad.
_USUAL = 9
_SEVERITY = {State.UP: 0, State.DEGRADED: 1, State.DOWN: 2}


_Device = TypeVar("_Device", Gpu, Nic)


@dataclass(frozen=True, slots=True)
class Rules:
    """When something is well, and how long that is believed.

    Attributes
    ----------
    good_probes : int
        How many good looks in a row make what was degraded or down trusted again.
    ttl : float
        Seconds after which what nobody looked at is unknown.
    slow : float
        The share of its rate below which a link is degraded.
    recovered : float
        The share of its rate that a degraded link must reach for a look to be a good one.
    errors : int
        By how much an error counter may grow from one look to the next. Losses of the link itself
        and uncorrected errors have no such allowance.
    """

    good_probes: int = 3
    ttl: float = 30.0
    slow: float = 0.5
    recovered: float = 0.7
    errors: int = 10

    def __post_init__(self) -> None:
        if self.good_probes < 1:
            raise ArgumentValueError(f"good_probes is at least 1, not {self.good_probes}")
        if not 0 < self.ttl < math.inf:
            raise ArgumentValueError(f"ttl is a positive number of seconds, not {self.ttl}")
        if not 0 < self.slow <= self.recovered <= 1:
            raise ArgumentValueError(
                f"0 < slow <= recovered <= 1 must hold, not slow={self.slow}, "
                f"recovered={self.recovered}"
            )
        if self.errors < 0:
            raise ArgumentValueError(f"errors is at least 0, not {self.errors}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is believed of a thing.

    Attributes
    ----------
    state : State
        Its state.
    reason : str
        Why, in words for an administrator; empty for what is up and never was otherwise.
    measured : float or None
        The bytes per second that were measured last.
    latency : float or None
        The seconds in one direction that were measured last.
    rate : float or None
        The bytes per second that it is held against: its own rate, or what it usually carries.
    """

    state: State
    reason: str = ""
    measured: float | None = None
    latency: float | None = None
    rate: float | None = None


@dataclass(slots=True)
class _Track:
    """What one probe has told of one thing."""

    state: State = State.UNKNOWN
    reason: str = "nobody has looked yet"
    #: When a sample last told anything.
    known_at: float = -math.inf
    #: States of good looks in a row, better than `state`.
    good: list[State] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sampled_at: float | None = None
    #: What was measured in good looks, the latest ones.
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    measured: float | None = None
    latency: float | None = None
    rate: float | None = None
    #: Why the last look told nothing, if it did not.
    blind: str = ""


class Health:
    """The states of all things, from samples.

    Parameters
    ----------
    rules : Rules, optional
        When something is well.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = Rules() if rules is None else rules
        self._tracks: dict[str, dict[str, _Track]] = {}

    @property
    def subjects(self) -> tuple[str, ...]:
        """Everything of which there was a sample."""
        return tuple(self._tracks)

    def add(self, sample: Sample, now: float) -> Verdict:
        """Take in a sample that came at `now`, and return the verdict on its subject.

        Parameters
        ----------
        sample : Sample
            What a probe saw. Its own time is compared only with that of the probe's last sample.
        now : float
            Seconds on the clock of whoever decides.
        """
        tracks = self._tracks.setdefault(sample.subject, {})
        track = tracks.setdefault(sample.probe, _Track())
        state, reason = self._seen(track, sample)
        if state is State.UNKNOWN:
            track.blind = reason
        else:
            track.blind = ""
            track.known_at = now
            self._settle(track, state, reason)
        return self.verdict(sample.subject, now)

    def verdict(self, subject: str, now: float) -> Verdict:
        """Return what is believed of a thing at `now`.

        Of several probes the gravest word counts. `UNKNOWN` if there was no sample, or none that
        told anything within the time to live.
        """
        tracks = self._tracks.get(subject)
        if not tracks:
            return Verdict(State.UNKNOWN, "nobody has looked yet")
        known: list[tuple[int, str, State]] = []
        blind: list[str] = []
        for probe, track in tracks.items():
            age = now - track.known_at
            if track.state is State.UNKNOWN:
                blind.append(f"{probe}: {track.blind or track.reason}")
            elif age > self.rules.ttl:
                why = track.blind or "no sample came"
                blind.append(f"{probe}: nothing known for {age:.0f} s: {why}")
            else:
                known.append((_SEVERITY[track.state], track.reason, track.state))
        measured, latency, rate = _numbers(tracks)
        if not known:
            return Verdict(State.UNKNOWN, "; ".join(blind), measured, latency, rate)
        gravest = max(severity for severity, _, _ in known)
        state = next(state for severity, _, state in known if severity == gravest)
        reasons = [reason for severity, reason, _ in known if severity == gravest and reason]
        return Verdict(state, "; ".join(dict.fromkeys(reasons)), measured, latency, rate)

    def judged(self, topology: Topology, now: float) -> Topology:
        """Return a topology whose GPUs and NICs are in the states that are believed at `now`.

        What nobody looks at, such as bridges and tunnels, keeps what its reader said of it.
        """

        def believed(device: _Device) -> _Device:
            verdict = self.verdict(device.name, now)
            own = device.state is not State.UNKNOWN or device.name not in self._tracks
            if verdict.state is State.UNKNOWN and own:
                return device
            return replace(device, state=verdict.state, reason=verdict.reason)

        return replace(
            topology,
            gpus=tuple(map(believed, topology.gpus)),
            nics=tuple(map(believed, topology.nics)),
        )

    # ------------------------------------------------------------------------------ one look

    def _seen(self, track: _Track, sample: Sample) -> tuple[State, str]:
        """Return the state of one look by itself, counters and rates included."""
        grown = self._growth(track, sample)
        slow = self._slowness(track, sample)
        if sample.state is not State.UP:
            return sample.state, sample.reason or f"{sample.probe} says {sample.state}"
        if grown or slow:
            return State.DEGRADED, "; ".join(filter(None, (grown, slow)))
        return State.UP, sample.reason

    def _growth(self, track: _Track, sample: Sample) -> str:
        """Return which error counters have grown too much since the last look, in words."""
        before, first = track.counters, track.sampled_at is None
        seconds = 0.0 if track.sampled_at is None else sample.at - track.sampled_at
        found = []
        for name, value in sample.counters:
            last = before.get(name)
            if first or last is None:
                continue
            # Less than before: it was reset, and all it counts has come since.
            growth = value - last if value >= last else value
            plain = name.rpartition(".")[2]
            allowed = 0 if plain.endswith(_GRAVE) else self.rules.errors
            if growth > allowed:
                since = f" in {seconds:.1f} s" if seconds > 0 else ""
                stuck = ", where it sticks" if value == LIMITS.get(plain) else ""
                found.append(f"{name} grew by {growth}{since} to {value}{stuck}")
        track.counters = {**before, **dict(sample.counters)}
        track.sampled_at = sample.at
        return "; ".join(found)

    def _slowness(self, track: _Track, sample: Sample) -> str:
        """Return in words that a link carries less than it should, if it does."""
        if sample.latency is not None:
            track.latency = sample.latency
        if sample.rate is not None:
            track.rate = sample.rate
        measured = sample.measured
        if measured is None:
            return ""
        track.measured = measured
        own = sample.rate is not None
        rate = sample.rate if sample.rate is not None else median(track.usual or [measured])
        track.rate = rate
        share = measured / rate if rate > 0 else 1.0
        bound = self.rules.slow if track.state is not State.DEGRADED else self.rules.recovered
        if share >= bound:
            track.usual.append(measured)
            return ""
        what = "what it should carry" if own else "what it usually carries"
        return f"measured {format_rate(measured)}, {share:.0%} of {what}, {format_rate(rate)}"

    def _settle(self, track: _Track, state: State, reason: str) -> None:
        """Move to the state of a look: at once if it is worse, after some looks if better."""
        if track.state is State.UNKNOWN or _SEVERITY[state] >= _SEVERITY[track.state]:
            track.state, track.reason, track.good = state, reason, []
            return
        track.good.append(state)
        needed = self.rules.good_probes
        if len(track.good) >= needed:
            track.state = max(track.good, key=lambda one: _SEVERITY[one])
            times = "one good look" if needed == 1 else f"{needed} good looks in a row"
            track.reason, track.good = reason or f"well again after {times}", []
            return
        cause = track.reason.partition("; better in")[0]
        track.reason = f"{cause}; better in {len(track.good)} of {needed} looks since"


def _numbers(
    tracks: dict[str, _Track],
) -> tuple[float | None, float | None, float | None]:
    """Return what was measured last, latency, and the rate, of whichever probe knows them."""
    measured = [track.measured for track in tracks.values() if track.measured is not None]
    latency = [track.latency for track in tracks.values() if track.latency is not None]
    rate = [track.rate for track in tracks.values() if track.rate is not None]
    return (
        measured[-1] if measured else None,
        latency[-1] if latency else None,
        rate[-1] if rate else None,
    )
