"""Moves between ranks that reach each other's memory: right, complete, and free of races."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import moved_of

from pycomm.algorithms.one_sided import OUT, X, counts, distant, moves
from pycomm.algorithms.schedule import COLLECTIVES, PARTED, ROOTED


def run(
    collective: str, size: int, root: int, count: int, *, one_step: bool, order: list[int]
) -> list[list[np.ndarray]]:
    """Return the arrays of all ranks, who have moved in the given order."""
    lengths = [counts(collective, rank, size, root, count) for rank in range(size)]
    # Every element of every input is a power of its own: sums tell what is in them.
    arrays = [
        [np.arange(lengths[rank][X]) * size + rank, np.full(lengths[rank][OUT], -1)]
        for rank in range(size)
    ]
    inputs = [one[X].copy() for one in arrays]
    for rank in order:
        for sources, targets, length in moves(
            collective, rank, size, root, count, one_step=one_step
        ):
            total = sum(inputs[p][s : s + length] for p, _, s in sources)
            for peer, side, start in targets:
                arrays[peer][side][start : start + length] = total
    return arrays


@given(data=st.data())
def test_they_do_what_the_collective_does(data: st.DataObject) -> None:
    collective = data.draw(st.sampled_from([one for one in COLLECTIVES if one != "barrier"]))
    size = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(0, 11))
    root = data.draw(st.integers(0, size - 1)) if collective in ROOTED else -1
    one_step = data.draw(st.booleans())
    order = data.draw(st.permutations(range(size)))
    arrays = run(collective, size, root, count, one_step=one_step, order=order)
    inputs = [
        np.arange(counts(collective, rank, size, root, count)[X]) * size + rank
        for rank in range(size)
    ]
    for rank in range(size):
        wanted = moved_of(collective, inputs, rank, root)
        found = arrays[rank][X if collective == "broadcast" else OUT]
        if wanted is not None:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("one_step", [False, True])
def test_no_two_ranks_touch_an_element_that_one_writes(collective: str, one_step: bool) -> None:
    for size, count in product((1, 2, 3, 4), (0, 1, 2, 7, 8)):
        root = size - 1 if collective in ROOTED else -1
        written: dict[tuple[int, int, int], int] = {}
        read: dict[tuple[int, int, int], set[int]] = {}
        for rank in range(size):
            for sources, targets, length in moves(
                collective, rank, size, root, count, one_step=one_step
            ):
                assert length > 0
                for peer, side, start in targets:
                    assert peer == rank or not one_step
                    for element in range(start, start + length):
                        assert (peer, side, element) not in written
                        written[peer, side, element] = rank
                for peer, side, start in sources:
                    for element in range(start, start + length):
                        read.setdefault((peer, side, element), set()).add(rank)
        for place, rank in written.items():
            assert read.get(place, set()) <= {rank}
            if place[1] == OUT and collective not in PARTED and not one_step:
                # In place the output is the input of that rank; in one step inputs are in slots.
                assert read.get((place[0], X, place[2]), set()) <= {rank, place[0]}


def test_work_is_shared_out_evenly() -> None:
    for rank in range(4):
        (only,) = moves("all_reduce", rank, 4, -1, 1000)
        assert only.length == 250
        assert [place.rank for place in only.sources] == [0, 1, 2, 3]  # the order of the sum
        assert only.targets[0].rank == rank
        (only,) = moves("reduce", rank, 4, 2, 1000)
        assert only.length == 250
        assert [place.rank for place in only.targets] == [2]


def test_which_arrays_others_reach() -> None:
    assert distant("all_gather", 3, -1, 5) == {(0, X), (1, X), (2, X)}
    assert distant("gather", 3, 1, 5) == {(1, OUT)}
    assert distant("gather", 3, 1, 5, one_step=True) == {(0, X), (2, X)}
    assert distant("broadcast", 3, 1, 5) == {(1, X)}
    assert distant("reduce", 2, 0, 5) == {(0, X), (1, X), (0, OUT)}
    assert not distant("barrier", 3, -1, 0)
    assert not distant("all_reduce", 1, -1, 9)
