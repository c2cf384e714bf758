"""Collectives between ranks of one host, straight in each other's memory.

Who moves what is in `pycomm.algorithms.one_sided`. Ranks meet and tell each other where their
arrays are: in a region that all map, at an address that the kernel reaches, or, copied there, in a
slot. Then each does its part, in blocks that stay in cache, and they meet again; where all inputs
are in slots, one meeting is enough. Contributions are combined in rank order and rounded once.

If the memory of a peer is out of reach, all ranks see that and take another road together.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pycomm.algorithms.one_sided import OUT, Place, X, counts, distant, moves
from pycomm.buffers import address_of
from pycomm.call import Call
from pycomm.dtypes import DType, Op
from pycomm.executor import Steps
from pycomm.kernels.host import quietly, reducer
from pycomm.reach import IN_SLOT, NOT_NEEDED, Block, Pair, Reached, locate, record, run
from pycomm.sharing import SLOT, Attempt, SharedHost
from pycomm.transports.base import Array, Tested
from pycomm.transports.board import Board
from pycomm.transports.shared import REGIONS
from pycomm.units import format_bytes

__all__ = ["SharedExecution"]

# Bytes up to which every input goes through a slot, registered or not.
_SHORT = 8 << 10


class _Pull(NamedTuple):
    """A move out of slots: `target` is the side that receives it, `own` where its input counts."""

    sources: list[Array]
    own: tuple[int, int] | None  # index among the sources, start in the input
    target: Place
    length: int


class _Work(NamedTuple):
    """What this rank does between two meetings, or, with `pulls`, after a single one."""

    blocks: Sequence[Block]
    pulls: Sequence[_Pull] = ()
    one_step: bool = False
    far: bool = False  # whether the kernel writes or reads memory of peers


class _Bound:
    """What is known about the arrays of one call."""

    __slots__ = ("arrays", "freed", "record", "records", "slotted", "works")

    def __init__(self, arrays: Pair, freed: int, record: bytes, slotted: bool) -> None:
        self.arrays = arrays
        self.freed = freed
        self.record = record
        #: Whether the input goes through the own slot.
        self.slotted = slotted
        # In turn: records of all ranks, and what is to be done then.
        self.records = [b"", b""]
        self.works: list[_Work | None] = [None, None]


class SharedExecution:
    """One kind of call, ready to run in the memory of a host.

    Parameters
    ----------
    host : SharedHost
        Whose memory.
    collective, dtype, op, root, count
        What is done; `count` elements of the smaller side, `root` -1 where there is none.
    registered : bool
        Whether to take another road for long arrays that are not registered.
    """

    def __init__(
        self,
        host: SharedHost,
        collective: str,
        dtype: DType,
        op: Op | None,
        root: int,
        count: int,
        *,
        registered: bool = False,
    ) -> None:
        self._host = host
        self._registered = registered
        #: Bytes that go in messages.
        self.bytes_sent = 0
        self._dtype = dtype
        self._reduce = None if op is None else reducer(dtype, op)
        what = (collective, dtype.name, str(op or ""), root, count)
        self._code = zlib.crc32(repr(what).encode())
        self._name = self._code.to_bytes(8, "little")
        self._what = (collective, host.rank, host.size, root, count)
        self._counts = counts(*self._what)
        longest = dtype.itemsize * max(
            counts(collective, rank, host.size, root, count)[X] for rank in range(host.size)
        )
        self._short = longest <= _SHORT
        self._fits_slot = longest <= SLOT
        # Arrays that others use, with a meeting at the end and without.
        self._distant = distant(collective, host.size, root, count)
        self._sources = distant(collective, host.size, root, count, one_step=True)
        self._gives = (host.rank, X) in self._sources
        self._moves = moves(*self._what)
        self._slots: list[tuple[Array, list[_Pull]]] = []

    def start(self, call: Call) -> Callable[[], bool] | None:
        """Start a short call, and return the test whether it is complete.

        None if it is not short, or others have to come first: then `steps` is to be used. The
        caller waits for the end before it starts another call.
        """
        board = self._host.board
        if not self._short or board is None or not self._host.free:
            return None
        return self._started(call, board)

    def _started(self, call: Call, board: Board) -> Callable[[], bool]:
        """Put the input in the own slot and arrive; return the test that ends the call."""
        arrays = call.bound
        if arrays is None:
            arrays = call.bound = call.flat()
        own, pulls = (self._slots or self._bind_slots())[board.turn]
        if self._gives:
            own[:] = arrays[X]
        arrived = board.arrive(self._name).test

        def test() -> bool:
            if not arrived():
                return False
            board.compare(self._code)
            self._pull(pulls, arrays)
            return True

        return test

    def describe(self, _: object = None) -> list[str]:
        """Return the lines that tell what is done; nothing is encoded in memory."""
        one_step = self._fits_slot and bool(self._sources)
        done = moves(*self._what, one_step=True) if one_step else self._moves
        read, written = (
            self._dtype.itemsize * sum(move.length * len(places) for move, places in pairs)
            for pairs in (
                [(move, move.sources) for move in done],
                [(move, move.targets) for move in done],
            )
        )
        meetings = "two meetings, no messages"
        if one_step:
            meetings = "one meeting, inputs in slots"
            if not self._short:
                meetings += "; two if an input is registered"
        return [
            f"  steps      {meetings}",
            f"  moves      this rank reads {format_bytes(read)} and writes {format_bytes(written)}",
        ]

    def steps(self, call: Call, tags: Sequence[int], otherwise: Callable[[], Steps]) -> Steps:
        """Return the steps of one call, those of `otherwise` if memory is out of reach."""
        return self._host.in_turn(partial(self._attempt, call), tags[0], otherwise)

    def _attempt(self, call: Call, board: Board) -> Attempt:
        if self._short:
            yield Tested(self._started(call, board))
            return True
        place = board.turn
        bound = call.bound
        if bound is None or bound.freed != REGIONS.freed:
            bound = call.bound = self._locate(call)
        if bound.slotted:
            own, _ = (self._slots or self._bind_slots())[place]
            own[:] = bound.arrays[X]
        yield board.arrive(bound.record)
        records = board.records()
        if records == bound.records[place]:
            work = bound.works[place]
        else:
            board.compare(self._code)
            work = self._bind(bound, records, place)
        if work is None:
            return False
        if work.one_step:
            self._pull(work.pulls, bound.arrays)
        else:
            run(self._host, work.blocks, self._reduce, far=work.far)
            yield board.arrive()
        return True

    # ----------------------------------------------------------------------------- by slots

    def _bind_slots(self) -> list[tuple[Array, list[_Pull]]]:
        """Return for each turn the own slot, and what to take from the slots of all."""
        kind, size = self._dtype.numpy, self._dtype.itemsize
        given = self._counts[X] * size if self._gives else 0
        for slots in self._host.slots:
            pulls = []
            for move in moves(*self._what, one_step=True):
                sources, own = [], None
                for index, place in enumerate(move.sources):
                    first = place.start * size
                    octets = slots[place.rank][first : first + move.length * size]
                    sources.append(octets.view(kind))
                    if place.rank == self._host.rank:
                        own = (index, place.start)
                pulls.append(_Pull(sources, own, move.targets[0], move.length))
            self._slots.append((slots[self._host.rank][:given].view(kind), pulls))
        return self._slots

    def _pull(self, pulls: Sequence[_Pull], arrays: Pair) -> None:
        """Take what is wanted from the slots of all, the own part from the input itself."""
        reduce = self._reduce
        for sources, own, (_, side, start), count in pulls:
            target = arrays[side]
            assert target is not None
            if count != target.size:
                target = target[start : start + count]
            if own is not None:
                mine = arrays[X]
                assert mine is not None
                index, first = own
                if count != mine.size:
                    mine = mine[first : first + count]
                sources = sources.copy()
                sources[index] = mine
            if reduce is None:
                target[:] = sources[0]
            else:
                quietly(reduce, sources, target)

    # ------------------------------------------------------------------------------ the rest

    def _locate(self, call: Call) -> _Bound:
        """Find out where the arrays of a call are."""
        host, arrays = self._host, call.flat()
        where = [NOT_NEEDED, NOT_NEEDED]
        for side, array in enumerate(arrays):
            if array is None or (host.rank, side) not in self._distant:
                continue
            where[side] = locate(host, array)
            registered = where[side][0] > 0
            if side == X and not registered and self._fits_slot and self._gives:
                where[X] = IN_SLOT
        told = record(self._code, where[X], where[OUT])
        return _Bound(arrays, REGIONS.freed, told, where[X] is IN_SLOT)

    def _bind(self, bound: _Bound, records: bytes, turn: int) -> _Work | None:
        """Return what to do, None if memory that somebody needs is out of reach."""
        host = self._host
        reached = Reached(host, self._dtype, records, turn)
        far = reached.far(self._distant)
        out_of_reach = reached.out_of_reach(self._distant)
        work: _Work | None
        if self._sources and reached.in_slots(rank for rank, _ in self._sources):
            pulls = (self._slots or self._bind_slots())[turn][1]
            work = _Work((), pulls, one_step=True)
        elif out_of_reach or (far and (self._registered or not host.reaches_all)):
            work = None
        else:
            # Also for calls that are not remembered: binding takes 10 us a block.
            addresses = tuple(0 if one is None else address_of(one) for one in bound.arrays)
            key = (self, turn, addresses, records)
            work = host.bound.get(key)
            if work is None:
                reduces = self._reduce is not None
                blocks = list(reached.blocks(self._moves, bound.arrays, reduces=reduces))
                work = _Work(blocks, far=far)
                host.remember(key, work)
        bound.records[turn], bound.works[turn] = records, work
        return work
