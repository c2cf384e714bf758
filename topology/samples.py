"""What probes say: a sample is one look at one thing, a finding all that one look at a host saw.

A probe never raises and never decides. It says what a thing reports of itself, with counters as
they are; `health` compares samples over time and decides.
"""

import math
from dataclasses import dataclass, field

from pycomm.errors import ArgumentTypeError
from pycomm.topology.graph import State, Topology

__all__ = ["Findings", "Sample", "check_sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one thing.

    Attributes
    ----------
    subject : str
        The name of the GPU, NIC or link, as in the topology of its host.
    probe : str
        Who looked: "nvml", "infiniband", "net", "pci" or "peer".
    at : float
        When, in seconds on a monotonic clock of the host that looked.
    state : State
        What the thing says of itself now; `UNKNOWN` where it cannot be told.
    reason : str
        Why, in words for an administrator, with the file, counter or call it comes from.
    counters : tuple of (str, int)
        Counts of errors since whenever; only their growth between samples means something.
    rate : float or None
        What it should carry, in bytes per second in one direction.
    measured : float or None
        What it carried when that was tried, in bytes per second in one direction.
    latency : float or None
        Seconds in one direction, if measured.
    """

    subject: str
    probe: str
    at: float
    state: State
    reason: str = ""
    counters: tuple[tuple[str, int], ...] = ()
    rate: float | None = None
    measured: float | None = None
    latency: float | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What one probe saw of one host.

    Attributes
    ----------
    topology : Topology
        The things that are there, on one host; what is missing or odd stands in its notes and in
        its `unknown`.
    samples : tuple of Sample
        How they are.
    """

    topology: Topology = field(default_factory=Topology)
    samples: tuple[Sample, ...] = ()


def check_sample(sample: object) -> None:
    """Refuse what is no sample, or has parts of other kinds: the probes of users may return it.

    Raises
    ------
    ArgumentTypeError
        With what is wrong.
    """
    if not isinstance(sample, Sample):
        raise ArgumentTypeError(f"a probe returns samples, not {sample!r}")
    texts = (sample.subject, sample.probe, sample.reason)
    rates = (sample.rate, sample.measured, sample.latency)
    numbers = [sample.at, *(one for one in rates if one is not None)]
    plain = all(isinstance(text, str) for text in texts) and isinstance(sample.state, State)
    try:
        finite = all(math.isfinite(one) and one >= 0 for one in numbers) and math.isfinite(
            sample.at
        )
        counted = all(isinstance(name, str) and int(n) == n >= 0 for name, n in sample.counters)
    except (TypeError, ValueError, OverflowError):
        finite = counted = False
    if not (plain and finite and counted):
        raise ArgumentTypeError(f"a sample with parts that are none of its kind: {sample!r}"[:400])
