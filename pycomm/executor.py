"""Runs a program on a transport: one executor for every schedule on every road."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from pycomm.algorithms.schedule import spans
from pycomm.buffers import address_of
from pycomm.dtypes import DType, Op, PremulSum
from pycomm.kernels.casts import FORMATS, narrow, widen
from pycomm.kernels.host import divide, premultiply, quietly, reduce_arrays
from pycomm.program import BoundRound, Copy, Message, Piece, Program
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Array, Pending, Transport

__all__ = ["WINDOW", "Execution", "Start", "Steps", "segments_of", "taking_turns"]

Steps = Generator[Pending, None, None]

#: Starts a segment of a reduction: ``start(segment, source, target, tag)``.
Start = Callable[[int, Array, Array, int], Steps]

#: Segments under way at a time, each with a tag of its own.
WINDOW = 4
_SHORTEST = 64 << 10  # bytes of a segment, if there are so many

# The four memories of a program, and the same as bytes.
_Memories = tuple[tuple[Array, Array, Array, Array], tuple[Array, Array, Array, Array]]


class Execution:
    """A program, ready to run with arrays of one dtype and op.

    `scaled` says that an average is wanted of what is added in steps: the input is divided first,
    so that no sum overflows. `widened` says that the program is one of float32, whose average is
    wanted in float16: divided first, its small values would vanish.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        pool: ScratchPool,
        dtype: DType,
        op: Op | None,
        *,
        scaled: bool = False,
        widened: bool = False,
    ) -> None:
        self.program = program
        self._transport = transport
        self._pool = pool
        self._dtype = dtype
        self._op = op
        self._scaled = scaled
        self._widened = widened
        # By a power of two first, which is exact, and by the rest once all is added.
        power = 1 << (transport.size - 1).bit_length()
        self._before, self._after = PremulSum(1 / power), PremulSum(power / transport.size)
        self._window = min(WINDOW, program.segments)
        self._scratch = (program.work + program.stage) * dtype.itemsize
        self._nothing = np.empty(0, dtype.numpy)

    def steps(self, x: Array | None, out: Array | None, tags: Sequence[int]) -> Steps:
        """Run, yielding what has to be waited for.

        Parameters
        ----------
        x, out : numpy.ndarray or None
            Input and output, one-dimensional, None where this rank has none. `out` may be `x`, or
            the rank's own part of the other one.
        tags : sequence of int
            `WINDOW` tags that no other operation uses at the same time.
        """
        if self._widened:
            yield from self._wide(x, out, tags)
        else:
            yield from self._run(x, out, tags)

    def _wide(self, x: Array | None, out: Array | None, tags: Sequence[int]) -> Steps:
        """Run in float32 for arrays of float16, and write averages, rounded once."""
        held: list[Array] = []

        def like(array: Array) -> Array:
            held.append(self._pool.take(4 * array.size))
            return held[-1][: 4 * array.size].view(np.float32)

        wide_x = wide_out = None
        if x is not None:
            wide_x = like(x)
            widen(x, wide_x, FORMATS["fp16"])
        if out is not None:
            wide_out = wide_x if x is not None and address_of(x) == address_of(out) else like(out)
        yield from self._run(wide_x, wide_out, tags)
        if out is not None:
            assert wide_out is not None
            divide(wide_out, self._transport.size)
            quietly(partial(narrow, saturate=False), wide_out, out, FORMATS["fp16"])
        for block in held:  # not after a failure: a message may still land in them
            self._pool.give(block)

    def _run(self, x: Array | None, out: Array | None, tags: Sequence[int]) -> Steps:
        program, pool, scratch = self.program, self._pool, self._scratch
        blocks = [pool.take(scratch) for _ in range(self._window)] if scratch else []
        if x is None:
            x = self._nothing
        if out is None:
            out = self._nothing
        held = list(blocks)
        if self._scaled:
            block, x = self._scale(x)
            held.append(block)
        for source, target in program.copies:
            _fill(out[target.start : target.stop], x[source.start : source.stop])
        if program.segments == 1:
            memories = self._memories(x, out, blocks[0] if blocks else None)
            yield from self._segment(program.rounds(0), memories, tags[0])
        else:
            slots = [
                self._memories(x, out, blocks[slot] if blocks else None)
                for slot in range(self._window)
            ]

            def start(segment: int, slot: int) -> Steps:
                return self._segment(program.rounds(segment), slots[slot], tags[slot])

            yield from taking_turns(program.segments, self._window, start)
        if self._scaled and self._after.factor != 1:
            premultiply(out, out, self._dtype, self._after)
        for block in held:  # not after a failure: a message may still land in them
            pool.give(block)

    def _scale(self, x: Array) -> tuple[Array, Array]:
        """Return the input divided by about the number of ranks, after the scratch that holds it.

        The average of halves that are added in steps: their sum may be too large for them.
        """
        block = self._pool.take(x.nbytes)
        scaled = block[: x.nbytes].view(self._dtype.numpy)
        premultiply(x, scaled, self._dtype, self._before)
        return block, scaled

    def prepared(self, x: Array | None, out: Array | None, tag: int) -> Callable[[], Steps] | None:
        """Return what does `steps` on the same arrays any number of times, one after the other.

        Everything is bound once: messages to arrays, arrays to requests. It has scratch of its own
        and needs one tag for itself. None where segments take turns, or the input is scaled.
        """
        program = self.program
        if program.segments > 1 or self._scaled or self._widened:
            return None
        x = self._nothing if x is None else x
        out = self._nothing if out is None else out
        block = np.empty(self._scratch, np.uint8) if self._scratch else None
        typed, octets = self._memories(x, out, block)

        def messages(bound: Sequence[Message]) -> list[tuple[int, Array]]:
            return [(peer, octets[memory][start:stop]) for peer, memory, start, stop in bound]

        def arrays(copies: Sequence[Copy]) -> list[tuple[Array, Array]]:
            return [(_at(typed, copy.target), _at(typed, copy.source)) for copy in copies]

        rounds = [
            (
                arrays(packs),
                self._transport.prepare(messages(sends), messages(recvs), tag),
                [([_at(typed, s) for s in sources], _at(typed, to)) for sources, to in reductions],
                arrays(unpacks),
            )
            for packs, sends, recvs, reductions, unpacks in program.rounds(0)
        ]
        copies = [pair for pair in arrays(program.copies) if not np.may_share_memory(*pair)]

        def steps() -> Steps:
            dtype, op = self._dtype, self._op
            for target, source in copies:
                target[:] = source
            for packs, start, reductions, unpacks in rounds:
                for target, source in packs:
                    target[:] = source
                yield start()
                for sources, target in reductions:
                    assert op is not None
                    reduce_arrays(sources, target, dtype, op)
                for target, source in unpacks:
                    target[:] = source

        return steps

    def _memories(self, x: Array, out: Array, block: Array | None) -> _Memories:
        if block is None:
            work = stage = self._nothing
        else:
            typed = block[: self._scratch].view(self._dtype.numpy)
            work, stage = typed[: self.program.work], typed[self.program.work :]
        octets = np.uint8
        return (
            (x, out, work, stage),
            (x.view(octets), out.view(octets), work.view(octets), stage.view(octets)),
        )

    def _segment(self, rounds: Sequence[BoundRound], memories: _Memories, tag: int) -> Steps:
        typed, octets = memories
        post = self._transport.post
        for packs, sends, recvs, reductions, unpacks in rounds:
            if packs:
                _copy(packs, typed)
            yield post(
                [(peer, octets[memory][start:stop]) for peer, memory, start, stop in sends],
                [(peer, octets[memory][start:stop]) for peer, memory, start, stop in recvs],
                tag,
            )
            for sources, (memory, start, stop) in reductions:
                self._reduce(sources, typed[memory][start:stop], typed)
            if unpacks:
                _copy(unpacks, typed)

    def _reduce(self, sources: Sequence[Piece], target: Array, typed: Sequence[Array]) -> None:
        assert self._op is not None
        arrays = [typed[memory][start:stop] for memory, start, stop in sources]
        reduce_arrays(arrays, target, self._dtype, self._op)


