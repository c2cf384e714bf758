"""Ring algorithms: each rank talks to its two neighbours only, and every link works all the time.

The ring reduce_scatter sends, in round r, the chunk that began r ranks behind: it travels once
around, picking up a contribution at each rank, and arrives complete at its owner. The ring
all_gather sends complete chunks around in the same way. All_reduce is one after the other.

Steps and bytes a rank, for D bytes on n ranks: all_reduce 2(n-1) steps, 2(n-1)/n D bytes, D/n a
hop; the others half of that. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009.
"""

from pycomm.algorithms.schedule import Recv, Round, Schedule, Send

__all__ = ["ring_all_gather", "ring_all_reduce", "ring_reduce_scatter"]


def ring_reduce_scatter(rank: int, size: int) -> Schedule:
    """Return the ring reduce_scatter: chunk i ends, complete, at rank i."""
    # The chunk that ends here in the last round left its owner's successor in the first one.
    rounds = tuple(_pass_on(rank, size, rank - turn - 1, reduce=True) for turn in range(size - 1))
    return Schedule("reduce_scatter", rank, size, size, rounds)


def ring_all_gather(rank: int, size: int) -> Schedule:
    """Return the ring all_gather: rank i begins with chunk i."""
    rounds = tuple(_pass_on(rank, size, rank - turn, reduce=False) for turn in range(size - 1))
    return Schedule("all_gather", rank, size, size, rounds)


def ring_all_reduce(rank: int, size: int) -> Schedule:
    """Return the ring all_reduce: a reduce_scatter, then an all_gather."""
    rounds = ring_reduce_scatter(rank, size).rounds + ring_all_gather(rank, size).rounds
    return Schedule("all_reduce", rank, size, size, rounds)


def _pass_on(rank: int, size: int, chunk: int, *, reduce: bool) -> Round:
    """Send `chunk` to the next rank, and receive the chunk before it from the previous one."""
    send = Send((rank + 1) % size, chunk % size)
    return (send, Recv((rank - 1) % size, (chunk - 1) % size, reduce))
