"""Regions of memory that peers map; all in one process here."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pycomm
from pycomm.bindings import _memory
from pycomm.transports import shared
from pycomm.transports.shared import (
    REGIONS,
    Regions,
    available_memory,
    second_level_cache,
    start_time,
)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


LONG = 100_000  # bytes of an array that has a region of its own
NOW = str(start_time(os.getpid()))


def test_a_region_is_found_by_address_and_opened_by_a_peer() -> None:
    regions, peer = Regions(), Regions()
    memory = regions.allocate(LONG)
    assert not memory.any()
    view = memory[100:300]
    found = regions.find(address(view), view.size)
    assert found is not None
    number, fd, size, offset = found
    assert (size, offset) == (LONG, 100)
    opened = peer.open(os.getpid(), NOW, number, fd, size)
    view[:] = 7
    assert (opened[100:300] == 7).all()
    opened[0] = 9
    assert memory[0] == 9
    assert peer.open(os.getpid(), NOW, number, fd, size) is opened
    assert peer.open(os.getpid(), "8", number, fd, size) is not opened  # another process
    assert regions.find(address(memory) - 1, 2) is None
    assert regions.find(address(memory) + LONG - 1, 2) is None
    assert regions.find(address(np.zeros(9)), 9) is None


def test_short_arrays_share_a_region() -> None:
    regions = Regions()
    before = descriptors()
    arrays = [regions.allocate(nbytes) for nbytes in (0, 1, 100, 65_536, 3) * 5]
    places = [regions.find(address(one), one.size) for one in arrays]
    assert len({place[:3] for place in places if place is not None}) == 1
    assert descriptors() == before + 1
    for index, one in enumerate(arrays):
        assert address(one) % 64 == 0
        assert not one.any()
        one[:] = index + 1
    for index, one in enumerate(arrays):
        assert (one == index + 1).all()
    more = [regions.allocate(65_536) for _ in range(15)]  # there is room for ten of them
    assert descriptors() == before + 2
    del arrays, one, more[:10]
    assert descriptors() == before + 1
    assert regions.freed == 1
    del more
    assert descriptors() == before
    assert not regions.allocate(10).any()


def test_memory_goes_with_its_last_view_and_a_peers_mapping_outlives_it() -> None:
    regions, peer = Regions(), Regions()
    before = descriptors()
    memory = regions.allocate(1 << 20)
    memory[:] = 3
    found = regions.find(address(memory), memory.size)
    assert found is not None
    opened = peer.open(os.getpid(), NOW, *found[:3])
    assert descriptors() == before + 1  # a mapping needs none
    view = memory[10:20].view(np.uint16)
    del memory
    assert view.tolist() == [0x0303] * 5
    assert regions.find(address(view), view.nbytes) is not None
    peer.sweep()
    assert len(peer._opened) == 1
    del view
    assert regions.find(0, 0) is None
    assert regions.freed == 1
    assert descriptors() == before
    assert (opened == 3).all()
    peer.sweep([os.getpid() + 1])
    assert len(peer._opened) == 1
    peer.sweep([os.getpid()])
    assert not peer._opened
    assert (opened == 3).all()


def test_a_descriptor_that_is_used_again_is_another_region() -> None:
    regions, peer = Regions(), Regions()
    first = regions.allocate(LONG)
    place = regions.find(address(first), LONG)
    assert place is not None
    peer.open(os.getpid(), NOW, *place[:3])
    del first
    second = regions.allocate(LONG)
    again = regions.find(address(second), LONG)
    assert again is not None
    assert again[0] != place[0]
    assert again[1] == place[1]  # the same descriptor
    peer.allocate(LONG)  # sweeps
    assert not peer._opened


def test_only_so_many_regions_of_peers_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_KEPT", 5)
    regions, peer = Regions(), Regions()
    kept = [regions.allocate(LONG) for _ in range(9)]
    for memory in kept:
        found = regions.find(address(memory), memory.size)
        assert found is not None
        peer.open(os.getpid(), NOW, *found[:3])
    assert len(peer._opened) == 5


def test_too_little_memory_is_said_with_numbers() -> None:
    free = available_memory()
    assert free is not None
    assert free > 1 << 20
    said = r"\d+ bytes of registered memory .* system has \d+ bytes"
    with pytest.raises(MemoryError, match=said):
        Regions().allocate(1 << 50)
    # What was promised before and not written yet counts, too.
    regions = Regions()
    first = regions.allocate(int(0.7 * free))
    with pytest.raises(MemoryError, match=said):
        regions.allocate(int(0.7 * free))
    del first
    assert regions.allocate(int(0.7 * free)).size


def test_a_container_may_have_less_than_the_system(tmp_path: Path) -> None:
    root = f"{tmp_path}/"
    assert available_memory(root) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4096 kB\n")
    assert available_memory(root) == 4 << 20
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available_memory(root) == 4 << 20
    (group / "memory.max").write_text("2000000\n")
    (group / "memory.current").write_text("1500000\n")
    (group / "memory.stat").write_text("anon 1400000\ninactive_file 100000\n")
    assert available_memory(root) == 600_000
    (group / "memory.current").write_text("5000000\n")
    assert available_memory(root) == 0


def test_the_size_of_a_cache(tmp_path: Path) -> None:
    assert second_level_cache(f"{tmp_path}/") == 1 << 20
    place = tmp_path / "sys/devices/system/cpu/cpu0/cache/index2"
    place.mkdir(parents=True)
    (place / "size").write_text("512K\n")
    assert second_level_cache(f"{tmp_path}/") == 512 << 10
    assert second_level_cache() >= 64 << 10


def test_the_launcher_is_found_behind_wrappers() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from pycomm.transports.shared import ancestors\n"
        "print(*(f'{pid}:{name}' for pid, name in ancestors(os.getpid())))\n"
    )
    run = subprocess.run(
        ["bash", "-c", '"$0" -c "$1"; true', sys.executable, code],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = [one.split(":", 1) for one in run.stdout.split() if ":" in one]
    assert found[0][1] == "bash"
    assert str(os.getpid()) in [pid for pid, _ in found]


def test_no_descriptor_left_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = Regions()
    kept = [regions.allocate(LONG) for _ in range(3)]

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(MemoryError, match=r"has 3 such pieces, .*ulimit -n"):
        regions.allocate(LONG)
    del kept


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_where_memory_cannot_be_shared_an_array_is_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "memfd_create", refused)
    x = pycomm.run_local(1, lambda comm: comm.empty((300, 200), "f8"))[0]
    assert x.shape == (300, 200)
    assert not x.any()
    assert REGIONS.find(address(x), x.nbytes) is None


def test_the_launcher_s_descendants_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory.admit(os.getppid())  # this system may know no such thing: that is no error
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(_memory, "_prctl", lambda *words: asked.append(words))
    _memory.admit(4711)
    assert asked == [(int.from_bytes(b"Yama"), 4711, 0, 0, 0)]
    monkeypatch.setattr(_memory, "_prctl", None)
    _memory.admit(4711)


def test_who_comes_in_the_midst_of_an_allocation_does_not_wait() -> None:
    """A signal handler in the same thread, for instance: it gets a region of its own."""
    regions = Regions()
    first = regions.allocate(10)
    with regions._lock:
        other = regions.allocate(10)
    again = regions.allocate(10)
    places = [regions.find(address(one), 10) for one in (first, other, again)]
    assert len({place[0] for place in places if place is not None}) == 2


def test_a_forked_child_has_memory_of_its_own() -> None:
    code = """
import os, pycomm
from pycomm.transports.shared import REGIONS
before = REGIONS.allocate(10)
REGIONS._lock.acquire()  # a thread that is not there in the child
child = os.fork()
if child == 0:
    REGIONS.allocate(1000)[:] = 7
    os._exit(0)
REGIONS._lock.release()
assert os.waitpid(child, 0)[1] == 0
after = REGIONS.allocate(1000)
assert not after.any()
assert REGIONS.find(after.ctypes.data, 9)[0] == REGIONS.find(before.ctypes.data, 9)[0]
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_process_is_dead_only_if_the_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = start_time(child.pid)
    assert started is not None
    child.kill()
    child.wait()
    assert start_time(child.pid) is None

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(OSError, match="open files"):
        start_time(os.getpid())
