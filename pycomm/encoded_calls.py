"""All_reduce with encoded messages, ready to run; what all such executions have in common.

Across hosts with equally many ranks only the hop between hosts is encoded: the ranks of a host add
up their values first and hand on the result as it is.
"""

from collections.abc import Sequence

import numpy as np

from pycomm.algorithms.compression import Codec
from pycomm.algorithms.hierarchical import Groups, rail_of
from pycomm.algorithms.schedule import spans
from pycomm.call import Call
from pycomm.dtypes import Op
from pycomm.encoded import EncodedSum, Note, cut
from pycomm.executor import WINDOW, Steps, segments_of, taking_turns
from pycomm.kernels.host import quietly
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Transport
from pycomm.units import format_bytes

__all__ = ["ITEM", "PIECES", "EncodedExecution", "EncodedFlat", "EncodedHierarchy", "add"]

#: Bytes of a float32.
ITEM = 4
#: Segments of a call that is not longer: while one is on the wire the other one is encoded. More
#: of them cost more than they hide (two hosts, 1 Gbit/s).
PIECES = 2


class EncodedExecution:
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
        raise NotImplementedError


class EncodedFlat(EncodedExecution):
    """All_reduce among all ranks, each of which may be anywhere."""

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        codec: Codec,
        op: Op,
        count: int,
        segment: int,
        note: Note,
    ) -> None:
        ranks = tuple(range(transport.size))
        pieces = segments_of(count, ITEM, segment, PIECES)
        self._sum = EncodedSum(transport, pool, ranks, codec, op, pieces, count, 1, note)
        self.segments, self.rounds = len(self._sum.segments), self._sum.rounds
        self.bytes_sent, self.plain_bytes = self._sum.bytes_sent, self._sum.plain_bytes

    def steps(self, call: Call, tags: Sequence[int]) -> Steps:
        """Return the steps of one call."""
        x, out = call.flat()
        assert x is not None
        assert out is not None
        start = self._sum.bind(call)

        def one(segment: int, slot: int) -> Steps:
            piece = slice(*self._sum.segments[segment])
            return start(segment, x[piece], out[piece], tags[slot])

        yield from taking_turns(self.segments, WINDOW, one)


class EncodedHierarchy(EncodedExecution):
    """All_reduce over hosts with equally many ranks, encoded between the hosts only.

    The ranks of a host share out the data: each adds up its slice of all of them, all_reduces it
    with the ranks that carry the same slice elsewhere, and gives it to the others of its host.
    """

    rounds = 1 + EncodedSum.rounds + 1

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        groups: Groups,
        codec: Codec,
        op: Op,
        count: int,
        segment: int,
        note: Note,
    ) -> None:
        self._transport, self._pool = transport, pool
        self._here, rail = rail_of(transport.rank, groups)
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
        inside = ITEM * (count + (len(self._here) - 2) * (stop - start))
        self.bytes_sent = self._sum.bytes_sent + inside
        self.plain_bytes = self._sum.plain_bytes + inside

    def steps(self, call: Call, tags: Sequence[int]) -> Steps:
        """Return the steps of one call."""
        x, out = call.flat()
        assert x is not None
        assert out is not None
        start = self._sum.bind(call)

        def one(segment: int, slot: int) -> Steps:
            tag = tags[slot]
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
            contributions = [
                x[own] if peer == local else come[peer].view(np.float32)
                for peer in range(len(here))
            ]
            total = contributions[0]
            if len(here) > 1:
                total = come[local].view(np.float32)
                quietly(add, contributions, total)
            yield from start(segment, total, out[own], tag)
            yield post(
                [(here[peer], out[own].view(np.uint8)) for peer in others],
                [(here[peer], out[pieces[peer]].view(np.uint8)) for peer in others],
                tag,
            )
            self._pool.give(block)

        yield from taking_turns(self.segments, WINDOW, one)


def add(contributions: Sequence[Array], total: Array) -> None:
    """Write the sum of at least two arrays, in their order, to `total`."""
    np.add(contributions[0], contributions[1], out=total)
    for other in contributions[2:]:
        np.add(total, other, out=total)
