"""Collectives made of messages: for roads without a library, and for what the library lacks.

Each is a generator over one-dimensional arrays: it posts rounds of messages, yields what it has to
wait for, and reduces with the kernels of `pycomm.kernels.host`. Reductions combine contributions
in rank order, so that every rank gets the same bits, in every run.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from pycomm.buffers import Buffer
from pycomm.dtypes import DType, Op
from pycomm.kernels.host import reduce_arrays
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Pending, Transport

__all__ = ["AtOnce", "Exchange", "Steps", "composed", "meeting", "others", "spans"]

Steps = Generator[Pending, None, None]

# Up to this size every rank sends everything to all others and reduces by itself: one round
# instead of two. With two ranks it moves no more bytes than two rounds do.
_AT_ONCE_PAIR = 512 << 10
_AT_ONCE = 16 << 10
# Longer reductions go in segments, so that receiving and reducing overlap and scratch stays small.
_SEGMENT = 2 << 20
_SMALLEST_SEGMENT = 64 << 10
_SCRATCH = 16 << 20


def others(rank: int, size: int) -> tuple[int, ...]:
    """Return the other ranks; each starts with its next, so that not all send to rank 0 first."""
    return tuple((rank + step) % size for step in range(1, size))


def spans(count: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``[0, count)`` into `parts` spans; the first ones take the remainder."""
    base, more = divmod(count, parts)
    starts = [part * base + min(part, more) for part in range(parts + 1)]
    return [(starts[part], starts[part + 1]) for part in range(parts)]


class Exchange:
    """What one collective call needs: a road, a tag of its own, and scratch memory."""

    __slots__ = ("_pool", "_tag", "_taken", "_transport", "others", "rank", "size")

    def __init__(
        self, transport: Transport, tag: int, pool: ScratchPool, others: Sequence[int]
    ) -> None:
        self._transport = transport
        self._tag = tag
        self._pool = pool
        self._taken: list[Array] = []
        self.rank = transport.rank
        self.size = transport.size
        self.others = others

    def post(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]]
    ) -> Pending:
        """Post one round of typed arrays."""
        octets = np.uint8
        return self._transport.post(
            [(peer, array.view(octets)) for peer, array in sends],
            [(peer, array.view(octets)) for peer, array in recvs],
            self._tag,
        )

    def scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return scratch for `count` elements, held until `release`."""
        block = self._pool.take(count * dtype.itemsize)
        self._taken.append(block)
        return block[: count * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give the scratch back. Not after a failure: a message may still land in it."""
        for block in self._taken:
            self._pool.give(block)
        self._taken.clear()


def _in_rank_order(others: Sequence[int], own: Array, received: Sequence[Array]) -> list[Array]:
    """Return one source a rank, own in its place; `received` is in the order of `others`."""
    sources = [own] * (len(others) + 1)
    for peer, array in zip(others, received, strict=True):
        sources[peer] = array
    return sources


class AtOnce:
    """all_reduce in one round, prepared once for a count, dtype and op.

    Every rank sends all to all others, and reduces by itself. The input is staged: a peer reads
    memory that was filled by a copy two to three times as fast as memory that arithmetic wrote, and
    the input may be the output.

    It is started like a collective of the library underneath.
    """

    def __init__(self, transport: Transport, tag: int, dtype: DType, op: Op, count: int) -> None:
        self._transport = transport
        self._tag = tag
        self._dtype = dtype
        self._op = op
        self._count = count
        self._busy = False
        peers = others(transport.rank, transport.size)
        nbytes = count * dtype.itemsize
        memory = np.empty((transport.size, nbytes), np.uint8)
        staged, rows = memory[0], list(memory[1:])
        self._sends = [(peer, staged) for peer in peers]
        self._recvs = list(zip(peers, rows, strict=True))
        self._staged = staged.view(dtype.numpy)
        self._others = peers
        self._received = [row.view(dtype.numpy) for row in rows]

    @staticmethod
    def fits(size: int, nbytes: int) -> bool:
        """Whether one round is faster than two for `nbytes` on `size` ranks."""
        return nbytes <= (_AT_ONCE_PAIR if size == 2 else _AT_ONCE)

    def __call__(
        self, x: Buffer | None, out: Buffer | None, root: int, in_place: bool
    ) -> Callable[[], bool]:
        """Start, and return the test whether it is complete."""
        if self._busy:  # one is in flight already: another needs memory of its own
            twin = AtOnce(self._transport, self._tag, self._dtype, self._op, self._count)
            return twin(x, out, root, in_place)
        assert x is not None
        assert out is not None
        self._busy = True
        own, target = x.flat, out.flat
        self._staged[:] = own
        round_test = self._transport.post(self._sends, self._recvs, self._tag).test

        def test() -> bool:
            if not round_test():
                return False
            sources = _in_rank_order(self._others, own, self._received)
            reduce_arrays(sources, target, self._dtype, self._op)
            self._busy = False
            return True

        return test


