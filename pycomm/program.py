"""A schedule bound to a count of elements: which memory every message and reduction touches.

Nomenclature. A chunk has an *origin*, where the caller's input holds it, and a *home*, where it
lives once something has been written to it: in the output, or in work memory where the rank has no
output for it. Until then it is read from its origin, so that no input is copied or changed.

Long chunks are cut into *segments*, which go through the schedule one after the other, several of
them under way at a time. Cutting chunks and not the whole data keeps every element in its chunk:
the order in which contributions are added, and so every bit of the result, does not depend on it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pycomm.algorithms.schedule import PARTED, Chunks, Recv, Round, Schedule, Send, chunk_sizes

__all__ = [
    "INPUT",
    "OUTPUT",
    "STAGE",
    "WORK",
    "BoundRound",
    "Copy",
    "Message",
    "Piece",
    "Program",
    "Reduction",
]

#: The memories: of the caller, and scratch that is needed for as long as a segment, or a round.
INPUT, OUTPUT, WORK, STAGE = range(4)

# Runs of chunks that are not neighbours travel as messages of their own from this size on, and
# packed into one below it.
_PACK = 8192  # bytes


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of a memory."""

    memory: int
    start: int
    stop: int


_NOWHERE = Piece(STAGE, 0, 0)  # where empty messages are


class Copy(NamedTuple):
    """Copy one piece to another of the same length."""

    source: Piece
    target: Piece


class Reduction(NamedTuple):
    """Combine sources, in their order, into `target`."""

    sources: tuple[Piece, ...]
    target: Piece


#: A message: peer, memory, and where in it, in bytes.
Message = tuple[int, int, int, int]


