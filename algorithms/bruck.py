"""Bruck's algorithms, and the dissemination barrier: log2(n) rounds for any number of ranks.

After round k a rank has heard, through others, from 2**(k+1) ranks. They move a block several
times in order to send few messages: for short ones.

Steps and bytes a rank, for D bytes on n ranks: all_gather ceil(log2 n) steps, (n-1)/n D bytes;
all_to_all ceil(log2 n) steps, about log2(n)/2 D bytes. Bruck, Ho, Kipnis, Upfal and Weathersby,
"Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
"""

from pycomm.algorithms.schedule import Recv, Round, Schedule, Send

__all__ = ["bruck_all_gather", "bruck_all_to_all", "dissemination_barrier"]


def _distances(size: int) -> list[int]:
    return [1 << bit for bit in range((size - 1).bit_length())]


def bruck_all_gather(rank: int, size: int) -> Schedule:
    """Return Bruck's all_gather: every rank sends all it has, twice as far back each time."""
    rounds: list[Round] = []
    for far in _distances(size):
        many = min(far, size - far)
        held = tuple((rank + offset) % size for offset in range(many))
        new = tuple((rank + far + offset) % size for offset in range(many))
        rounds += ((Send((rank - far) % size, held), Recv((rank + far) % size, new, reduce=False)),)
    return Schedule("all_gather", rank, size, size, tuple(rounds))


def bruck_all_to_all(rank: int, size: int) -> Schedule:
    """Return Bruck's all_to_all: a block goes as far as its distance has bits, bit by bit.

    Every block on the way to a rank `distance` ahead has the place of the block that will arrive
    from as far behind, so that no place is needed twice.
    """
    rounds: list[Round] = []
    for far in _distances(size):
        moving = [distance for distance in range(size) if distance & far]
        # A block that moves for the first time is still in the input.
        held = tuple(
            (rank - distance) % size if distance & (far - 1) else size + (rank + distance) % size
            for distance in moving
        )
        places = tuple((rank - distance) % size for distance in moving)
        rounds.append((Send((rank + far) % size, held), Recv((rank - far) % size, places, False)))
    return Schedule("all_to_all", rank, size, size, tuple(rounds))


def dissemination_barrier(rank: int, size: int) -> Schedule:
    """Return the dissemination barrier: empty messages, twice as far each time."""
    rounds = tuple(
        (Send((rank + far) % size, ()), Recv((rank - far) % size, (), reduce=False))
        for far in _distances(size)
    )
    return Schedule("barrier", rank, size, 1, rounds)
