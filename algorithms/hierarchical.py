"""Hierarchical algorithms: stages inside hosts and stages across them, composed.

All_reduce: reduce_scatter inside each host, so that every rank of it holds a slice; all_reduce of
each slice across the hosts, by the ranks that carry it; all_gather inside. So all ranks of a host
use the network at once, and D bytes cross it where a flat algorithm would send more. Any algorithm
can have a seat inside, and any across. Stages that have nothing to do vanish: the first and the
last with one rank a host, the middle one with one host.

Groups are nested tuples of ranks: ``((0, 1), (2, 3))`` are two hosts of two ranks,
``(((0, 1), (2, 3)), ((4, 5), (6, 7)))`` two racks of two such hosts. They need not be of equal
size, nor in the order of ranks: a rank of a small host then carries several slices.

Steps and bytes a rank, for D bytes on h hosts of p ranks, direct inside and ring across: all_reduce
2 + 2(h-1) steps; 2(p-1)/p D bytes inside, 2(h-1)/h D/p across; reduce_scatter and all_gather half
of that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import lcm, prod
from typing import Any, NamedTuple

from pycomm.algorithms.compose import Rounds, beside, mirrored, within
from pycomm.algorithms.direct import direct_all_reduce, direct_reduce_scatter
from pycomm.algorithms.recursive import halving_doubling_all_reduce, recursive_doubling_all_reduce
from pycomm.algorithms.ring import ring_all_reduce, ring_broadcast, ring_reduce_scatter
from pycomm.algorithms.schedule import Chunks, Recv, Schedule, Send, spans
from pycomm.algorithms.tree import (
    binomial_all_reduce,
    binomial_broadcast,
    double_tree_all_reduce,
    double_tree_broadcast,
)
from pycomm.errors import ScheduleError

__all__ = [
    "Groups",
    "hierarchical_all_gather",
    "hierarchical_all_reduce",
    "hierarchical_broadcast",
    "hierarchical_reduce_scatter",
    "hosts_of",
    "rail_of",
]

#: Ranks, or groups of them, nested equally deep everywhere.
Groups = tuple[Any, ...]
# Where a chunk is at home: which child at each level, from the top, modulo how many there are.
_Path = tuple[int, ...]
_Paths = tuple[tuple[int, _Path], ...]  # of chunks, by number


class _Meeting(NamedTuple):
    """Ranks that work together at one level, and the chunks that end at each of them."""

    members: tuple[int, ...]
    chunks: tuple[Chunks, ...]


_Level = Mapping[int, list[_Meeting]]  # which meetings each rank takes part in

_REDUCE_SCATTERS = {"direct": direct_reduce_scatter, "ring": ring_reduce_scatter}
_ALL_REDUCES = {
    "binomial": binomial_all_reduce,
    "direct": direct_all_reduce,
    "double_tree": double_tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "recursive_doubling": recursive_doubling_all_reduce,
    "ring": ring_all_reduce,
}
_BROADCASTS = {
    "binomial": binomial_broadcast,
    "double_tree": double_tree_broadcast,
    "ring": ring_broadcast,
}


def hierarchical_all_reduce(
    rank: int,
    size: int,
    groups: Groups,
    *,
    inside: str = "direct",
    across: str = "ring",
    bandwidths: Sequence[float] | None = None,
) -> Schedule:
    """Return the hierarchical all_reduce.

    Parameters
    ----------
    rank, size : int
        Whose schedule, among how many ranks.
    groups : nested tuple of int
        All ranks, host by host; see above.
    inside : str
        The reduce_scatter (and all_gather) below the top: ``"direct"`` or ``"ring"``.
    across : str
        The all_reduce at the top, any but the hierarchical one.
    bandwidths : sequence of float, optional
        How fast the road of each rank to other hosts is, in any unit: the slices have sizes in
        proportion, as the slowest rank that carries a slice allows. Equal slices if None.
    """
    depth = _depth(groups, size)
    paths = _slices(groups)
    *lower, top = _meetings(groups, paths)
    seats = [_seat(_REDUCE_SCATTERS, inside)] * max(1, depth - 1)
    if depth == 1:
        up = _reduced(rank, [top], seats)
        return Schedule("all_reduce", rank, size, len(paths), up + mirrored(up))
    build = _seat(_ALL_REDUCES, across)
    parts = []
    for members, chunks in top.get(rank, ()):
        seat = build(members.index(rank), len(members))
        shares = _shared_out(tuple(chain.from_iterable(chunks)), seat.chunks)
        parts.append(within(seat.rounds, members, shares))
    up = _reduced(rank, lower, seats)
    rounds = up + beside(parts) + mirrored(up)
    weights = _weights(groups, paths, bandwidths)
    return Schedule("all_reduce", rank, size, len(paths), rounds, weights=weights)


def hierarchical_reduce_scatter(
    rank: int, size: int, groups: Groups, *, inside: str = "direct", across: str = "ring"
) -> Schedule:
    """Return the hierarchical reduce_scatter; parameters as in `hierarchical_all_reduce`.

    In each host the part of a rank elsewhere is reduced at the rank of the same position there,
    and from these across the hosts. Both seats are ``"direct"`` or ``"ring"``.
    """
    rounds = _parts_reduced(rank, size, groups, inside, across)
    return Schedule("reduce_scatter", rank, size, size, rounds)


def hierarchical_all_gather(
    rank: int, size: int, groups: Groups, *, inside: str = "direct", across: str = "ring"
) -> Schedule:
    """Return the hierarchical all_gather: the reduce_scatter backwards."""
    rounds = mirrored(_parts_reduced(rank, size, groups, inside, across))
    return Schedule("all_gather", rank, size, size, rounds)


def hierarchical_broadcast(
    rank: int,
    size: int,
    root: int,
    groups: Groups,
    *,
    across: str = "binomial",
    bandwidths: Sequence[float] | None = None,
) -> Schedule:
    """Return the hierarchical broadcast; `bandwidths` as in `hierarchical_all_reduce`.

    The root scatters slices inside its host, each slice goes across the hosts, and each host puts
    the slices together. `across` is ``"binomial"``, ``"double_tree"`` or ``"ring"``.
    """
    depth = _depth(groups, size)
    build = _seat(_BROADCASTS, across)
    width = _width([len(leaf) for leaf in hosts_of(groups)])
    paths = tuple((slice_, (0,) * (depth - 1) + (slice_,)) for slice_ in range(width))
    stages: list[Rounds] = []
    here = groups
    for _ in range(depth - 1):
        # From the child that has the data to the others, slice by slice.
        source = next((i for i, child in enumerate(here) if root in _ranks(child)), 0)
        parts = []
        for members, slices in _holders(here, root, width).items():
            if rank in members:
                seat = build(members.index(rank), len(members), source)
                parts.append(within(seat.rounds, members, _shared_out(slices, seat.chunks)))
        stages.append(beside(parts))
        here = next(child for child in here if rank in _ranks(child))
    # In each host from the ranks that hold slices to the others; the root has them all already.
    held = {member: tuple(range(place, width, len(here))) for place, member in enumerate(here)}
    spread = tuple(
        step
        for member in here
        if member != rank
        for step in (Send(member, held[rank]), Recv(member, held[member], False))
        if step.chunks and (member != root if isinstance(step, Send) else rank != root)
    )
    scatter: tuple[Send | Recv, ...] = ()
    if rank == root:
        scatter = tuple(Send(member, held[member]) for member in here if member != root)
    elif root in here:
        scatter = (Recv(root, held[rank], False),)
    rounds = ((scatter,), *stages, (spread,))
    weights = _weights(groups, paths, bandwidths)
    return Schedule(
        "broadcast", rank, size, width, _talking(chain.from_iterable(rounds)), root, weights
    )


def _reduced(
    rank: int, levels: Sequence[_Level], seats: Sequence[Callable[..., Schedule]]
) -> Rounds:
    """Return the rounds that reduce from the lowest of `levels` to the highest."""
    rounds: Rounds = ()
    for level, build in zip(levels, seats, strict=True):
        rounds += beside(
            within(build(members.index(rank), len(members)).rounds, members, chunks)
            for members, chunks in level.get(rank, ())
        )
    return _talking(rounds)


def _parts_reduced(rank: int, size: int, groups: Groups, inside: str, across: str) -> Rounds:
    depth = _depth(groups, size)
    seats = [_seat(_REDUCE_SCATTERS, inside)] * depth
    if depth > 1:
        seats[-1] = _seat(_REDUCE_SCATTERS, across)
    return _reduced(rank, _meetings(groups, _homes(groups)), seats)


def _talking(rounds: Iterator[Any] | Rounds) -> Rounds:
    return tuple(steps for steps in rounds if steps)


def _seat(known: Mapping[str, Callable[..., Schedule]], name: str) -> Callable[..., Schedule]:
    try:
        return known[name]
    except KeyError:
        raise ScheduleError(f"no seat for {name!r}; known: {', '.join(sorted(known))}") from None


def _shared_out(chunks: Chunks, shares: int) -> list[Chunks]:
    return [chunks[start:stop] for start, stop in spans(len(chunks), shares)]


# ------------------------------------------------------------------------------------ the groups


def _is_host(groups: Groups) -> bool:
    return not groups or not isinstance(groups[0], tuple)


def rail_of(rank: int, groups: Groups) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a rank's host, and those in its place on all hosts, of equal size."""
    hosts = hosts_of(groups)
    here = next(ranks for ranks in hosts if rank in ranks)
    return here, tuple(ranks[here.index(rank)] for ranks in hosts)


