"""All_reduce across hosts whose ranks share memory: messages only between hosts.

The ranks of a host share out the data. Each reduces its own slice out of the inputs of all ranks of
the host, all_reduces it with the ranks that carry the same slice elsewhere, and writes the result
to the outputs of all ranks of the host. Nobody else reads or writes that slice, so the ranks of a
host need to meet twice only, before and after all of it. A slice goes in segments, several of them
under way, so that the network works while memory is read and written.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pycomm.algorithms.compose import within
from pycomm.algorithms.one_sided import OUT, Move, Place, X
from pycomm.algorithms.ring import ring_all_reduce
from pycomm.algorithms.schedule import Schedule, spans
from pycomm.call import Call
from pycomm.dtypes import DType, Op
from pycomm.executor import WINDOW, Execution, Start, Steps, segments_of, taking_turns
from pycomm.kernels.host import reducer
from pycomm.program import Program
from pycomm.reach import Pair, Reached, locate, record, run
from pycomm.scratch import ScratchPool
from pycomm.sharing import Attempt, SharedHost
from pycomm.transports.base import Array, Transport
from pycomm.transports.board import Board
from pycomm.units import format_bytes

__all__ = ["Across", "PlainAcross", "SharedHierarchy"]


class Across(Protocol):
    """What all_reduces one slice between hosts."""

    #: Rounds of messages of each segment.
    rounds: int
    #: The pieces ``[start, stop)`` of the slice that go one after the other.
    segments: list[tuple[int, int]]
    #: Bytes that this rank sends, and those that it would send without a codec.
    bytes_sent: int
    plain_bytes: int

    def bind(self, call: Call) -> Start:
        """Return what starts a segment of a call: ``start(segment, source, target, tag)``."""


class PlainAcross:
    """A ring between the ranks that carry the same slice.

    Parameters
    ----------
    transport, pool
        The road, and where scratch comes from.
    rail : tuple of int
        The ranks.
    dtype, op, count
        What is reduced.
    segment : int
        Bytes that a segment may have.
    """

    def __init__(
        self,
        transport: Transport,
        pool: ScratchPool,
        rail: tuple[int, ...],
        dtype: DType,
        op: Op,
        count: int,
        segment: int,
    ) -> None:
        rank, size = transport.rank, transport.size
        seat = ring_all_reduce(rail.index(rank), len(rail))
        chunks = [(chunk,) for chunk in range(seat.chunks)]
        rounds = within(seat.rounds, rail, chunks)
        schedule = Schedule("all_reduce", rank, size, seat.chunks, rounds)
        self.rounds = schedule.steps
        self.segments = segments_of(count, dtype.itemsize, segment)
        self._executions = {
            length: Execution(
                Program(schedule, length, dtype.itemsize, length * dtype.itemsize or 1),
                transport, pool, dtype, op,
            )
            for length in {stop - start for start, stop in self.segments}
        }  # fmt: skip
        self.bytes_sent = self.plain_bytes = dtype.itemsize * sum(
            schedule.elements_sent(stop - start) for start, stop in self.segments
        )

    def bind(self, call: Call) -> Start:  # noqa: ARG002
        """Return what starts a segment, of whatever call."""

        def start(_: int, source: Array, target: Array, tag: int) -> Steps:
            return self._executions[source.size].steps(source, target, (tag,) * WINDOW)

        return start


class SharedHierarchy:
    """The all_reduce of one dtype, op and count, over hosts with equally many ranks.

    Parameters
    ----------
    host : SharedHost
        The ranks of this host.
    dtype, op, count
        What is reduced; `op` is that inside the host.
    across : Across
        What all_reduces the slice of this rank between hosts.
    said : str
        What distinguishes the call from others, beside these.
    """

    def __init__(
        self, host: SharedHost, dtype: DType, op: Op, count: int, across: Across, said: str = ""
    ) -> None:
        self._host, self._dtype, self._reduce = host, dtype, reducer(dtype, op)
        self._code = zlib.crc32(repr(("hierarchical", dtype.name, str(op), count, said)).encode())
        self._start, _ = spans(count, host.size)[host.rank]
        self._across = across
        #: Bytes that this rank sends, all of them to other hosts.
        self.bytes_sent = across.bytes_sent
        self.segments = len(across.segments)

    def describe(self, codec: object = None) -> list[str]:
        """Return the lines that tell what is done; `codec` encodes what goes to other hosts."""
        cut = f", each in {self.segments} segments" if self.segments > 1 else ""
        how = ""
        if codec is not None:
            how = f", instead of {format_bytes(self._across.plain_bytes)}, as {codec}"
        return [
            f"  steps      two meetings inside the host; {self._across.rounds} across{cut}",
            f"  sends      {format_bytes(self.bytes_sent)} from this rank, all to other hosts{how}",
        ]

    def start(self, call: Call) -> None:
        """Return nothing: this is never done in one step."""

    def steps(self, call: Call, tags: Sequence[int], otherwise: Callable[[], Steps]) -> Steps:
        """Return the steps of one call, those of `otherwise` if memory is out of reach."""
        return self._host.in_turn(partial(self._attempt, call, tags), tags[0], otherwise)

    def _attempt(self, call: Call, tags: Sequence[int], board: Board) -> Attempt:
        # What one host can, the others must be able to, too: whether arrays are registered does
        # not count here, since hosts do not tell each other.
        if not self._host.reaches_all:
            return False
        x, out = call.flat()
        assert x is not None
        assert out is not None
        slots = board.turn
        yield board.arrive(record(self._code, locate(self._host, x), locate(self._host, out)))
        board.compare(self._code)
        reached = Reached(self._host, self._dtype, board.records(), slots)
        across = self._across.bind(call)

        def start(segment: int, slot: int) -> Steps:
            return self._segment(reached, (x, out), across, segment, tags[slot])

        yield from taking_turns(self.segments, WINDOW, start)
        yield board.arrive()
        return True

    def _segment(
        self,
        reached: Reached,
        arrays: Pair,
        across: Start,
        segment: int,
        tag: int,
    ) -> Steps:
        start, stop = (self._start + place for place in self._across.segments[segment])
        host, out = self._host, arrays[OUT]
        assert out is not None
        own = Place(host.rank, OUT, start)
        sources = tuple(Place(rank, X, start) for rank in range(host.size))
        self._move(reached, arrays, Move(sources, (own,), stop - start), reduces=True)
        part = out[start:stop]
        yield from across(segment, part, part, tag)
        others = (host.rank + step for step in range(1, host.size))
        targets = tuple(Place(rank % host.size, OUT, start) for rank in others)
        self._move(reached, arrays, Move((own,), targets, stop - start), reduces=False)

    def _move(self, reached: Reached, arrays: Pair, move: Move, *, reduces: bool) -> None:
        if not move.length:
            return
        places = (*move.sources, *move.targets)
        far = reached.far((place.rank, place.side) for place in places)
        blocks = reached.blocks([move], arrays, reduces=reduces)
        run(self._host, blocks, self._reduce if reduces else None, far=far)
