"""Schedules: counted, proved right for many ranks, and rejected when broken on purpose."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import ScheduleError
from pycomm.algorithms.recursive import recursive_doubling_all_reduce
from pycomm.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pycomm.algorithms.schedule import Recv, Round, Schedule, Send, chunk_sizes
from pycomm.algorithms.verify import verify

Build = Callable[[int, int], Schedule]

ALGORITHMS: dict[str, Build] = {
    "ring all_reduce": ring_all_reduce,
    "ring reduce_scatter": ring_reduce_scatter,
    "ring all_gather": ring_all_gather,
    "recursive doubling all_reduce": recursive_doubling_all_reduce,
}
RINGS = [name for name in ALGORITHMS if name.startswith("ring")]


def all_ranks(name: str, size: int) -> list[Schedule]:
    return [ALGORITHMS[name](rank, size) for rank in range(size)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", range(1, 34))
def test_right_for_any_number_of_ranks(name: str, size: int) -> None:
    verify(all_ranks(name, size))


@pytest.mark.parametrize("size", range(1, 34))
def test_steps_and_bytes_of_the_ring(size: int) -> None:
    """docs/algorithms.md: 2(n-1) steps, 2(n-1)/n D bytes a rank, D/n a hop; the halves half."""
    count = 12 * size
    for name in RINGS:
        halves = 2 if name == "ring all_reduce" else 1
        for schedule in all_ranks(name, size):
            assert schedule.steps == halves * (size - 1)
            assert schedule.elements_sent(count) == halves * (size - 1) * count // size
            assert schedule.largest_hop(count) == (count // size if size > 1 else 0)


@pytest.mark.parametrize("size", range(1, 34))
def test_steps_and_bytes_of_recursive_doubling(size: int) -> None:
    """docs/algorithms.md: log2(m) steps of D bytes, m the largest power of two; n > m: 2 more."""
    doublings = size.bit_length() - 1
    extra = 2 if size & (size - 1) else 0
    schedules = all_ranks("recursive doubling all_reduce", size)
    assert max(schedule.steps for schedule in schedules) == doublings + extra
    assert max(schedule.elements_sent(7) for schedule in schedules) == 7 * (
        doublings + (1 if extra else 0)
    )


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("size", [2, 3, 5, 6, 12, 24])
def test_neighbours_only_and_a_permutation_each_round(name: str, size: int) -> None:
    schedules = all_ranks(name, size)
    for number in range(schedules[0].steps):
        targets = []
        for schedule in schedules:
            (send, recv) = schedule.rounds[number]
            assert send.peer == (schedule.rank + 1) % size
            assert recv.peer == (schedule.rank - 1) % size
            targets.append(send.peer)
        assert sorted(targets) == list(range(size))


@given(st.integers(0, 2**40), st.integers(1, 99))
def test_chunks_cover_the_data(count: int, chunks: int) -> None:
    sizes = chunk_sizes(count, chunks)
    assert sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_broken_schedules_are_rejected(data: st.DataObject) -> None:
    """A step dropped, doubled, sent elsewhere, with another chunk, or stored instead of reduced."""
    name = data.draw(st.sampled_from(list(ALGORITHMS)))
    size = data.draw(st.integers(2, 9))
    schedules = all_ranks(name, size)
    rank = data.draw(st.integers(0, size - 1))
    rounds = [list(steps) for steps in schedules[rank].rounds]
    places = [(r, s) for r, steps in enumerate(rounds) for s in range(len(steps))]
    number, place = data.draw(st.sampled_from(places))
    step = rounds[number][place]
    kinds = ["drop", "peer", "reduce"] + ["chunk"] * (schedules[0].chunks > 1)
    kind = data.draw(st.sampled_from(kinds))
    if kind == "drop":
        del rounds[number][place]
    elif kind == "peer" and size > 2:
        others = [p for p in range(size) if p not in (rank, step.peer)]
        rounds[number][place] = dataclasses.replace(step, peer=data.draw(st.sampled_from(others)))
    elif kind == "chunk":
        others = [c for c in range(schedules[0].chunks) if c != step.chunk]
        rounds[number][place] = dataclasses.replace(step, chunk=data.draw(st.sampled_from(others)))
    elif isinstance(step, Recv):
        rounds[number][place] = dataclasses.replace(step, reduce=not step.reduce)
    else:
        del rounds[number][place]
    broken: tuple[Round, ...] = tuple(tuple(steps) for steps in rounds)
    with pytest.raises(ScheduleError):
        verify([
            dataclasses.replace(schedule, rounds=broken) if schedule.rank == rank else schedule
            for schedule in schedules
        ])  # fmt: skip


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 24])
def test_and_for_modulo_is_rejected(size: int) -> None:
    """``& (n - 1)`` in place of ``% n`` is right for powers of two only."""

    def wrong(rank: int) -> Schedule:
        rounds = tuple(
            (Send((rank + 1) & (size - 1), (rank - turn) % size),
             Recv((rank - 1) & (size - 1), (rank - turn - 1) % size, False))
            for turn in range(size - 1)
        )  # fmt: skip
        return Schedule("all_gather", rank, size, size, rounds)

    with pytest.raises(ScheduleError):
        verify([wrong(rank) for rank in range(size)])


def two(*rounds: tuple[Round, Round], collective: str = "all_reduce", chunks: int = 1) -> None:
    """Verify two ranks, given round by round."""
    verify(
        [
            Schedule(collective, rank, 2, chunks, tuple(pair[rank] for pair in rounds))
            for rank in range(2)
        ]
    )


def test_what_is_wrong_is_said() -> None:
    swap = ((Send(1, 0), Recv(1, 0, True)), (Send(0, 0), Recv(0, 0, True)))
    two(swap)
    for rounds, message in (
        ((swap, swap), "twice"),
        ((((Recv(1, 0, True),), (Recv(0, 0, True),)),), "deadlock: ranks \\[0, 1\\]"),
        ((((Send(1, 0),), ()),), "deadlock: ranks \\[0\\]"),
        ((((), ()),), "rank 0 ends with .*instead of"),
        ((((Send(1, 0), Recv(1, 0, False)), (Send(0, 0), Recv(0, 0, False))),), "ends with"),
    ):
        with pytest.raises(ScheduleError, match=message):
            two(*rounds)
    with pytest.raises(ScheduleError, match="sends what is not there"):
        two(((Recv(1, 0, False),), (Send(0, 0),)), collective="broadcast")
    two(((Send(1, 0),), (Recv(0, 0, False),)), collective="broadcast")
    # A message is another chunk than the one it is stored in.
    with pytest.raises(ScheduleError, match="rank 1 ends with"):
        two(
            ((Send(1, 0), Send(1, 1)), (Recv(0, 1, False), Recv(0, 0, False))),
            collective="broadcast",
            chunks=2,
        )


def test_schedules_that_do_not_belong_together() -> None:
    ring = all_ranks("ring all_reduce", 3)
    foreign = ring_all_gather(2, 3)
    for schedules in ([], ring[:2], [ring[1], ring[0], ring[2]], [*ring[:2], foreign]):
        with pytest.raises(ScheduleError):
            verify(schedules)


@pytest.mark.parametrize(
    "rounds",
    [
        ((Send(3, 0),),),
        ((Send(0, 0),),),
        ((Send(-1, 0),),),
        ((Send(1, 3),),),
        ((Recv(1, -1, True),),),
        ((Recv(1, 0, True), Recv(2, 0, True)),),
    ],
)
def test_steps_that_cannot_be(rounds: tuple[Round, ...]) -> None:
    with pytest.raises(ScheduleError, match="rank 0, round 0"):
        Schedule("all_reduce", 0, 3, 3, rounds)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_json_and_print(name: str) -> None:
    for schedule in all_ranks(name, 6):
        assert Schedule.from_json(schedule.to_json()) == schedule
    for text in ("", "{}", "[1]", schedule.to_json().replace("send", "sent")):
        with pytest.raises(ScheduleError):
            Schedule.from_json(text)


def test_a_schedule_prints_readably() -> None:
    assert str(ring_all_reduce(0, 3)).splitlines() == [
        "all_reduce, rank 0 of 3, 3 chunks",
        "  round   0: 2 -> 1, 1 += 2",
        "  round   1: 1 -> 1, 0 += 2",
        "  round   2: 0 -> 1, 2 <- 2",
        "  round   3: 2 -> 1, 1 <- 2",
    ]
