"""What was measured: frozen records that the text, JSON, CSV and plot writers read."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pycomm.bench.timing import IterationStats

__all__ = [
    "Compression",
    "Device",
    "Header",
    "PeerResult",
    "Roofline",
    "Row",
    "Side",
    "Summary",
    "Wire",
    "geometric_mean",
    "make_side",
    "ratio",
    "summarize",
]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a row, out of place or in place.

    Attributes
    ----------
    seconds : float
        Time a call, combined over ranks.
    algbw, busbw : float
        GB/s (1e9 bytes).
    wrong : int or None
        Wrong elements over all ranks, None if not checked.
    per_rank : tuple of float
        Each rank's own time in seconds.
    iterations : IterationStats or None
        Statistics over single iterations if asked for.
    """

    seconds: float
    algbw: float
    busbw: float
    wrong: int | None
    per_rank: tuple[float, ...]
    iterations: IterationStats | None = None


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What another library needed for the same call, None where it has no such call."""

    name: str
    out_of_place: Side | None
    in_place: Side | None


@dataclass(frozen=True, slots=True)
class Wire:
    """What one call out of place has sent, and what it should have sent, over all ranks.

    Attributes
    ----------
    ran : str
        The algorithm that ran.
    sent, scheduled : int or None
        Bytes as counted on the way out, and as the schedules say; None for the library's own
        collective, which does not tell.
    """

    ran: str
    sent: int | None
    scheduled: int | None


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the machine's memory allows, see `pycomm.bench.roofline`.

    Attributes
    ----------
    nbytes : int
        Bytes that each rank has to read and write.
    out_of_place, in_place : Side
        The time that takes when all ranks do it at once.
    """

    nbytes: int
    out_of_place: Side
    in_place: Side


@dataclass(frozen=True, slots=True)
class Compression:
    """What a row's messages are encoded with, and what that saves and costs, out of place.

    Attributes
    ----------
    name : str
        The format, ``"none"`` for messages as they are.
    error_feedback : bool
        Whether rounding errors are fed back; `max_error` and `mean_error` are then those of the
        mean of some calls.
    sent : int or None
        Bytes of one call over all ranks; None for the library's own collective.
    max_error, mean_error : float or None
        Errors over all elements and ranks, relative to the largest result; None of no elements,
        and where a result is not finite.
    """

    name: str
    error_feedback: bool
    sent: int | None
    max_error: float | None
    mean_error: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    algorithm: str | None
    out_of_place: Side | None
    in_place: Side | None
    peers: tuple[PeerResult, ...] = ()
    timestamp: str = ""
    iterations: int = 0
    wire: Wire | None = None
    roofline: Roofline | None = None
    compression: Compression | None = None

    def reached(self, side: str) -> float | None:
        """Return which part of the roofline is reached on that side, 1 being all of it."""
        mine: Side | None = getattr(self, side)
        if self.roofline is None or mine is None:
            return None
        return ratio(getattr(self.roofline, side).seconds, mine.seconds)

    @property
    def sides(self) -> tuple[tuple[str, Side | None], ...]:
        """The two sides with their names."""
        return (("out_of_place", self.out_of_place), ("in_place", self.in_place))

    def peer_ratio(self, peer: PeerResult, side: str) -> float | None:
        """Return the time of `peer` over that of pycomm on that side, None if either is missing."""
        mine, other = getattr(self, side), getattr(peer, side)
        return ratio(other.seconds, mine.seconds) if mine and other else None


@dataclass(frozen=True, slots=True)
class Device:
    """Where one rank runs."""

    rank: int
    pid: int
    hostname: str
    cpu: str


@dataclass(frozen=True, slots=True)
class Header:
    """What is known before the first row."""

    program: str
    collective: str
    ranks: int
    version: str
    devices: tuple[Device, ...]
    blocks: int
    peers: tuple[tuple[str, str], ...]
    start_time: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known after the last row.

    `bandwidth_okay` is None if no least bandwidth was asked for (``NCCL_TESTS_MIN_BW``),
    `wires_wrong`, the rows whose bytes are not those of their schedules, if none were counted.
    """

    wrong: int
    bandwidth: float
    bandwidth_okay: bool | None
    peer_ratios: tuple[tuple[str, float, int], ...]
    wires_wrong: int | None = None

    @property
    def okay(self) -> bool:
        """Whether every element was right, the bandwidth enough, and all bytes as scheduled."""
        return self.wrong == 0 and self.bandwidth_okay is not False and not self.wires_wrong


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the quotient of two times, None where it is not a positive number."""
    return numerator / denominator if numerator > 0 and denominator > 0 else None


def make_side(
    seconds: float,
    nbytes: int,
    factor: float,
    *,
    wrong: int | None = None,
    per_rank: Sequence[float] = (),
    iterations: IterationStats | None = None,
) -> Side:
    """Return the side of a row that moved `nbytes` in `seconds`; no time means no bandwidth."""
    algbw = nbytes / 1e9 / seconds if seconds > 0 else 0.0
    return Side(seconds, algbw, algbw * factor, wrong, tuple(per_rank), iterations)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def summarize(rows: Sequence[Row], peers: Sequence[str], least: float | None) -> Summary:
    """Return the last lines of a run.

    Parameters
    ----------
    rows : sequence of Row
        All rows.
    peers : sequence of str
        Names of the peers in the rows, in their order.
    least : float or None
        The average bus bandwidth that was asked for; 0.9 of it is enough.
    """
    sides = [side for row in rows for _, side in row.sides if side is not None]
    bandwidth = sum(side.busbw for side in sides) / len(sides) if sides else 0.0
    ratios = []
    for index, name in enumerate(peers):
        found = [
            value
            for row in rows
            # A row without bytes says nothing, except of a collective that never has any.
            if row.size or row.type == "none"
            for side, _ in row.sides
            if (value := row.peer_ratio(row.peers[index], side)) is not None
        ]
        mean = geometric_mean(found)
        if mean is not None:
            ratios.append((name, mean, len(found)))
    wires = [row.wire for row in rows if row.wire is not None]
    return Summary(
        wires_wrong=sum(wire.sent != wire.scheduled for wire in wires) if wires else None,
        wrong=sum(side.wrong or 0 for side in sides),
        bandwidth=bandwidth,
        bandwidth_okay=None if least is None else bandwidth >= 0.9 * least,
        peer_ratios=tuple(ratios),
    )
