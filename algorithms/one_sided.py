"""What each rank moves where it reaches the memory of all others: reads and writes, no messages.

Between two meetings of all ranks, inputs are ready and no output is read yet: any rank may read any
input and write any output. Moves say which rank does what. In *two steps*, a meeting before and one
after, work is shared out evenly: for all_reduce of D bytes each rank reads D/n of every input and
writes D/n of every output. In *one step* ranks write nothing but their own memory, so that no
meeting is needed afterwards if inputs stay as they are until the next one.
"""

from typing import NamedTuple

from pycomm.algorithms.schedule import spans

__all__ = ["OUT", "Move", "Place", "X", "counts", "distant", "moves"]

#: The arrays of a rank: its input, which broadcast also writes, and its output.
X, OUT = 0, 1


class Place(NamedTuple):
    """Where elements begin: in array `side` of `rank`, at element `start`."""

    rank: int
    side: int
    start: int


class Move(NamedTuple):
    """Combine `length` elements at each source, in their order, and write them to all targets."""

    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    length: int


def counts(collective: str, rank: int, size: int, root: int, count: int) -> tuple[int, int]:
    """Return how many elements the input and the output of a rank have, 0 for one that is not.

    `count` is the number of elements of the smaller side.
    """
    at_root = rank == root
    if collective == "barrier":
        return 0, 0
    if collective == "broadcast":
        return count, 0
    if collective == "scatter":
        return count * size * at_root, count
    if collective in ("gather", "reduce"):
        return count, count * (size if collective == "gather" else 1) * at_root
    many_in = collective in ("all_to_all", "reduce_scatter")
    many_out = collective in ("all_gather", "all_to_all")
    return count * (size if many_in else 1), count * (size if many_out else 1)


def moves(
    collective: str, rank: int, size: int, root: int, count: int, *, one_step: bool = False
) -> tuple[Move, ...]:
    """Return what `rank` does.

    Parameters
    ----------
    collective : str
        One of `pycomm.algorithms.COLLECTIVES`.
    rank, size, root : int
        Who does it, among how many, for whom (-1 without a root).
    count : int
        Elements of the smaller side: of the whole for all_reduce, reduce and broadcast, of a part
        for the others.
    one_step : bool
        Whether to write nothing but one's own memory.
    """
    # Beginning with oneself, so that not all read the same memory at the same time.
    peers = tuple((rank + step) % size for step in range(size))
    everyone = range(size)
    if collective in ("all_reduce", "reduce"):
        outputs = (root,) if collective == "reduce" else peers
        if one_step:
            outputs = tuple(output for output in outputs if output == rank)
        start, stop = (0, count) if one_step else spans(count, size)[rank]
        found = Move(
            tuple(Place(peer, X, start) for peer in everyone),
            tuple(Place(output, OUT, start) for output in outputs),
            stop - start,
        )
        return (found,) if outputs and found.length else ()
    if count == 0:
        return ()
    if collective == "reduce_scatter":
        parts = tuple(Place(peer, X, rank * count) for peer in everyone)
        return (Move(parts, (Place(rank, OUT, 0),), count),)
    copies: list[tuple[Place, Place]] = []
    if collective == "all_gather":
        copies = [(Place(peer, X, 0), Place(rank, OUT, peer * count)) for peer in peers]
    elif collective == "all_to_all":
        copies = [(Place(peer, X, rank * count), Place(rank, OUT, peer * count)) for peer in peers]
    elif collective == "broadcast" and rank != root:
        copies = [(Place(root, X, 0), Place(rank, X, 0))]
    elif collective == "scatter":
        copies = [(Place(root, X, rank * count), Place(rank, OUT, 0))]
    elif collective == "gather" and not one_step:
        copies = [(Place(rank, X, 0), Place(root, OUT, rank * count))]
    elif collective == "gather" and rank == root:
        copies = [(Place(peer, X, 0), Place(root, OUT, peer * count)) for peer in peers]
    return tuple(Move((source,), (target,), count) for source, target in copies)


def distant(
    collective: str, size: int, root: int, count: int, *, one_step: bool = False
) -> frozenset[tuple[int, int]]:
    """Return which arrays, as (rank, side), are read or written by other ranks."""
    return frozenset(
        (place.rank, place.side)
        for rank in range(size)
        for move in moves(collective, rank, size, root, count, one_step=one_step)
        for place in (*move.sources, *move.targets)
        if place.rank != rank
    )
