"""Schedules: proved right for many ranks and layouts, and rejected when broken on purpose."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import ArgumentTypeError, ArgumentValueError, ScheduleError
from pycomm.algorithms import (
    COLLECTIVES,
    Algorithm,
    Link,
    Model,
    Recv,
    Schedule,
    Send,
    algorithm_of,
    names,
    predict,
    register,
    simulate,
    unregister,
    verify,
)
from pycomm.algorithms.hierarchical import (
    Groups,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_broadcast,
    hierarchical_reduce_scatter,
    hosts_of,
)
from pycomm.algorithms.ring import ring_all_gather, ring_all_reduce
from pycomm.algorithms.schedule import REDUCING, ROOTED, Round, chunk_sizes, spans

ALGORITHMS = [
    algorithm_of(collective, name) for collective in COLLECTIVES for name in names(collective)
]
LAYOUTS: list[Groups] = [
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),  # round robin
    ((3, 1), (2, 0)),
    ((0,), (1,), (2,)),  # one rank a host
    ((2, 0, 1),),  # one host
    ((0, 1, 2), (3,)),  # uneven
    ((3, 1, 2), (0, 4)),
    ((0, 1, 2), (3, 4), (5,)),
    ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)),
    tuple(tuple(range(7 * host, 7 * host + 7)) for host in range(3)),
    ((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11)),
    (((0, 1), (2, 3)), ((4, 5), (6, 7))),  # three levels
    (((0, 7), (2, 5)), ((4, 1), (6, 3))),
    (((0, 1, 2), (3,)), ((4,), (5,), (6, 7))),
    (((0,), (1,)), ((2,), (3,)), ((4,), (5,))),
]


def named(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


def roots(algorithm: Algorithm, size: int) -> list[int]:
    return sorted({0, size // 2, size - 1}) if algorithm.collective in ROOTED else [-1]


def count_of(layout: Groups) -> int:
    return sum(map(len, hosts_of(layout)))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_right_for_any_number_of_ranks(algorithm: Algorithm) -> None:
    for size in range(1, 34):
        for root in roots(algorithm, size):
            verify(algorithm.schedules(size, root))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("inside", ["direct", "ring"])
def test_hierarchies_are_right(layout: Groups, inside: str) -> None:
    size = count_of(layout)
    ranks = range(size)
    speeds = [1.0 + rank % 3 for rank in ranks]
    for across in (
        "binomial",
        "direct",
        "double_tree",
        "halving_doubling",
        "recursive_doubling",
        "ring",
    ):
        for bandwidths in (None, speeds):
            verify([
                hierarchical_all_reduce(
                    r, size, layout, inside=inside, across=across, bandwidths=bandwidths
                )
                for r in ranks
            ])  # fmt: skip
    for across, build in itertools.product(
        ("direct", "ring"), (hierarchical_reduce_scatter, hierarchical_all_gather)
    ):
        verify([build(r, size, layout, inside=inside, across=across) for r in ranks])
    for across, root in itertools.product(("binomial", "double_tree", "ring"), ranks):
        verify([hierarchical_broadcast(r, size, root, layout, across=across) for r in ranks])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_hosts_in_any_order(data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(data.draw(st.integers(1, 12)))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {len(ranks)})
    layout = tuple(tuple(ranks[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False))
    for algorithm in ALGORITHMS:
        if algorithm.grouped:
            root = data.draw(st.sampled_from(ranks)) if algorithm.collective in ROOTED else -1
            verify(algorithm.schedules(len(ranks), root, layout))


def test_bytes_across_hosts_are_few_and_fall_on_all_ranks() -> None:
    """2(h-1)/h D leave a host of any size, equally from each of its ranks; flat rings double it."""
    for hosts, each in ((2, 2), (2, 4), (3, 2), (4, 3)):
        size, count = hosts * each, 5040
        layout = tuple(tuple(range(h, size, hosts)) for h in range(hosts))  # round robin
        host = {rank: number for number, ranks in enumerate(layout) for rank in ranks}
        for rank in range(size):
            schedule = hierarchical_all_reduce(rank, size, layout)
            sizes = schedule.sizes(count)
            across = sum(
                sizes[chunk]
                for step in schedule.sends()
                if host[step.peer] != host[rank]
                for chunk in step.chunks
            )
            assert across * hosts * each == 2 * (hosts - 1) * count


def test_slices_follow_the_bandwidth_of_the_slowest_carrier() -> None:
    layout = ((0, 1), (2, 3))
    schedule = hierarchical_all_reduce(0, 4, layout, bandwidths=[30, 10, 40, 10])
    sizes = schedule.sizes(4000)  # slices of two chunks: ranks 0 and 2 carry the first
    assert [sum(sizes[:2]), sum(sizes[2:])] == [3000, 1000]
    assert hierarchical_all_reduce(0, 4, layout, bandwidths=[5, 5, 5, 5]).weights is None
    broadcast = hierarchical_broadcast(0, 4, 1, layout, bandwidths=[30, 10, 40, 10])
    assert broadcast.sizes(4000) == [3000, 1000]
    for extreme in ([1e-300, 1, 1e300, 1], [5e-324] * 4, [1e308, 1, 1, 1]):
        verify([hierarchical_all_reduce(r, 4, layout, bandwidths=extreme) for r in range(4)])
    nan, inf = float("nan"), float("inf")
    for wrong in ([1, 2, 3], [1, 2, 3, 0], [nan, 1, 2, 3], [1, nan, 1, 1], [1, 2, 3, inf], 5,
                  [10**400, 1, 1, 1], ["a", 1, 1, 1]):  # fmt: skip
        with pytest.raises(ScheduleError, match="bandwidths"):
            hierarchical_all_reduce(0, 4, layout, bandwidths=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "groups",
    [
        (), ((),), ((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1), 2, 3), (((0, 1),), (2, 3)),
        ((0, 1), (2, 4)), [[0, 1], [2, 3]],
    ],
)  # fmt: skip
def test_groups_that_are_none(groups: Groups) -> None:
    with pytest.raises(ScheduleError, match=r"group|ranks once"):
        hierarchical_all_reduce(0, 4, groups)


def test_seats_that_there_are_not() -> None:
    with pytest.raises(ScheduleError, match="no seat for 'magic'; known: direct, ring"):
        hierarchical_all_reduce(0, 4, ((0, 1), (2, 3)), inside="magic")
    with pytest.raises(ScheduleError, match="no seat for 'ring2'"):
        hierarchical_all_reduce(0, 4, ((0, 1), (2, 3)), across="ring2")


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
@pytest.mark.parametrize("op", ["sum", "min"])
def test_numbers(algorithm: Algorithm, op: str) -> None:
    """The simulator, with real numbers, against NumPy."""
    generator = random.Random(named(algorithm))
    kind = algorithm.collective
    for size in (1, 2, 3, 5, 8, 11):
        root = generator.choice(roots(algorithm, size))
        part = generator.choice([0, 1, 3, 17])
        many = size if kind in ("all_to_all", "reduce_scatter", "scatter") else 1
        inputs = [np.arange(part * many) * (rank + 1) for rank in range(size)]
        groups = tuple(range(size)) if size < 4 else (tuple(range(2)), tuple(range(2, size)))
        given_ = [None] * size if kind == "barrier" else inputs
        found = simulate(algorithm.schedules(size, root, groups), given_, op)
        for rank in range(size):
            expected = expected_result(kind, inputs, op, rank, root)
            np.testing.assert_array_equal(found[rank], expected)


def expected_result(
    kind: str, inputs: list[np.ndarray[Any, Any]], op: str, rank: int, root: int
) -> np.ndarray[Any, Any]:
    mine = slice(*spans(inputs[0].size, len(inputs))[rank])
    total = sum(inputs) if op == "sum" else np.min(inputs, axis=0)
    everything = np.concatenate(inputs)
    nothing = everything[:0]
    results = {
        "all_gather": everything,
        "all_reduce": total,
        "all_to_all": np.concatenate([x[mine] for x in inputs]),
        "barrier": nothing,
        "broadcast": inputs[root],
        "gather": everything if rank == root else nothing,
        "reduce": total if rank == root else nothing,
        "reduce_scatter": total[mine],
        "scatter": inputs[root][mine],
    }
    return np.asarray(results[kind])


def test_halves_accumulate_in_float32() -> None:
    inputs = [np.array([x], np.float16) for x in (2048, 1, 1, 1)]
    one_shot = algorithm_of("all_reduce", "one_shot").schedules(4)
    assert [float(out[0]) for out in simulate(one_shot, inputs)] == [2052] * 4  # 2051, to even


def test_what_the_simulator_refuses() -> None:
    ring = algorithm_of("all_reduce", "ring").schedules(2)
    for inputs, op in (
        ([[1]], "sum"), ([[1], None], "sum"), ([[[1]], [[2]]], "sum"), ([[1], [2]], "mean"),
    ):  # fmt: skip
        with pytest.raises(ArgumentValueError):
            simulate(ring, inputs, op)
    scatter = algorithm_of("reduce_scatter", "ring").schedules(2)
    with pytest.raises(ArgumentValueError, match="no parts"):
        simulate(scatter, [[1, 2, 3]] * 2)


# ------------------------------------------------------------------------------- broken on purpose


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_broken_schedules_are_rejected(data: st.DataObject) -> None:
    """A step dropped, sent elsewhere, with another chunk, or stored instead of reduced."""
    algorithm = data.draw(st.sampled_from(ALGORITHMS), label="algorithm")
    size = data.draw(st.integers(2, 9), label="size")
    root = data.draw(st.sampled_from(roots(algorithm, size)), label="root")
    layout = (tuple(range(size // 2)), tuple(range(size // 2, size)))
    schedules = algorithm.schedules(size, root, layout)
    busy = [rank for rank in range(size) if schedules[rank].steps]
    rank = data.draw(st.sampled_from(busy), label="rank")
    rounds = [list(steps) for steps in schedules[rank].rounds]
    places = [(r, s) for r, steps in enumerate(rounds) for s in range(len(steps))]
    number, place = data.draw(st.sampled_from(places), label="place")
    step = rounds[number][place]
    kinds = ["drop"]
    others = [peer for peer in range(size) if peer not in (rank, step.peer)]
    chunks = [c for c in range(schedules[0].slots) if c not in step.chunks]
    if others:
        kinds.append("peer")
    if step.chunks and chunks:
        kinds.append("chunk")
    if isinstance(step, Recv) and step.chunks and algorithm.collective in REDUCING:
        kinds.append("reduce")
    kind = data.draw(st.sampled_from(kinds), label="kind")
    if kind == "drop":
        del rounds[number][place]
    elif kind == "peer":
        rounds[number][place] = step._replace(peer=data.draw(st.sampled_from(others)))
    elif kind == "chunk":
        swapped = (data.draw(st.sampled_from(chunks)), *step.chunks[1:])
        rounds[number][place] = step._replace(chunks=swapped)
    else:
        assert isinstance(step, Recv)
        rounds[number][place] = step._replace(reduce=not step.reduce)
    broken = tuple(map(tuple, rounds))
    with pytest.raises(ScheduleError):
        verify([*schedules[:rank], replace(schedules[rank], rounds=broken), *schedules[rank + 1 :]])


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 24])
def test_and_for_modulo_is_rejected(size: int) -> None:
    """``& (n - 1)`` in place of ``% n`` is right for powers of two only."""

    def wrong(rank: int) -> Schedule:
        rounds = tuple(
            (Send((rank + 1) & (size - 1), ((rank - turn) % size,)),
             Recv((rank - 1) & (size - 1), ((rank - turn - 1) % size,), False))
            for turn in range(size - 1)
        )  # fmt: skip
        return Schedule("all_gather", rank, size, size, rounds)

    with pytest.raises(ScheduleError):
        verify([wrong(rank) for rank in range(size)])


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 12, 24])
def test_rings_talk_to_neighbours_in_permutations(name: str, size: int) -> None:
    schedules = algorithm_of(name, "ring").schedules(size)
    for number in range(schedules[0].steps):
        targets = []
        for schedule in schedules:
            (send, recv) = schedule.rounds[number]
            assert send.peer == (schedule.rank + 1) % size
            assert recv.peer == (schedule.rank - 1) % size
            targets.append(send.peer)
        assert sorted(targets) == list(range(size))


def test_a_rank_hands_on_in_one_of_the_two_trees() -> None:
    for size in range(2, 70):
        for schedule in algorithm_of("broadcast", "double_tree").schedules(size, 0)[1:]:
            sent = {chunk for step in schedule.sends() for chunk in step.chunks}
            assert len(sent) <= 1


def two(*rounds: tuple[Round, Round], collective: str = "all_reduce", chunks: int = 1) -> None:
    """Verify two ranks, given round by round."""
    root = 0 if collective in ROOTED else -1
    verify(
        [
            Schedule(collective, rank, 2, chunks, tuple(pair[rank] for pair in rounds), root)
            for rank in range(2)
        ]
    )


def test_what_is_wrong_is_said() -> None:
    swap = ((Send(1, (0,)), Recv(1, (0,), True)), (Send(0, (0,)), Recv(0, (0,), True)))
    two(swap)
    store = ((Send(1, (0,)), Recv(1, (0,), False)), (Send(0, (0,)), Recv(0, (0,), False)))
    for rounds, message in (
        ((swap, swap), "twice"),
        ((((Recv(1, (0,), True),), (Recv(0, (0,), True),)),), "deadlock: ranks \\[0, 1\\]"),
        ((((Send(1, (0,)),), ()),), "deadlock: ranks \\[0\\]"),
        ((((), ()),), "rank 0 ends with .*instead of"),
        ((store,), "ends with"),
        ((((Send(1, (0,)),), (Recv(0, (), False),)),), "chunks"),
    ):
        with pytest.raises(ScheduleError, match=message):
            two(*rounds)
    with pytest.raises(ScheduleError, match="sends what is not there"):
        two(((Recv(1, (1,), False),), (Send(0, (0,)),)), collective="all_gather", chunks=2)
    two(((Send(1, (0,)),), (Recv(0, (0,), False),)), collective="broadcast")
    # A message is another chunk than the one it is stored in, which may have another size.
    with pytest.raises(ScheduleError, match="chunks have different sizes"):
        two(
            ((Send(1, (0, 1)),), (Recv(0, (1, 0), False),)),
            collective="broadcast",
            chunks=2,
        )
    with pytest.raises(ScheduleError, match=r"barrier without a word from \[1\]"):
        two(((Send(1, ()),), (Recv(0, (), False),)), collective="barrier")


def test_schedules_that_do_not_belong_together() -> None:
    ring = algorithm_of("all_reduce", "ring").schedules(3)
    foreign = ring_all_gather(2, 3)
    other_root = [algorithm_of("broadcast", "ring").schedule(r, 2, r) for r in range(2)]
    for schedules in ([], ring[:2], [ring[1], ring[0], ring[2]], [*ring[:2], foreign], other_root):
        with pytest.raises(ScheduleError):
            verify(schedules)


@pytest.mark.parametrize(
    "rounds",
    [
        ((Send(3, (0,)),),),
        ((Send(0, (0,)),),),
        ((Send(-1, (0,)),),),
        ((Send(1, (3,)),),),
        ((Send(1, (1, 1)),),),
        ((Recv(1, (-1,), True),),),
        ((Recv(1, (0,), True), Recv(2, (0,), False)),),
        ((Recv(1, (0,), False), Recv(2, (0, 1), False)),),
    ],
)
def test_steps_that_cannot_be(rounds: tuple[Round, ...]) -> None:
    with pytest.raises(ScheduleError, match="rank 0, round 0"):
        Schedule("all_reduce", 0, 3, 3, rounds)


@pytest.mark.parametrize(
    "facts",
    [
        ("all_reduced", 0, 3, 3, ()),
        ("all_reduce", 3, 3, 3, ()),
        ("all_reduce", 0, 3, 0, ()),
        ("all_reduce", 0, 3, 10**9, ()),
        ("broadcast", 0, 3, 1, ((Recv(1, (0,), False),),), 0),  # the root's input
        ("all_to_all", 0, 3, 3, ((Recv(1, (4,), False),),)),
        ("all_reduce", 0, 3, 3, (), 0),
        ("broadcast", 0, 3, 3, ()),
        ("all_gather", 0, 3, 4, ()),
        ("all_gather", 0, 3, 3, (), -1, (1, 1, 1)),
        ("all_reduce", 0, 3, 3, (), -1, (1, 1)),
        ("all_reduce", 0, 3, 3, (), -1, (1, 0, 1)),
    ],
)
def test_schedules_that_cannot_be(facts: tuple[object, ...]) -> None:
    with pytest.raises(ScheduleError):
        Schedule(*facts)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- the records


@given(st.integers(0, 2**40), st.integers(1, 99))
def test_chunks_cover_the_data(count: int, chunks: int) -> None:
    sizes = chunk_sizes(count, chunks)
    assert sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 2**40), st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_weighted_chunks_cover_the_data(count: int, weights: list[int]) -> None:
    cut = spans(count, len(weights), weights)
    assert cut[0][0] == 0
    assert cut[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    for (start, stop), weight in zip(cut, weights, strict=True):
        assert abs((stop - start) - count * weight / sum(weights)) <= 1 + count * 1e-12


def test_parts_are_cut_one_by_one() -> None:
    schedule = Schedule("all_gather", 0, 2, 4, ())
    assert schedule.spans(10) == [(0, 3), (3, 5), (5, 8), (8, 10)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_json_and_print(algorithm: Algorithm) -> None:
    for schedule in algorithm.schedules(6, roots(algorithm, 6)[-1], ((0, 1, 2), (3, 4, 5))):
        assert Schedule.from_json(schedule.to_json()) == schedule
    weighted = hierarchical_all_reduce(0, 4, ((0, 1), (2, 3)), bandwidths=[2, 1, 2, 1])
    assert Schedule.from_json(weighted.to_json()) == weighted


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "3", ring_all_reduce(0, 3).to_json().replace("send", "sent")]
)
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(ScheduleError, match="not a schedule"):
        Schedule.from_json(text)


def test_a_schedule_prints_readably() -> None:
    assert str(ring_all_reduce(0, 3)).splitlines() == [
        "all_reduce, rank 0 of 3, 3 chunks",
        "  round   0: 2 -> 1, 1 += 2",
        "  round   1: 1 -> 1, 0 += 2",
        "  round   2: 0 -> 1, 2 <- 2",
        "  round   3: 2 -> 1, 1 <- 2",
    ]


# ------------------------------------------------------------------------------------------- cost


def plain(latency: float, bandwidth: float, reduce_bandwidth: float = 1e30, nics: int = 0) -> Model:
    link = Link(latency, bandwidth)
    return Model(link, link, reduce_bandwidth, nics)


def test_the_model_agrees_with_the_formulas() -> None:
    for size in (2, 3, 4, 7, 8):
        nbytes = 840 * size
        ring = algorithm_of("all_reduce", "ring").schedules(size)
        steps = 2 * (size - 1)
        hop = nbytes / size
        expected = steps * (1e-6 + hop / 1e9) + (size - 1) * hop / 1e8
        assert predict(ring, nbytes, plain(1e-6, 1e9, 1e8)) == pytest.approx(expected)
    doubling = algorithm_of("all_reduce", "recursive_doubling").schedules(8)
    assert predict(doubling, 1000, plain(1e-6, 1e9)) == pytest.approx(3 * (1e-6 + 1e-6))
    one = algorithm_of("all_reduce", "ring").schedules(1)
    assert predict(one, 1000, plain(1e-6, 1e9)) == 0.0


@pytest.mark.parametrize("size", [3, 4, 8, 32])
def test_a_direct_exchange_fills_the_ways_as_a_ring_does(size: int) -> None:
    nbytes = 840 * size
    optimum = 2 * (size - 1) / size * nbytes / 1e9
    for name in ("direct", "ring"):
        schedules = algorithm_of("all_reduce", name).schedules(size)
        assert predict(schedules, nbytes, plain(0.0, 1e9)) == pytest.approx(optimum)


def test_ranks_of_a_host_share_its_nic() -> None:
    layout = ((0, 1), (2, 3))
    schedules = algorithm_of("all_reduce", "hierarchical").schedules(4, -1, layout)
    free = Link(0.0, 1e30)
    nbytes = 1 << 20
    for nics, factor in ((0, 1), (2, 1), (1, 2)):
        model = Model(free, Link(0.0, 1e9), 1e30, nics)
        expected = factor * 2 * (nbytes / 2 / 2) / 1e9  # twice half of a slice
        assert predict(schedules, nbytes, model, layout) == pytest.approx(expected)


def test_segments_make_a_chain_a_pipeline() -> None:
    size, nbytes = 8, 1 << 20
    chain = algorithm_of("broadcast", "ring").schedules(size, 0)
    alone = predict(chain, nbytes, plain(0.0, 1e9))
    assert alone == pytest.approx((size - 1) * nbytes / 1e9)
    for segments in (8, 64):
        expected = (segments + size - 2) * nbytes / segments / 1e9
        found = predict(chain, nbytes, plain(0.0, 1e9), segments=segments)
        assert found == pytest.approx(expected)


def test_predictions_that_make_no_sense() -> None:
    ring = algorithm_of("all_reduce", "ring").schedules(3)
    for options in ({"segments": 0}, {"window": 0}):
        with pytest.raises(ScheduleError):
            predict(ring, 100, plain(0.0, 1e9), **options)


def test_models_go_to_json_and_back() -> None:
    model = Model(Link(1e-6, 1e9, 1e-7), Link(2e-6, 1e8), 1e10, 2)
    assert Model.from_dict(model.to_dict()) == model
    for change in ({"nics": -1}, {"reduce_bandwidth": 0}, {"inside": [1, 0]}, {"across": "fast"},
                   {"inside": [-1, 1, 0]}, {"across": [float("nan"), 1, 0]}):  # fmt: skip
        with pytest.raises((ValueError, KeyError, TypeError)):
            Model.from_dict({**model.to_dict(), **change})


# --------------------------------------------------------------------------------------- registry


def build_wrong(rank: int, size: int) -> Schedule:
    rounds = ring_all_reduce(rank, size).rounds
    return Schedule("all_reduce", rank, size, size, rounds[:-1])


def test_a_wrong_algorithm_is_found_before_it_runs() -> None:
    for build, message in (
        (build_wrong, "'mine' is wrong on 3 ranks"),
        (ring_all_gather, "schedule of all_gather"),
        (lambda rank, size: ring_all_reduce(0, size), "asked for rank 1 of 3"),
        (lambda rank, size: None, "returns NoneType"),
    ):
        mine = register("all_reduce", "mine", build)
        try:
            with pytest.raises(ScheduleError, match=message):
                mine.schedule(0, 3)
        finally:
            unregister("all_reduce", "mine")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("all_reduce", "ring", ring_all_reduce), ArgumentValueError),
        (("all_reduce", "auto", ring_all_reduce), ArgumentValueError),
        (("all_reduce", "my ring", ring_all_reduce), ArgumentValueError),
        (("all_reduce", "class", ring_all_reduce), ArgumentValueError),
        (([], "mine", ring_all_reduce), ArgumentTypeError),
        (("all_reduced", "mine", ring_all_reduce), ArgumentValueError),
        (("all_reduce", "mine", None), ArgumentTypeError),
        (("all_reduce", 3, ring_all_reduce), ArgumentTypeError),
    ],
)
def test_what_cannot_be_registered(
    arguments: tuple[str, str, Callable[..., Schedule]], error: type[Exception]
) -> None:
    with pytest.raises(error):
        register(*arguments)
    with pytest.raises(ArgumentValueError):
        unregister("all_reduce", "ring")
    with pytest.raises(ArgumentValueError, match="unknown collective"):
        names("all_reduced")
    with pytest.raises(ArgumentValueError, match="unknown algorithm 'mine'"):
        unregister("all_reduce", "mine")