def segments_of(
    count: int, itemsize: int, longest: int, pieces: int = WINDOW
) -> list[tuple[int, int]]:
    """Return the pieces ``[start, stop)`` in which `count` elements go, one after the other.

    So many `pieces`, fewer if their messages would be too short, more if they would have more than
    `longest` bytes; at least one.
    """
    nbytes = count * itemsize
    return spans(count, max(1, min(pieces, nbytes // _SHORTEST), -(-nbytes // longest)))


def taking_turns(segments: int, window: int, start: Callable[[int, int], Steps]) -> Steps:
    """Run segments, up to `window` of them under way, each in a slot, in a fixed order.

    ``start(segment, slot)`` returns the steps of a segment. All have equally many, so that they end
    in order, and the slot of the first is free for the next.
    """
    running: deque[tuple[Steps, Pending]] = deque()
    following = 0
    while True:
        while following < segments and len(running) < window:
            segment = start(following, following % window)
            following += 1
            pending = next(segment, None)
            if pending is not None:
                running.append((segment, pending))
        if not running:
            return
        segment, pending = running.popleft()
        yield pending
        upcoming = next(segment, None)
        if upcoming is not None:
            running.append((segment, upcoming))


def _at(typed: Sequence[Array], piece: Piece) -> Array:
    return typed[piece.memory][piece.start : piece.stop]


def _copy(copies: Sequence[Copy], typed: Sequence[Array]) -> None:
    for (source, first, last), (target, start, stop) in copies:
        typed[target][start:stop] = typed[source][first:last]


def _fill(target: Array, source: Array) -> None:
    """Copy unless `source` is in place already; they never overlap in part."""
    if not np.may_share_memory(target, source):
        target[:] = source
