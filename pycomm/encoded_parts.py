"""Reduce_scatter and all_gather with encoded messages."""

from collections.abc import Callable, Sequence

import numpy as np

from pycomm.algorithms.compression import Codec
from pycomm.algorithms.compression.codec import exact_size
from pycomm.algorithms.hierarchical import Groups, hosts_of
from pycomm.call import Call
from pycomm.dtypes import Op, ReduceOp
from pycomm.encoded import ITEM, Encoder, Note, cut
from pycomm.encoded_calls import PIECES, EncodedExecution, add
from pycomm.executor import Steps, segments_of
from pycomm.kernels.host import quietly
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Transport

__all__ = ["EncodedParts"]


class EncodedParts(EncodedExecution):
    """Reduce_scatter or all_gather, one encoded message for each segment and pair of ranks.

    With `groups`, hosts of equally many ranks, between any two ranks in the same place of their
    hosts; inside of hosts values go as they are. A result of reduce_scatter is not encoded: it
    stays where it is. A part of all_gather is encoded for its own rank, too, so that all have the
    same.
    """

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        groups: Groups | None,
        collective: str,
        codec: Codec,
        op: Op | None,
        count: int,
        segment: int,
        note: Note,
    ) -> None:
        self._transport, self._pool, self._note = transport, pool, note
        self._count = count
        self._reduces = op is not None
        self._size_of = exact_size(codec)
        rank, size = transport.rank, transport.size
        hosts = hosts_of(groups) if groups is not None else tuple((one,) for one in range(size))
        #: For each place in a host, the ranks that have it.
        self._rails = list(zip(*hosts, strict=True))
        here = next(ranks for ranks in hosts if rank in ranks)
        self._here, self._local = here, here.index(rank)
        self._rail = self._rails[self._local]
        self._index = self._rail.index(rank)
        inputs = len(here)
        average = op is ReduceOp.AVG
        shift = (inputs - 1).bit_length()
        self._before = np.float32(1 / inputs if average else 0.5**shift)
        self._divisor = np.float32(len(self._rail) if average else 1)
        self._after = np.float32(1 if average else 2.0**shift)
        self._pieces = segments_of(count, ITEM, segment, PIECES)
        self.segments = len(self._pieces)
        self.rounds = 1 + (inputs > 1)
        others = len(self._rail) - 1
        inside = ITEM * count * len(self._rail) * (inputs - 1)
        self.bytes_sent = inside + others * sum(
            self._size_of(stop - start) for start, stop in self._pieces
        )
        self.plain_bytes = inside + others * ITEM * count
        self._layout = (collective, count, str(op or ""), inputs, self._index, *self._rail)
        self._sizes = (others * count if self._reduces else count,)

    def _bind(self, call: Call, x: Array, out: Array) -> Callable[[int, int], Steps]:
        encoder = Encoder.of(call, self._note, self._layout, self._sizes)
        one = self._reduce if self._reduces else self._gather

        def start(segment: int, tag: int) -> Steps:
            return one(encoder, segment, x, out, tag)

        return start

    def _parts(self, array: Array, ranks: Sequence[int], segment: int) -> list[Array]:
        """Return that segment of the parts of some ranks."""
        first, last = self._pieces[segment]
        count = self._count
        return [array[rank * count + first : rank * count + last] for rank in ranks]

    def _reduce(self, encoder: Encoder, segment: int, x: Array, out: Array, tag: int) -> Steps:
        here, local, rail, index = self._here, self._local, self._rail, self._index
        first, last = self._pieces[segment]
        encoded, plain = self._size_of(last - first), ITEM * (last - first)
        pieces = len(rail) * (len(here) + 2) + 1
        nbytes = 2 * len(rail) * encoded + (len(rail) * len(here) + 1) * plain
        block, take = cut(self._pool, nbytes, pieces)
        contributions = self._parts(x, rail, segment)
        if len(here) > 1:
            come = [[take(plain) for _ in rail] for _ in here]
            others = [peer for peer in range(len(here)) if peer != local]
            yield self._transport.post(
                [
                    (here[peer], part.view(np.uint8))
                    for peer in others
                    for part in self._parts(x, self._rails[peer], segment)
                ],
                [(here[peer], part) for peer in others for part in come[peer]],
                tag,
            )
            for place in range(len(rail)):
                values = [theirs[place].view(np.float32) for theirs in come]
                total = values[local]
                values[local] = contributions[place]
                quietly(add, values, total)
                quietly(np.multiply, total, self._before, total)
                contributions[place] = total
        peers = [place for place in range(len(rail)) if place != index]
        gone, codes = ([take(encoded) for _ in rail] for _ in range(2))
        for slot, place in enumerate(peers):
            encoder.encode(contributions[place], gone[place], 0, slot * self._count + first)
        yield self._transport.post(
            [(rail[place], gone[place]) for place in peers],
            [(rail[place], codes[place]) for place in peers],
            tag,
        )
        result, scratch = out[first:last], take(plain).view(np.float32)
        own = contributions[index]
        quietly(encoder.add_up, codes, index, own, result, scratch, self._divisor)
        if self._after != 1:
            quietly(np.multiply, result, self._after, result)
        self._pool.give(block)  # not after a failure: a message may still land in it

    def _gather(self, encoder: Encoder, segment: int, x: Array, out: Array, tag: int) -> Steps:
        here, local, rail, index = self._here, self._local, self._rail, self._index
        first, last = self._pieces[segment]
        encoded = self._size_of(last - first)
        block, take = cut(self._pool, len(rail) * encoded, len(rail))
        codes = [take(encoded) for _ in rail]
        encoder.encode(x[first:last], codes[index], 0, first)
        peers = [place for place in range(len(rail)) if place != index]
        yield self._transport.post(
            [(rail[place], codes[index]) for place in peers],
            [(rail[place], codes[place]) for place in peers],
            tag,
        )
        own = self._parts(out, rail, segment)
        for code, part in zip(codes, own, strict=True):
            encoder.decode(code, part)
        self._pool.give(block)
        if len(here) > 1:
            others = [peer for peer in range(len(here)) if peer != local]
            yield self._transport.post(
                [(here[peer], part.view(np.uint8)) for peer in others for part in own],
                [
                    (here[peer], part.view(np.uint8))
                    for peer in others
                    for part in self._parts(out, self._rails[peer], segment)
                ],
                tag,
            )