def _all_reduce(exchange: Exchange, x: Array, out: Array, dtype: DType, op: Op, root: int) -> Steps:
    """Direct: each rank reduces its own slice of all contributions, then sends it to all."""
    del root
    slices = spans(x.size, exchange.size)
    first, last = slices[exchange.rank]
    gathering: list[Pending] = []

    def forward(start: int, stop: int) -> None:
        """Send the part [start, stop) of the own slice on, and receive that of the others."""
        own = out[first:last][start:stop]
        sends = [(peer, own) for peer in exchange.others]
        recvs = []
        for peer in exchange.others:
            low, high = slices[peer]
            recvs.append((peer, out[low:high][start:stop]))
        gathering.append(exchange.post(_filled(sends), _filled(recvs)))

    yield from _reduce_slices(exchange, x, slices, out[first:last], dtype, op, forward)
    yield from gathering


def _filled(parts: list[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """Drop empty messages: slices differ by one element, so a last segment may be empty."""
    return [(peer, array) for peer, array in parts if array.size]


def _reduce_slices(
    exchange: Exchange,
    x: Array,
    slices: list[tuple[int, int]],
    target: Array,
    dtype: DType,
    op: Op,
    reduced: Callable[[int, int], None],
) -> Steps:
    """Reduce the own slice of everybody's `x` into `target`, segment by segment.

    `target` may be the own slice of `x`. ``reduced(start, stop)`` is called after each segment,
    equally often on every rank: the bounds are offsets into the longest slice, and shorter slices
    end before the last one does.
    """
    own = x[slices[exchange.rank][0] : slices[exchange.rank][1]]
    longest = max(high - low for low, high in slices)
    others = exchange.others
    room = _SCRATCH // max(1, 2 * len(others))
    segment = max(1, min(_SEGMENT, max(_SMALLEST_SEGMENT, room)) // x.itemsize)
    segment = max(1, min(segment, longest))
    scratch = exchange.scratch(2 * len(others) * segment, x.dtype)
    halves = scratch.reshape(2, len(others), segment)

    def post(index: int) -> tuple[Pending, list[Array]]:
        start, stop = index * segment, (index + 1) * segment
        length = own[start:stop].size
        received = [halves[index % 2, row, :length] for row in range(len(others))]
        sends = []
        for peer in others:
            low, high = slices[peer]
            sends.append((peer, x[low:high][start:stop]))
        recvs = list(zip(others, received, strict=True))
        return exchange.post(_filled(sends), _filled(recvs)), received

    count = max(1, -(-longest // segment))
    upcoming = post(0)
    for index in range(count):
        pending, received = upcoming
        if index + 1 < count:
            upcoming = post(index + 1)
        yield pending
        start, stop = index * segment, (index + 1) * segment
        part = own[start:stop]
        sources = _in_rank_order(others, part, received)
        reduce_arrays(sources, target[start:stop], dtype, op, sent=True)
        reduced(start, stop)


def _reduce_scatter(
    exchange: Exchange, x: Array, out: Array, dtype: DType, op: Op, root: int
) -> Steps:
    del root
    slices = [(peer * out.size, (peer + 1) * out.size) for peer in range(exchange.size)]
    yield from _reduce_slices(exchange, x, slices, out, dtype, op, lambda *_: None)


def _reduce(
    exchange: Exchange, x: Array, out: Array | None, dtype: DType, op: Op, root: int
) -> Steps:
    """Reduce by slices, each at its own rank, and gather the slices at `root`."""
    slices = spans(x.size, exchange.size)
    first, last = slices[exchange.rank]
    if exchange.rank == root:
        assert out is not None
        yield from _reduce_slices(exchange, x, slices, out[first:last], dtype, op, lambda *_: None)
        parts = [(peer, out[slices[peer][0] : slices[peer][1]]) for peer in exchange.others]
        yield exchange.post([], _filled(parts))
    else:
        own = exchange.scratch(last - first, x.dtype)
        yield from _reduce_slices(exchange, x, slices, own, dtype, op, lambda *_: None)
        yield exchange.post(_filled([(root, own)]), [])


def _slot(out: Array, size: int, rank: int) -> Array:
    part = out.size // size
    return out[rank * part : (rank + 1) * part]


def _fill(slot: Array, source: Array) -> None:
    """Copy unless `source` is in place already; they never overlap in part."""
    if not np.may_share_memory(slot, source):
        slot[:] = source


def _all_gather(exchange: Exchange, x: Array, out: Array, *_: object) -> Steps:
    own = _slot(out, exchange.size, exchange.rank)
    _fill(own, x)
    recvs = [(peer, _slot(out, exchange.size, peer)) for peer in exchange.others]
    yield exchange.post([(peer, own) for peer in exchange.others], recvs)


def _all_to_all(exchange: Exchange, x: Array, out: Array, *_: object) -> Steps:
    size, rank = exchange.size, exchange.rank
    sends = [(peer, _slot(x, size, peer)) for peer in exchange.others]
    pending = exchange.post(sends, [(peer, _slot(out, size, peer)) for peer in exchange.others])
    _slot(out, size, rank)[:] = _slot(x, size, rank)
    yield pending


def _broadcast(
    exchange: Exchange, x: Array, out: Array | None, dtype: DType, op: Op | None, root: int
) -> Steps:
    """Binomial tree: whoever has the data sends it to a rank half as far away as the last time."""
    del out, dtype, op
    size = exchange.size
    place = (exchange.rank - root) % size
    reach = 1 << (size - 1).bit_length()
    if place:
        reach = place & -place  # the lowest set bit: how far its subtree reaches
        yield exchange.post([], [((place - reach + root) % size, x)])
    children = []
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            children.append(((place + reach + root) % size, x))
    yield exchange.post(children, [])


def _gather(
    exchange: Exchange, x: Array, out: Array | None, dtype: DType, op: Op | None, root: int
) -> Steps:
    del dtype, op
    if exchange.rank != root:
        yield exchange.post([(root, x)], [])
        return
    assert out is not None
    _fill(_slot(out, exchange.size, root), x)
    yield exchange.post([], [(p, _slot(out, exchange.size, p)) for p in exchange.others])


def _scatter(
    exchange: Exchange, x: Array | None, out: Array, dtype: DType, op: Op | None, root: int
) -> Steps:
    del dtype, op
    if exchange.rank != root:
        yield exchange.post([], [(root, out)])
        return
    assert x is not None
    _fill(out, _slot(x, exchange.size, root))
    yield exchange.post([(p, _slot(x, exchange.size, p)) for p in exchange.others], [])


def _barrier(exchange: Exchange, *_: object) -> Steps:
    """Dissemination: after round k a rank has heard, through others, from 2**k ranks."""
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < exchange.size:
        behind = (exchange.rank - distance) % exchange.size
        ahead = (exchange.rank + distance) % exchange.size
        yield exchange.post([(ahead, nothing)], [(behind, nothing)])
        distance *= 2


_STEPS: dict[str, Callable[..., Steps]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}


def composed(
    collective: str,
    exchange: Exchange,
    x: Array | None = None,
    out: Array | None = None,
    dtype: DType | None = None,
    op: Op | None = None,
    root: int = -1,
) -> Steps:
    """Return the steps of `collective` for this rank.

    `x` and `out` are one-dimensional; `out` may be `x`, or x the rank's own slot of out (and the
    other way round for reduce_scatter and scatter); None where this rank has none.
    """
    return _STEPS[collective](exchange, x, out, dtype, op, root)


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
