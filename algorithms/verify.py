"""The checker: moves symbols instead of data, and proves a collective right or says why not.

A chunk of a rank holds a symbol: which chunk of the data it is, and the ranks whose contributions
it is made of, as a bit mask. The collective says what every chunk holds before and what it must
hold after. In between the schedules of all ranks run together, by the rules of `schedule`: a round
is over when every send and receive of it has met its counterpart, which proves that there is no
deadlock even if no message is buffered. A contribution that would be reduced a second time, or into
nothing, or into another chunk, is an error at once.
"""

from collections.abc import Sequence

from pycomm.algorithms.matching import Matcher
from pycomm.algorithms.schedule import PARTED, REDUCING, Chunks, Recv, Schedule, Send
from pycomm.errors import ScheduleError

__all__ = ["verify"]

# A symbol is one number, mask of ranks and number of the chunk: ``mask << _BITS | chunk``.
_BITS = 40
_CHUNK = (1 << _BITS) - 1
_NOTHING = -1


def verify(schedules: Sequence[Schedule]) -> None:
    """Prove that the schedules of all ranks together do their collective.

    Parameters
    ----------
    schedules : sequence of Schedule
        One a rank, in rank order.

    Raises
    ------
    ScheduleError
        If they do not belong together, deadlock, leave a message without its counterpart, reduce a
        contribution twice, send what is not there, or end with anything but the right result.
    """
    _belong_together(schedules)
    first = schedules[0]
    symbols = _Symbols(schedules)
    symbols.run()
    everybody = (1 << first.size) - 1
    for rank in range(first.size):
        _check_result(first, rank, symbols.state[rank])
        if first.collective == "barrier" and symbols.heard[rank] != everybody:
            missing = _ranks(~symbols.heard[rank] & everybody)
            raise ScheduleError(f"rank {rank} leaves the barrier without a word from {missing}")


def _belong_together(schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise ScheduleError("no schedules")
    first = schedules[0]
    facts = (first.collective, len(schedules), first.chunks, first.root, first.weights)
    for rank, one in enumerate(schedules):
        found = (one.collective, one.size, one.chunks, one.root, one.weights)
        if found != facts or one.rank != rank:
            raise ScheduleError(f"the schedule in place {rank} does not belong there: {one}")


def _owner(schedule: Schedule, chunk: int) -> int:
    """Return whose part of the data a chunk belongs to: parts are runs of equally many chunks."""
    return chunk * schedule.size // schedule.chunks


def _before(schedule: Schedule, rank: int) -> list[int]:
    """Return what each chunk of `rank` holds before."""
    own, chunks = 1 << rank + _BITS, range(schedule.chunks)
    kind = schedule.collective
    if kind in REDUCING or (kind in ("broadcast", "scatter") and rank == schedule.root):
        return [own | chunk for chunk in chunks]
    if kind in ("all_gather", "gather"):
        return [own | c if _owner(schedule, c) == rank else _NOTHING for c in chunks]
    nothing = [_NOTHING] * schedule.chunks
    if kind != "all_to_all":
        return nothing
    # The input for rank t is the data's piece (rank, t); the own piece is at home already.
    pieces = [own | rank * schedule.chunks + chunk for chunk in chunks]
    return [pieces[c] if _owner(schedule, c) == rank else _NOTHING for c in chunks] + pieces


def _check_result(schedule: Schedule, rank: int, found: list[int]) -> None:
    kind, root, size, chunks = schedule.collective, schedule.root, schedule.size, schedule.chunks
    if kind == "barrier" or (kind in ("gather", "reduce") and rank != root):
        return
    everybody = (1 << size) - 1 << _BITS
    for chunk in range(chunks):
        owner = _owner(schedule, chunk) if kind in PARTED else -1
        if kind in ("reduce_scatter", "scatter") and owner != rank:
            continue  # does not matter
        if kind in REDUCING:
            wanted = everybody | chunk
        elif kind == "all_to_all":
            within = chunk - owner * chunks // size
            wanted = 1 << owner + _BITS | owner * chunks + rank * chunks // size + within
        else:
            source = root if kind in ("broadcast", "scatter") else owner
            wanted = 1 << source + _BITS | chunk
        if found[chunk] != wanted:
            raise ScheduleError(
                f"rank {rank} ends with {_listed(found[chunk])} in chunk {chunk} instead of "
                f"{_listed(wanted)}"
            )


class _Symbols(Matcher):
    """All schedules, moving symbols."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        super().__init__(schedules)
        self.state = [_before(schedules[0], rank) for rank in range(self.size)]
        self._updates: list[dict[int, int]] = [{} for _ in range(self.size)]
        first = schedules[0]
        # How many chunks each part has: chunks of parts are alike if their numbers within are.
        self._alike = first.chunks // first.size if first.collective in PARTED else 0
        self._listening = schedules[0].collective == "barrier"
        #: From whom each rank of a barrier has heard, through others too.
        self.heard = [1 << rank for rank in range(self.size)]
        self._hearing = list(self.heard)

    def leave(self, actor: int) -> None:
        """Apply what the round has written."""
        updates = self._updates[actor]
        if updates:
            state = self.state[actor]
            for chunk, symbol in updates.items():
                state[chunk] = symbol
            updates.clear()
        self.heard[actor] = self._hearing[actor]

    def meet(self, sender: int, receiver: int, sent: Chunks, recv: Recv) -> None:
        """Move or combine the symbols of a message."""
        source, held, updates = self.state[sender], self.state[receiver], self._updates[receiver]
        for place, chunk in zip(sent, recv.chunks, strict=True):
            symbol = source[place]
            if place != chunk and not (self._alike and (place - chunk) % self._alike == 0):
                raise ScheduleError(
                    f"{self.place(receiver, recv)} takes chunk {place} of rank {sender} for "
                    f"{chunk}: chunks have different sizes"
                )
            if symbol == _NOTHING:
                raise ScheduleError(
                    f"{self.place(sender, Send(receiver, sent))} sends what is not there yet"
                )
            if recv.reduce:
                found = updates.get(chunk, held[chunk])
                if found == _NOTHING or found & _CHUNK != symbol & _CHUNK:
                    raise ScheduleError(
                        f"{self.place(receiver, recv)} reduces {_listed(symbol)} into "
                        f"{_listed(found)}"
                    )
                both = found & symbol
                if both > _CHUNK:
                    raise ScheduleError(
                        f"{self.place(receiver, recv)} reduces the contribution of ranks "
                        f"{_ranks(both >> _BITS)} twice"
                    )
                symbol |= found
            updates[chunk] = symbol
        if self._listening:
            self._hearing[receiver] |= self.heard[sender]


def _listed(symbol: int) -> str:
    if symbol == _NOTHING:
        return "nothing"
    return f"chunk {symbol & _CHUNK} of ranks {_ranks(symbol >> _BITS)}"


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
