"""The one place where pycomm waits: deadlines, signals, and who is missing.

A wait polls. While it polls it answers notes of peers, so that a rank whose deadline passes can ask
all others where they are and name those that do not answer. A rank that leaves because of an
exception says so, and those who wait for it raise at once instead of after the deadline.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pycomm.deadline import Deadline
from pycomm.errors import CommError, CommTimeoutError, PeerError, describe
from pycomm.transports.base import Pending, Transport

__all__ = ["Waiter"]

#: A wait looks for notes this often (seconds); shorter waits never do.
_NOTES_EVERY = 0.02
#: How long a rank whose deadline has passed listens for answers (seconds).
_ROLL_CALL = 0.5
#: Longest text of a note: it must travel as one small message.
_TEXT_LIMIT = 400


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is: operation and sequence number; p2p messages carry no number."""

    operation: str
    sequence: int | None = None

    def __str__(self) -> str:
        return self.operation if self.sequence is None else f"{self.operation} #{self.sequence}"


@dataclass(slots=True, eq=False)
class Waiter:
    """Waits on one transport, for one communicator.

    `gave_up` and `left` hold what peers have said: rank -> where, rank -> why.
    """

    transport: Transport
    label: str
    #: The waiters of all communicators that grew out of one `init`: each answers for all.
    family: "list[Waiter]"
    #: What else has to go on while this rank waits here, if anything.
    beside: "Callable[[], None] | None" = None
    #: Whether peers were told that this rank leaves: they count it out.
    has_left: bool = False
    gave_up: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    _answers: dict[int, str] = field(default_factory=dict)
    _outgoing: list[Pending] = field(default_factory=list)

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        sequence: int | None = None,
        peers: "tuple[int, ...] | None" = None,
    ) -> None:
        """Poll `ready` until it is true.

        Parameters
        ----------
        ready : callable
            Makes progress, and says whether the wait is over.
        deadline : Deadline
            When to give up.
        operation, sequence : str, int
            What is waited for: for messages, and for peers who ask.
        peers : tuple of int, optional
            The ranks this wait depends on; all by default.

        Raises
        ------
        CommTimeoutError
            If the deadline passes, here or on a peer that waits for the same.
        PeerError
            If a peer has left the communicator.
        """
        idle, clock, moment = self.transport.idle, time.monotonic, deadline.moment
        beside = self.beside
        spins = 0
        notes_at = 0.0
        while not ready():
            spins += 1
            now = clock()
            if now >= notes_at:
                # The first time round only sets the clock: most waits end before it strikes.
                if notes_at:
                    self._listen(_Place(operation, sequence), deadline, peers)
                notes_at = now + _NOTES_EVERY
            if now >= moment:
                raise self._timed_out(_Place(operation, sequence), deadline, peers)
            if beside is not None:
                beside()
            idle(spins)

    def leave(self, reason: BaseException, seconds: float = 0.5) -> None:
        """Tell all peers that this rank leaves because of `reason`, waiting at most `seconds`."""
        self.has_left = True
        self._tell_all("left", describe(reason))
        moment = time.monotonic() + seconds
        while self._outgoing and time.monotonic() < moment:
            self._flush()
            self.transport.idle(1)

    def forget(self) -> None:
        """Answer no more for this communicator: it has ended."""
        if self in self.family:
            self.family.remove(self)

    def answer(self, operation: str) -> None:
        """Answer peers who ask, from a wait that is none of this object's."""
        place = _Place(operation)
        for waiter in tuple(self.family):
            waiter._take_notes(None, place, self.label)

    def give_up(self, where: str) -> None:
        """Tell all peers that this rank has given up at `where`, without waiting."""
        self._tell_all("asks", where)
        self._flush()

    def _listen(self, place: _Place, deadline: Deadline, peers: "tuple[int, ...] | None") -> None:
        for waiter in tuple(self.family):
            waiter._take_notes(place if waiter is self else None, place, self.label)
        gone = [rank for rank in self.left if peers is None or rank in peers]
        if gone:
            raise self._abandoned(place, gone)
        if any(peers is None or rank in peers for rank in self.gave_up):
            raise self._timed_out(place, deadline, peers)

    def _take_notes(self, own: _Place | None, place: _Place, label: str) -> None:
        """Read what has arrived; answer who asks with `place`, this rank's whereabouts."""
        try:
            notes = self.transport.notes()
        except Exception:
            return  # a lost peer shows in the operation itself
        for peer, raw in notes:
            note: dict[str, Any] = json.loads(raw)
            text = str(note.get("text", ""))
            if note["kind"] == "asks":
                self.gave_up[peer] = text
                self._answers[peer] = text
                where = str(own) if own is not None else f"{place} of {label}"
                self._tell(peer, "answers", where)
            elif note["kind"] == "answers":
                self._answers[peer] = text
            elif note["kind"] == "left":
                self.left[peer] = text
        self._flush()

    def _tell(self, peer: int, kind: str, text: str) -> None:
        note = json.dumps({"kind": kind, "text": text[:_TEXT_LIMIT]}).encode()
        try:
            pending = self.transport.notify(peer, note)
        except Exception:
            pending = None  # a dead peer needs no note
        if pending is not None:
            self._outgoing.append(pending)

    def _tell_all(self, kind: str, text: str) -> None:
        for peer in range(self.transport.size):
            if peer != self.transport.rank:
                self._tell(peer, kind, text)

    def _flush(self) -> None:
        still = []
        for pending in self._outgoing:
            try:
                if not pending.test():
                    still.append(pending)
            except Exception:  # noqa: S112 - a dead peer needs no note
                continue
        self._outgoing = still

    def _timed_out(
        self, place: _Place, deadline: Deadline, peers: "tuple[int, ...] | None"
    ) -> CommError:
        """Hold a roll call and return the error that tells what it found."""
        rank, size = self.transport.rank, self.transport.size
        awaited = [peer for peer in (range(size) if peers is None else peers) if peer != rank]
        self._answers = dict(self.gave_up)
        self._tell_all("asks", str(place))
        moment = time.monotonic() + _ROLL_CALL
        while time.monotonic() < moment and not all(p in self._answers for p in awaited):
            self._take_notes(place, place, self.label)
            if self.left:
                return self._abandoned(place, list(self.left))
            time.sleep(0.001)
        missing = tuple(peer for peer in awaited if peer not in self._answers)
        elsewhere = {
            peer: where for peer, where in sorted(self._answers.items()) if where != str(place)
        }
        if deadline.passed:
            cause = f"no end within {deadline.timeout:g} s"
        else:
            cause = f"{_ranks(sorted(set(awaited) & set(self.gave_up)))} gave up waiting"
        found = [f"not heard from: {_ranks(missing)}"] if missing else []
        found += [f"rank {peer} is at {where}" for peer, where in elsewhere.items()]
        if not found and peers is not None:
            found = ["the peer answers from the same operation: is there a matching one for it?"]
        elif not found:
            found = ["all ranks answer and wait for the same: do they pass the same count?"]
        error = CommTimeoutError(
            f"{place} on rank {rank} of {size} ({self.label}): {cause}; {'; '.join(found)}. "
            "The communicator is broken now: call abort(); a longer wait is timeout=seconds",
            operation=place.operation,
            sequence=place.sequence,
            rank=rank,
        )
        error.missing = missing
        error.timeout = deadline.timeout
        return error

    def _abandoned(self, place: _Place, gone: list[int]) -> PeerError:
        reasons = "; ".join(f"rank {peer} left with {self.left[peer]}" for peer in sorted(gone))
        error = PeerError(
            f"{place} on rank {self.transport.rank} of {self.transport.size} ({self.label}) "
            f"cannot end: {reasons}",
            operation=place.operation,
            sequence=place.sequence,
            rank=self.transport.rank,
        )
        error.peers = tuple(sorted(gone))
        return error


def _ranks(ranks: "list[int] | tuple[int, ...]") -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
