"""All_reduce with encoded messages, ready to run; what all such executions have in common.

Across hosts with equally many ranks only the hop between hosts is encoded: the ranks of a host add
up their values first and hand on the result as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from pycomm.algorithms.compression import Codec
from pycomm.algorithms.hierarchical import Groups, rail_of
from pycomm.algorithms.schedule import spans
from pycomm.call import Call
from pycomm.dtypes import Op
from pycomm.encoded import ITEM, EncodedSum, Note, cut
from pycomm.executor import WINDOW, Start, Steps, segments_of, taking_turns
from pycomm.kernels.host import quietly
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Transport
from pycomm.units import format_bytes

__all__ = ["PIECES", "EncodedAllReduce", "EncodedExecution", "add"]

#: Segments of a call that is not longer: while one is on the wire the other one is encoded. More
#: of them cost more than they hide (two hosts, 1 Gbit/s).
PIECES = 2


class EncodedExecution(ABC):
    """What all of them have in common.

    Attributes
    ----------
    bytes_sent : int
        Bytes that this rank sends in one call.
    plain_bytes : int
        What that would be without a codec.
    segments : int
        Into how many segments the data is cut.
    rounds : int
        Rounds of messages of a segment.
    """

    bytes_sent: int
    plain_bytes: int
    segments: int
    rounds: int

    def describe(self, codec: object, hosts: int) -> list[str]:
        """Return the lines that tell what is done."""
        cut_in = f", each in {self.segments} segments" if self.segments > 1 else ""
        sent, plain = format_bytes(self.bytes_sent), format_bytes(self.plain_bytes)
        lines = [
            f"  steps      {self.rounds}{cut_in}",
            f"  sends      {sent} from this rank instead of {plain}, as {codec}",
        ]
        if hosts == 1:
            lines.append("  note       inside one host this is slower than without compression")
        return lines

    def steps(self, call: Call, tags: Sequence[int]) -> Steps:
        """Return the steps of one call; `tags` are `WINDOW` tags for it alone."""
        x, out = call.flat()
        assert x is not None
        assert out is not None
        start = self._bind(call, x, out)

        def one(segment: int, slot: int) -> Steps:
            return start(segment, tags[slot])

        yield from taking_turns(self.segments, WINDOW, one)

    @abstractmethod
    def _bind(self, call: Call, x: Array, out: Array) -> Callable[[int, int], Steps]:
        """Return what starts a segment of a call: ``start(segment, tag)``."""


class EncodedAllReduce(EncodedExecution):
    """All_reduce of all ranks, or over hosts with equally many, encoded between the hosts only.

    The ranks of a host share out the data: each adds up its slice of all of them, all_reduces it
    with the ranks that carry the same slice elsewhere, and gives it to the others of its host.
    Without `groups` each rank is treated as a host.
    """

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        groups: Groups | None,
        codec: Codec,
        op: Op,
        count: int,
        segment: int,
        note: Note,
    ) -> None:
        self._transport, self._pool = transport, pool
        alone = tuple((rank,) for rank in range(transport.size))
        self._here, rail = rail_of(transport.rank, alone if groups is None else groups)
        self._local = self._here.index(transport.rank)
        slices = spans(count, len(self._here))
        start, stop = slices[self._local]
        # All ranks have equally many segments, whose lengths may differ by one.
        longest = max(end - begin for begin, end in slices)
        self.segments = len(segments_of(longest, ITEM, segment, PIECES))
        own = spans(stop - start, self.segments)
        self._sum = EncodedSum(transport, pool, rail, codec, op, own, count, len(self._here), note)
        #: What goes on between hosts, for ranks that do the stages inside in another way.
        self.across = self._sum
        self._pieces = [
            [(begin + first, begin + last) for first, last in spans(end - begin, self.segments)]
            for begin, end in slices
        ]
        self.rounds = self._sum.rounds + 2 * (len(self._here) > 1)
        inside = ITEM * (count - (stop - start) + (len(self._here) - 1) * (stop - start))
        self.bytes_sent = self._sum.bytes_sent + inside
        self.plain_bytes = self._sum.plain_bytes + inside

    def _bind(self, call: Call, x: Array, out: Array) -> Callable[[int, int], Steps]:
        across = self._sum.bind(call)
        inside = self._across_only if len(self._here) == 1 else self._with_stages

        def start(segment: int, tag: int) -> Steps:
            return inside(across, segment, x, out, tag)

        return start

    def _across_only(self, across: Start, segment: int, x: Array, out: Array, tag: int) -> Steps:
        piece = slice(*self._pieces[0][segment])
        return across(segment, x[piece], out[piece], tag)

    def _with_stages(self, across: Start, segment: int, x: Array, out: Array, tag: int) -> Steps:
        here, local = self._here, self._local
        pieces = [slice(*theirs[segment]) for theirs in self._pieces]
        own = pieces[local]
        others = [peer for peer in range(len(here)) if peer != local]
        length = own.stop - own.start
        block, take = cut(self._pool, ITEM * length * len(here), len(here))
        come = [take(ITEM * length) for _ in here]
        post = self._transport.post
        yield post(
            [(here[peer], x[pieces[peer]].view(np.uint8)) for peer in others],
            [(here[peer], come[peer]) for peer in others],
            tag,
        )
        contributions = [one.view(np.float32) for one in come]
        total = contributions[local]
        contributions[local] = x[own]
        quietly(add, contributions, total)
        yield from across(segment, total, out[own], tag)
        yield post(
            [(here[peer], out[own].view(np.uint8)) for peer in others],
            [(here[peer], out[pieces[peer]].view(np.uint8)) for peer in others],
            tag,
        )
        self._pool.give(block)  # not after a failure: a message may still land in it


def add(contributions: Sequence[Array], total: Array) -> None:
    """Write the sum of at least two arrays, in their order, to `total`."""
    np.add(contributions[0], contributions[1], out=total)
    for other in contributions[2:]:
        np.add(total, other, out=total)
