"""All ranks at once: lets the rounds of many schedules meet, message by message.

The checker and both simulators are this with their own idea of what a message does.
"""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycomm.algorithms.schedule import Chunks, Recv, Schedule, Send, Step
from pycomm.errors import ScheduleError

__all__ = ["Matcher", "many_objects"]


@contextmanager
def many_objects() -> Iterator[None]:
    """Do without the collector of cycles: schedules of many ranks are millions of acyclic objects.

    Looking for cycles among them takes twice as long as making them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Matcher:
    """Runs the schedules of all ranks together; subclasses say what happens.

    Both sides of a message stay in their rounds until it has been matched: so `meet` sees what the
    sender held before its round, and what a round writes is to be applied by `leave`.

    Parameters
    ----------
    schedules : sequence of Schedule
        One a rank, in rank order.
    copies : int
        How many times to run them, independently. Copy c of rank r is the actor ``c * size + r``.
    """

    def __init__(self, schedules: Sequence[Schedule], copies: int = 1) -> None:
        self.size = len(schedules)
        self.schedules = schedules
        self.at = [-1] * (self.size * copies)  # the round each actor is in
        self._open = [0] * (self.size * copies)  # its steps that have not met their counterparts
        # What waits for a counterpart, by sender and receiver: messages arrive in order.
        self._waiting: dict[int, deque[Step]] = {}
        self._ready = list(range(self.size))

    def run(self) -> None:
        """Run until nothing moves any more.

        Raises
        ------
        ScheduleError
            If somebody still waits then.
        """
        take, next_round = self.take, self._next_round
        with many_objects():
            while (actor := take()) is not None:
                next_round(actor)
        self._check_ended()

    def take(self) -> int | None:
        """Return an actor whose round is over, None if there is none."""
        return self._ready.pop() if self._ready else None

    def over(self, actor: int) -> None:
        """Note that all messages of the actor's round have met their counterparts."""
        self._ready.append(actor)

    def meet(self, sender: int, receiver: int, sent: Chunks, recv: Recv) -> None:
        """Do what a message does."""

    def leave(self, actor: int) -> None:
        """End the round of an actor."""

    def end(self, actor: int) -> None:
        """Note that an actor has no more rounds."""

    def place(self, actor: int, step: Step) -> str:
        """Return where an actor is, for messages."""
        return f"rank {actor % self.size}, round {self.at[actor]}, '{step}'"

    def _next_round(self, actor: int) -> None:
        self.leave(actor)
        size, left, waiting = self.size, self._open, self._waiting
        rank = actor % size
        rounds = self.schedules[rank].rounds
        number = self.at[actor] + 1
        while number < len(rounds) and not rounds[number]:
            number += 1
        self.at[actor] = number
        if number == len(rounds):
            self.end(actor)
            return
        steps: Sequence[Any] = rounds[number]
        left[actor] = len(steps)
        first, row = actor - rank, actor * size
        for step in steps:
            to = step.peer
            peer = first + to
            sending = step.__class__ is Send
            key = row + to if sending else peer * size + rank
            queue = waiting.get(key)
            if not queue or (queue[0].__class__ is Send) is sending:
                if queue is None:
                    queue = waiting[key] = deque()
                queue.append(step)
                continue
            other: Any = queue.popleft()
            if len(other.chunks) != len(step.chunks):
                self._refuse(actor, step, peer, other)
            if sending:
                self.meet(actor, peer, step.chunks, other)
            else:
                self.meet(peer, actor, other.chunks, step)
            left[actor] -= 1
            left[peer] -= 1
            if not left[peer]:
                self.over(peer)
        if not left[actor]:
            self.over(actor)

    def _refuse(self, actor: int, step: Step, peer: int, other: Step) -> None:
        raise ScheduleError(
            f"{self.place(actor, step)} has {len(step.chunks)} chunks, and "
            f"{self.place(peer, other)} {len(other.chunks)}"
        )

    def _check_ended(self) -> None:
        size = self.size
        stuck = [
            actor
            for actor, at in enumerate(self.at)
            if at < len(self.schedules[actor % size].rounds)
        ]
        if stuck:
            rank, number = stuck[0] % size, self.at[stuck[0]]
            steps = ", ".join(map(str, self.schedules[rank].rounds[number]))
            ranks = sorted({actor % size for actor in stuck})
            raise ScheduleError(
                f"deadlock: ranks {ranks} never finish; rank {rank} is in round {number}: {steps}"
            )
