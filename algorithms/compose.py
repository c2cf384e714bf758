"""How schedules are put together: one after the other, side by side, in a group, backwards."""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from pycomm.algorithms.schedule import Chunks, Recv, Round, Send, Step

__all__ = ["Rounds", "beside", "mirrored", "within"]

Rounds = tuple[Round, ...]


def within(rounds: Rounds, ranks: Sequence[int], chunks: Sequence[Chunks]) -> Rounds:
    """Return rounds of a group as rounds of all ranks.

    Parameters
    ----------
    rounds : tuple of Round
        The rounds of one member, with peers numbered in the group and chunks in its data.
    ranks : sequence of int
        The members of the group, as ranks among all.
    chunks : sequence of Chunks
        For each chunk of the group's data the chunks of the whole that it stands for, maybe none.
    """

    def renamed(step: Step) -> Step | None:
        mapped = tuple(chain.from_iterable(chunks[chunk] for chunk in step.chunks))
        if step.chunks and not mapped:
            return None  # nothing to carry
        if isinstance(step, Send):
            return Send(ranks[step.peer], mapped)
        return Recv(ranks[step.peer], mapped, step.reduce)

    return tuple(
        tuple(named for step in steps if (named := renamed(step)) is not None) for steps in rounds
    )


def beside(parts: Iterable[Rounds]) -> Rounds:
    """Return rounds that do what all `parts` do at the same time, round by round."""
    return tuple(tuple(chain.from_iterable(steps)) for steps in zip_longest(*parts, fillvalue=()))


def mirrored(rounds: Rounds, *, reduce: bool = False) -> Rounds:
    """Return the rounds backwards in time, with data flowing the other way.

    A reduction to one place becomes the distribution from there: reduce becomes broadcast,
    reduce_scatter all_gather, and the other way round with `reduce`, which makes receives reduce.
    """
    return tuple(
        tuple(
            Recv(step.peer, step.chunks, reduce)
            if isinstance(step, Send)
            else Send(step.peer, step.chunks)
            for step in reversed(steps)  # messages between two ranks keep their order
        )
        for steps in reversed(rounds)
    )
