"""Recursive algorithms: partners twice as far away, or twice as near, each time.

Recursive doubling exchanges everything with the partner whose number differs in bit k: few steps
and many bytes, for short messages. Halving-doubling exchanges only the half that the partner is to
reduce, then gathers the halves back in reverse: few steps and few bytes.

For a size that is no power of two, the first ranks are paired: the even one of a pair hands its
data over before, and gets the result after.

Steps and bytes a rank, for D bytes on n ranks, m the largest power of two up to n: doubling log2(m)
steps of D bytes; halving-doubling 2 log2(m) steps, 2(m-1)/m D bytes; for n > m both two steps more
and, on some ranks, D bytes more in one hop.
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005.
"""

from collections.abc import Callable

from pycomm.algorithms.compose import Rounds, mirrored
from pycomm.algorithms.schedule import Recv, Schedule, Send, one

__all__ = ["halving_doubling_all_reduce", "recursive_doubling_all_reduce"]


def recursive_doubling_all_reduce(rank: int, size: int) -> Schedule:
    """Return the recursive doubling all_reduce, for any number of ranks; the data is one chunk."""
    return Schedule("all_reduce", rank, size, 1, _folded(rank, size, _exchange_all, one(0)))


def halving_doubling_all_reduce(rank: int, size: int) -> Schedule:
    """Return the halving-doubling all_reduce (Rabenseifner), for any number of ranks."""
    power = 1 << (size.bit_length() - 1)
    rounds = _folded(rank, size, _halve_and_double, tuple(range(power)))
    return Schedule("all_reduce", rank, size, power, rounds)


Numbered = Callable[[int], int]


def _exchange_all(place: int, power: int, peer: Numbered) -> Rounds:
    distances = [1 << bit for bit in range(power.bit_length() - 1)]
    return tuple(
        (Send(peer(place ^ far), one(0)), Recv(peer(place ^ far), one(0), True))
        for far in distances
    )


def _halve_and_double(place: int, power: int, peer: Numbered) -> Rounds:
    """Halve until only the chunk with the number of this place is left, then double back."""
    halving = []
    first, far = 0, power // 2  # the range of chunks that this place still reduces, 2 far long
    while far:
        lower, upper = tuple(range(first, first + far)), tuple(range(first + far, first + 2 * far))
        keep, give = (upper, lower) if place & far else (lower, upper)
        halving.append((Send(peer(place ^ far), give), Recv(peer(place ^ far), keep, True)))
        first, far = keep[0], far // 2
    return (*halving, *mirrored(tuple(halving)))


def _folded(
    rank: int, size: int, inner: Callable[[int, int, Numbered], Rounds], everything: tuple[int, ...]
) -> Rounds:
    """Run `inner` on a power of two of the ranks; the others hand over before, and get after."""
    power = 1 << (size.bit_length() - 1)
    pairs = size - power  # the first 2 * pairs ranks are paired

    def peer(place: int) -> int:
        return 2 * place + 1 if place < pairs else place + pairs

    if rank < 2 * pairs and rank % 2 == 0:
        # Silent in between: rounds with the same number happen at about the same time.
        silent = ((),) * len(inner(0, power, peer))
        return ((Send(rank + 1, everything),), *silent, (Recv(rank + 1, everything, False),))
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    rounds = inner(place, power, peer)
    if not pairs:
        return rounds
    if rank < 2 * pairs:
        return ((Recv(rank - 1, everything, True),), *rounds, (Send(rank - 1, everything),))
    return ((), *rounds, ())
