"""What one rank does in a collective: frozen steps over chunks, in rounds.

Nomenclature. The data of a rank is cut into *chunks*, numbered from 0; the first chunks take the
remainder, as `chunk_sizes` says. A *step* sends a chunk to a peer, or receives one from a peer and
either stores it or reduces it into what is there. A *round* is a tuple of steps that are all in
flight together: sends read what a chunk held before the round, receives write after it, and the
next round begins when all of it is complete. A *schedule* is the tuple of rounds of one rank.
"""

import json
from dataclasses import dataclass
from typing import Any

from pycomm.errors import ScheduleError

__all__ = ["COLLECTIVES", "Recv", "Round", "Schedule", "Send", "chunk_sizes"]

#: The collectives that schedules describe. In each, a rank holds all chunks of one buffer.
COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")


@dataclass(frozen=True, slots=True, order=True)
class Send:
    """Send `chunk` to `peer`."""

    peer: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk} -> {self.peer}"


@dataclass(frozen=True, slots=True, order=True)
class Recv:
    """Receive from `peer` into `chunk`, reducing it into what is there if `reduce`."""

    peer: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.chunk} {'+=' if self.reduce else '<-'} {self.peer}"


Round = tuple[Send | Recv, ...]


def chunk_sizes(count: int, chunks: int) -> list[int]:
    """Return how many of `count` elements each of `chunks` chunks holds."""
    base, more = divmod(count, chunks)
    return [base + (index < more) for index in range(chunks)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of one rank.

    Attributes
    ----------
    collective : str
        One of `COLLECTIVES`.
    rank, size : int
        Whose rounds, among how many ranks.
    chunks : int
        Into how many chunks the data is cut, equally on all ranks.
    rounds : tuple of Round
        What to do, in order.

    Raises
    ------
    ScheduleError
        If a step names a peer or a chunk that does not exist, or two receives of one round write
        the same chunk.
    """

    collective: str
    rank: int
    size: int
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ScheduleError(f"unknown collective {self.collective!r}; known: {COLLECTIVES}")
        if not 0 <= self.rank < self.size or self.chunks < 1:
            raise ScheduleError(f"no rank {self.rank} of {self.size} with {self.chunks} chunks")
        for number, steps in enumerate(self.rounds):
            place = f"rank {self.rank}, round {number}"
            written: set[int] = set()
            for step in steps:
                if not 0 <= step.peer < self.size or step.peer == self.rank:
                    raise ScheduleError(f"{place}: no peer {step.peer} in '{step}'")
                if not 0 <= step.chunk < self.chunks:
                    raise ScheduleError(f"{place}: no chunk {step.chunk} in '{step}'")
                if isinstance(step, Recv) and step.chunk in written:
                    raise ScheduleError(f"{place}: chunk {step.chunk} is written twice")
                if isinstance(step, Recv):
                    written.add(step.chunk)

    @property
    def steps(self) -> int:
        """Rounds that communicate: how many messages follow each other."""
        return sum(1 for steps in self.rounds if steps)

    def elements_sent(self, count: int) -> int:
        """Return how many elements this rank sends when the data has `count`."""
        sizes = chunk_sizes(count, self.chunks)
        return sum(sizes[s.chunk] for steps in self.rounds for s in steps if isinstance(s, Send))

    def largest_hop(self, count: int) -> int:
        """Return the most elements this rank sends to one peer in one round."""
        sizes = chunk_sizes(count, self.chunks)
        largest = 0
        for steps in self.rounds:
            to: dict[int, int] = {}
            for step in steps:
                if isinstance(step, Send):
                    to[step.peer] = to.get(step.peer, 0) + sizes[step.chunk]
            largest = max(largest, *to.values(), 0)
        return largest

    def to_json(self) -> str:
        """Return the schedule as JSON, for `from_json`."""
        rounds = [
            [
                ["send", s.peer, s.chunk]
                if isinstance(s, Send)
                else ["reduce" if s.reduce else "recv", s.peer, s.chunk]
                for s in steps
            ]
            for steps in self.rounds
        ]
        return json.dumps(
            {
                "collective": self.collective,
                "rank": self.rank,
                "size": self.size,
                "chunks": self.chunks,
                "rounds": rounds,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Return the schedule that `to_json` wrote; `ScheduleError` for anything else."""
        try:
            told: dict[str, Any] = json.loads(text)
            rounds = tuple(
                tuple(
                    Send(peer, chunk) if kind == "send" else Recv(peer, chunk, _REDUCES[kind])
                    for kind, peer, chunk in steps
                )
                for steps in told["rounds"]
            )
            return cls(told["collective"], told["rank"], told["size"], told["chunks"], rounds)
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a schedule: {error}") from error

    def __str__(self) -> str:
        head = f"{self.collective}, rank {self.rank} of {self.size}, {self.chunks} chunks"
        lines = [
            f"  round {number:>3}: {', '.join(map(str, steps)) or 'nothing'}"
            for number, steps in enumerate(self.rounds)
        ]
        return "\n".join([head, *lines])


_REDUCES = {"reduce": True, "recv": False}
