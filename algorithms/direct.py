"""Direct algorithms: everybody talks to everybody, in one round, or two for all_reduce.

In a direct reduce_scatter each rank gets all contributions to its chunk at once, combines them in
rank order, and rounds once. One-shot all_reduce has every rank send everything to all others and
reduce by itself: a single round, for short messages.

Steps and bytes a rank, for D bytes on n ranks: reduce_scatter, all_gather and all_to_all 1 step,
(n-1)/n D bytes; all_reduce 2 steps, 2(n-1)/n D bytes; one-shot 1 step, (n-1) D bytes; reduce 2
steps, up to D bytes. The largest hop is D/n, of one-shot D.
"""

from pycomm.algorithms.schedule import Recv, Round, Schedule, Send, one

__all__ = [
    "direct_all_gather",
    "direct_all_reduce",
    "direct_all_to_all",
    "direct_gather",
    "direct_reduce",
    "direct_reduce_scatter",
    "direct_scatter",
    "one_shot_all_reduce",
]


def others(rank: int, size: int) -> tuple[int, ...]:
    """Return the other ranks; each starts with its next, so that not all send to rank 0 first."""
    return tuple((rank + step) % size for step in range(1, size))


def direct_reduce_scatter(rank: int, size: int) -> Schedule:
    """Return the direct reduce_scatter: every rank gets all contributions to its chunk at once."""
    return Schedule("reduce_scatter", rank, size, size, _rounds(_to_owners(rank, size)))


def direct_all_gather(rank: int, size: int) -> Schedule:
    """Return the direct all_gather: every rank sends its chunk to all others."""
    return Schedule("all_gather", rank, size, size, _rounds(_from_owners(rank, size)))


def direct_all_reduce(rank: int, size: int) -> Schedule:
    """Return the direct all_reduce: a direct reduce_scatter, then a direct all_gather."""
    rounds = _rounds(_to_owners(rank, size), _from_owners(rank, size))
    return Schedule("all_reduce", rank, size, size, rounds)


def one_shot_all_reduce(rank: int, size: int) -> Schedule:
    """Return the one-shot all_reduce: everybody sends everything to all, and reduces by itself."""
    peers = others(rank, size)
    everything: Round = (
        *(Send(peer, one(0)) for peer in peers),
        *(Recv(peer, one(0), True) for peer in peers),
    )
    return Schedule("all_reduce", rank, size, 1, _rounds(everything))


def direct_all_to_all(rank: int, size: int) -> Schedule:
    """Return the direct all_to_all; see `pycomm.algorithms.schedule` for its chunks."""
    peers = others(rank, size)
    sends = tuple(Send(peer, one(size + peer)) for peer in peers)
    recvs = tuple(Recv(peer, one(peer), False) for peer in peers)
    return Schedule("all_to_all", rank, size, size, _rounds(sends + recvs))


def direct_reduce(rank: int, size: int, root: int) -> Schedule:
    """Return the direct reduce: a direct reduce_scatter, then a gather at the root."""
    rounds = _rounds(_to_owners(rank, size), _to_root(rank, size, root))
    return Schedule("reduce", rank, size, size, rounds, root)


def direct_gather(rank: int, size: int, root: int) -> Schedule:
    """Return the direct gather: every rank sends its chunk to the root."""
    return Schedule("gather", rank, size, size, _rounds(_to_root(rank, size, root)), root)


def direct_scatter(rank: int, size: int, root: int) -> Schedule:
    """Return the direct scatter: the root sends every rank its chunk."""
    steps: Round = (Recv(root, one(rank), False),)
    if rank == root:
        steps = tuple(Send(peer, one(peer)) for peer in others(rank, size))
    return Schedule("scatter", rank, size, size, _rounds(steps), root)


def _to_owners(rank: int, size: int) -> Round:
    peers = others(rank, size)
    return (*(Send(p, one(p)) for p in peers), *(Recv(p, one(rank), True) for p in peers))


def _from_owners(rank: int, size: int) -> Round:
    peers = others(rank, size)
    return (*(Send(p, one(rank)) for p in peers), *(Recv(p, one(p), False) for p in peers))


def _to_root(rank: int, size: int, root: int) -> Round:
    if rank != root:
        return (Send(root, one(rank)),)
    return tuple(Recv(peer, one(peer), False) for peer in others(rank, size))


def _rounds(*rounds: Round) -> tuple[Round, ...]:
    return tuple(steps for steps in rounds if steps)
