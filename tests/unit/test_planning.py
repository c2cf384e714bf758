"""Offsets and counts beyond 2**31, with addresses that are never read or written."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import executor
from pycomm.algorithms import COLLECTIVES, algorithm_of, names
from pycomm.algorithms.direct import direct_all_reduce
from pycomm.algorithms.schedule import PARTED, ROOTED, spans
from pycomm.dtypes import DTYPES, ReduceOp
from pycomm.executor import WINDOW, Execution
from pycomm.program import Program
from pycomm.scratch import ScratchPool
from pycomm.transports.base import MESSAGE_LIMIT, message_spans

Array = np.ndarray[Any, Any]
Span = tuple[int, int]


class Unreal(np.ndarray[Any, Any]):
    """An array at an address where there is nothing: neither written nor printed."""

    def __setitem__(self, key: object, value: object) -> None:
        """Write nothing: there is no memory."""

    def __repr__(self) -> str:
        return f"<{self.size} elements at {address(self):#x}>"


def fake(count: int, dtype: str, address: int) -> Array:
    """Return an array at an address where there is nothing."""

    class Nowhere:
        __array_interface__ = {
            "shape": (count,),
            "typestr": np.dtype(dtype).str,
            "data": (address, False),
            "version": 3,
        }

    return np.asarray(Nowhere()).view(Unreal)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class Complete:
    def test(self) -> bool:
        return True


class Recorder:
    """A transport that remembers what was posted."""

    tag_limit = 100

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[tuple[int, int, int]] = []
        self.received: list[tuple[int, int, int]] = []

    def post(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Complete:
        self.sent += [(peer, address(a), a.size) for peer, a in sends]
        self.received += [(peer, address(a), a.size) for peer, a in recvs]
        return Complete()


def covered(parts: list[Span], start: int, stop: int) -> bool:
    """Whether spans (address, size) cover [start, stop) exactly once."""
    for at, size in sorted(parts):
        if at != start or size <= 0:
            return False
        start += size
    return start == stop


@given(st.integers(0, 2**36))
def test_long_messages_go_in_pieces(nbytes: int) -> None:
    cut = message_spans(nbytes)
    assert cut[0][0] == 0
    assert cut[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert max(stop - start for start, stop in cut) <= MESSAGE_LIMIT < 2**31


ALGORITHMS = [(c, name) for c in COLLECTIVES if c != "barrier" for name in names(c)]


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("part", [2**31 + 3, 3])
@pytest.mark.parametrize("segment", [1 << 60, 1 << 31])
def test_more_than_two_gigaelements(
    collective: str, name: str, part: int, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages have the right lengths and places, whatever the count; no memory is touched."""
    size, itemsize, at_x, at_out = 4, 8, 1 << 44, 1 << 46
    root = 1 if collective in ROOTED else -1
    algorithm = algorithm_of(collective, name)
    whole = collective not in PARTED
    count = part if whole else part * size
    monkeypatch.setattr(executor, "reduce_arrays", lambda *_, **__: None)
    monkeypatch.setattr(ScratchPool, "take", lambda _, n: fake(n, "u1", 1 << 40))
    monkeypatch.setattr(executor, "_copy", lambda *_: None)
    roads = []
    for rank in range(size):
        schedule = algorithm.schedule(rank, size, root, ((0, 2), (1, 3)))
        program = Program(schedule, count, itemsize, segment)
        road = Recorder(rank, size)
        running = Execution(program, road, ScratchPool(), DTYPES["float64"], ReduceOp.SUM)  # type: ignore[arg-type]
        x, out = fake(count, "f8", at_x), fake(count, "f8", at_out)
        for _ in running.steps(x, out, range(WINDOW)):
            pass
        roads.append(road)
        assert sum(n for _, _, n in road.sent) == schedule.elements_sent(count) * itemsize
        inside = (range(at_x, at_x + count * itemsize), range(at_out, at_out + count * itemsize))
        for _, at, n in road.sent + road.received:
            assert n > 0
            assert at < 1 << 44 or any(at in r and at + n - 1 in r for r in inside)
    for a, b in itertools.permutations(range(size), 2):
        sent = [n for peer, _, n in roads[a].sent if peer == b]
        received = [n for peer, _, n in roads[b].received if peer == a]
        assert sent == received


@pytest.mark.parametrize("rank", range(4))
def test_direct_all_reduce_touches_each_byte_once(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers get their slices of x and the own slice of the result; the own slice is reduced."""
    size, base, itemsize, count = 4, 1 << 44, 8, 2**31 + 3
    reduced: list[Span] = []

    def note(sources: list[Array], out: Array, *_: object) -> None:
        assert len(sources) == size
        reduced.append((address(out), out.nbytes))

    monkeypatch.setattr(executor, "reduce_arrays", note)
    monkeypatch.setattr(ScratchPool, "take", lambda _, n: fake(n, "u1", 1 << 40))
    program = Program(direct_all_reduce(rank, size), count, itemsize, 1 << 30)
    road = Recorder(rank, size)
    running = Execution(program, road, ScratchPool(), DTYPES["float64"], ReduceOp.SUM)  # type: ignore[arg-type]
    x = fake(count, "f8", base)
    for _ in running.steps(x, x, range(WINDOW)):
        pass
    cut = [(base + start * itemsize, base + stop * itemsize) for start, stop in spans(count, size)]
    own = cut[rank]
    assert covered(reduced, *own)
    for peer in range(size):
        if peer == rank:
            continue
        sent = [(at, n) for to, at, n in road.sent if to == peer]
        assert covered([s for s in sent if cut[peer][0] <= s[0] < cut[peer][1]], *cut[peer])
        assert covered([s for s in sent if own[0] <= s[0] < own[1]], *own)
        result = [(at, n) for by, at, n in road.received if by == peer and at >= base]
        assert covered(result, *cut[peer])


def test_scratch_is_used_again_within_limits() -> None:
    pool = ScratchPool()
    block = pool.take(5000)
    assert block.size == 8192
    pool.give(block)
    assert pool.take(6000) is block
    assert pool.take(0).size == pool.take(1).size == 4096
    first, second = pool.take(40 << 20), pool.take(40 << 20)
    pool.give(first)
    pool.give(second)  # over the limit: given to the system
    assert pool.take(40 << 20) is first
    assert pool.take(40 << 20) is not second
