"""Collectives between ranks of one host, straight in each other's memory.

Who moves what is in `pycomm.algorithms.one_sided`. Ranks meet and tell each other where their
arrays are: in a region that all map, at an address that the kernel reaches, or, copied there, in a
slot. Then each does its part, in blocks that stay in cache, and they meet again; where all inputs
are in slots, one meeting is enough. Contributions are combined in rank order and rounded once.

If the memory of a peer is out of reach, all ranks see that and take another road together.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pycomm.algorithms.one_sided import OUT, Place, X, counts, distant, moves
from pycomm.call import Call
from pycomm.dtypes import DType, Op
from pycomm.errors import CommError
from pycomm.executor import Steps
from pycomm.kernels.host import quietly, reducer
from pycomm.sharing import SLOT, SharedHost, Turn, address_of, at_address
from pycomm.transports.base import Array, Tested
from pycomm.transports.board import Board
from pycomm.transports.shared import REGIONS

__all__ = ["SharedExecution"]

# Bytes of a block: what all ranks have there stays in a second-level cache meanwhile.
_BLOCK = 256 << 10
# Bytes of what is copied in one piece: nothing of it is used again.
_PIECE = 4 << 20
# Bytes up to which every input goes through a slot, registered or not.
_SHORT = 8 << 10

# A record: the call, how many regions the process has freed, and for both arrays where they are.
# That is the number of a region, with its descriptor, length and the offset in it; or one of these,
# the second one with an address.
_NONE, _ADDRESS, _IN_SLOT = 0, -1, -2
_RECORD = struct.Struct("10q")
_NOT_NEEDED = (_NONE, 0, 0, 0)

_Where = tuple[int, ...]
_Pair = tuple[Array | None, Array | None]


class _Far(NamedTuple):
    """Memory of a peer that only the kernel reaches, and what it is copied from or to here."""

    pid: int
    own: int
    other: int
    nbytes: int


class _Block(NamedTuple):
    """A piece of a move, bound to memory; what is done is in the order of the fields."""

    fetches: tuple[_Far, ...]
    sources: list[Array]  # to combine into `total`, if there are any
    total: Array
    copies: list[Array]  # receive `total`
    puts: tuple[_Far, ...]


class _Pull(NamedTuple):
    """A move out of slots: `target` is the side that receives it, `own` where its input counts."""

    sources: list[Array]
    own: tuple[int, int] | None  # index among the sources, start in the input
    target: Place
    length: int


class _Work(NamedTuple):
    """What this rank does between two meetings, or, with `pulls`, after a single one."""

    blocks: Sequence[_Block]
    pulls: Sequence[_Pull] = ()
    one_step: bool = False
    far: bool = False  # whether the kernel writes or reads memory of peers


class _Bound:
    """What is known about the arrays of one call."""

    __slots__ = ("arrays", "freed", "record", "records", "slotted", "works")

    def __init__(self, arrays: _Pair, freed: int, record: bytes, slotted: bool) -> None:
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

    def steps(self, call: Call, tags: Sequence[int], otherwise: Callable[[], Steps]) -> Steps:
        """Return the steps of one call, those of `otherwise` if memory is out of reach."""
        # The turn is taken now and not when it first runs: calls come to the board in their order.
        return self._steps(call, self._host.turn(), tags, otherwise)

    def _steps(
        self, call: Call, turn: Turn, tags: Sequence[int], otherwise: Callable[[], Steps]
    ) -> Steps:
        host, before = self._host, turn.before
        turn.before = None
        if before is not None and not before.over:
            yield before
        if host.usable is None:
            yield from host.set_up(tags[0])
        board = host.board
        if board is None:
            turn.over = True
            yield from otherwise()
            return
        place = board.turn
        if self._short:
            turn.over = True
            test = self.start(call)
            assert test is not None
            turn.over = False
            yield Tested(test)
            turn.over = True
            return
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
            turn.over = True
            yield from otherwise()
            return
        if work.one_step:
            self._pull(work.pulls, bound.arrays)
        else:
            self._do(work)
            yield board.arrive()
        turn.over = True

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

    def _pull(self, pulls: Sequence[_Pull], arrays: _Pair) -> None:
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
        where: list[_Where] = []
        slotted = False
        for side, array in enumerate(arrays):
            if array is None or (host.rank, side) not in self._distant:
                where.append(_NOT_NEEDED)
                continue
            address = address_of(array)
            region = REGIONS.find(address, array.nbytes)
            if region is not None:
                where.append(region)
            elif side == X and self._fits_slot and self._gives:
                slotted = True
                where.append((_IN_SLOT, 0, 0, 0))
            else:
                where.append((_ADDRESS, address, 0, 0))
        freed = REGIONS.freed
        record = _RECORD.pack(self._code, freed, *where[X], *where[OUT])
        return _Bound(arrays, freed, record, slotted)

    def _bind(self, bound: _Bound, records: bytes, turn: int) -> _Work | None:
        """Return what to do, None if memory that somebody needs is out of reach."""
        size = self._host.size
        told = [_RECORD.unpack_from(records, Board.RECORD * rank) for rank in range(size)]
        self._host.sweep([one[1] for one in told])
        where = [(one[2:6], one[6:]) for one in told]
        work: _Work | None
        needed = [where[rank][side][0] for rank, side in self._distant]
        far = _ADDRESS in needed
        if self._sources and all(where[rank][X][0] == _IN_SLOT for rank, _ in self._sources):
            pulls = (self._slots or self._bind_slots())[turn][1]
            work = _Work((), pulls, one_step=True)
        elif far and (self._registered or not self._host.reaches_all):
            work = None
        else:
            # Also for calls that are not remembered: binding takes 10 us a block.
            addresses = tuple(0 if one is None else address_of(one) for one in bound.arrays)
            key = (self, turn, addresses, records)
            work = self._host.bound.get(key)
            if work is None:
                x, out = (
                    None if one is None else at_address(address, one.nbytes).view(one.dtype)
                    for address, one in zip(addresses, bound.arrays, strict=True)
                )
                work = _Work(list(self._blocks((x, out), where, turn)), far=far)
                self._host.remember(key, work)
        bound.records[turn], bound.works[turn] = records, work
        return work

    def _blocks(
        self, arrays: _Pair, where: Sequence[tuple[_Where, _Where]], turn: int
    ) -> Iterator[_Block]:
        """Yield the own part of the work, bound to memory."""
        block = (_PIECE if self._reduce is None else _BLOCK) // self._dtype.itemsize
        for move in self._moves:
            sources, targets = (
                [self._reach(arrays, where, place, turn, move.length) for place in places]
                for places in (move.sources, move.targets)
            )
            if self._reduce is None and _same(sources[0], targets[0]):
                continue
            for start in range(0, move.length, block):
                yield self._block(sources, targets, start, min(start + block, move.length))

    def _reach(
        self,
        arrays: _Pair,
        where: Sequence[tuple[_Where, _Where]],
        place: Place,
        turn: int,
        count: int,
    ) -> Array | tuple[int, int]:
        """Return `count` elements of a rank, or their process and address there."""
        host, kind = self._host, self._dtype.numpy
        assert host.board is not None
        rank, side, start = place
        if rank == host.rank:
            own = arrays[side]
            assert own is not None
            return own[start : start + count]
        first, nbytes = start * kind.itemsize, count * kind.itemsize
        number, second, size, offset = where[rank][side]
        pid, started = host.board.pids[rank], host.board.starts[rank]
        if number == _ADDRESS:
            return pid, second + first
        if number == _IN_SLOT:
            octets = host.slots[turn][rank][first : first + nbytes]
        else:
            region = REGIONS.open(pid, started, number, second, size)
            octets = region[offset + first : offset + first + nbytes]
        return octets.view(kind)

    def _block(
        self,
        sources: Sequence[Array | tuple[int, int]],
        targets: Sequence[Array | tuple[int, int]],
        start: int,
        stop: int,
    ) -> _Block:
        """Bind elements ``[start, stop)`` of a move."""
        kind = self._dtype.numpy
        first, nbytes = start * kind.itemsize, (stop - start) * kind.itemsize
        copies = [target[start:stop] for target in targets if isinstance(target, np.ndarray)]
        read: list[Array] = []
        fetches: list[_Far] = []
        room = None
        for index, source in enumerate(sources):
            if isinstance(source, np.ndarray):
                read.append(source[start:stop])
                continue
            if self._reduce is None and copies:
                read.append(copies.pop())  # straight to its place
            else:
                if room is None:
                    room = self._host.room((len(sources) + 1) * _BLOCK)
                read.append(room[index * _BLOCK :][:nbytes].view(kind))
            pid, address = source
            fetches.append(_Far(pid, address_of(read[-1]), address + first, nbytes))
        if self._reduce is None:
            (total,), read = read, []
        elif copies:
            total = copies.pop(0)  # of this rank, if it gets the result at all
        else:
            room = self._host.room((len(sources) + 1) * _BLOCK)
            total = room[len(sources) * _BLOCK :][:nbytes].view(kind)
        puts = [
            _Far(target[0], address_of(total), target[1] + first, nbytes)
            for target in targets
            if not isinstance(target, np.ndarray)
        ]
        return _Block(tuple(fetches), read, total, copies, tuple(puts))

    def _do(self, work: _Work) -> None:
        """Do the own part of the work."""
        board = self._host.board
        assert board is not None
        try:
            if work.far:
                board.check_recent()
            quietly(self._run, work.blocks)
        except OSError as error:
            board.check()
            raise CommError(f"memory of a peer went out of reach: {error}") from error

    def _run(self, blocks: Sequence[_Block]) -> None:
        reduce = self._reduce
        read, write = self._host.kernel.read, self._host.kernel.write
        for fetches, sources, total, copies, puts in blocks:
            for far in fetches:
                read(*far)
            if reduce is not None:
                reduce(sources, total)
            for target in copies:
                target[:] = total
            for far in puts:
                write(*far)


def _same(source: Array | tuple[int, int], target: Array | tuple[int, int]) -> bool:
    """Return whether a copy is of what is in its place already."""
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        return address_of(source) == address_of(target)
    return False
