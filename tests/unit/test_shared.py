"""Regions of memory that peers map, and the board they meet at; all in one process here."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pycomm import PeerError
from pycomm.transports import shared
from pycomm.transports.shared import Board, Regions, available_memory, start_time


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_is_found_by_address_and_opened_by_a_peer() -> None:
    regions, peer = Regions(), Regions()
    memory = regions.allocate(10_000)
    assert not memory.any()
    view = memory[100:300]
    found = regions.find(address(view), view.size)
    assert found is not None
    number, fd, size, offset = found
    assert offset == 100
    opened = peer.open(os.getpid(), "7", number, fd, size)
    view[:] = 7
    assert (opened[100:300] == 7).all()
    opened[0] = 9
    assert memory[0] == 9
    assert peer.open(os.getpid(), "7", number, fd, size) is opened
    assert peer.open(os.getpid(), "8", number, fd, size) is not opened  # another process
    assert regions.find(address(memory) - 1, 2) is None
    assert regions.find(address(memory) + 9_999, 2) is None
    assert regions.find(address(np.zeros(9)), 9) is None


def test_memory_goes_with_its_last_view_and_a_peers_mapping_outlives_it() -> None:
    regions, peer = Regions(), Regions()
    before = descriptors()
    memory = regions.allocate(1 << 20)
    memory[:] = 3
    found = regions.find(address(memory), memory.size)
    assert found is not None
    opened = peer.open(os.getpid(), "7", *found[:3])
    view = memory[10:20].view(np.uint16)
    del memory
    assert view.tolist() == [0x0303] * 5
    assert regions.find(address(view), view.nbytes) is not None
    del view
    assert regions.find(0, 0) is None
    assert (opened == 3).all()
    del opened
    peer._opened.clear()
    assert descriptors() == before


def test_only_so_many_regions_of_peers_stay_mapped() -> None:
    regions, peer = Regions(), Regions()
    kept = [regions.allocate(10) for _ in range(shared._KEPT + 5)]
    for memory in kept:
        found = regions.find(address(memory), memory.size)
        assert found is not None
        peer.open(os.getpid(), "7", *found[:3])
    assert len(peer._opened) == shared._KEPT


def test_too_little_memory_is_said_with_numbers() -> None:
    free = available_memory()
    assert free is not None
    assert free > 1 << 20
    with pytest.raises(
        MemoryError, match=r"\d+ bytes of registered memory .* system has \d+ bytes"
    ):
        Regions().allocate(1 << 50)


def boards(size: int, *, crowded: bool = False) -> list[Board]:
    pages = [np.zeros(Board.SIZE, np.uint8) for _ in range(size)]
    own = start_time(os.getpid())
    assert own is not None
    return [
        Board(rank, pages, [os.getpid()] * size, [own] * size, crowded=crowded)
        for rank in range(size)
    ]


def test_ranks_meet_and_read_what_was_published() -> None:
    ranks = boards(3)
    for turn in range(1, 6):
        arrivals = [board.arrive(turn, rank, -turn) for rank, board in enumerate(ranks[:2])]
        assert not any(arrival.test() for arrival in arrivals)
        assert ranks[0].missing(turn) == [2]
        arrivals.append(ranks[2].arrive(turn, 2, -turn, 8, 7, 6, 5, 2**62))
        for arrival in arrivals:
            assert arrival.test()
            assert arrival.test()
            records = arrival.records()
            assert [record[:4] for record in records[:2]] == [
                (turn, 0, -turn, 0), (turn, 1, -turn, 0),
            ]  # fmt: skip
            assert records[2] == (turn, 2, -turn, 8, 7, 6, 5, 2**62)


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads() -> None:
    fast, slow = boards(2)
    slow_arrival = slow.arrive(1)
    assert fast.arrive(10).test()
    later = fast.arrive(20)
    assert not later.test()
    assert slow_arrival.test()
    assert slow_arrival.records() == [(10, *[0] * 7), (1, *[0] * 7)]


def test_a_dead_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_LOOK_EVERY", 0.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(child.pid)
    own = start_time(os.getpid())
    assert started is not None
    assert own is not None
    pages = [np.zeros(Board.SIZE, np.uint8) for _ in range(2)]
    arrival = Board(0, pages, [os.getpid(), child.pid], [own, started]).arrive()
    assert not arrival.test()
    assert not arrival.test()
    child.kill()
    try:
        # Dead, and not yet waited for: a zombie counts as dead.
        while start_time(child.pid) is not None:
            pass
        with pytest.raises(PeerError, match="rank 1 has ended"):
            arrival.test()
    finally:
        child.communicate()
    assert start_time(child.pid) is None


def test_waiting_yields_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    for crowded, expected in ((False, 0), (True, 3)):
        arrival = boards(2, crowded=crowded)[0].arrive()
        assert not any(arrival.test() for _ in range(3))
        assert len(yields) == expected


def test_fences_where_stores_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_ORDERED", False)
    test_ranks_meet_and_read_what_was_published()
    assert shared._fence.locked()
