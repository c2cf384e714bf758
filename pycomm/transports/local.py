"""Threads as ranks: for tests, notebooks, and code that has no MPI.

A message is handed over by reference: the receiving thread copies it out of the sender's array,
and the sender's round is complete after that. Short messages are copied when they are sent, as MPI
does it, so that programs which rely on that behave the same on both roads.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pycomm.dtypes import DType, Op
from pycomm.errors import CommError, MismatchError
from pycomm.transports.base import Array, Native, Pending

__all__ = ["LocalTransport"]

#: Messages up to this size are copied when they are sent (Open MPI's shared-memory eager limit).
_EAGER = 4096
#: How long an idle wait sleeps before it looks again, if nothing wakes it (seconds).
_NAP = 0.02

# A box is known by (source, channel, tag); collectives and the user's messages have channels of
# their own.
_Key = tuple[int, str, int]


@dataclass(slots=True)
class _Message:
    data: Array
    sender: int
    taken: bool = False


@dataclass(slots=True)
class _Mailbox:
    """What has been sent to one rank and not been received yet."""

    bell: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[_Key, deque[_Message]] = field(default_factory=dict)
    notes: deque[tuple[int, bytes]] = field(default_factory=deque)
    #: Counts rings: a rank that finds it changed since its last look does not sleep.
    rings: int = 0

    def ring(self) -> None:
        with self.bell:
            self.rings += 1
            self.bell.notify_all()


class _Group:
    """What the ranks of one communicator share."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        size = len(hosts)
        self.size = size
        self.hosts = hosts
        self.boxes = [_Mailbox() for _ in range(size)]
        self.lock = threading.Lock()
        # The first member to arrive makes the new group, the last to pick it up drops the entry;
        # the count tells consecutive splits over the same ranks apart.
        self.splits: dict[tuple[tuple[int, ...], int], _Group] = {}
        self.picked_up: Counter[tuple[tuple[int, ...], int]] = Counter()

    def split(self, members: tuple[int, ...], count: int) -> "_Group":
        key = (members, count)
        with self.lock:
            hosts = tuple(self.hosts[member] for member in members)
            group = self.splits.setdefault(key, _Group(hosts))
            self.picked_up[key] += 1
            if self.picked_up[key] == len(members):
                del self.splits[key], self.picked_up[key]
        return group


@dataclass(slots=True)
class _Receive:
    source: int
    key: _Key
    into: Array
    done: bool = False


class _Round:
    """The `Pending` of posted messages."""

    def __init__(
        self, transport: "LocalTransport", sent: list[_Message], receives: list[_Receive]
    ) -> None:
        self._transport = transport
        self._sent = sent
        self._receives = receives

    def test(self) -> bool:
        if self._receives:
            for receive in self._receives:
                self._transport.match(receive.key)
            self._receives = [receive for receive in self._receives if not receive.done]
        if self._sent:
            self._sent = [message for message in self._sent if not message.taken]
        return not self._receives and not self._sent


class _Split:
    """The `Pending` of a split: complete at once, for its members share this process."""

    def __init__(self, transport: "LocalTransport") -> None:
        self.transport = transport

    def test(self) -> bool:
        return True

    def abandon(self) -> None:
        """Do nothing: nobody waits for it."""


