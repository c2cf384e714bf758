"""All_reduce between ranks of one host, straight in each other's memory.

Registered memory (`Communicator.empty`) is mapped by all ranks of the host. Each rank reduces its
own slice out of the inputs of all, block by block in cache, and writes the result to the outputs of
all: two meetings, and no copy. Contributions are combined in rank order and rounded once.

Ranks first tell each other where their arrays are. Unless all are registered, they take the road
that the call would take otherwise: whether memory is registered may differ between ranks.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycomm.algorithms.schedule import spans
from pycomm.call import Call
from pycomm.executor import Execution, Steps
from pycomm.kernels.host import reduce_arrays
from pycomm.transports.base import Array, Transport
from pycomm.transports.shared import REGIONS, Board, start_time

__all__ = ["MESSAGE", "SharedHost", "SharedSteps"]

# Bytes of a block: accumulator and sources stay in a second-level cache on their way.
_BLOCK = 256 << 10
_NOWHERE = -1
# Arrays that are used again are bound once: so many, and none that would be long in memory for it.
_BOUND, _LARGEST_BOUND = 8, 1 << 20
#: Bytes that each rank tells when they first meet.
MESSAGE = 64


# Inputs of all ranks, room for their sum, outputs of all ranks.
_Block = tuple[list[Array], Array, list[Array]]


class SharedHost:
    """What the ranks of one communicator, all on one host, share; set up when it is first used."""

    def __init__(self, transport: Transport, gather: Callable[[], Execution]) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._crowded = transport.crowded
        self._gather = gather  # what tells `MESSAGE` bytes of each rank to all
        self.usable: bool | None = None  # not known before the ranks have met
        self.board: Board | None = None
        self.last: SharedSteps | None = None  # the call that was made last
        self.bound: OrderedDict[tuple[object, ...], list[_Block]] = OrderedDict()

    def remember(self, key: tuple[object, ...], blocks: list[_Block], nbytes: int) -> None:
        """Keep what is bound to short arrays for the next call with the same ones."""
        if nbytes <= _LARGEST_BOUND:
            self.bound[key] = blocks
            if len(self.bound) > _BOUND:
                self.bound.popitem(last=False)

    def set_up(self, tags: range) -> Steps:
        """Exchange pages and try them; afterwards `usable` is the same on all ranks."""
        gather = self._gather()
        page = REGIONS.allocate(Board.SIZE)
        found = REGIONS.find(_address(page), page.size)
        assert found is not None
        number, fd, size, _ = found
        own = f"{os.getpid()} {start_time(os.getpid())} {number} {fd} {size}"
        told = np.zeros(MESSAGE, np.uint8)
        told[: len(own)] = np.frombuffer(own.encode(), np.uint8)
        everyone = np.empty(MESSAGE * self.size, np.uint8)
        yield from gather.steps(told, everyone, tags)
        facts = [
            bytes(row).rstrip(b"\0").decode().split() for row in everyone.reshape(self.size, -1)
        ]
        pages: list[Array] = []
        try:
            for rank, (pid, start, *where) in enumerate(facts):
                if start_time(int(pid)) != start:
                    raise OSError("another process has that number here")
                opened = page
                if rank != self.rank:
                    opened = REGIONS.open(int(pid), start, *map(int, where))
                pages.append(opened)
        except OSError:
            pages = []
        told[:] = bool(pages)
        yield from gather.steps(told, everyone, tags)
        self.usable = bool(everyone.all())
        if self.usable:
            pids = [int(fact[0]) for fact in facts]
            starts = [fact[1] for fact in facts]
            self.board = Board(self.rank, pages, pids, starts, crowded=self._crowded)

    def describe(self, array: Array) -> tuple[int, ...]:
        """Return region and place of an array for the others, `_NOWHERE` if it is in none."""
        found = REGIONS.find(_address(array), array.nbytes)
        return (_NOWHERE, 0, 0, 0) if found is None else found

    def view(self, rank: int, record: tuple[int, ...], like: Array) -> Array:
        """Return the array of a rank that it has described, of the length of `like`."""
        number, fd, size, offset = record
        assert self.board is not None
        pid, start = self.board.pids[rank], self.board.starts[rank]
        region = REGIONS.open(pid, start, number, fd, size)
        return region[offset : offset + like.nbytes].view(like.dtype)


class SharedSteps:
    """The steps of one all_reduce in shared memory.

    Attributes
    ----------
    done, over : bool
        Whether it has been done there; whether it has been tried.
    """

    def __init__(self, host: SharedHost, call: Call, tags: range) -> None:
        assert call.x is not None
        assert call.out is not None
        assert call.op is not None
        self._host = host
        self._x, self._out = call.x.flat, call.out.flat
        self._in_place = call.in_place
        self._dtype, self._op = call.dtype, call.op
        self._tags = tags
        self.done = False
        self.over = False
        self._before, host.last = host.last, self

    def test(self) -> bool:
        """Return whether the board is free for the call after this one, as a `Pending`."""
        return self.over

    def steps(self) -> Steps:
        """Run, yielding what has to be waited for."""
        # One after the other, in the order of calls: each rank has a single flag.
        if self._before is not None and not self._before.over:
            yield self._before
        self._before = None
        yield from self._run()
        self.over = True
        # The board remembers the last call, but not its memory.
        self._x = self._out = np.empty(0)

    def _run(self) -> Steps:
        host = self._host
        if host.usable is None:
            yield from host.set_up(self._tags)
        if not host.usable:
            return
        board = host.board
        assert board is not None
        x = host.describe(self._x)
        arrival = board.arrive(*x, *(x if self._in_place else host.describe(self._out)))
        yield arrival
        records = arrival.records()
        if any(record[0] == _NOWHERE or record[4] == _NOWHERE for record in records):
            return
        key = (self._x.nbytes, self._dtype, *records)
        blocks = host.bound.get(key)
        if blocks is None:
            blocks = self._bind(records)
            host.remember(key, blocks, self._x.nbytes)
        dtype, op = self._dtype, self._op
        for sources, total, targets in blocks:
            reduce_arrays(sources, total, dtype, op)
            for target in targets:
                target[:] = total
        yield board.arrive()
        self.done = True

    def _bind(self, records: Sequence[tuple[int, ...]]) -> list[_Block]:
        """Return the blocks of the own slice: inputs of all, room for their sum, outputs of all."""
        host, size = self._host, self._x.size
        sources, targets = [], []
        for rank, record in enumerate(records):
            own = rank == host.rank
            sources.append(self._x if own else host.view(rank, record[:4], self._x))
            targets.append(self._out if own else host.view(rank, record[4:], self._out))
        start, stop = spans(size, host.size)[host.rank]
        block = max(1, _BLOCK // self._x.itemsize)
        room = np.empty(min(block, max(stop - start, 1)), self._x.dtype)
        return [
            (
                [x[first : min(first + block, stop)] for x in sources],
                room[: min(block, stop - first)],
                [out[first : min(first + block, stop)] for out in targets],
            )
            for first in range(start, stop, block)
        ]


def _address(array: Array) -> int:
    interface: dict[str, Any] = array.__array_interface__
    return int(interface["data"][0])
