"""Groups and rings from measured pairs."""

from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.errors import ArgumentValueError
from pycomm.topology.clusters import healthy, leaders, measured_clusters, ring_order


def hosts(sizes: list[int]) -> list[tuple[int, ...]]:
    """Ranks dealt out round robin, as launchers do it too."""
    groups: list[list[int]] = [[] for _ in sizes]
    rank = 0
    while any(len(group) < size for group, size in zip(groups, sizes, strict=True)):
        for group, size in zip(groups, sizes, strict=True):
            if len(group) < size:
                group.append(rank)
                rank += 1
    return [tuple(group) for group in groups]


def test_leaders_and_healthy() -> None:
    assert leaders([(3, 1), (0, 2)]) == (3, 0)
    assert healthy(range(5), {1, 4}) == (0, 2, 3)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.floats(5.0, 1000.0),
    st.randoms(use_true_random=False),
)
def test_hosts_are_found_by_latency(sizes: list[int], factor: float, random: object) -> None:
    groups = hosts(sizes)
    place = {rank: number for number, group in enumerate(groups) for rank in group}
    costs = {
        (a, b): (1e-6 if place[a] == place[b] else factor * 1e-6) * random.uniform(1, 1.9)  # type: ignore[attr-defined]
        for a, b in combinations(sorted(place), 2)
    }
    found = measured_clusters(sorted(place), costs)
    both = len(sizes) > 1 and max(sizes) > 1
    everyone = (tuple(sorted(place)),)
    assert found == (tuple(sorted(groups)) if both else everyone)


def test_what_was_not_measured_stands_alone() -> None:
    assert measured_clusters([0, 1, 2], {(0, 1): 1e-6}) == ((0, 1), (2,))
    assert measured_clusters([0, 1], {}) == ((0,), (1,))
    with pytest.raises(ArgumentValueError, match="positive"):
        measured_clusters([0, 1], {(0, 1): 0.0})


def test_noise_makes_no_groups() -> None:
    costs = {(0, 1): 1.0, (0, 2): 1.9, (1, 2): 1.5}
    assert measured_clusters([0, 1, 2], costs) == ((0, 1, 2),)


@given(st.lists(st.integers(0, 4), max_size=9), st.data())
def test_a_ring_enters_each_group_once(sizes: list[int], data: st.DataObject) -> None:
    groups = hosts(sizes)
    ranks = sorted(rank for group in groups for rank in group)
    pairs = list(combinations(ranks, 2))
    costs = data.draw(st.dictionaries(st.sampled_from(pairs), st.floats(0.1, 9))) if pairs else {}
    order = ring_order(groups, costs)
    assert sorted(order) == ranks
    place = {rank: number for number, group in enumerate(groups) for rank in group}
    entries = sum(place[a] != place[b] for a, b in pairwise((*order, *order[:1])))
    filled = sum(1 for group in groups if group)
    assert entries == (filled if filled > 1 else 0)


def test_a_ring_goes_around_a_slow_link() -> None:
    costs = dict.fromkeys(combinations(range(5), 2), 1.0) | {(0, 1): 50.0, (2, 3): 50.0}
    order = ring_order([(rank,) for rank in range(5)], costs)
    hops = {tuple(sorted(hop)) for hop in pairwise((*order, order[0]))}
    assert not hops & {(0, 1), (2, 3)}


def test_a_long_ring_goes_around_slow_links() -> None:
    slow = {(0, 1), (4, 5), (8, 9)}
    costs = {pair: 50.0 if pair in slow else 1.0 for pair in combinations(range(12), 2)}
    order = ring_order([(rank,) for rank in range(12)], costs)
    hops = {tuple(sorted(hop)) for hop in pairwise((*order, order[0]))}
    assert not hops & slow


@given(st.lists(st.floats(0.5, 20.0), min_size=10, max_size=10))
def test_the_best_of_all_rings(prices: list[float]) -> None:
    costs = dict(zip(combinations(range(5), 2), prices, strict=True))

    def worst(order: tuple[int, ...]) -> float:
        return max(costs[min(hop), max(hop)] for hop in pairwise((*order, order[0])))

    best = min(worst((0, *rest)) for rest in permutations(range(1, 5)))
    assert worst(ring_order([(rank,) for rank in range(5)], costs)) == best
