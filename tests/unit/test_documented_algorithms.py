"""docs/algorithms.md: its numbers, pictures and code are true, and its example is right."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.examples import EXAMPLES

import pycomm
from pycomm import ScheduleError
from pycomm.algorithms import (
    COLLECTIVES,
    Algorithm,
    Recv,
    Schedule,
    Send,
    algorithm_of,
    names,
    simulate,
    unregister,
    verify,
)
from pycomm.algorithms.compose import mirrored
from pycomm.algorithms.hierarchical import Groups, hierarchical_all_reduce
from pycomm.algorithms.matching import Matcher
from pycomm.algorithms.schedule import ROOTED, Chunks, Round, Step

PAGE = (EXAMPLES.parent / "algorithms.md").read_text()
#: The fenced blocks, as (language, text).
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = {collective: names(collective) for collective in COLLECTIVES}
    yield
    for collective, known in before.items():
        for name in set(names(collective)).difference(known):
            unregister(collective, name)


# --------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Ranks:
    """`n` ranks on `h` hosts of `p`."""

    h: int
    p: int

    @property
    def n(self) -> int:
        return self.h * self.p

    @property
    def m(self) -> int:
        return 1 << self.n.bit_length() - 1

    @property
    def extra(self) -> bool:
        """Whether n > m."""
        return self.n > self.m

    @property
    def b(self) -> int:
        return sum(number.bit_count() for number in range(self.n))


def log2_up(number: int) -> int:
    return (number - 1).bit_length()


def log2(power: int) -> int:
    return power.bit_length() - 1


class Formula(NamedTuple):
    text: str
    value: Callable[[Ranks], int | Fraction]


F, Frac = Formula, Fraction

STEPS = {
    "1": F("1", lambda _: 1),
    "2": F("2", lambda _: 2),
    "n-1": F("n-1", lambda r: r.n - 1),
    "2n-2": F("2(n-1)", lambda r: 2 * (r.n - 1)),
    "log": F("⌈log2 n⌉", lambda r: log2_up(r.n)),
    "2log": F("2⌈log2 n⌉", lambda r: 2 * log2_up(r.n)),
    "tree": F("log2(m) + 1", lambda r: log2(r.m) + 1),
    "2tree": F("2 log2(m) + 2", lambda r: 2 * log2(r.m) + 2),
    "folded": F("log2(m); 2 more if n > m", lambda r: log2(r.m) + 2 * r.extra),
    "2folded": F("2 log2(m); 2 more if n > m", lambda r: 2 * log2(r.m) + 2 * r.extra),
    "hosts": F("h; h-1 if p = 1", lambda r: r.h - (r.p == 1)),
    "2hosts": F("2h; 2(h-1) if p = 1", lambda r: 2 * (r.h - (r.p == 1))),
    "hosts log": F("⌈log2 h⌉; 2 more if p > 1", lambda r: log2_up(r.h) + 2 * (r.p > 1)),
}
BYTES = {
    "0": F("0", lambda _: 0),
    "D": F("D", lambda _: 1),
    "D/n": F("D/n", lambda r: Frac(1, r.n)),
    "part": F("(n-1)/n D", lambda r: Frac(r.n - 1, r.n)),
    "2part": F("2(n-1)/n D", lambda r: Frac(2 * (r.n - 1), r.n)),
    "all": F("(n-1) D", lambda r: r.n - 1),
    "log": F("⌈log2 n⌉ D", lambda r: log2_up(r.n)),
    "bits": F("b/n D", lambda r: Frac(r.b, r.n)),
    "tree": F("min(n, 4)/2 D", lambda r: Frac(min(r.n, 4), 2)),
    "folded": F("log2(m) D; D more if n > m", lambda r: log2(r.m) + r.extra),
    "2folded": F("2(m-1)/m D; D more if n > m", lambda r: Frac(2 * (r.m - 1), r.m) + r.extra),
    "hosts": F(
        "(2(p-1) + ⌈log2 h⌉)/p D, ⌈log2 h⌉/p D of it across",
        lambda r: Frac(2 * (r.p - 1) + log2_up(r.h), r.p),
    ),
    "part hosts": F("(n-1)/n D, (h-1)/n D of it across", lambda r: Frac(r.n - 1, r.n)),
    "2part hosts": F("2(n-1)/n D, 2(h-1)/n D of it across", lambda r: Frac(2 * (r.n - 1), r.n)),
}
HOPS = {
    "0": BYTES["0"],
    "D": BYTES["D"],
    "D/n": BYTES["D/n"],
    "half": F("D/2", lambda _: Frac(1, 2)),
    "half or D": F("D/2; D if n > m", lambda r: 1 if r.extra else Frac(1, 2)),
    "bruck": F("max(m/2, n-m)/n D", lambda r: max(Frac(r.m, 2), Frac(r.n - r.m)) / r.n),
    "floor": F("⌊n/2⌋/n D", lambda r: Frac(r.n // 2, r.n)),
    "D/p": F("D/p", lambda r: Frac(1, r.p)),
    "D/p or D/n": F("D/p; D/n if p = 1", lambda r: Frac(1, r.p if r.p > 1 else r.n)),
}
#: For each algorithm its steps, bytes and hop.
TABLE = {
    ("all_reduce", "one_shot"): ("1", "all", "D"),
    ("all_reduce", "direct"): ("2", "2part", "D/n"),
    ("all_reduce", "ring"): ("2n-2", "2part", "D/n"),
    ("all_reduce", "recursive_doubling"): ("folded", "folded", "D"),
    ("all_reduce", "halving_doubling"): ("2folded", "2folded", "half or D"),
    ("all_reduce", "binomial"): ("2log", "log", "D"),
    ("all_reduce", "double_tree"): ("2tree", "tree", "half"),
    ("all_reduce", "hierarchical"): ("2hosts", "2part hosts", "D/p or D/n"),
    ("reduce_scatter", "direct"): ("1", "part", "D/n"),
    ("reduce_scatter", "ring"): ("n-1", "part", "D/n"),
    ("reduce_scatter", "hierarchical"): ("hosts", "part hosts", "D/p or D/n"),
    ("all_gather", "direct"): ("1", "part", "D/n"),
    ("all_gather", "ring"): ("n-1", "part", "D/n"),
    ("all_gather", "bruck"): ("log", "part", "bruck"),
    ("all_gather", "hierarchical"): ("hosts", "part hosts", "D/p or D/n"),
    ("broadcast", "binomial"): ("log", "log", "D"),
    ("broadcast", "double_tree"): ("tree", "D", "half"),
    ("broadcast", "ring"): ("n-1", "D", "D"),
    ("broadcast", "hierarchical"): ("hosts log", "hosts", "D/p"),
    ("reduce", "direct"): ("2", "D", "D/n"),
    ("reduce", "binomial"): ("log", "D", "D"),
    ("reduce", "double_tree"): ("tree", "D", "half"),
    ("all_to_all", "direct"): ("1", "part", "D/n"),
    ("all_to_all", "bruck"): ("log", "bits", "floor"),
    ("gather", "direct"): ("1", "D/n", "D/n"),
    ("scatter", "direct"): ("1", "part", "D/n"),
    ("barrier", "dissemination"): ("log", "0", "0"),
}
ACROSS: dict[str, Callable[[Ranks], Fraction]] = {
    "all_reduce": lambda r: Frac(2 * (r.h - 1), r.n),
    "reduce_scatter": lambda r: Frac(r.h - 1, r.n),
    "all_gather": lambda r: Frac(r.h - 1, r.n),
    "broadcast": lambda r: Frac(log2_up(r.h), r.p),
}


class Rounds(Matcher):
    """Counts rounds on the longest path: one takes a step once both ends have come to it."""

    def __init__(self, schedules: list[Schedule]) -> None:
        super().__init__(schedules)
        self.begun, self.ended = [0] * self.size, [0] * self.size

    def leave(self, actor: int) -> None:
        self.begun[actor] = self.ended[actor]

    def meet(self, sender: int, receiver: int, sent: Chunks, recv: Recv) -> None:
        end = max(self.begun[sender], self.begun[receiver]) + 1
        for actor in (sender, receiver):
            self.ended[actor] = max(self.ended[actor], end)


def longest_path(schedules: list[Schedule]) -> int:
    rounds = Rounds(schedules)
    rounds.run()
    return max(rounds.ended)


def hosts_of_equal_size(ranks: Ranks) -> Groups:
    """Round robin, so that ranks of a host are not neighbours."""
    return tuple(tuple(range(host, ranks.n, ranks.h)) for host in range(ranks.h))


def layouts(algorithm: Algorithm) -> Iterator[Ranks]:
    for n in range(1, 34):
        for h in range(1, n + 1) if algorithm.grouped else (1,):
            if n % h == 0:
                yield Ranks(h, n // h)


def all_schedules(algorithm: Algorithm, ranks: Ranks) -> Iterator[list[Schedule]]:
    n = ranks.n
    for root in {0, n // 2, n - 1} if algorithm.collective in ROOTED else (-1,):
        yield algorithm.schedules(n, root, hosts_of_equal_size(ranks))


def ids(pair: tuple[str, str]) -> str:
    return "-".join(pair)


def test_the_table_lists_every_algorithm_with_its_formulas() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    known = {(collective, name) for collective in COLLECTIVES for name in names(collective)}
    assert {row[:2] for row in rows} == known
    assert len(rows) == len(known)
    for collective, name, *found, wins in rows:
        steps, bytes_, hop = TABLE[collective, name]
        assert found == [STEPS[steps].text, BYTES[bytes_].text, HOPS[hop].text], (collective, name)
        assert wins


@pytest.mark.parametrize("pair", TABLE, ids=ids)
def test_the_numbers_of_the_table(pair: tuple[str, str]) -> None:
    algorithm = algorithm_of(*pair)
    steps, bytes_, hop = TABLE[pair]
    for ranks in layouts(algorithm):
        for schedules in all_schedules(algorithm, ranks):
            whole = schedules[0].chunks  # one element a chunk
            found = (
                longest_path(schedules),
                Fraction(max(s.elements_sent(whole) for s in schedules), whole),
                Fraction(max(s.largest_hop(whole) for s in schedules), whole),
            )
            formulas = (STEPS[steps], BYTES[bytes_], HOPS[hop])
            expected = tuple(f.value(ranks) if ranks.n > 1 else 0 for f in formulas)
            assert found == expected, (ranks, schedules[0].root)


@pytest.mark.parametrize("collective", ACROSS)
def test_the_bytes_across_hosts(collective: str) -> None:
    algorithm = algorithm_of(collective, "hierarchical")
    for ranks in layouts(algorithm):
        for schedules in all_schedules(algorithm, ranks):
            sent = [
                sum(len(step.chunks) for step in s.sends() if (step.peer - s.rank) % ranks.h)
                for s in schedules
            ]
            assert Fraction(max(sent), schedules[0].chunks) == ACROSS[collective](ranks), ranks


def test_a_binomial_all_reduce_has_the_fewest_messages() -> None:
    for size in range(1, 34):
        schedules = algorithm_of("all_reduce", "binomial").schedules(size)
        assert sum(len(list(s.sends())) for s in schedules) == 2 * (size - 1)


# ----------------------------------------------------------------------------- pictures and code

HOSTS = ((0, 2), (1, 3))
#: Collective, name, rank, size, root and groups of the pictures, in their order.
PICTURES: list[tuple[str, str, int, int, int, Groups | None]] = [
    ("all_reduce", "ring", 0, 3, -1, None),
    ("reduce_scatter", "ring", 0, 3, -1, None),
    ("all_gather", "ring", 0, 3, -1, None),
    ("broadcast", "ring", 1, 4, 0, None),
    ("all_reduce", "recursive_doubling", 0, 5, -1, None),
    ("all_reduce", "recursive_doubling", 1, 5, -1, None),
    ("all_reduce", "halving_doubling", 0, 4, -1, None),
    ("all_reduce", "one_shot", 0, 3, -1, None),
    ("all_reduce", "direct", 0, 3, -1, None),
    ("reduce_scatter", "direct", 0, 3, -1, None),
    ("all_gather", "direct", 0, 3, -1, None),
    ("reduce", "direct", 1, 3, 0, None),
    ("all_to_all", "direct", 0, 3, -1, None),
    ("gather", "direct", 0, 3, 0, None),
    ("scatter", "direct", 0, 3, 0, None),
    ("all_gather", "bruck", 0, 5, -1, None),
    ("all_to_all", "bruck", 0, 4, -1, None),
    ("barrier", "dissemination", 0, 5, -1, None),
    ("broadcast", "binomial", 0, 5, 0, None),
    ("broadcast", "binomial", 2, 5, 0, None),
    ("reduce", "binomial", 2, 5, 0, None),
    ("all_reduce", "binomial", 2, 5, -1, None),
    ("broadcast", "double_tree", 4, 6, 0, None),
    ("reduce", "double_tree", 4, 6, 0, None),
    ("all_reduce", "double_tree", 4, 6, -1, None),
    ("all_reduce", "hierarchical", 1, 4, -1, HOSTS),
    ("reduce_scatter", "hierarchical", 1, 4, -1, HOSTS),
    ("all_gather", "hierarchical", 1, 4, -1, HOSTS),
    ("broadcast", "hierarchical", 1, 4, 0, HOSTS),
]


def test_every_algorithm_has_a_picture() -> None:
    pictured = {(collective, name) for collective, name, *_ in PICTURES}
    assert pictured == {(c, name) for c in COLLECTIVES for name in names(c)}


def test_the_pictures_are_what_print_shows() -> None:
    # A block with a language is code, or the output of the code before it.
    shown = [text for language, text in BLOCKS if not language and re.match(r".*rank \d", text)]
    printed = [
        f"{algorithm_of(collective, name).schedule(rank, size, root, groups)}\n"
        for collective, name, rank, size, root, groups in PICTURES
    ]
    assert shown == printed


def test_the_code_runs_and_prints_what_the_page_says() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for number, (language, text) in enumerate(BLOCKS):
        if language != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, f"docs/algorithms.md, block {number}", "exec"), space)
        told, output = BLOCKS[number + 1]
        assert printed.getvalue() == (output if told == "text" else ""), text
        ran += 1
    assert ran > 10
    assert {language for language, _ in BLOCKS} == {"", "console", "python", "text"}


def test_other_seats_are_right_too() -> None:
    """What the page registers: a ring inside and a double tree across."""
    for groups in (((0, 1, 2), (3, 4)), ((0, 2), (1, 3)), ((1,), (0, 2), (3,))):
        size = sum(map(len, groups))
        verify(
            [
                hierarchical_all_reduce(r, size, groups, inside="ring", across="double_tree")
                for r in range(size)
            ]
        )


def floats(size: int, count: int) -> list[np.ndarray[Any, Any]]:
    """Return inputs whose sums depend on the order of additions."""
    generator = np.random.default_rng(size)
    wide = generator.normal(size=(size, count)) * 10.0 ** generator.integers(-4, 5, (size, count))
    return list(wide.astype(np.float32))


@pytest.mark.parametrize("name", names("all_reduce"))
def test_every_rank_gets_the_same_bits(name: str) -> None:
    for size in (2, 3, 5, 8, 11):
        groups = (tuple(range(size // 2)), tuple(range(size // 2, size)))
        found = simulate(
            algorithm_of("all_reduce", name).schedules(size, -1, groups), floats(size, 101)
        )
        assert len({array.tobytes() for array in found}) == 1


def test_direct_and_one_shot_add_in_rank_order_and_a_ring_by_chunks() -> None:
    inputs = floats(7, 100)
    in_order = inputs[0]
    for other in inputs[1:]:
        in_order = in_order + other
    found = {
        name: simulate(algorithm_of("all_reduce", name).schedules(7), inputs)[0]
        for name in ("direct", "one_shot", "ring")
    }
    assert found["direct"].tobytes() == found["one_shot"].tobytes() == in_order.tobytes()
    assert found["ring"].tobytes() != in_order.tobytes()
    start, stop = algorithm_of("all_reduce", "ring").schedule(0, 7).spans(100)[2]
    around = inputs[3][start:stop]
    for rank in (4, 5, 6, 0, 1, 2):
        around = around + inputs[rank][start:stop]
    assert found["ring"][start:stop].tobytes() == around.tobytes()


# -------------------------------------------------------------------- the algorithm of one's own


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_algorithm", EXAMPLES / "own_algorithm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_example_whole() -> None:
    assert ("python", (EXAMPLES / "own_algorithm.py").read_text()) in BLOCKS


def test_the_example_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    block = BLOCKS.index(("python", (EXAMPLES / "own_algorithm.py").read_text()))
    assert ("text", capsys.readouterr().out) == BLOCKS[block + 1]


def test_the_example_is_right_and_needs_half_of_the_steps(example: Any) -> None:
    for size in range(1, 18):
        schedules = [example.two_way_ring(rank, size) for rank in range(size)]
        verify(schedules)
        assert longest_path(schedules) == 2 * (size // 2)
        for schedule in schedules:
            assert schedule.elements_sent(size) == 2 * (size - 1)
            assert {(step.peer - schedule.rank) % size for step in schedule.sends()} <= {
                1 % size,
                size - 1,
            }


def altered(schedule: Schedule, change: Callable[[int, Step], Step]) -> Schedule:
    rounds = tuple(
        tuple(change(number, step) for step in steps)
        for number, steps in enumerate(schedule.rounds)
    )
    return replace(schedule, rounds=rounds)


def turned(schedule: Schedule) -> Schedule:
    """Swap the neighbours."""
    rank, size = schedule.rank, schedule.size
    return altered(schedule, lambda _, step: step._replace(peer=(2 * rank - step.peer) % size))


def shifted(schedule: Schedule) -> Schedule:
    """Send the next chunk in the first round."""

    def next_chunk(number: int, step: Step) -> Step:
        if number or isinstance(step, Recv):
            return step
        return step._replace(chunks=((step.chunks[0] + 1) % schedule.chunks,))

    return altered(schedule, next_chunk)


def stored(schedule: Schedule) -> Schedule:
    """Store instead of reducing."""
    return altered(
        schedule,
        lambda _, step: step._replace(reduce=False) if isinstance(step, Recv) else step,
    )


@pytest.mark.parametrize("wrong", [turned, shifted, stored])
@pytest.mark.parametrize("size", [3, 4, 5, 8, 17])
def test_one_wrong_rank_is_found(
    example: Any, wrong: Callable[[Schedule], Schedule], size: int
) -> None:
    schedules = [example.two_way_ring(rank, size) for rank in range(size)]
    for rank in {0, size // 2, size - 1}:
        with pytest.raises(ScheduleError):
            verify([*schedules[:rank], wrong(schedules[rank]), *schedules[rank + 1 :]])


def wrong_everywhere(right: Schedule) -> Iterator[tuple[Round, ...]]:
    """Yield rounds that are wrong if all ranks have such."""
    rank, size, half = right.rank, right.size, len(right.rounds) // 2
    to_owners = right.rounds[:half]
    yield right.rounds[:-1]
    yield to_owners
    yield to_owners + mirrored(to_owners, reduce=True)
    if size % 2 == 0:  # the opposite rank sends both ways, and counts twice
        before, after, far = (rank - 1) % size, (rank + 1) % size, size // 2
        other_way = (
            Send(after, ((rank + far) % size,)),
            Recv(before, ((before + far) % size,), True),
        )
        to_owners = (right.rounds[0] + other_way, *right.rounds[1:half])
        yield to_owners + mirrored(to_owners)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 16])
def test_what_is_wrong_on_all_ranks_is_found(example: Any, size: int) -> None:
    right = [example.two_way_ring(rank, size) for rank in range(size)]
    for broken in zip(*map(wrong_everywhere, right), strict=True):
        with pytest.raises(ScheduleError):
            verify([replace(s, rounds=rounds) for s, rounds in zip(right, broken, strict=True)])


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7, 101])
def test_the_example_on_threads(example: Any, size: int, count: int) -> None:
    pycomm.algorithms.register("all_reduce", "two_way_ring", example.two_way_ring)
    inputs = [np.arange(count) * (rank + 1) - rank for rank in range(size)]

    def work(comm: pycomm.Communicator) -> list[np.ndarray[Any, Any]]:
        return [
            comm.all_reduce(
                inputs[comm.rank].astype(dtype),
                np.empty(count, dtype),
                op=op,
                algorithm="two_way_ring",
            )
            for dtype, op in (("i8", "sum"), ("f4", "max"), ("f8", "avg"))
        ]

    for total, most, mean in pycomm.run_local(size, work, timeout=30):
        np.testing.assert_array_equal(total, sum(inputs))
        np.testing.assert_array_equal(most, np.max(inputs, axis=0))
        np.testing.assert_allclose(mean, np.mean(inputs, axis=0))
