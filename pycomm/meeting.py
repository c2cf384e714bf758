"""How some of the ranks of a transport meet, before they make something together."""

from collections.abc import Sequence

import numpy as np

from pycomm.executor import Steps
from pycomm.transports.base import Array, Transport

__all__ = ["meeting"]


def meeting(transport: Transport, members: Sequence[int], tag: int, span: Array) -> Steps:
    """Meet `members`, some of the ranks of `transport`, and compare a number with all of them.

    Parameters
    ----------
    transport : Transport
        The road of all ranks.
    members : sequence of int
        Who meets.
    tag : int
        A tag that no other round uses at the same time.
    span : numpy.ndarray
        Two uint64, both the number of this rank; at the end the smallest and the largest of all.
    """
    # In rank order, so that lists of the same ranks in another order meet, and differ.
    ranks = sorted(members)
    place = ranks.index(transport.rank)
    distance = 1
    while distance < len(ranks):
        ahead = ranks[(place + distance) % len(ranks)]
        behind = ranks[(place - distance) % len(ranks)]
        told, heard = span.copy(), np.zeros(2, np.uint64)
        yield transport.post([(ahead, told.view(np.uint8))], [(behind, heard.view(np.uint8))], tag)
        span[0], span[1] = min(span[0], heard[0]), max(span[1], heard[1])
        distance *= 2
