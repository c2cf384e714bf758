"""What the ranks of one host share: a board to meet at, slots, and ways into each other's memory.

Registered memory (`Communicator.empty`) is mapped by all ranks of the host. Any other memory of a
peer is read and written by the kernel (process_vm_readv), where the system allows it. Slots are a
piece of registered memory that each rank has, two in turn, for short inputs.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from pycomm.bindings import _memory
from pycomm.buffers import address_of
from pycomm.executor import Steps
from pycomm.transports.base import Array, Pending, Transport
from pycomm.transports.board import Board
from pycomm.transports.shared import REGIONS, ancestors, start_time

__all__ = ["SLOT", "Attempt", "SharedHost", "at_address"]

#: Steps that return in the end whether they have done what they were for.
Attempt = Generator[Pending, None, bool]
#: Bytes of a slot.
SLOT = 64 << 10
_READABLE = 1024  # addresses that are remembered
_BOUND = 8  # pieces of work that are kept, bound to memory
_TOLD = 128  # bytes that each rank tells when they first meet
# What starts ranks on a host: Open MPI, MPICH and Intel MPI, Slurm.
_LAUNCHERS = ("prte", "orted", "mpirun", "mpiexec", "hydra_pmi_proxy", "hydra_bstrap", "slurmstepd")
_MAGIC = 0x70_79_63_6F_6D_6D


def at_address(address: int, nbytes: int) -> Array:
    """Return memory of this process as bytes, without holding its owner."""
    return np.frombuffer(_memory.at(address, nbytes), np.uint8)


def _launcher() -> int:
    """Return the process whose descendants the ranks of this host are, as far as that shows."""
    parents = ancestors(os.getpid())
    # There may be shells and other wrappers in between, one for each rank.
    known = [pid for pid, name in parents if name.startswith(_LAUNCHERS)]
    return known[0] if known else os.getppid()


class _Turn:
    """The place of one call in the order of calls: the board serves one at a time."""

    __slots__ = ("before", "over")

    def __init__(self, before: "_Turn | None") -> None:
        self.before = before
        self.over = before is None

    def test(self) -> bool:
        """Return whether the call after this one may use the board, as a `Pending`."""
        return self.over


class SharedHost:
    """What the ranks of a communicator that are on one host share; set up when first used.

    All ranks of the communicator set it up together, each those of its host, and all of them know
    whether it worked everywhere. Ranks are numbered within the host.

    Attributes
    ----------
    usable : bool or None
        Whether they can map each other's memory; None before they have met. Equal on all.
    reaches_all : bool
        Whether they reach memory that is not registered, too. Equal on all.
    bound : dict
        What was bound to memory lately. It holds mapped regions, but no memory of callers: it is
        looked up by address, and whoever calls with that address holds what is there now.
    """

    def __init__(self, transport: Transport, refused: Callable[[], None]) -> None:
        here = transport.hosts[transport.rank]
        self._ranks = tuple(rank for rank in range(transport.size) if transport.hosts[rank] == here)
        self.rank = self._ranks.index(transport.rank)
        self.size = len(self._ranks)
        self._transport = transport
        self._refused = refused  # called if memory turns out not to be usable
        self.usable: bool | None = None
        self.reaches_all = False
        self.board: Board | None = None
        self.slots: tuple[list[Array], ...] = ()  # in turn, of each rank
        self._last = _Turn(None)
        self._freed = [0] * self.size
        self.bound: dict[object, Any] = {}
        self._room = np.empty(0, np.uint8)
        self.kernel = _memory.Reach()
        self._seen = np.zeros(1, np.int64)
        self._readable: set[int] = set()

    def in_turn(
        self, body: Callable[[Board], Attempt], tag: int, otherwise: Callable[[], Steps]
    ) -> Steps:
        """Return the steps of one call: those of `body`, once it is its turn.

        Parameters
        ----------
        body : callable
            Returns steps that use the board, and in the end whether they have done the call.
        tag : int
            For what the ranks tell each other when they first meet.
        otherwise : callable
            Returns other steps for a call that is not done: memory is out of reach.
        """
        # The turn is taken now and not when it first runs: calls come to the board in their order.
        turn = self._last = _Turn(self._last)
        return self._in_turn(turn, body, tag, otherwise)

    def _in_turn(
        self,
        turn: _Turn,
        body: Callable[[Board], Attempt],
        tag: int,
        otherwise: Callable[[], Steps],
    ) -> Steps:
        before, turn.before = turn.before, None
        if before is not None and not before.over:
            yield before
        if self.usable is None:
            yield from self._set_up(tag)
        done = False
        if self.board is not None:
            done = yield from body(self.board)
        turn.over = True
        if not done:
            yield from otherwise()

    @property
    def free(self) -> bool:
        """Whether no call has the board, or waits for it."""
        return self._last.over

    def room(self, nbytes: int) -> Array:
        """Return bytes for one call, which may be used until the next one asks."""
        if self._room.size < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room

    def reads(self, address: int) -> bool:
        """Return whether the kernel copies what is at an address of this process.

        Memory of devices, or that is secret, it does not, not even for the process itself.
        """
        if address in self._readable or not self.reaches_all:
            return True  # or nobody will try
        try:
            self.kernel.read(os.getpid(), address_of(self._seen), address, 1)
        except OSError:
            return False
        if len(self._readable) >= _READABLE:
            self._readable.clear()
        self._readable.add(address)
        return True

    def remember(self, key: object, work: object) -> None:
        """Keep what is bound to memory for the next call on the same memory."""
        if len(self.bound) >= _BOUND:
            del self.bound[next(iter(self.bound))]
        self.bound[key] = work

    def sweep(self, freed: Sequence[int]) -> None:
        """Let go of memory of ranks that have freed some, given how often each rank has."""
        assert self.board is not None
        changed = [rank for rank, times in enumerate(freed) if times != self._freed[rank]]
        if changed:
            self._freed = list(freed)
            self.bound.clear()
            REGIONS.sweep([self.board.pids[rank] for rank in changed if rank != self.rank])

    def _set_up(self, tag: int) -> Steps:
        """Exchange memory and try it; afterwards what is usable is known, equally on all ranks."""
        _memory.admit(_launcher())
        probe = np.array([_MAGIC, 0], np.int64)
        told = np.zeros(_TOLD, np.uint8)
        own: tuple[Array, ...] = ()
        # Who has no such memory tells nothing: the others wait for its word.
        with suppress(OSError, MemoryError):
            slots = REGIONS.allocate(2 * SLOT)
            own = slots, REGIONS.allocate(Board.nbytes(self.size) if self.rank == 0 else 1)
            facts = [os.getpid(), start_time(os.getpid()), address_of(probe)]
            for one in own:
                place = REGIONS.find(address_of(one), one.nbytes)
                assert place is not None
                facts += place
            text = " ".join(map(str, facts)).encode()
            told[: len(text)] = np.frombuffer(text, np.uint8)
        everyone = np.empty((self._transport.size, _TOLD), np.uint8)
        yield from self._gather(told, everyone, tag)
        rows = everyone[list(self._ranks)]
        words = [bytes(row).rstrip(b"\0").decode().split() for row in rows]
        opened, reaches = None, False
        if all(words):
            pids, starts = [int(one[0]) for one in words], [one[1] for one in words]
            opened = self._open(pids, starts, words, own)
            reaches = opened is not None and self._reach(pids, [int(one[2]) for one in words])
        told[:2] = opened is not None, reaches
        yield from self._gather(told, everyone, tag)
        self.usable, self.reaches_all = (bool(everyone[:, one].all()) for one in (0, 1))
        if opened is None or not self.usable:
            self._refused()
        else:
            memory, theirs = opened
            self.slots = tuple([one[start : start + SLOT] for one in theirs] for start in (0, SLOT))
            crowded = self._transport.crowded
            self.board = Board(self.rank, memory, pids, starts, self._ranks, crowded=crowded)

    def _gather(self, told: Array, everyone: Array, tag: int) -> Steps:
        """Tell a row to all, once."""
        rank, size = self._transport.rank, self._transport.size
        everyone[rank] = told
        peers = [peer for peer in range(size) if peer != rank]
        yield self._transport.post(
            [(peer, told) for peer in peers], [(peer, everyone[peer]) for peer in peers], tag
        )

    def _open(
        self,
        pids: Sequence[int],
        starts: Sequence[str],
        words: Sequence[Sequence[str]],
        own: tuple[Array, ...],
    ) -> tuple[Array, list[Array]] | None:
        """Return the board and the slots of all ranks, None if they cannot be mapped here."""
        found: list[tuple[Array, ...]] = []
        try:
            for peer, (pid, start) in enumerate(zip(pids, starts, strict=True)):
                if start_time(pid) != start:
                    return None  # another process has that number here
                if peer == self.rank:
                    found.append(own)
                    continue
                where = [int(word) for word in words[peer][3:]]
                places = (where[:4], where[4:])
                found.append(
                    tuple(REGIONS.open(pid, start, *place[:3])[place[3] :] for place in places)
                )
        except OSError:
            return None
        return found[0][1][: Board.nbytes(self.size)], [slots for slots, _ in found]

    def _reach(self, pids: Sequence[int], addresses: Sequence[int]) -> bool:
        """Return whether the kernel reads and writes memory of all peers."""
        if not _memory.available():
            return False
        seen = self._seen
        try:
            for peer, pid in enumerate(pids):
                if peer == self.rank:
                    continue
                self.kernel.read(pid, address_of(seen), addresses[peer], 8)
                if seen[0] != _MAGIC:
                    return False
                self.kernel.write(pid, address_of(seen), addresses[peer] + 8, 8)
        except OSError:
            return False
        return True
