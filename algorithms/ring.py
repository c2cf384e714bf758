"""Ring algorithms: each rank talks to its two neighbours only, and every link works all the time.

The ring reduce_scatter sends, in round r, the chunk that began r ranks behind: it travels once
around, picking up a contribution at each rank, and arrives complete at its owner. The ring
all_gather sends complete chunks around in the same way. All_reduce is one after the other. The ring
broadcast is a chain from the root, which works while many segments of the data follow each other.

Steps and bytes a rank, for D bytes on n ranks: all_reduce 2(n-1) steps, 2(n-1)/n D bytes, D/n a
hop; reduce_scatter and all_gather half of that. Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.
"""

from itertools import pairwise

from pycomm.algorithms.compose import Rounds
from pycomm.algorithms.schedule import Recv, Round, Schedule, Send, one

__all__ = ["ring_all_gather", "ring_all_reduce", "ring_broadcast", "ring_reduce_scatter"]


def ring_reduce_scatter(rank: int, size: int) -> Schedule:
    """Return the ring reduce_scatter: chunk i ends, complete, at rank i."""
    return Schedule("reduce_scatter", rank, size, size, _reduce_around(rank, size))


def ring_all_gather(rank: int, size: int) -> Schedule:
    """Return the ring all_gather: rank i begins with chunk i."""
    return Schedule("all_gather", rank, size, size, _store_around(rank, size))


def ring_all_reduce(rank: int, size: int) -> Schedule:
    """Return the ring all_reduce: a reduce_scatter, then an all_gather."""
    rounds = _reduce_around(rank, size) + _store_around(rank, size)
    return Schedule("all_reduce", rank, size, size, rounds)


def ring_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Return the chain broadcast: every rank hands on to the next what it has received."""
    place = (rank - root) % size
    before: Round = (Recv((rank - 1) % size, one(0), False),) if place > 0 else ()
    after: Round = (Send((rank + 1) % size, one(0)),) if place < size - 1 else ()
    rounds = tuple(steps for steps in (before, after) if steps)
    return Schedule("broadcast", rank, size, 1, rounds, root)


def _reduce_around(rank: int, size: int) -> Rounds:
    # The chunk that ends here in the last round left its owner's successor in the first one.
    return _around(rank, size, rank - 1, reduce=True)


def _store_around(rank: int, size: int) -> Rounds:
    return _around(rank, size, rank, reduce=False)


def _around(rank: int, size: int, first: int, *, reduce: bool) -> Rounds:
    """Send chunk `first` to the next rank, then each time the one that has just arrived."""
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    chunks = [(first - turn) % size for turn in range(size)]
    return tuple(
        (Send(ahead, one(sent)), Recv(behind, one(received), reduce))
        for sent, received in pairwise(chunks)
    )
