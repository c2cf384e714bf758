"""How long a call takes: blocks of iterations, taken in turn by everything that is compared.

A shared machine is slow for a while and fast for a while. Everything in one row of the table is
therefore measured in turn, A B C A B C ..., a block of iterations each, and the median of the
blocks is reported: a slow spell hits all of them alike, or is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCKS",
    "Clock",
    "Contender",
    "IterationStats",
    "combine",
    "iteration_stats",
    "measure",
    "median_of_blocks",
    "split_iterations",
    "stepper",
]

Clock = Callable[[], float]
Call = Callable[..., Any]

BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed: one step of it, and how many calls each block makes.

    Attributes
    ----------
    step : callable
        One iteration.
    blocks : tuple of int
        Iterations of each block.
    settle : callable or None
        Run after each iteration, outside the time taken.
    """

    step: Call
    blocks: tuple[int, ...]
    settle: Call | None = None


def split_iterations(iterations: int, blocks: int = BLOCKS) -> tuple[int, ...]:
    """Divide `iterations` into at most `blocks` blocks that differ by one at most."""
    number = min(blocks, iterations)
    return tuple(iterations // number + (index < iterations % number) for index in range(number))


def stepper(
    call: Call, *, aggregate: int = 1, barrier: Call | None = None, wait_each: bool = False
) -> Call:
    """Return one iteration as a function: `aggregate` calls, and what is to follow them.

    Parameters
    ----------
    call : callable
        The collective; it takes ``async_op=True`` if `aggregate` is more than one.
    aggregate : int
        Calls of an iteration. More than one are all issued, then waited for.
    barrier : callable, optional
        Run at the end of the iteration, inside the time taken.
    wait_each : bool
        Wait for each aggregated call before the next is issued.
    """
    if aggregate == 1 and barrier is None:
        return call

    def step() -> None:
        if aggregate == 1:
            call()
        elif wait_each:
            for _ in range(aggregate):
                call(async_op=True).wait()
        else:
            for work in [call(async_op=True) for _ in range(aggregate)]:
                work.wait()
        if barrier is not None:
            barrier()

    return step


def measure(
    contenders: Sequence[Contender], *, barrier: Call, clock: Clock, each: bool = False
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Time all contenders on this rank, one block of each in turn.

    Parameters
    ----------
    contenders : sequence of Contender
        All with the same number of blocks.
    barrier : callable
        Run before each block.
    clock : callable
        Returns seconds.
    each : bool
        Read the clock around every iteration instead of around every block.

    Returns
    -------
    blocks : numpy.ndarray
        Seconds an iteration, of shape (contenders, blocks).
    iterations : list of numpy.ndarray
        For each contender the seconds of its iterations; empty unless `each`.
    """
    rounds = len(contenders[0].blocks)
    blocks = np.zeros((len(contenders), rounds))
    iterations: list[list[float]] = [[] for _ in contenders]
    for index in range(rounds):
        for which, contender in enumerate(contenders):
            count = contender.blocks[index]
            barrier()
            if each or contender.settle is not None:
                seconds = _each(contender, count, clock)
                blocks[which, index] = sum(seconds) / count
                if each:
                    iterations[which] += seconds
            else:
                blocks[which, index] = _together(contender.step, count, clock) / count
    return blocks, [np.array(seconds) for seconds in iterations]


def _together(step: Call, count: int, clock: Clock) -> float:
    start = clock()
    for _ in range(count):
        step()
    return clock() - start


def _each(contender: Contender, count: int, clock: Clock) -> list[float]:
    seconds = []
    for _ in range(count):
        start = clock()
        contender.step()
        seconds.append(clock() - start)
        if contender.settle is not None:
            contender.settle()
    return seconds


def combine(per_rank: NDArray[np.float64], average: int) -> NDArray[np.float64]:
    """Combine times over ranks (axis 0) as ``-a`` says: 0 rank 0, 1 average, 2 min, 3 max."""
    combined: NDArray[np.float64]
    if average == 0:
        combined = per_rank[0]
    elif average == 1:
        combined = per_rank.mean(axis=0)
    else:
        combined = per_rank.min(axis=0) if average == 2 else per_rank.max(axis=0)
    return combined


def median_of_blocks(blocks: NDArray[np.float64]) -> float:
    """Return the median of the times of the blocks."""
    return float(np.median(blocks))


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Statistics over the iterations of one row, in seconds, each taken from its slowest rank."""

    times: tuple[float, ...]
    minimum: float
    maximum: float
    mean: float
    p50: float
    p95: float
    p99: float
    stdev: float
    per_rank: tuple[tuple[float, ...], ...]

    @property
    def cv_percent(self) -> float:
        """Standard deviation in percent of the mean, 0 where the mean is 0."""
        return self.stdev / self.mean * 100 if self.mean > 0 else 0.0


def iteration_stats(per_rank: NDArray[np.float64]) -> IterationStats:
    """Return the statistics of iteration times of shape (ranks, iterations)."""
    times = per_rank.max(axis=0).tolist()
    ordered = sorted(times)

    def percentile(percent: int) -> float:
        return float(ordered[max(0, -(-len(ordered) * percent // 100) - 1)])

    return IterationStats(
        times=tuple(times),
        minimum=ordered[0],
        maximum=ordered[-1],
        mean=float(np.mean(ordered)),
        p50=float(ordered[len(ordered) // 2]),
        p95=percentile(95),
        p99=percentile(99),
        stdev=float(np.std(ordered)),
        per_rank=tuple(tuple(row) for row in per_rank.tolist()),
    )
