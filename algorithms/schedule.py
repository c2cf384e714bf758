"""What one rank does in a collective: frozen steps over chunks, in rounds.

Nomenclature. The data of a collective is cut into *chunks*, numbered from 0. A *step* is one
message: it sends some chunks to a peer, or receives some from a peer and either stores them or
reduces them into what is there. A *round* is a tuple of steps that are all in flight together:
sends read what a chunk held before the round, receives write after it, and the next round begins
when all of it is complete. A *schedule* is the tuple of rounds of one rank.

What the data is depends on the collective. In all_reduce, broadcast and reduce it is one array, and
chunks are cut from all of it. In all_gather, gather, reduce_scatter and scatter it is one part for
each rank, and each part is cut into equally many chunks. All_to_all has two such arrays: the first
chunks are the output, part t from rank t, and as many chunks after them the input, part t for rank
t. A barrier has no data: its messages are empty.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from pycomm.errors import ScheduleError

__all__ = [
    "COLLECTIVES",
    "PARTED",
    "REDUCING",
    "ROOTED",
    "Chunks",
    "Recv",
    "Round",
    "Schedule",
    "Send",
    "chunk_sizes",
    "data_count",
    "one",
    "spans",
]

COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "scatter",
)  # fmt: skip
#: Collectives whose data is one part for each rank.
PARTED = frozenset({"all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"})
#: Collectives that have a root.
ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
#: Collectives that reduce.
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})

_MOST_CHUNKS = 1 << 22

#: The chunks of one message, in the order in which they travel.
Chunks = tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def one(chunk: int) -> Chunks:
    """Return `chunk` as the only one of a message; schedules of many ranks share the tuples."""
    return (chunk,)


class Send(NamedTuple):
    """Send `chunks` to `peer`, as one message."""

    peer: int
    chunks: Chunks

    def __str__(self) -> str:
        return f"{_listed(self.chunks)} -> {self.peer}"


class Recv(NamedTuple):
    """Receive one message from `peer` into `chunks`, reducing it into them if `reduce`.

    Several receives of one round may reduce into the same chunk: they are combined in rank order,
    with what the rank itself holds in its place; halves accumulate in float32 and round once.
    """

    peer: int
    chunks: Chunks
    reduce: bool

    def __str__(self) -> str:
        return f"{_listed(self.chunks)} {'+=' if self.reduce else '<-'} {self.peer}"


Step = Send | Recv
Round = tuple[Step, ...]


def _listed(chunks: Chunks) -> str:
    """Return chunk numbers with runs written as first-last."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "nothing"


def data_count(collective: str, part: int, size: int) -> int:
    """Return the elements of the data: all parts together where it has one of `part` a rank."""
    return part * size if collective in PARTED else part


def chunk_sizes(count: int, chunks: int) -> list[int]:
    """Return how many of `count` elements each of `chunks` equal chunks holds.

    The first ones take the remainder.
    """
    base, more = divmod(count, chunks)
    return [base + (index < more) for index in range(chunks)]


