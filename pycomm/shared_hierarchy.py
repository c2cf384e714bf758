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

from pycomm.algorithms.compose import within
from pycomm.algorithms.hierarchical import Groups, hosts_of
from pycomm.algorithms.one_sided import OUT, Move, Place, X
from pycomm.algorithms.ring import ring_all_reduce
from pycomm.algorithms.schedule import Schedule, chunk_sizes, spans
from pycomm.call import Call
from pycomm.dtypes import DType, Op
from pycomm.executor import WINDOW, Execution, Steps, taking_turns
from pycomm.kernels.host import reducer
from pycomm.program import Program
from pycomm.reach import Pair, Reached, locate, record, run
from pycomm.scratch import ScratchPool
from pycomm.sharing import Attempt, SharedHost
from pycomm.transports.base import Transport
from pycomm.transports.board import Board
from pycomm.units import format_bytes

__all__ = ["SharedHierarchy"]

_SHORTEST = 64 << 10  # bytes of a segment, if the slice is not shorter


class SharedHierarchy:
    """The all_reduce of one dtype, op and count, over hosts with equally many ranks.

    Parameters
    ----------
    host : SharedHost
        The ranks of this host.
    transport : Transport
        The road to the others.
    pool : ScratchPool
        Where scratch comes from.
    groups : tuple of tuple of int
        The ranks, host by host.
    dtype, op, count
        What is reduced.
    segment : int
        Bytes that a segment of a slice may have.
    """

    def __init__(
        self,
        host: SharedHost,
        transport: Transport,
        pool: ScratchPool,
        groups: Groups,
        dtype: DType,
        op: Op,
        count: int,
        segment: int,
    ) -> None:
        self._host, self._dtype, self._reduce = host, dtype, reducer(dtype, op)
        self._code = zlib.crc32(repr(("hierarchical", dtype.name, str(op), count)).encode())
        rank, size = transport.rank, transport.size
        start, stop = spans(count, host.size)[host.rank]
        rail = tuple(ranks[host.rank] for ranks in hosts_of(groups))
        seat = ring_all_reduce(rail.index(rank), len(rail))
        chunks = [(chunk,) for chunk in range(seat.chunks)]
        rounds = within(seat.rounds, rail, chunks)
        self.schedule = Schedule("all_reduce", rank, size, seat.chunks, rounds)
        nbytes = (stop - start) * dtype.itemsize
        longest = max(1, min(segment, max(_SHORTEST, nbytes // WINDOW)) // dtype.itemsize)
        lengths = chunk_sizes(stop - start, max(1, -(-(stop - start) // longest)))
        executions = {
            length: Execution(
                Program(self.schedule, length, dtype.itemsize, length * dtype.itemsize or 1),
                transport, pool, dtype, op,
            )
            for length in set(lengths)
        }  # fmt: skip
        self._segments: list[tuple[int, int, Execution]] = []
        for length in lengths:
            self._segments.append((start, start + length, executions[length]))
            start += length
        #: Bytes that this rank sends, all of them to other hosts.
        self.bytes_sent = dtype.itemsize * sum(map(self.schedule.elements_sent, lengths))
        self.segments = len(lengths)

    def describe(self) -> list[str]:
        """Return the lines that tell what is done."""
        cut = f", each in {self.segments} segments" if self.segments > 1 else ""
        return [
            f"  steps      two meetings inside the host; {self.schedule.steps} across{cut}",
            f"  sends      {format_bytes(self.bytes_sent)} from this rank, all to other hosts",
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

        def start(segment: int, slot: int) -> Steps:
            return self._segment(reached, (x, out), self._segments[segment], tags[slot])

        yield from taking_turns(self.segments, WINDOW, start)
        yield board.arrive()
        return True

    def _segment(
        self, reached: Reached, arrays: Pair, segment: tuple[int, int, Execution], tag: int
    ) -> Steps:
        start, stop, execution = segment
        host, out = self._host, arrays[OUT]
        assert out is not None
        own = Place(host.rank, OUT, start)
        sources = tuple(Place(rank, X, start) for rank in range(host.size))
        self._move(reached, arrays, Move(sources, (own,), stop - start), reduces=True)
        part = out[start:stop]
        yield from execution.steps(part, part, (tag,) * WINDOW)
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
