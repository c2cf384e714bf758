"""How the ranks that are left agree on who is left, when some do not answer any more.

Everybody tells everybody whom it hears; who is not heard within a while is out, and what the others
hear counts as well, until all who are left say the same. If the network has split, each side sees
the other as lost: only the side with more than half of the ranks goes on, or, of two halves, that
with the lowest rank. Ranks that have said that they leave count on neither side.
"""

from collections.abc import Callable, Collection

import numpy as np

from pycomm.deadline import Deadline
from pycomm.errors import CommError, CommTimeoutError
from pycomm.transports.base import Array, Pending, Transport

__all__ = ["agree"]

# Messages that may never come: the road may write into their memory as long as the process lives.
_kept: list[object] = []

#: Rounds after which ranks that still do not agree give up: each round takes out at least one.
_ROUNDS = 8
#: Seconds more in later rounds.
_SOON = 2.0

Wait = Callable[[Callable[[], bool], Deadline], bool]


def agree(
    transport: Transport, gone: Collection[int], patience: float, wait: Wait, tag: int
) -> tuple[int, ...]:
    """Return the ranks that are left, the same on each of them; called by those.

    Parameters
    ----------
    transport : Transport
        A road on which nothing else goes on.
    gone : collection of int
        Ranks that have said that they leave.
    patience : float
        Seconds within which all who are left come here.
    wait : callable
        ``wait(ready, deadline)`` returns whether it became ready before the deadline.
    tag : int
        The first of 8 tags that nothing has been sent with.

    Raises
    ------
    CommError
        If this rank is on the smaller side, or the ranks do not come to the same answer.
    """
    rank, size = transport.rank, transport.size
    if rank in gone:
        raise CommError(
            f"rank {rank} has told the others that it leaves: they go on without it",
            operation="group",
            rank=rank,
        )
    view = set(range(size)) - set(gone)
    for number in range(_ROUNDS):
        # Whoever came late is as late in the rounds that follow.
        deadline = Deadline(patience if number == 0 else patience + _SOON)
        heard = _round(transport, view, deadline, wait, tag + number)
        hears = {**heard, rank: {rank, *heard}}
        left = _all_in_touch(rank, hears)
        same = number > 0 and left == view and all(told == left for told in heard.values())
        view = left
        if same:
            _check_side(rank, size, view, gone)
            return tuple(sorted(view))
    raise CommTimeoutError(
        f"rank {rank}: the ranks that are left do not agree on who is: {sorted(view)} here",
        operation="group",
        rank=rank,
    )


def _all_in_touch(rank: int, hears: dict[int, set[int]]) -> set[int]:
    """Return ranks that all hear each other, `rank` among them; as many as a simple search finds.

    While two of them do not, the one that hears the fewest leaves, of equal ones the highest: that
    is the same for all who know the same.
    """
    left = {other for other in hears if other in hears[rank] and rank in hears[other]}
    while True:
        touch = {a: sum(b in hears[a] and a in hears[b] for b in left if b != a) for a in left}
        poorest = min(left - {rank}, key=lambda one: (touch[one], -one), default=rank)
        if touch[poorest] >= len(left) - 1 or poorest == rank:
            return left
        left.discard(poorest)


def _round(
    transport: Transport, view: set[int], deadline: Deadline, wait: Wait, tag: int
) -> dict[int, set[int]]:
    """Tell all in `view` who is in it; return what those say who answer."""
    own = np.zeros(transport.size, np.uint8)
    own[list(view)] = 1
    told: dict[int, Array] = {}
    pending: dict[int, Pending] = {}
    kept: list[object] = [own, told]
    for peer in sorted(view - {transport.rank}):
        told[peer] = np.zeros(transport.size, np.uint8)
        try:
            pending[peer] = transport.post([], [(peer, told[peer])], tag)
            kept += [pending[peer], transport.post([(peer, own)], [], tag)]
        except Exception:  # noqa: S112 - whoever cannot be reached is not heard
            continue

    def answered(peer: int) -> bool:
        try:
            return pending[peer].test()
        except Exception:
            return False

    missing = set(pending)

    def ready() -> bool:
        missing.difference_update({peer for peer in missing if answered(peer)})
        return not missing

    wait(ready, deadline)
    _kept.append(kept)
    return {
        peer: set(np.flatnonzero(told[peer]).tolist()) for peer in pending if peer not in missing
    }


def _check_side(rank: int, size: int, view: Collection[int], gone: Collection[int]) -> None:
    """Refuse to go on with the smaller part of a network that has split."""
    others = size - len(set(gone) - set(view))
    half = 2 * len(view) == others
    if 2 * len(view) < others or (half and min(view) != min(set(range(size)) - set(gone))):
        raise CommError(
            f"rank {rank} hears only {sorted(view)} of {others} ranks: the others may go on "
            "without it, so it must not",
            operation="group",
            rank=rank,
        )