def spans(count: int, chunks: int, weights: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Cut ``[0, count)`` into spans, equal ones or in proportion to `weights`."""
    if weights is None:
        ends = list(accumulate(chunk_sizes(count, chunks), initial=0))
    else:
        total = sum(weights)
        ends = [count * sum_ // total for sum_ in accumulate(weights, initial=0)]
    return list(pairwise(ends))


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
        Into how many chunks the data is cut, equally on all ranks; where the data is one part for
        each rank, a multiple of `size`.
    rounds : tuple of Round
        What to do, in order.
    root : int
        The root of collectives that have one, else -1.
    weights : tuple of int, optional
        The sizes of the chunks in proportion, equal ones if None. Not where the data has parts.

    Raises
    ------
    ScheduleError
        If a step names a peer or a chunk that does not exist, or a round writes a chunk twice.
    """

    collective: str
    rank: int
    size: int
    chunks: int
    rounds: tuple[Round, ...]
    root: int = -1
    weights: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ScheduleError(f"unknown collective {self.collective!r}; known: {COLLECTIVES}")
        if not 0 <= self.rank < self.size or not 1 <= self.chunks <= _MOST_CHUNKS:
            raise ScheduleError(f"no rank {self.rank} of {self.size} with {self.chunks} chunks")
        if (self.collective in ROOTED) != (0 <= self.root < self.size):
            raise ScheduleError(f"{self.collective} of {self.size} ranks with root {self.root}")
        parted = self.collective in PARTED
        if parted and self.chunks % self.size:
            raise ScheduleError(f"{self.chunks} chunks are no equal parts of {self.size} ranks")
        if self.weights is not None and (
            parted or len(self.weights) != self.chunks or min(self.weights) < 1
        ):
            raise ScheduleError(f"weights {self.weights} do not fit {self.chunks} chunks")
        self._check_rounds()

    def _check_rounds(self) -> None:
        rank, size, slots = self.rank, self.size, self.slots
        # The caller's input follows: that of all_to_all, and all that a broadcast's root has.
        written = -1 if self.collective == "broadcast" and rank == self.root else self.chunks
        for number, steps in enumerate(self.rounds):
            writes = 0
            for step in steps:
                peer, chunks = step.peer, step.chunks
                if not 0 <= peer < size or peer == rank:
                    raise ScheduleError(f"rank {rank}, round {number}: no peer {peer} in '{step}'")
                if len(chunks) == 1:
                    known = 0 <= chunks[0] < slots
                else:
                    known = not chunks or (min(chunks) >= 0 and max(chunks) < slots)
                    if len(set(chunks)) != len(chunks):
                        raise ScheduleError(
                            f"rank {rank}, round {number}: a chunk comes twice in '{step}'"
                        )
                if not known:
                    raise ScheduleError(f"rank {rank}, round {number}: no such chunk in '{step}'")
                if step.__class__ is Recv:
                    writes += 1
                    if max(chunks, default=-1) >= written:
                        raise ScheduleError(
                            f"rank {rank}, round {number}: '{step}' writes into the input"
                        )
            if writes > 1:
                self._check_writes(number, steps)

    def _check_writes(self, number: int, steps: Round) -> None:
        written: dict[int, bool] = {}
        for step in steps:
            if isinstance(step, Recv):
                for chunk in step.chunks:
                    if chunk in written and not (step.reduce and written[chunk]):
                        raise ScheduleError(
                            f"rank {self.rank}, round {number}: chunk {chunk} is written twice"
                        )
                    written[chunk] = step.reduce

    @property
    def slots(self) -> int:
        """How many chunks steps can name: all_to_all has an input beside its output."""
        return 2 * self.chunks if self.collective == "all_to_all" else self.chunks

    @property
    def steps(self) -> int:
        """Rounds of this rank that communicate."""
        return sum(1 for steps in self.rounds if steps)

    def spans(self, count: int) -> list[tuple[int, int]]:
        """Return where each chunk begins and ends in data of `count` elements.

        Parts of ranks follow each other; `count` is then a multiple of `size`.
        """
        if self.collective not in PARTED:
            return spans(count, self.chunks, self.weights)
        part = count // self.size
        within = spans(part, self.chunks // self.size)
        return [
            (owner * part + start, owner * part + stop)
            for owner in range(self.size)
            for start, stop in within
        ]

    def sizes(self, count: int) -> list[int]:
        """Return how many of `count` elements each chunk that steps can name holds."""
        sizes = [stop - start for start, stop in self.spans(count)]
        return sizes * (self.slots // self.chunks)

    def segments(self, count: int, longest: int) -> int:
        """Return into how many segments each chunk is cut so that none is above `longest`."""
        return max(1, -(-max(self.sizes(count)) // max(1, longest)))

    def sends(self) -> Iterator[Send]:
        """Yield all sends in order."""
        for steps in self.rounds:
            for step in steps:
                if isinstance(step, Send):
                    yield step

    def elements_sent(self, count: int) -> int:
        """Return how many elements this rank sends when the data has `count`."""
        sizes = self.sizes(count)
        return sum(sizes[chunk] for step in self.sends() for chunk in step.chunks)

    def largest_hop(self, count: int) -> int:
        """Return the most elements this rank sends in one message."""
        sizes = self.sizes(count)
        return max((sum(sizes[chunk] for chunk in s.chunks) for s in self.sends()), default=0)

    def to_json(self) -> str:
        """Return the schedule as JSON, for `from_json`."""
        rounds = [
            [
                ["send", s.peer, s.chunks]
                if isinstance(s, Send)
                else ["reduce" if s.reduce else "recv", s.peer, s.chunks]
                for s in steps
            ]
            for steps in self.rounds
        ]
        told = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps({**told, "rounds": rounds})

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Return the schedule that `to_json` wrote; `ScheduleError` for anything else."""
        try:
            told: dict[str, Any] = json.loads(text)
            rounds = tuple(
                tuple(
                    Send(peer, tuple(chunks))
                    if kind == "send"
                    else Recv(peer, tuple(chunks), _REDUCES[kind])
                    for kind, peer, chunks in steps
                )
                for steps in told["rounds"]
            )
            weights = told["weights"]
            facts = {name: told[name] for name in _FIELDS}
            facts["weights"] = None if weights is None else tuple(weights)
            return cls(rounds=rounds, **facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a schedule: {error}") from error

    def __str__(self) -> str:
        way = "to" if self.collective in ("gather", "reduce") else "from"
        root = "" if self.root < 0 else f" {way} root {self.root}"
        chunks = f"{self.chunks} chunk{'s' * (self.chunks > 1)}"
        head = f"{self.collective}{root}, rank {self.rank} of {self.size}, {chunks}"
        lines = [
            f"  round {number:>3}: {', '.join(map(str, steps)) or 'nothing'}"
            for number, steps in enumerate(self.rounds)
        ]
        return "\n".join([head, *lines])


_FIELDS = ("collective", "rank", "size", "chunks", "root", "weights")
_REDUCES = {"reduce": True, "recv": False}
