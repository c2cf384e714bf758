"""Latency and bandwidth between ranks, measured over their own road.

Ranks meet in pairs, as in a tournament: nobody is in two pairs at a time, and no two pairs cross
between hosts by the same host's link at a time, so that pairs do not disturb each other. What is
measured is what a program gets: Python, the library underneath, the wire.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, zip_longest
from typing import NamedTuple

import numpy as np

from pycomm.errors import CommError
from pycomm.topology.graph import State
from pycomm.topology.samples import Sample
from pycomm.transports.base import Array, Transport

__all__ = [
    "BRIEF",
    "CONFIRMING",
    "THOROUGH",
    "Effort",
    "Pair",
    "Rounds",
    "Wait",
    "measure",
    "one_by_one",
    "pair_name",
    "tournament",
]

Pair = tuple[int, int]
Rounds = tuple[tuple[Pair, ...], ...]
#: ``wait(ready, patient)`` waits until `ready` returns True and raises after a deadline; a patient
#: one leaves the core to others meanwhile.
Wait = Callable[[Callable[[], bool], bool], None]

_FIRST = 16 << 10  # bytes of the shortest message that says something about bandwidth
_LONGEST = 4 << 20
# A pair that has taken so many seconds tries no more: its link is slow, and others wait.
_PATIENCE = 0.1
_SHORT_TRIPS = 2e-3  # seconds that round trips may take which are not needed

# A long message takes so many times what a round trip does, where that is possible.
_TRIPS_LONG = 6


def pair_name(a: int, b: int) -> str:
    """Return the subject of samples of a pair."""
    return f"rank {min(a, b)} - rank {max(a, b)}"


def tournament(hosts: Sequence[Sequence[int]], turn: int | None = None) -> Rounds:
    """Return who meets whom, round by round.

    Parameters
    ----------
    hosts : sequence of sequence of int
        The ranks of each host.
    turn : int, optional
        None for all pairs there are. Otherwise one pair for each two hosts, which goes round with
        `turn`; none inside of hosts, whose memory does not wear out.
    """
    rounds: list[tuple[Pair, ...]] = []
    if turn is None:
        inside = [list(combinations(sorted(host), 2)) for host in hosts]
        rounds += [tuple(filter(None, pairs)) for pairs in zip_longest(*inside)]
    for meeting in _circle(len(hosts)):
        crossing = [_crossing(hosts[a], hosts[b], turn) for a, b in meeting]
        rounds += [tuple(filter(None, pairs)) for pairs in zip_longest(*crossing)]
    return tuple(tuple((min(pair), max(pair)) for pair in pairs) for pairs in rounds if any(pairs))


def one_by_one(pairs: Sequence[Pair]) -> Rounds:
    """Return rounds of one pair each."""
    return tuple((pair,) for pair in pairs)


def _crossing(ours: Sequence[int], theirs: Sequence[int], turn: int | None) -> list[Pair]:
    """Return the pairs of two hosts: of all their ranks, or of those whose turn it is."""
    if turn is None:
        return [(a, b) for a in ours for b in theirs]
    # The ranks of one turn have the same place, as the ranks of a rail have.
    return [(ours[turn % len(ours)], theirs[turn % len(theirs)])]


def _circle(count: int) -> Iterator[list[Pair]]:
    """Yield who meets whom in each round, all against all in as few rounds as possible.

    The first stays, the others move on by one place (the circle method of tournaments).
    """
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)  # whoever meets nobody has a rest
    half = len(places) // 2
    for _ in range(len(places) - 1):
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(a, b) for a, b in met if a is not None and b is not None]
        places.insert(1, places.pop())


class Effort(NamedTuple):
    """How often a pair tries, the best counting.

    `trips` and `most_trips` are round trips, more than `trips` of them only while they are short;
    `tries` are messages each way that take `seconds`: clocks and interrupts count little then.
    """

    trips: int
    most_trips: int
    tries: int
    seconds: float


#: For all pairs, once.
THOROUGH = Effort(8, 100, 3, 3e-3)
#: For what is repeated beside a running program.
BRIEF = Effort(3, 20, 2, 3e-3)
#: For what seemed slow: long enough for TCP to find the rate anew if it has lost something before.
CONFIRMING = Effort(3, 20, 4, 8e-3)


class _Messages(NamedTuple):
    """How a rank talks to the other one of its pair."""

    transport: Transport
    wait: Wait
    tag: int
    effort: Effort

    def exchange(
        self,
        sends: list[tuple[int, Array]],
        recvs: list[tuple[int, Array]],
        patient: bool = False,
    ) -> None:
        self.wait(self.transport.post(sends, recvs, self.tag).test, patient)

    def send(self, peer: int, data: Array) -> None:
        self.exchange([(peer, data)], [])

    def receive(self, peer: int, into: Array) -> None:
        self.exchange([], [(peer, into)])


def measure(
    transport: Transport,
    rounds: Rounds,
    tag: int,
    wait: Wait,
    clock: Callable[[], float],
    effort: Effort = THOROUGH,
) -> tuple[Sample, ...]:
    """Measure the pairs of this rank; called by all ranks with the same rounds.

    Each pair exchanges some short messages, then longer and longer ones until one takes long enough
    to be timed, in both directions. All ranks meet between rounds.

    Parameters
    ----------
    transport : Transport
        The road, on which nothing else goes on.
    rounds : tuple of tuple of (int, int)
        What `tournament` returned.
    tag : int
        The first of two tags that nothing else uses.
    wait : callable
        ``wait(ready, patient)`` waits until `ready` returns True, and raises `CommError` after a
        deadline. A patient wait leaves the core to others.
    clock : callable
        Returns seconds.
    effort : Effort
        How often each pair tries.

    Returns
    -------
    tuple of Sample
        One for each pair of which this rank is the smaller: latency is half of the shortest round
        trip, `measured` the bytes per second of the slower direction. If a wait ends with an error,
        the last sample says so, and no more pairs were measured.
    """
    rank, found = transport.rank, []
    room = _room()
    messages = _Messages(transport, wait, tag, effort)
    for number, pairs in enumerate(rounds):
        mine = next((pair for pair in pairs if rank in pair), None)
        try:
            if number:
                _meet(messages)
            if mine is not None and mine[0] == rank:
                latency, bandwidth = _lead(messages, mine[1], room)
                name, now = pair_name(*mine), clock()
                found.append(
                    Sample(name, "peer", now, State.UP, measured=bandwidth, latency=latency)
                )
            elif mine is not None:
                _follow(messages, mine[0], room)
        except CommError as error:
            where = pair_name(*mine) if mine else pair_name(rank, rank)
            found.append(Sample(where, "peer", clock(), State.DOWN, f"no answer: {error}"))
            break
    return tuple(found)


@cache
def _room() -> Array:
    """Return memory for messages; pages that were never touched would be timed as well."""
    return np.ones(_LONGEST, np.uint8)


def _meet(messages: _Messages) -> None:
    """Return when all ranks have come here (dissemination; Hensgen, Finkel, Manber, 1988)."""
    rank, size = messages.transport.rank, messages.transport.size
    distance, nothing = 1, np.zeros(1, np.uint8)
    while distance < size:
        heard = np.zeros(1, np.uint8)
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        # Patiently: whoever spins here takes the core from those who measure.
        meeting = messages._replace(tag=messages.tag + 1)
        meeting.exchange([(ahead, nothing)], [(behind, heard)], True)
        distance *= 2


def _lead(messages: _Messages, peer: int, room: Array) -> tuple[float, float]:
    """Measure a pair as the one that says how; return latency and bandwidth."""
    began = time.perf_counter()
    short, answer = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    trip, count, last = float("inf"), 0, False
    while not last:
        count += 1
        start = time.perf_counter()
        last = count >= messages.effort.most_trips or (
            count >= messages.effort.trips and start - began > _SHORT_TRIPS
        )
        short[0] = last
        messages.send(peer, short)
        messages.receive(peer, answer)
        trip = min(trip, time.perf_counter() - start)
    # Long enough that neither clocks nor the trip itself, which is taken off, count for much.
    wanted = max(messages.effort.seconds, _TRIPS_LONG * trip)
    nbytes, tries = _FIRST, 0
    there, back = float("inf"), float("inf")
    while True:
        messages.send(peer, np.array([nbytes], np.int64).view(np.uint8))
        messages.receive(peer, answer)
        part = room[:nbytes]
        start = time.perf_counter()
        messages.send(peer, part)
        messages.receive(peer, answer)
        middle = time.perf_counter()
        messages.send(peer, short)
        messages.receive(peer, part)
        now = time.perf_counter()
        one, other = middle - start, now - middle
        shorter = min(one, other)
        if shorter < wanted and nbytes < _LONGEST and now - began < _PATIENCE:
            growth = min(max(wanted / shorter, 2.0), 8.0)
            nbytes = min(int(nbytes * growth) // 4096 * 4096, _LONGEST)
            continue
        there, back, tries = min(there, one), min(back, other), tries + 1
        if tries == messages.effort.tries or now - began > _PATIENCE:
            break
    messages.send(peer, np.zeros(8, np.uint8))
    messages.receive(peer, answer)
    # Each took its message and a short one in the other direction: the latency of both is not the
    # wire's rate. A trip that met interrupts is longer than that, so it is not trusted beyond.
    slower = max(there, back)
    return trip / 2, nbytes / (slower - min(trip, slower / _TRIPS_LONG))


def _follow(messages: _Messages, peer: int, room: Array) -> None:
    """Answer the one that measures."""
    short, told = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    while told[0] == 0:
        messages.receive(peer, told)
        messages.send(peer, short)
    while True:
        messages.receive(peer, told)
        messages.send(peer, short)
        nbytes = int(told.view(np.int64)[0])
        if nbytes == 0:
            return
        part = room[:nbytes]
        messages.receive(peer, part)
        messages.send(peer, short)
        messages.receive(peer, told)
        messages.send(peer, part)
