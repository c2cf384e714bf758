"""Collectives whose messages are encoded: fewer bytes on the wire, sums in float32.

All_reduce has a seat for a codec among ranks that divide the data among themselves: each encodes
the slices of the others and sends them to their owners; an owner adds up what it decodes, in rank
order and in float32, with its own values as they are; it encodes the result once and sends that to
all. Nobody encodes it again, and its owner decodes it, too, so all ranks end with the same bits.

With error feedback there are two rounding errors to keep: that of a rank's contributions, and that
of the results it owns (worker and server error in Tang et al., "1-bit Adam", 2021).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pycomm.algorithms.compression import Codec, ErrorFeedback
from pycomm.algorithms.compression.codec import exact_size
from pycomm.algorithms.schedule import spans
from pycomm.call import Call
from pycomm.dtypes import Op, ReduceOp
from pycomm.executor import Start, Steps
from pycomm.kernels.host import quietly
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Transport

__all__ = ["ITEM", "EncodedSum", "Encoder", "Note", "cut"]

#: Bytes of a float32.
ITEM = 4
_ALIGNMENT = 64

#: Adds to the count of values that were too large.
Note = Callable[[int], None]


class Encoder(NamedTuple):
    """What one call encodes with: a codec, maybe with the residuals of the call's key."""

    codec: Codec
    note: Note
    residuals: tuple[Array, ...] = ()

    @classmethod
    def of(
        cls, call: Call, note: Note, layout: tuple[object, ...], sizes: Sequence[int]
    ) -> "Encoder":
        """Return that of a call; its residuals belong to `layout` and have these lengths."""
        codec = call.codec
        assert codec is not None
        if isinstance(codec, ErrorFeedback):
            return cls(codec, note, codec.residuals(call.key, layout, sizes))
        return cls(codec, note)

    def encode(self, source: Array, target: Array, which: int, start: int) -> None:
        """Encode; the residual is the piece from `start` on of the `which`-th one."""
        if self.residuals:
            assert isinstance(self.codec, ErrorFeedback)
            kept = self.residuals[which][start : start + source.size]
            self.note(self.codec.compensate(source, target, kept))
        else:
            self.note(int(self.codec.encode(source, target) or 0))

    def decode(self, source: Array, target: Array) -> None:
        """Decode."""
        self.codec.decode(source, target)

    def add_up(
        self,
        come: Sequence[Array],
        index: int,
        own: Array,
        total: Array,
        scratch: Array,
        divisor: np.float32,
    ) -> None:
        """Write the sum of all contributions, in their order, over `divisor` to `total`.

        Those of others are encoded in `come`; the one of this rank, at `index`, is `own`. `scratch`
        is as long as `total`. To be called `quietly`.
        """
        for peer, encoded in enumerate(come):
            target = scratch if peer else total
            if peer == index:
                target = own
            else:
                self.decode(encoded, target)
            if peer:
                np.add(total, target, out=total)
            elif target is own:
                total[:] = own
        if divisor != 1:
            np.divide(total, divisor, out=total)


