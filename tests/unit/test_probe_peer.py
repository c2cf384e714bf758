"""Tournaments of ranks, and what pairs measure on a road of threads."""

import threading
import time
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.errors import CommTimeoutError
from pycomm.topology.graph import State
from pycomm.topology.probes import peer
from pycomm.topology.samples import Sample
from pycomm.transports.local import LocalTransport


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.none() | st.integers(0, 9))
def test_nobody_is_disturbed(sizes: list[int], turn: int | None) -> None:
    ranks = iter(range(sum(sizes)))
    hosts = [[next(ranks) for _ in range(size)] for size in sizes]
    place = {rank: number for number, host in enumerate(hosts) for rank in host}
    rounds = peer.tournament(hosts, turn)
    met = list(chain.from_iterable(rounds))
    assert len(set(met)) == len(met)
    for pairs in rounds:
        busy = list(chain.from_iterable(pairs))
        assert len(set(busy)) == len(busy)
        crossing = [
            place[rank] for pair in pairs for rank in pair if place[pair[0]] != place[pair[1]]
        ]
        assert len(set(crossing)) == len(crossing), "two pairs share the link of a host"
    if turn is None:
        assert sorted(met) == list(combinations(range(sum(sizes)), 2))
    else:
        hosts_met = sorted({tuple(sorted((place[a], place[b]))) for a, b in met})
        assert hosts_met == list(combinations(range(len(sizes)), 2))


def test_every_pair_has_its_turn() -> None:
    hosts = [[0, 1, 2], [3, 4, 5]]
    met = {pair for turn in range(3) for pair in chain(*peer.tournament(hosts, turn))}
    assert met == {(0, 3), (1, 4), (2, 5)}


def measured(size: int, absent: tuple[int, ...] = ()) -> list[tuple[Sample, ...]]:
    transports = LocalTransport.create(size)
    rounds = peer.tournament([[rank] for rank in range(size)])
    found: list[tuple[Sample, ...]] = [()] * size

    def rank(number: int) -> None:
        ends = time.monotonic() + (0.5 if absent else 20.0)

        def wait(ready: object, patient: bool) -> None:
            spins = 0
            while not ready():  # type: ignore[operator]
                spins += 1
                transports[number].idle(spins)
                if time.monotonic() > ends:
                    raise CommTimeoutError("nobody comes")

        found[number] = peer.measure(transports[number], rounds, 0, wait, time.monotonic)

    threads = [
        threading.Thread(target=rank, args=(number,))
        for number in range(size)
        if number not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_all_pairs_are_measured() -> None:
    samples = [sample for own in measured(3) for sample in own]
    assert {sample.subject for sample in samples} == {
        peer.pair_name(a, b) for a, b in combinations(range(3), 2)
    }
    for sample in samples:
        assert sample.state is State.UP
        assert sample.latency is not None
        assert 0 < sample.latency < 1
        assert sample.measured is not None
        assert sample.measured > 1e6


@pytest.mark.parametrize("absent", [0, 1])
def test_a_peer_that_does_not_come_is_a_sample(absent: int) -> None:
    (last,) = measured(2, (absent,))[1 - absent][-1:]
    assert last.state is State.DOWN
    assert "nobody comes" in last.reason