class BoundRound(NamedTuple):
    """One round: what to pack before it, its messages, what to reduce and unpack after it."""

    packs: tuple[Copy, ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    reductions: tuple[Reduction, ...]
    unpacks: tuple[Copy, ...]


class Program:
    """A schedule bound to a count.

    Parameters
    ----------
    schedule : Schedule
        What to do.
    count : int
        Elements of the data, of all parts together where it has parts.
    itemsize : int
        Bytes of an element.
    segment : int
        Bytes that a segment of a chunk may have.

    Attributes
    ----------
    segments : int
        Into how many segments each chunk is cut.
    copies : tuple of Copy
        What goes from the input to the output as it is; nothing to do for input in its place.
    work, stage : int
        Elements of scratch that one segment needs.
    """

    def __init__(self, schedule: Schedule, count: int, itemsize: int, segment: int) -> None:
        self.schedule = schedule
        self.segments = schedule.segments(count, segment // itemsize)
        self.itemsize = itemsize
        self._bounds = schedule.spans(count)
        own = self._own = _own_chunks(schedule)
        self._own_start = self._bounds[own.start][0] if len(own) else 0
        # The longest segment of each chunk comes first, so that it tells how much scratch to have.
        self._lengths = [chunk_sizes(stop - start, self.segments) for start, stop in self._bounds]
        self._work_starts = self._place_work()
        origin = [True] * schedule.slots  # whether a chunk is still read from its origin
        self._rounds: list[tuple[Round, tuple[bool, ...]]] = []
        for steps in schedule.rounds:
            if steps:
                self._rounds.append((steps, tuple(origin)))
            for step in steps:
                if isinstance(step, Recv):
                    for chunk in step.chunks:
                        origin[chunk] = False
        self.copies = tuple(self._copies(origin))
        self.stage = 0
        self._bound: list[tuple[BoundRound, ...] | None] = [None] * self.segments
        self._bound[0] = self._bind(0)

    def rounds(self, segment: int) -> tuple[BoundRound, ...]:
        """Return what to do for one segment."""
        bound = self._bound[segment]
        if bound is None:
            bound = self._bound[segment] = self._bind(segment)
        return bound

    # ------------------------------------------------------------------------- where chunks are

    def _place_work(self) -> dict[int, int]:
        """Return where in work memory each chunk without a place in the output is at home."""
        kind, rank, root = self.schedule.collective, self.schedule.rank, self.schedule.root
        self.work = 0
        starts: dict[int, int] = {}
        if kind not in ("reduce_scatter", "scatter") and (
            kind not in ("gather", "reduce") or rank == root
        ):
            return starts
        written = {
            chunk
            for steps in self.schedule.rounds
            for step in steps
            if isinstance(step, Recv)
            for chunk in step.chunks
        }
        outputs = self._own if kind in ("reduce_scatter", "scatter") else ()
        for chunk in sorted(written.difference(outputs)):
            starts[chunk] = self.work
            self.work += self._lengths[chunk][0]
        return starts

    def _whole_origin(self, chunk: int) -> Piece:
        start, stop = self._bounds[chunk % len(self._bounds)]
        if self.schedule.collective in ("all_gather", "gather"):
            start, stop = start - self._own_start, stop - self._own_start
        return Piece(INPUT, start, stop)

    def _whole_home(self, chunk: int) -> Piece:
        start, stop = self._bounds[chunk]
        kind = self.schedule.collective
        if kind in ("reduce_scatter", "scatter"):
            return Piece(OUTPUT, start - self._own_start, stop - self._own_start)
        return Piece(INPUT if kind == "broadcast" else OUTPUT, start, stop)

    def _piece(self, chunk: int, segment: int, *, origin: bool) -> Piece:
        """Return where the segment of a chunk is."""
        chunks = len(self._bounds)
        sizes = self._lengths[chunk % chunks]
        if chunk >= chunks:
            whole = self._whole_origin(chunk)  # the input of all_to_all
        elif origin:
            whole = self._whole_origin(chunk)
        elif chunk in self._work_starts:
            start = self._work_starts[chunk]
            return Piece(WORK, start, start + sizes[segment])
        else:
            whole = self._whole_home(chunk)
        base = sizes[-1]
        start = whole.start + segment * base + min(segment, sum(sizes) - base * len(sizes))
        return Piece(whole.memory, start, start + sizes[segment])

    def _copies(self, origin: Sequence[bool]) -> Iterator[Copy]:
        """Yield what reaches the output without any message."""
        kind = self.schedule.collective
        gets_it = self.schedule.rank == self.schedule.root
        wanted: Iterable[int] = ()
        if kind == "all_reduce" or (kind == "reduce" and gets_it):
            wanted = range(len(self._bounds))
        elif kind in ("all_gather", "all_to_all", "reduce_scatter") or gets_it:
            wanted = self._own  # of a broadcast nothing
        for chunk in wanted:
            if origin[chunk]:
                yield Copy(self._whole_origin(chunk), self._whole_home(chunk))

    # ------------------------------------------------------------------------------- binding

    def _bind(self, segment: int) -> tuple[BoundRound, ...]:
        rounds = []
        for steps, origin in self._rounds:
            binding = _Binding(self, segment, origin)
            sending = {chunk for s in steps if isinstance(s, Send) for chunk in s.chunks}
            for step in steps:
                if isinstance(step, Send):
                    binding.send(step)
                else:
                    binding.receive(step, sending)
            rounds.append(binding.round())
            self.stage = max(self.stage, binding.staged)
        return tuple(rounds)

    def messages(self, chunks: Chunks, segment: int) -> list[Chunks]:
        """Return the chunks of each message that a step of the schedule becomes.

        Both ends find the same: it depends on the numbers and sizes of the chunks alone, and in
        all_to_all, where the ends have different numbers, on nothing.
        """
        if len(chunks) < 2 or self.schedule.collective == "all_to_all":
            return [chunks]
        runs: list[list[int]] = []
        for chunk in chunks:
            if runs and self.segments == 1 and chunk == runs[-1][-1] + 1:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        elements = sum(self._lengths[chunk][segment] for chunk in chunks)
        if elements * self.itemsize < _PACK * len(runs):
            return [chunks]
        return [tuple(run) for run in runs]

    def pieces(self, chunks: Chunks, segment: int, origin: Sequence[bool]) -> list[Piece]:
        """Return where chunks are, neighbours in memory joined, empty ones left out."""
        return _joined(self._piece(c, segment, origin=origin[c]) for c in chunks)

    def home(self, chunk: int, segment: int) -> Piece:
        """Return where the segment of a chunk is at home."""
        return self._piece(chunk, segment, origin=False)


class _Binding:
    """One round of one segment, in the making."""

    def __init__(self, program: Program, segment: int, origin: Sequence[bool]) -> None:
        self._program = program
        self._segment = segment
        self._origin = origin
        self.staged = 0
        self._packs: list[Copy] = []
        self._sends: list[Message] = []
        self._recvs: list[Message] = []
        self._unpacks: list[Copy] = []
        # Contributions to each chunk, as (sender, where it is staged).
        self._arriving: dict[int, list[tuple[int, Piece]]] = {}

    def _stage(self, length: int) -> Piece:
        self.staged += length
        return Piece(STAGE, self.staged - length, self.staged)

    def _message(self, peer: int, piece: Piece) -> Message:
        size = self._program.itemsize
        return (peer, piece.memory, piece.start * size, piece.stop * size)

    def send(self, step: Send) -> None:
        """Add a send."""
        for chunks in self._program.messages(step.chunks, self._segment):
            pieces = self._program.pieces(chunks, self._segment, self._origin)
            if len(pieces) > 1:
                packed = self._stage(sum(stop - start for _, start, stop in pieces))
                self._packs += _spread(pieces, packed, packing=True)
                pieces = [packed]
            if pieces or not step.chunks:
                self._sends.append(self._message(step.peer, pieces[0] if pieces else _NOWHERE))

    def receive(self, step: Recv, sending: set[int]) -> None:
        """Add a receive; what is being sent in the same round is written after it only."""
        for chunks in self._program.messages(step.chunks, self._segment):
            homes = [self._program.home(chunk, self._segment) for chunk in chunks]
            pieces = _joined(homes)
            if not pieces:
                if not step.chunks:
                    self._recvs.append(self._message(step.peer, _NOWHERE))
                continue
            if step.reduce:
                staged = self._stage(sum(stop - start for _, start, stop in homes))
                at = staged.start
                for chunk, (_, start, stop) in zip(chunks, homes, strict=True):
                    source = Piece(STAGE, at, at + stop - start)
                    self._arriving.setdefault(chunk, []).append((step.peer, source))
                    at = source.stop
            elif len(pieces) > 1 or not sending.isdisjoint(chunks):
                staged = self._stage(sum(stop - start for _, start, stop in pieces))
                self._unpacks += _spread(pieces, staged, packing=False)
            else:
                staged = pieces[0]
            self._recvs.append(self._message(step.peer, staged))

    def round(self) -> BoundRound:
        """Return the round."""
        return BoundRound(
            tuple(self._packs),
            tuple(self._sends),
            tuple(self._recvs),
            tuple(self._reductions()),
            tuple(self._unpacks),
        )

    def _reductions(self) -> Iterator[Reduction]:
        last: Reduction | None = None
        rank = self._program.schedule.rank
        for chunk in sorted(self._arriving):
            own = self._program.pieces((chunk,), self._segment, self._origin)
            if not own:
                continue  # empty
            arrived = sorted([*self._arriving[chunk], (rank, own[0])])
            one = Reduction(
                tuple(source for _, source in arrived),
                self._program.home(chunk, self._segment),
            )
            joined = last and _join(last, one)
            if last and not joined:
                yield last
            last = joined or one
        if last:
            yield last


def _own_chunks(schedule: Schedule) -> range:
    """Return the chunks that are this rank's part; none where the data has no parts."""
    if schedule.collective not in PARTED:
        return range(0)
    each = schedule.chunks // schedule.size
    return range(schedule.rank * each, (schedule.rank + 1) * each)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours in memory, and leave out what is empty."""
    joined: list[Piece] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if joined and joined[-1].memory == piece.memory and joined[-1].stop == piece.start:
            joined[-1] = Piece(piece.memory, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def _spread(pieces: Sequence[Piece], packed: Piece, *, packing: bool) -> Iterator[Copy]:
    """Yield the copies between pieces and the one that holds them all."""
    at = packed.start
    for piece in pieces:
        part = Piece(packed.memory, at, at + piece.stop - piece.start)
        yield Copy(piece, part) if packing else Copy(part, piece)
        at = part.stop


def _join(first: Reduction, second: Reduction) -> Reduction | None:
    """Return both as one where all of their memory is next to each other."""
    if len(first.sources) != len(second.sources):
        return None
    pairs = [
        _joined(pair)
        for pair in zip(
            (*first.sources, first.target), (*second.sources, second.target), strict=True
        )
    ]
    if any(len(pair) != 1 for pair in pairs):
        return None
    *sources, target = (pair[0] for pair in pairs)
    return Reduction(tuple(sources), target)
