"""All ranks in one process, with real numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm.algorithms.matching import Matcher
from pycomm.algorithms.schedule import PARTED, Chunks, Recv, Schedule
from pycomm.errors import ArgumentValueError

__all__ = ["simulate"]

Array = np.ndarray[Any, Any]

_UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def simulate(schedules: Sequence[Schedule], inputs: Sequence[Any], op: str = "sum") -> list[Array]:
    """Run the schedules of all ranks on arrays.

    Parameters
    ----------
    schedules : sequence of Schedule
        One a rank, in rank order.
    inputs : sequence of array
        The input of each rank, one-dimensional and of equal dtype; what `Communicator`'s method of
        that name takes. None for a rank that has no input, and for all ranks of a barrier.
    op : str
        ``"sum"``, ``"prod"``, ``"min"`` or ``"max"``, for collectives that reduce. Contributions
        that meet in one round are combined in rank order; halves accumulate in float32.

    Returns
    -------
    list of numpy.ndarray
        The output of each rank; empty where it has none.

    Raises
    ------
    ArgumentValueError
        If the inputs or the op do not fit.
    ScheduleError
        If the schedules do not fit each other.

    Examples
    --------
    >>> from pycomm.algorithms import algorithm_of, simulate
    >>> ring = algorithm_of("all_reduce", "ring").schedules(3)
    >>> simulate(ring, [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]])[2]
    array([111, 222, 333, 444])
    """
    if op not in _UFUNCS:
        raise ArgumentValueError(f"unknown op {op!r}; known: {', '.join(_UFUNCS)}")
    if len(inputs) != len(schedules):
        raise ArgumentValueError(f"{len(inputs)} inputs for {len(schedules)} ranks")
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    run = _Numbers(schedules, arrays, _UFUNCS[op])
    run.run()
    return [_output(schedule, run.state[schedule.rank], run.dtype) for schedule in schedules]


def _own(schedule: Schedule) -> slice:
    """Return the chunks that are a rank's part of the data."""
    each = schedule.chunks // schedule.size
    return slice(schedule.rank * each, (schedule.rank + 1) * each)


class _Numbers(Matcher):
    """All schedules, moving arrays."""

    def __init__(
        self, schedules: Sequence[Schedule], inputs: Sequence[Array | None], ufunc: np.ufunc
    ) -> None:
        super().__init__(schedules)
        given = [x for x in inputs if x is not None]
        if any(x.ndim != 1 for x in given):
            raise ArgumentValueError("inputs must be one-dimensional")
        self.dtype = given[0].dtype if given else np.dtype(np.uint8)
        self.state = [_input(one, x) for one, x in zip(schedules, inputs, strict=True)]
        self._ufunc = ufunc
        # What a round writes: chunk -> [(sender, contribution)], and whether it is reduced.
        self._arrived: list[dict[int, list[tuple[int, Any]]]] = [{} for _ in schedules]
        self._stored: list[dict[int, Any]] = [{} for _ in schedules]

    def meet(self, sender: int, receiver: int, sent: Chunks, recv: Recv) -> None:
        """Note what a message brings."""
        for place, chunk in zip(sent, recv.chunks, strict=True):
            brought = self.state[sender][place]
            if recv.reduce:
                self._arrived[receiver].setdefault(chunk, []).append((sender, brought))
            else:
                self._stored[receiver][chunk] = brought

    def leave(self, actor: int) -> None:
        """Store and reduce what has come."""
        state = self.state[actor]
        for chunk, brought in self._stored[actor].items():
            state[chunk] = brought
        for chunk, arrived in self._arrived[actor].items():
            arrived.append((actor, state[chunk]))
            arrived.sort(key=lambda pair: pair[0])
            total = arrived[0][1]
            half = self.dtype.itemsize == 2 and self.dtype.kind not in "iu"
            total = total.astype(np.float32) if half else total
            with np.errstate(all="ignore"):
                for _, contribution in arrived[1:]:
                    total = self._ufunc(total, contribution)
                state[chunk] = total.astype(self.dtype) if half else total
        self._stored[actor].clear()
        self._arrived[actor].clear()


def _input(schedule: Schedule, x: Array | None) -> list[Any]:
    """Return what each chunk that steps can name holds before, None for nothing."""
    kind, at_root = schedule.collective, schedule.rank == schedule.root
    state: list[Any] = [None] * schedule.slots
    holds = kind != "barrier" and (kind not in ("broadcast", "scatter") or at_root)
    if not holds:
        return state
    if x is None:
        raise ArgumentValueError(f"rank {schedule.rank} needs an input for {kind}")
    count = x.size * (schedule.size if kind in ("all_gather", "gather") else 1)
    if kind in PARTED and count % schedule.size:
        raise ArgumentValueError(f"{x.size} elements are no parts of {schedule.size} ranks")
    own = _own(schedule)
    bounds = schedule.spans(count)
    if kind in ("all_gather", "gather"):
        base = bounds[own][0][0]
        state[own] = [x[start - base : stop - base] for start, stop in bounds[own]]
    elif kind == "all_to_all":
        pieces = [x[start:stop] for start, stop in bounds]
        state[schedule.chunks :] = pieces
        state[own] = pieces[own]
    else:
        state = [x[start:stop] for start, stop in bounds]
    return state


def _output(schedule: Schedule, state: list[Any], dtype: np.dtype[Any]) -> Array:
    kind, at_root = schedule.collective, schedule.rank == schedule.root
    chunks = state[: schedule.chunks]
    if kind == "barrier" or (kind in ("gather", "reduce") and not at_root):
        chunks = []
    elif kind in ("reduce_scatter", "scatter"):
        chunks = state[_own(schedule)]
    return np.concatenate([*chunks, np.empty(0, dtype)])
