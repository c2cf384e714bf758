"""The checker: moves symbols instead of data, and proves a collective right or says why not.

A chunk of a rank holds a symbol: which chunk of the data it is, and the ranks whose contributions
it is made of, as a bit mask. The collective says what every chunk holds before and what it must
hold after. In between the schedules of all ranks run together, by the rules of `schedule`: a round
is over when every send and receive of it has met its counterpart, which proves that there is no
deadlock even if no message is buffered. A contribution that would be reduced a second time, or into
nothing, or into another chunk, is an error at once.
"""

from collections import deque
from collections.abc import Sequence

from pycomm.algorithms.schedule import Recv, Schedule, Send
from pycomm.errors import ScheduleError

__all__ = ["verify"]

Symbol = tuple[int, int]  # chunk, mask of ranks

_NOTHING: Symbol = (-1, 0)


def verify(schedules: Sequence[Schedule], root: int = 0) -> None:
    """Prove that the schedules of all ranks together do their collective.

    Parameters
    ----------
    schedules : sequence of Schedule
        One a rank, in rank order.
    root : int
        Where the data of a broadcast begins.

    Raises
    ------
    ScheduleError
        If they do not belong together, deadlock, leave a message without its counterpart, reduce a
        contribution twice, send what is not there, or end with anything but the right result.
    """
    _belong_together(schedules)
    first = schedules[0]
    state = [_before(first, rank, root) for rank in range(first.size)]
    _run(schedules, state)
    for rank in range(first.size):
        for chunk in range(first.chunks):
            wanted = _after(first, rank, chunk, root)
            found = state[rank][chunk]
            if wanted is not None and found != wanted:
                raise ScheduleError(
                    f"rank {rank} ends with {_listed(found)} in chunk {chunk} instead of "
                    f"{_listed(wanted)}"
                )


def _belong_together(schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise ScheduleError("no schedules")
    first = schedules[0]
    facts = (first.collective, len(schedules), first.chunks)
    for rank, schedule in enumerate(schedules):
        if (schedule.collective, schedule.size, schedule.chunks) != facts or schedule.rank != rank:
            raise ScheduleError(f"the schedule in place {rank} does not belong there: {schedule}")


def _before(schedule: Schedule, rank: int, root: int) -> list[Symbol]:
    """Return what each chunk of `rank` holds before."""
    own = [(chunk, 1 << rank) for chunk in range(schedule.chunks)]
    if schedule.collective in ("all_reduce", "reduce_scatter"):
        return own
    if schedule.collective == "broadcast":
        return own if rank == root else [_NOTHING] * schedule.chunks
    return [
        symbol if _owner(schedule, chunk) == rank else _NOTHING for chunk, symbol in enumerate(own)
    ]


def _after(schedule: Schedule, rank: int, chunk: int, root: int) -> Symbol | None:
    """Return what a chunk of `rank` must hold after, None where it does not matter."""
    if schedule.collective == "broadcast":
        return (chunk, 1 << root)
    owner = _owner(schedule, chunk)
    if schedule.collective == "all_gather":
        return (chunk, 1 << owner)
    if schedule.collective == "reduce_scatter" and owner != rank:
        return None
    return (chunk, (1 << schedule.size) - 1)


def _owner(schedule: Schedule, chunk: int) -> int:
    """Return whose part of the data a chunk belongs to: parts are runs of equally many chunks."""
    return chunk * schedule.size // schedule.chunks


def _run(schedules: Sequence[Schedule], state: list[list[Symbol]]) -> None:
    """Run all schedules on `state`, until they end or nothing moves any more."""
    size = len(schedules)
    at = [-1] * size  # the round each rank is in
    open_steps = [0] * size  # its sends and receives that have not met their counterparts
    updates: list[dict[int, Symbol]] = [{} for _ in range(size)]
    # What waits for a counterpart, by (sender, receiver): messages arrive in order.
    sends: dict[tuple[int, int], deque[Symbol]] = {}
    receives: dict[tuple[int, int], deque[Recv]] = {}

    def begin(rank: int) -> None:
        """Enter the next round with steps, if there is one."""
        while open_steps[rank] == 0 and at[rank] < len(schedules[rank].rounds):
            for chunk, symbol in updates[rank].items():
                state[rank][chunk] = symbol
            updates[rank].clear()
            at[rank] += 1
            if at[rank] == len(schedules[rank].rounds):
                return
            for step in schedules[rank].rounds[at[rank]]:
                open_steps[rank] += 1
                if isinstance(step, Recv):
                    receives.setdefault((step.peer, rank), deque()).append(step)
                else:
                    _check_there(schedules[rank], at[rank], step, state[rank][step.chunk])
                    key = (rank, step.peer)
                    sends.setdefault(key, deque()).append(state[rank][step.chunk])

    moved = True
    while moved:
        moved = False
        for rank in range(size):
            begin(rank)
        for (sender, receiver), waiting in receives.items():
            ready = sends.get((sender, receiver))
            while waiting and ready:
                step, symbol = waiting.popleft(), ready.popleft()
                place = f"rank {receiver}, round {at[receiver]}, '{step}'"
                updates[receiver][step.chunk] = _received(
                    step, state[receiver][step.chunk], symbol, place
                )
                open_steps[receiver] -= 1
                open_steps[sender] -= 1
                moved = True
    stuck = [rank for rank in range(size) if at[rank] < len(schedules[rank].rounds)]
    if stuck:
        rank = stuck[0]
        steps = ", ".join(map(str, schedules[rank].rounds[at[rank]]))
        raise ScheduleError(
            f"deadlock: ranks {stuck} never finish; rank {rank} is in round {at[rank]}: {steps}"
        )


def _check_there(schedule: Schedule, number: int, step: Send, symbol: Symbol) -> None:
    if symbol == _NOTHING:
        raise ScheduleError(
            f"rank {schedule.rank}, round {number}: '{step}' sends what is not there yet"
        )


def _received(step: Recv, held: Symbol, symbol: Symbol, place: str) -> Symbol:
    if not step.reduce:
        return symbol
    if held[0] != symbol[0]:
        raise ScheduleError(f"{place} reduces {_listed(symbol)} into {_listed(held)}")
    twice = held[1] & symbol[1]
    if twice:
        raise ScheduleError(f"{place} reduces the contribution of ranks {_ranks(twice)} twice")
    return (held[0], held[1] | symbol[1])


def _listed(symbol: Symbol) -> str:
    return "nothing" if symbol == _NOTHING else f"chunk {symbol[0]} of ranks {_ranks(symbol[1])}"


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
