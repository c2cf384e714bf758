"""Offsets and counts beyond 2**31, with addresses that are never read or written."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import collectives
from pycomm.collectives import Exchange, composed, others, spans
from pycomm.dtypes import DTYPES, ReduceOp
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


@given(st.integers(0, 2**40), st.integers(1, 64))
def test_spans_cover_once(count: int, parts: int) -> None:
    cut = spans(count, parts)
    assert len(cut) == parts
    assert cut[0][0] == 0
    assert cut[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 2**36))
def test_long_messages_go_in_pieces(nbytes: int) -> None:
    cut = message_spans(nbytes)
    assert cut[0][0] == 0
    assert cut[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert max(stop - start for start, stop in cut) <= MESSAGE_LIMIT < 2**31


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("count", [2**31 + 3, 3 * 2**31 + 1])
def test_all_reduce_of_more_than_two_gigaelements(
    rank: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct all_reduce: peers get their slices of x and the own slice of the result, once."""
    size, base, itemsize = 4, 1 << 44, 8
    reduced: list[Span] = []

    def note(sources: list[Array], out: Array, *_: object, sent: bool) -> None:
        assert sent
        assert len(sources) == size
        if out.size:
            reduced.append((address(out), out.nbytes))

    monkeypatch.setattr(collectives, "reduce_arrays", note)
    monkeypatch.setattr(collectives, "_SEGMENT", 1 << 30)  # few rounds
    monkeypatch.setattr(collectives, "_SMALLEST_SEGMENT", 1 << 30)
    monkeypatch.setattr(Exchange, "scratch", lambda _, n, dtype: fake(n, dtype.str, 1 << 40))
    road = Recorder(rank, size)
    x = fake(count, "f8", base)
    exchange = Exchange(road, 0, ScratchPool(), others(rank, size))  # type: ignore[arg-type]
    for _ in composed("all_reduce", exchange, x, x, DTYPES["float64"], ReduceOp.SUM):
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


@pytest.mark.parametrize(
    "collective", ["all_to_all", "all_gather", "gather", "scatter", "broadcast"]
)
def test_moves_of_more_than_two_gigaelements(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count, base, other = 4, 2**31 + 4, 1 << 44, 1 << 45
    monkeypatch.setattr(collectives, "_fill", lambda *_: None)
    monkeypatch.setattr(collectives, "_slot", _slot_without_assignment)
    road = Recorder(0, size)
    x, out = fake(count, "f4", base), fake(count, "f4", other)
    whole_in = collective in ("all_to_all", "scatter")
    part = count // size
    if collective in ("gather", "all_gather"):
        x = fake(part, "f4", base)
    if collective == "scatter":
        out = fake(part, "f4", other)
    exchange = Exchange(road, 0, ScratchPool(), others(0, size))  # type: ignore[arg-type]
    for _ in composed(collective, exchange, x, out, DTYPES["float32"], None, 0):
        pass
    if whole_in:
        assert covered([(at, n) for _, at, n in road.sent], base + part * 4, base + count * 4)
    if collective in ("all_to_all", "all_gather", "gather"):
        received = [(at, n) for _, at, n in road.received]
        assert covered(received, other + part * 4, other + count * 4)
    if collective == "broadcast":
        assert {(at, n) for _, at, n in road.sent} == {(base, count * 4)}


def _slot_without_assignment(out: Array, size: int, rank: int) -> Array:
    part = out.size // size
    return out[rank * part : (rank + 1) * part].view(Unreal)


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
