"""How a rank reaches the arrays of the other ranks of its host, and what it does with them.

An array is in a region that all ranks map, at an address that only the kernel reaches, or, copied
there, in a slot. Ranks tell each other which when they meet; then moves are bound to memory.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from pycomm.algorithms.one_sided import Move, Place, X
from pycomm.buffers import address_of
from pycomm.dtypes import DType
from pycomm.errors import CommError
from pycomm.kernels.host import Reducer, quietly
from pycomm.sharing import SharedHost, at_address
from pycomm.transports.base import Array
from pycomm.transports.board import Board
from pycomm.transports.shared import REGIONS, second_level_cache

__all__ = [
    "IN_SLOT", "NOT_NEEDED", "OUT_OF_REACH", "Block", "Pair", "Reached", "Where", "locate",
    "record", "run",
]  # fmt: skip

# Bytes of what is copied in one piece: nothing of it is used again.
_PIECE = 4 << 20

#: Where an array is: the number of a region, with its descriptor, length and the offset in it; or
#: `_ADDRESS`, with the address; or one of the three below.
Where = tuple[int, ...]
_ADDRESS = -1
NOT_NEEDED: Where = (0, 0, 0, 0)
IN_SLOT: Where = (-2, 0, 0, 0)
OUT_OF_REACH: Where = (-3, 0, 0, 0)
# A record: the call, how many regions the process has freed, and where both arrays are.
_RECORD = struct.Struct("10q")

#: Input and output of a rank, None for one that it has not.
Pair = tuple[Array | None, Array | None]
# Elements of a rank, or their process and address there.
_Reached = Array | tuple[int, int]


class _Far(NamedTuple):
    """Memory of a peer that only the kernel reaches, and what it is copied from or to here."""

    pid: int
    own: int
    other: int
    nbytes: int


class Block(NamedTuple):
    """A piece of a move, bound to memory; what is done is in the order of the fields."""

    fetches: tuple[_Far, ...]
    sources: list[Array]  # to combine into `total`, if there are any
    total: Array
    copies: list[Array]  # receive `total`
    puts: tuple[_Far, ...]


@cache
def _block() -> int:
    """Return the bytes of a block: what a few ranks have there stays in a second-level cache."""
    return min(max(second_level_cache() // 8, 64 << 10), 1 << 20)


def locate(host: SharedHost, array: Array) -> Where:
    """Return where an array of this process is."""
    address = address_of(array)
    region = REGIONS.find(address, array.nbytes)
    if region is None and not host.reads(address):
        return OUT_OF_REACH
    return region or (_ADDRESS, address, 0, 0)


def record(call: int, x: Where, out: Where) -> bytes:
    """Return what to tell the others before `call`."""
    return _RECORD.pack(call, REGIONS.freed, *x, *out)


class Reached:
    """The arrays of all ranks of a host, as they have told in one meeting.

    Parameters
    ----------
    host : SharedHost
        The host.
    dtype : DType
        Of the elements.
    records : bytes
        What all ranks have told, see `record`.
    turn : int
        Which slots they have used.
    """

    def __init__(self, host: SharedHost, dtype: DType, records: bytes, turn: int) -> None:
        self._host = host
        self._kind = dtype.numpy
        self._turn = turn
        told = [_RECORD.unpack_from(records, Board.RECORD * rank) for rank in range(host.size)]
        host.sweep([one[1] for one in told])
        self._where = [(one[2:6], one[6:]) for one in told]
        self._own: Pair = (None, None)

    def in_slots(self, ranks: Iterable[int]) -> bool:
        """Return whether the inputs of all these ranks are in slots."""
        return all(self._where[rank][X] == IN_SLOT for rank in ranks)

    def out_of_reach(self, arrays: Iterable[tuple[int, int]]) -> bool:
        """Return whether nobody but its owner reaches one of these arrays, each (rank, side)."""
        return any(self._where[rank][side] == OUT_OF_REACH for rank, side in arrays)

    def far(self, arrays: Iterable[tuple[int, int]]) -> bool:
        """Return whether only the kernel reaches one of these arrays, each (rank, side)."""
        return any(self._where[rank][side][0] == _ADDRESS for rank, side in arrays)

    def blocks(self, moves: Iterable[Move], arrays: Pair, *, reduces: bool) -> Iterator[Block]:
        """Yield the work of this rank, bound to memory.

        Parameters
        ----------
        moves : iterable of Move
            What to do.
        arrays : pair of array
            Those of this rank. The blocks do not hold them: whoever runs the blocks does.
        reduces : bool
            Whether sources are combined, or a single one copied.
        """
        x, out = (
            None if one is None else at_address(address_of(one), one.nbytes).view(one.dtype)
            for one in arrays
        )
        self._own = (x, out)
        length = (_block() if reduces else _PIECE) // self._kind.itemsize
        for move in moves:
            sources, targets = (
                [self._reach(place, move.length) for place in places]
                for places in (move.sources, move.targets)
            )
            if not reduces and _same(sources[0], targets[0]):
                continue
            for start in range(0, move.length, length):
                stop = min(start + length, move.length)
                yield self._block(sources, targets, start, stop, reduces=reduces)

    def _reach(self, place: Place, count: int) -> _Reached:
        host, kind = self._host, self._kind
        assert host.board is not None
        rank, side, start = place
        if rank == host.rank:
            own = self._own[side]
            assert own is not None
            return own[start : start + count]
        first, nbytes = start * kind.itemsize, count * kind.itemsize
        where = self._where[rank][side]
        number, second, size, offset = where
        pid, started = host.board.pids[rank], host.board.starts[rank]
        if number == _ADDRESS:
            return pid, second + first
        if where == IN_SLOT:
            octets = host.slots[self._turn][rank][first : first + nbytes]
        else:
            try:
                region = REGIONS.open(pid, started, number, second, size)
            except OSError as error:
                host.board.check_dying()
                raise CommError(
                    f"registered memory of process {pid} cannot be mapped: {error}"
                ) from error
            octets = region[offset + first : offset + first + nbytes]
        return octets.view(kind)

    def _block(
        self,
        sources: Sequence[_Reached],
        targets: Sequence[_Reached],
        start: int,
        stop: int,
        *,
        reduces: bool,
    ) -> Block:
        """Bind elements ``[start, stop)`` of a move."""
        kind = self._kind
        first, nbytes = start * kind.itemsize, (stop - start) * kind.itemsize
        copies = [target[start:stop] for target in targets if isinstance(target, np.ndarray)]
        read: list[Array] = []
        fetches: list[_Far] = []

        def room(index: int) -> Array:
            # Of the host, for one call at a time.
            octets = self._host.room((len(sources) + 1) * _block())[index * _block() :]
            return octets[:nbytes].view(kind)

        for index, source in enumerate(sources):
            if isinstance(source, np.ndarray):
                read.append(source[start:stop])
                continue
            straight = not reduces and copies
            read.append(copies.pop() if straight else room(index))
            pid, address = source
            fetches.append(_Far(pid, address_of(read[-1]), address + first, nbytes))
        if not reduces:
            (total,), read = read, []
        elif copies:
            total = copies.pop(0)  # of this rank, if it gets the result at all
        else:
            total = room(len(sources))
        puts = [
            _Far(target[0], address_of(total), target[1] + first, nbytes)
            for target in targets
            if not isinstance(target, np.ndarray)
        ]
        return Block(tuple(fetches), read, total, copies, tuple(puts))


def run(host: SharedHost, blocks: Iterable[Block], reduce: Reducer | None, *, far: bool) -> None:
    """Do the work of this rank; `far` says whether the kernel moves some of it.

    Raises
    ------
    PeerError, CommError
        If memory of a peer is gone.
    """
    board = host.board
    assert board is not None
    try:
        if far:
            board.check_recent()
        quietly(_run, host, blocks, reduce)
    except OSError as error:
        board.check_dying()
        raise CommError(f"memory of a peer went out of reach: {error}") from error


def _run(host: SharedHost, blocks: Iterable[Block], reduce: Reducer | None) -> None:
    read, write = host.kernel.read, host.kernel.write
    for fetches, sources, total, copies, puts in blocks:
        for far in fetches:
            read(*far)
        if sources:
            assert reduce is not None
            reduce(sources, total)
        for target in copies:
            target[:] = total
        for far in puts:
            write(*far)


def _same(source: _Reached, target: _Reached) -> bool:
    """Return whether a copy is of what is in its place already."""
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        return address_of(source) == address_of(target)
    return False
