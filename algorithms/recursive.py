"""Recursive doubling: everybody exchanges everything with a partner twice as far away each time.

Few steps and many bytes: for short messages. In round k a rank exchanges all it has with the rank
whose number differs in bit k. For a size that is no power of two, the first ranks are paired: the
even one of a pair hands its data over before, and gets the result after.

Steps and bytes a rank, for D bytes on n ranks, m the largest power of two up to n: log2(m) steps of
D bytes, and for n > m two steps more. Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005.
"""

from pycomm.algorithms.schedule import Recv, Round, Schedule, Send

__all__ = ["recursive_doubling_all_reduce"]


def recursive_doubling_all_reduce(rank: int, size: int) -> Schedule:
    """Return the recursive doubling all_reduce, for any number of ranks; the data is one chunk."""
    power = 1 << (size.bit_length() - 1)
    pairs = size - power  # the first 2 * pairs ranks are paired
    before: Round = ()
    after: Round = ()
    if rank < 2 * pairs and rank % 2 == 0:
        silent: tuple[Round, ...] = ((),) * (power.bit_length() - 1)
        rounds = ((Send(rank + 1, 0),), *silent, (Recv(rank + 1, 0, False),))
        return Schedule("all_reduce", rank, size, 1, rounds)
    if rank < 2 * pairs:
        before, after = (Recv(rank - 1, 0, True),), (Send(rank - 1, 0),)
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    exchanges = []
    distance = 1
    while distance < power:
        partner = place ^ distance
        peer = 2 * partner + 1 if partner < pairs else partner + pairs
        exchanges.append((Send(peer, 0), Recv(peer, 0, True)))
        distance *= 2
    outer = (before, *exchanges, after) if pairs else tuple(exchanges)
    return Schedule("all_reduce", rank, size, 1, outer)
