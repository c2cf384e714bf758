"""From measured pairs to groups and orders: who is near whom, and a ring that minds slow links.

Pure functions on ranks and numbers. What was not measured is None, and joins nobody.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, permutations

from pycomm.errors import ArgumentValueError

__all__ = ["Pairs", "healthy", "leaders", "measured_clusters", "ring_order"]

Groups = tuple[tuple[int, ...], ...]
#: A number for pairs of ranks, the smaller rank first.
Pairs = Mapping[tuple[int, int], float]

#: Costs that differ by less than this factor are of one kind of link.
_SAME_KIND = 2.0
#: Rings of up to so many groups are searched through, longer ones improved step by step.
_SEARCHED = 8


def leaders(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the first rank of each group: who speaks for it."""
    return tuple(group[0] for group in groups)


def healthy(ranks: Collection[int], lost: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that are not among the lost ones, ascending."""
    return tuple(sorted(set(ranks) - set(lost)))


def measured_clusters(ranks: Sequence[int], costs: Pairs) -> Groups:
    """Return the groups of ranks that are near each other, by what was measured between them.

    Ranks are joined by their cheapest links, and the links are cut where their costs leap: where
    the next dearer link of the minimum spanning tree costs at least twice as much as the one
    before it. Among several leaps the dearest counts: groups are as large as they can be.

    Parameters
    ----------
    ranks : sequence of int
        All ranks.
    costs : mapping of (int, int) to float
        What it costs to reach a rank from another: a latency, or seconds per byte. Pairs that are
        missing were not measured.

    Returns
    -------
    tuple of tuple of int
        One group if all links are alike; ranks that nothing was measured of stand alone.
    """
    for pair, cost in costs.items():
        if not cost > 0:
            raise ArgumentValueError(f"the cost of pair {pair} is {cost}, not a positive number")
    tree = _spanning_tree(ranks, costs)
    ordered = sorted(costs[pair] for pair in tree)
    leaps = [after for before, after in pairwise(ordered) if after >= _SAME_KIND * before]
    bound = leaps[-1] if leaps else float("inf")
    return _joined(ranks, [pair for pair in tree if costs[pair] < bound])


def _spanning_tree(ranks: Sequence[int], costs: Pairs) -> list[tuple[int, int]]:
    """Return the cheapest links that join whatever can be joined (Kruskal, 1956)."""
    root = {rank: rank for rank in ranks}

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    tree = []
    # By cost, then by pair: equal on every rank.
    for pair in sorted(costs, key=lambda pair: (costs[pair], pair)):
        if (a := find(pair[0])) != (b := find(pair[1])):
            root[a] = b
            tree.append(pair)
    return tree


def _joined(ranks: Sequence[int], links: list[tuple[int, int]]) -> Groups:
    """Return the connected ranks together, groups in the order of their smallest rank."""
    group_of = {rank: {rank} for rank in ranks}
    for a, b in links:
        if group_of[a] is not group_of[b]:
            group_of[a] |= group_of[b]
            for rank in group_of[b]:
                group_of[rank] = group_of[a]
    found = {min(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(found[first] for first in sorted(found))


def ring_order(groups: Sequence[Sequence[int]], costs: Pairs | None = None) -> tuple[int, ...]:
    """Return the ranks in an order for a ring that enters and leaves each group once.

    So each slow link between groups is crossed once in each direction, whatever the numbers of the
    ranks are. With costs, groups follow each other such that the dearest of the links between them
    is as cheap as possible, and then their sum: a slow link is passed by where a way around it
    exists. Up to 8 groups the best order is found, beyond that one that no exchange of two ends
    improves (2-opt; Croes, 1958).

    Parameters
    ----------
    groups : sequence of sequence of int
        Groups of ranks, such as those of hosts.
    costs : mapping of (int, int) to float, optional
        As for `measured_clusters`. The cost between groups is the least of their pairs; that of
        pairs which were not measured counts as the dearest.
    """
    filled = [tuple(group) for group in groups if group]
    if costs and len(filled) > 3:  # fewer have one ring only
        filled = _best_ring(filled, _between(filled, costs))
    return tuple(rank for group in filled for rank in group)


def _between(groups: list[tuple[int, ...]], costs: Pairs) -> dict[tuple[int, int], float]:
    """Return the cost between groups, by their numbers, in both directions."""
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    dearest = max(costs.values())
    found: dict[tuple[int, int], float] = {}
    for (a, b), cost in costs.items():
        here, there = group_of.get(a), group_of.get(b)
        if here is None or there is None or here == there:
            continue
        known = min(cost, found.get((here, there), cost))
        found[here, there] = found[there, here] = known
    numbers = range(len(groups))
    return {(a, b): found.get((a, b), dearest) for a in numbers for b in numbers if a != b}


def _best_ring(
    groups: list[tuple[int, ...]], between: dict[tuple[int, int], float]
) -> list[tuple[int, ...]]:
    def price(order: Sequence[int]) -> tuple[float, float]:
        hops = [between[hop] for hop in pairwise((*order, order[0]))]
        return max(hops), sum(hops)

    rest = range(1, len(groups))
    if len(groups) <= _SEARCHED:
        order = min(((0, *one) for one in permutations(rest)), key=price)
        return [groups[number] for number in order]
    best = [0, *rest]
    improved = True
    while improved:
        improved = False
        for start in range(1, len(best) - 1):
            for stop in range(start + 2, len(best) + 1):
                turned = best[:start] + best[start:stop][::-1] + best[stop:]
                if price(turned) < price(best):
                    best, improved = turned, True
    return [groups[number] for number in best]
