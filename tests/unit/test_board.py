"""The board that the ranks of a host meet at; all in one process here."""

import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from pycomm import MismatchError, PeerError
from pycomm.transports import board
from pycomm.transports.board import Board
from pycomm.transports.shared import start_time


def boards(size: int, *, crowded: bool = False) -> list[Board]:
    memory = np.zeros(Board.nbytes(size), np.uint8)
    own = start_time(os.getpid())
    assert own is not None
    pids, starts = [os.getpid()] * size, [own] * size
    names = [10 + rank for rank in range(size)]
    return [Board(rank, memory, pids, starts, names, crowded=crowded) for rank in range(size)]


def record(*words: int) -> bytes:
    return struct.pack(f"{len(words)}q", *words)


def told(one: Board, size: int) -> list[tuple[int, ...]]:
    raw = one.records()
    assert len(raw) == size * Board.RECORD
    return [struct.unpack_from("3q", raw, rank * Board.RECORD) for rank in range(size)]


def test_ranks_meet_and_read_what_was_told() -> None:
    ranks = boards(3)
    for turn in range(1, 6):
        for rank, one in enumerate(ranks[:2]):
            assert one.turn == (turn - 1) % 2
            assert not one.arrive(record(turn, rank, -turn)).test()
        ranks[2].arrive(record(turn, 2**62, 7))
        for one in ranks:
            assert one.test()
            assert one.test()
            assert told(one, 3) == [(turn, 0, -turn), (turn, 1, -turn), (turn, 2**62, 7)]
            one.compare(turn)
            one.check_recent()


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads() -> None:
    fast, slow = boards(2)
    slow.arrive(record(1, 0, 0))
    assert fast.arrive(record(10, 0, 0)).test()
    assert not fast.arrive(record(20, 0, 0)).test()
    assert slow.test()
    assert told(slow, 2) == [(10, 0, 0), (1, 0, 0)]


def test_who_calls_something_else_is_named() -> None:
    ranks = boards(3)
    for one, call in zip(ranks, (5, 6, 5), strict=True):
        one.arrive(record(call))
    assert all(one.test() for one in ranks)
    for one, call, others in ((ranks[0], 5, "rank 11"), (ranks[1], 6, "rank 10, 12")):
        with pytest.raises(MismatchError, match=others + " calls something else"):
            one.compare(call)


def test_a_dead_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_LOOK_EVERY", 0.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started, own = start_time(child.pid), start_time(os.getpid())
    assert started is not None
    assert own is not None
    memory = np.zeros(Board.nbytes(2), np.uint8)
    pids, starts = [os.getpid(), child.pid], [own, started]
    mine, theirs = (Board(rank, memory, pids, starts, range(2)) for rank in (0, 1))
    mine.arrive()
    assert not mine.test()
    assert not mine.test()
    child.kill()
    try:
        # Dead, and not yet waited for: a zombie counts as dead.
        while start_time(child.pid) is not None:
            pass
        with pytest.raises(PeerError, match="rank 1 has ended"):
            mine.test()
        # One that died after it had arrived is noticed if that was long ago.
        theirs.arrive()
        assert mine.test()
        mine.check_recent()
        monkeypatch.setattr(board, "_LATE", 0)
        time.sleep(0.001)
        with pytest.raises(PeerError, match="rank 1 has ended") as caught:
            mine.check_recent()
        assert caught.value.peers == (1,)
    finally:
        child.communicate()
    assert start_time(child.pid) is None


def test_waiting_yields_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    for crowded, expected in ((False, 0), (True, 3)):
        one = boards(2, crowded=crowded)[0].arrive()
        assert not any(one.test() for _ in range(3))
        assert len(yields) == expected


def test_fences_where_stores_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[int] = []
    order = Board._order
    monkeypatch.setattr(Board, "_order", lambda one: (orders.append(1), order(one)))
    test_ranks_meet_and_read_what_was_told()
    assert not orders
    monkeypatch.setattr(board, "_ORDERED", False)
    test_ranks_meet_and_read_what_was_told()
    assert len(orders) == 5 * (3 + 6)


def test_a_process_that_is_dying_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it gives up its memory a moment before it counts as dead."""
    one, _ = boards(2)
    looks: list[int] = []

    def dies(_: int) -> str | None:
        looks.append(1)
        return one.starts[1] if len(looks) < 9 else None

    monkeypatch.setattr(board, "start_time", dies)
    with pytest.raises(PeerError):
        one.check_dying()
    monkeypatch.setattr(board, "start_time", lambda _: one.starts[1])
    one.check_dying()  # nobody dies


def test_unknown_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = boards(2)

    def unknown(_: int) -> str | None:
        raise OSError("too many open files")

    monkeypatch.setattr(board, "start_time", unknown)
    one.check()