class LocalTransport:
    """The road of one thread among `size` threads of this process."""

    tag_limit = 1 << 15
    library = "threads"
    crowded = False
    shares_memory = False  # they have the same memory anyway

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._box = group.boxes[rank]
        # Receives by key in the order they were posted: messages go to them in that order.
        self._posted: dict[_Key, deque[_Receive]] = {}
        self._split_counts: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self._gone = False
        self.bytes_sent = 0
        self.rank = rank
        self.size = group.size
        self.hosts = group.hosts

    @classmethod
    def create(cls, size: int, hosts: Sequence[int] | None = None) -> "list[LocalTransport]":
        """Return the transports of `size` ranks, as if they were on `hosts`; all on one if None."""
        group = _Group((0,) * size if hosts is None else tuple(hosts))
        return [cls(group, rank) for rank in range(size)]

    def post(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Pending:
        """Start one round of messages."""
        receives = [self._receive(peer, "round", tag, into) for peer, into in recvs]
        self.bytes_sent += sum(data.size for _, data in sends)
        return _Round(self, [self._send(p, "round", tag, data) for p, data in sends], receives)

    def prepare(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Callable[[], Pending]:
        """Return what starts the same round any number of times."""
        return partial(self.post, sends, recvs, tag)

    def post_message(self, peer: int, data: Array, tag: int, *, receive: bool) -> Pending:
        """Start one message of the user's."""
        if receive:
            return _Round(self, [], [self._receive(peer, "user", tag, data)])
        return _Round(self, [self._send(peer, "user", tag, data)], [])

    def _send(self, peer: int, channel: str, tag: int, data: Array) -> _Message:
        if self._gone:
            raise CommError(f"rank {self.rank} has aborted this communicator")
        eager = data.nbytes <= _EAGER
        message = _Message(data.copy() if eager else data, self.rank, taken=eager)
        box = self._group.boxes[peer]
        with box.bell:
            box.messages.setdefault((self.rank, channel, tag), deque()).append(message)
        box.ring()
        return message

    def _receive(self, peer: int, channel: str, tag: int, into: Array) -> _Receive:
        receive = _Receive(peer, (peer, channel, tag), into)
        self._posted.setdefault(receive.key, deque()).append(receive)
        return receive

    def match(self, key: _Key) -> None:
        """Receive what has arrived under `key`."""
        while key in self._posted:
            with self._box.bell:
                waiting = self._box.messages.get(key)
                if not waiting:
                    return
                message = waiting.popleft()
                if not waiting:
                    del self._box.messages[key]
            receive = self._posted[key].popleft()
            if not self._posted[key]:
                del self._posted[key]
            self._deliver(message, receive)

    def _deliver(self, message: _Message, receive: _Receive) -> None:
        try:
            if message.data.size != receive.into.size:
                raise MismatchError(
                    f"rank {self.rank} waits for {receive.into.size} bytes from rank "
                    f"{receive.source}, which sends {message.data.size}"
                )
            np.copyto(receive.into, message.data)
            receive.done = True
        finally:
            if not message.taken:
                message.taken = True
                self._group.boxes[message.sender].ring()

    def native(
        self,
        collective: str,  # noqa: ARG002
        dtype: DType,  # noqa: ARG002
        op: Op | None,  # noqa: ARG002
        count: int,  # noqa: ARG002
        *,
        in_turn: bool = False,  # noqa: ARG002
    ) -> Native | None:
        """Return None: there is no library underneath."""
        return None

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`: no library underneath has errors of its own."""
        return error

    def idle(self, spins: int) -> None:  # noqa: ARG002
        """Sleep until a peer rings, but not for long: deadlines and signals have to be seen."""
        box = self._box
        with box.bell:
            if box.rings == self._seen:
                box.bell.wait(_NAP)
            self._seen = box.rings

    def notify(self, peer: int, note: bytes) -> Pending | None:
        """Deliver a note at once."""
        box = self._group.boxes[peer]
        box.notes.append((self.rank, note))
        box.ring()
        return None

    def notes(self) -> list[tuple[int, bytes]]:
        """Return the notes that have arrived."""
        arrived = []
        while self._box.notes:
            arrived.append(self._box.notes.popleft())
        return arrived

    def split(self, ranks: Sequence[int]) -> Any:
        """Return the `Pending` of a new transport for `ranks`."""
        members = tuple(ranks)
        count = self._split_counts[members] = self._split_counts.get(members, 0) + 1
        group = self._group.split(members, count)
        return _Split(LocalTransport(group, members.index(self.rank)))

    def close(self) -> None:
        """Nothing to free: the group goes with its last rank."""

    def abort(self) -> None:
        """Refuse to send from now on."""
        self._gone = True