@lru_cache(maxsize=256)
def hosts_of(groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return the hosts that nested groups consist of, in order."""
    if _is_host(groups):
        return (groups,)
    return tuple(leaf for child in groups for leaf in hosts_of(child))


@lru_cache(maxsize=1024)
def _ranks(groups: Groups) -> frozenset[int]:
    return frozenset(chain.from_iterable(hosts_of(groups)))


def _depth(groups: Groups, size: int) -> int:
    """Return how many levels the groups have, 1 for a single host, after checking them."""
    try:
        return _checked_depth(groups, size)
    except TypeError:  # not hashable
        raise ScheduleError(f"groups are tuples of ranks or of groups, not {groups!r}") from None


@lru_cache(maxsize=256)
def _checked_depth(groups: Groups, size: int) -> int:

    def depth(part: Any) -> int:
        if not isinstance(part, tuple) or not part:
            raise ScheduleError(f"a group is a tuple of ranks or of groups, not {part!r}")
        if not any(isinstance(child, tuple) for child in part):
            return 1
        depths = {depth(child) for child in part}
        if len(depths) > 1:
            raise ScheduleError(f"groups are not nested equally deep: {part!r}")
        return 1 + depths.pop()

    levels = depth(groups)
    if sorted(chain.from_iterable(hosts_of(groups))) != list(range(size)):
        raise ScheduleError(f"groups must hold each of {size} ranks once, not {groups!r}")
    return levels


def _width(lengths: Sequence[int]) -> int:
    """Return into how many shares data is cut that groups of these lengths carry together."""
    # Each rank of a group carries equally many with the least common multiple, if it is not large.
    even = lcm(*lengths)
    return even if even <= 4 * max(lengths) else max(lengths)


@lru_cache(maxsize=64)
def _slices(groups: Groups) -> _Paths:
    """Return a path for each chunk of an all_reduce: cut for the ranks of a host, then above."""
    at: list[Groups] = [groups]
    radices = [_width([len(groups)])]  # from the top down
    while not _is_host(at[0]):
        at = [child for group in at for child in group]
        radices.append(_width([len(group) for group in at]))
    paths = []
    for chunk in range(prod(radices)):
        path, rest = [], chunk  # slices of a host are next to each other: the top varies first
        for radix in radices:
            rest, digit = divmod(rest, radix)
            path.append(digit)
        paths.append((chunk, tuple(path)))
    return tuple(paths)


@lru_cache(maxsize=64)
def _homes(groups: Groups) -> _Paths:
    """Return the path to each rank, as the path of the chunk that is its part."""
    if _is_host(groups):
        return tuple((rank, (place,)) for place, rank in enumerate(groups))
    return tuple(
        (rank, (place, *path)) for place, child in enumerate(groups) for rank, path in _homes(child)
    )


def _carrier(groups: Groups, path: _Path) -> int:
    """Return the rank of the groups that stands for the end of `path`, and is it if it is there."""
    child = groups[path[0] % len(groups)]
    return child if _is_host(groups) else _carrier(child, path[1:])


@lru_cache(maxsize=64)
def _meetings(groups: Groups, paths: _Paths) -> list[_Level]:
    """Return who meets for which chunks at each level, hosts first."""
    levels: list[dict[int, list[_Meeting]]] = []
    if not _is_host(groups):
        below = tuple((chunk, path[1:]) for chunk, path in paths)
        for child in groups:
            for number, level in enumerate(_meetings(child, below)):
                if number == len(levels):
                    levels.append({})
                for rank, meetings in level.items():
                    levels[number].setdefault(rank, []).extend(meetings)
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for chunk, path in paths:
        if _is_host(groups):
            members: tuple[int, ...] = groups
        else:
            members = tuple(_carrier(child, path[1:]) for child in groups)
        owned = found.setdefault(members, [[] for _ in members])
        owned[path[0] % len(groups)].append(chunk)
    top: dict[int, list[_Meeting]] = {}
    for members, owned in found.items():
        meeting = _Meeting(members, tuple(map(tuple, owned)))
        for rank in members:
            top.setdefault(rank, []).append(meeting)
    return [*levels, top]


def _holders(groups: Groups, root: int, width: int) -> dict[tuple[int, ...], Chunks]:
    """Return which ranks, one a child, hold the slices of a broadcast first."""

    def holder(part: Groups, slice_: int) -> int:
        if _is_host(part):
            return int(part[slice_ % len(part)])
        return holder(next((child for child in part if root in _ranks(child)), part[0]), slice_)

    found: dict[tuple[int, ...], Chunks] = {}
    for slice_ in range(width):
        members = tuple(holder(child, slice_) for child in groups)
        found[members] = (*found.get(members, ()), slice_)
    return found


def _weights(
    groups: Groups, paths: _Paths, bandwidths: Sequence[float] | None
) -> tuple[int, ...] | None:
    """Return the sizes of slices in proportion to what the slowest rank that carries each can."""
    if bandwidths is None:
        return None
    ranks = len(_ranks(groups))
    try:
        speeds = [float(speed) for speed in bandwidths]
    except (OverflowError, TypeError, ValueError):
        speeds = []
    if len(speeds) != ranks or not all(0 < speed < float("inf") for speed in speeds):
        raise ScheduleError(f"bandwidths must be one positive number for each of {ranks} ranks")
    # Relative ones, none of them too small to count with.
    fastest = max(speeds)
    speeds = [max(speed / fastest, 1e-9) for speed in speeds]
    leaves = hosts_of(groups)
    carried = dict.fromkeys(range(ranks), 0)
    for _, path in paths:
        for leaf in leaves:
            carried[leaf[path[-1] % len(leaf)]] += 1
    rates = [
        min(
            speeds[rank] / carried[rank] for rank in (leaf[path[-1] % len(leaf)] for leaf in leaves)
        )
        for _, path in paths
    ]
    scale = 1000 / min(rates)
    weights = tuple(round(rate * scale) for rate in rates)
    return None if len(set(weights)) == 1 else weights