class EncodedSum:
    """All_reduce of float32 among some ranks, with encoded messages.

    Values are encoded at about the size of one rank's contribution: a sum is divided by a power of
    two before it is encoded, an average by the number of ranks, so that fp16 neither overflows nor
    loses small values.

    Parameters
    ----------
    transport, pool
        The road, and where scratch comes from.
    ranks : tuple of int
        Who takes part, in the order in which contributions are added. This rank is one of them.
    codec : Codec
        What tells the sizes.
    op : ReduceOp
        Sum or average.
    segments : list of tuple of int
        The pieces ``[start, stop)`` of the values that go one after the other.
    whole : int
        How many values the whole call has, of which these may be a slice.
    inputs : int
        How many ranks' values have been added up in each contribution already.
    note : callable
        Gets the number of values that were too large.

    Attributes
    ----------
    segments : list of tuple of int
        The same.
    bytes_sent, plain_bytes : int
        Bytes that this rank sends, and those that it would send without a codec.
    """

    #: Rounds of messages of each segment.
    rounds = 2

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        ranks: tuple[int, ...],
        codec: Codec,
        op: Op,
        segments: list[tuple[int, int]],
        whole: int,
        inputs: int,
        note: Note,
    ) -> None:
        self._transport, self._pool, self._note = transport, pool, note
        self._ranks = ranks
        self._index = ranks.index(transport.rank)
        self._size_of = exact_size(codec)
        size = len(ranks)
        average = op is ReduceOp.AVG
        self._before = np.float32(1 / inputs if average else 0.5 ** (inputs - 1).bit_length())
        self._divisor = np.float32(size if average else 2 ** (size - 1).bit_length())
        after = 1.0 if average else 2.0 ** ((inputs - 1).bit_length() + (size - 1).bit_length())
        self._after = np.float32(after)
        self.segments = segments
        count = segments[-1][1]
        self._owned: list[int] = []  # where each segment's results are among all that are owned
        owned = self.bytes_sent = self.plain_bytes = 0
        for start, stop in self.segments:
            self._owned.append(owned)
            bounds = spans(stop - start, size)
            first, last = bounds[self._index]
            own = last - first
            owned += own
            others = [end - begin for begin, end in bounds]
            del others[self._index]
            self.bytes_sent += sum(map(self._size_of, others)) + (size - 1) * self._size_of(own)
            self.plain_bytes += ITEM * (sum(others) + (size - 1) * own)
        # With other segments results are owned in other places.
        self._layout = ("all_reduce", whole, len(segments), str(op), inputs, self._index, *ranks)
        self._sizes = (count, owned)

    def bind(self, call: Call) -> Start:
        """Return what starts a segment of a call: ``start(segment, source, target, tag)``.

        `source` and `target` are that segment of the contribution and of the result; they may be
        the same.
        """
        encoder = Encoder.of(call, self._note, self._layout, self._sizes)

        def start(segment: int, source: Array, target: Array, tag: int) -> Steps:
            return self._steps(encoder, segment, source, target, tag)

        return start

    def _steps(
        self, encoder: Encoder, segment: int, source: Array, target: Array, tag: int
    ) -> Steps:
        begin, end = self.segments[segment]
        index, ranks = self._index, self._ranks
        bounds = spans(end - begin, len(ranks))
        own = slice(*bounds[index])
        lengths = [stop - start for start, stop in bounds]
        sizes = [self._size_of(length) for length in lengths]
        scaled = 0 if self._before == 1 else end - begin
        nbytes = 2 * sum(sizes) + len(ranks) * sizes[index] + ITEM * (2 * lengths[index] + scaled)
        block, take = cut(self._pool, nbytes, 3 * len(ranks) + 3)
        contribution = source
        if scaled:
            # Not in the target: this rank's own part is read after the messages have gone.
            contribution = take(ITEM * scaled).view(np.float32)
            quietly(np.multiply, source, self._before, contribution)
        gone = [take(size) for size in sizes]
        come = [take(sizes[index]) for _ in ranks]
        peers = [peer for peer in range(len(ranks)) if peer != index]
        for peer in peers:
            first, last = bounds[peer]
            encoder.encode(contribution[first:last], gone[peer], 0, begin + first)
        post = self._transport.post
        yield post(
            [(ranks[peer], gone[peer]) for peer in peers],
            [(ranks[peer], come[peer]) for peer in peers],
            tag,
        )
        total, part = (take(ITEM * lengths[index]).view(np.float32) for _ in range(2))
        quietly(encoder.add_up, come, index, contribution[own], total, part, self._divisor)
        encoder.encode(total, gone[index], 1, self._owned[segment])
        result = [gone[index] if peer == index else take(sizes[peer]) for peer in range(len(ranks))]
        yield post(
            [(ranks[peer], gone[index]) for peer in peers],
            [(ranks[peer], result[peer]) for peer in peers],
            tag,
        )
        for peer, (first, last) in enumerate(bounds):
            encoder.decode(result[peer], target[first:last])
        if self._after != 1:
            quietly(np.multiply, target, self._after, target)
        self._pool.give(block)  # not after a failure: a message may still land in it


def cut(pool: ScratchPool, nbytes: int, pieces: int) -> tuple[Array, Callable[[int], Array]]:
    """Return a block of scratch for so many aligned pieces, and what cuts the next one off it."""
    block = pool.take(nbytes + pieces * _ALIGNMENT)
    used = 0

    def take(size: int) -> Array:
        nonlocal used
        start = used
        used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return block[start : start + size]

    return block, take
