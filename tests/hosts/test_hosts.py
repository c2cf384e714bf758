"""Over several hosts: results, what crosses between hosts, and the tool that makes the hosts."""

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from hosts.harness import Hosts, Tool

MIB = 1 << 20
LAYOUTS = {
    "1 rank a host": (1, ()),
    "2 ranks a host": (2, ()),
    "2 ranks a host, round robin": (2, ("--map-by", "node")),
}
layouts = pytest.mark.parametrize(("ranks", "options"), LAYOUTS.values(), ids=LAYOUTS)


@layouts
def test_results(hosts: Hosts, ranks: int, options: tuple[str, ...]) -> None:
    told = hosts.run("results", ranks, *options)
    assert [rank["wrong"] for rank in told] == [[]] * len(told)
    assert all(rank["right"] == told[0]["right"] >= 36 for rank in told)
    # Where the ranks are, and that they know.
    turn = 1 if options else ranks
    names = [f"h{rank // turn % hosts.count + 1}" for rank in range(len(told))]
    assert [rank["host"] for rank in told] == names
    before: Counter[str] = Counter()
    for rank, name in zip(told, names, strict=True):
        assert rank["local"] == [before[name], ranks]
        before[name] += 1


@layouts
def test_plans(hosts: Hosts, ranks: int, options: tuple[str, ...]) -> None:
    for rank in hosts.run("plans", ranks, *options):
        for text, sent, planned in rank.values():
            assert "predicted" in text
            assert sent == planned > 0
        assert ("two meetings inside the host" in rank["long"][0]) == (ranks > 1)
        assert "meeting" not in rank["short"][0]


@layouts
def test_bytes_that_cross(hosts: Hosts, ranks: int, options: tuple[str, ...]) -> None:
    # Without a rate packets of one stream pass each other, on two cores, and TCP repeats some.
    with hosts.shaped("4gbit", "0"):
        told = hosts.run("crossing", ranks, *options)
    size, data = len(told), 4 * MIB
    names = [rank["host"] for rank in told]
    for number, rank in enumerate(told):
        expected = 2 * (hosts.count - 1) / hosts.count * data
        assert 1.0 < rank["hierarchical"] / expected < 1.1, (number, rank)
        # Every rank whose successor is elsewhere sends its share across.
        leave = sum(names[r] == rank["host"] != names[(r + 1) % size] for r in range(size))
        assert leave == (ranks if options else 1)
        expected = leave * 2 * (size - 1) / size * data
        assert 1.0 < rank["ring"] / expected < 1.1, (number, rank)


@layouts
def test_encoded(hosts: Hosts, ranks: int, options: tuple[str, ...]) -> None:
    """Only what goes between hosts is encoded, and the interfaces count what it should be."""
    with hosts.shaped("4gbit", "0"):
        told = hosts.run("encoded", ranks, *options)
    for rank in told:
        assert rank["wrong"] == []
        for name, item in (("bf16", 2), ("fp8_e4m3", 1 + 1 / 256)):
            algorithm, meets, nbytes = rank[name]
            assert (algorithm, meets) == (
                ("hierarchical", True) if ranks > 1 else ("direct", False)
            )
            expected = 2 * (hosts.count - 1) / hosts.count * 4 * MIB * item
            # Headers of packets of 1,500 bytes are 4.6% more.
            assert 1.0 < nbytes / expected < 1.08


@pytest.mark.parametrize("hosts", [2], indirect=True, ids=["2 hosts"])
def test_a_rate_limits(hosts: Hosts) -> None:
    with hosts.shaped("1gbit", "0"):
        told = hosts.run("timing", 2)
    wire = 8 * MIB / 125e6  # half of the data twice, each way at once
    for rank in told:
        assert 0.9 * wire < rank["large"] < 10 * wire
        assert rank["small"] < 0.5 * wire


@pytest.mark.skipif(shutil.which("cc") is None, reason="a delay needs a C compiler")
@pytest.mark.parametrize("hosts", [2], indirect=True, ids=["2 hosts"])
def test_a_delay_delays(hosts: Hosts) -> None:
    with hosts.shaped("none", "3ms"):
        told = hosts.run("timing", 1)
    # One rank waits for an answer of the other, which may find its message there already.
    assert 0.006 < max(rank["small"] for rank in told) < 0.06


@pytest.mark.parametrize("hosts", [2], indirect=True, ids=["2 hosts"])
def test_a_hang_shows_the_stack_of_every_rank(hosts: Hosts) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        hosts.run("hangs", 1, limit=5)
    for rank in ("0", "1"):
        output = str(caught.value).partition(f"---- {rank} ----")[2].partition("----")[0]
        assert "in hangs" in output
    status = hosts.tool.do("status")
    assert status.count("processes 2") == 3, status  # their holders: nothing is left


def test_each_host_is_its_own(hosts: Hosts) -> None:
    show = "hostname; cat /proc/sys/kernel/random/boot_id; echo $TMPDIR; ls /sys/class/net"
    seen = []
    for index in range(1, hosts.count + 1):
        hosts.tool.do("exec", index, "--", "touch", f"/dev/shm/of-{index}")
        assert hosts.tool.do("exec", index, "--", "ls", "/dev/shm").split() == [f"of-{index}"]
        name, boot, tmpdir, *links = hosts.tool.do("exec", index, "--", "sh", "-c", show).split()
        assert name == f"h{index}"
        assert Path(tmpdir).is_dir()
        assert links == ["eth0", "lo"]
        assert hosts.tool.do("exec", index, "--", "sh", "-c", "echo $PPID") == "0\n"
        seen.append((boot, tmpdir))
    assert all(len(set(column)) == hosts.count for column in zip(*seen, strict=True))
    code, _ = hosts.tool.ask("exec", 1, "--", "sh", "-c", "exit 7")
    assert code == 7


def test_bytes_and_status(hosts: Hosts) -> None:
    sent = dict(line.split() for line in hosts.tool.do("bytes").splitlines())
    assert list(sent) == [f"h{index}" for index in range(hosts.count + 1)]
    inside = hosts.tool.do("exec", 1, "--", "cat", "/sys/class/net/eth0/statistics/tx_bytes")
    assert int(inside) >= int(sent["h1"]) > 0
    assert "shape none 0" in hosts.tool.do("status")
    code, text = hosts.tool.ask("up", 2)
    assert code == 1
    assert "is in use" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "10"], "1 to 9 hosts, not 10"),
        (["shape", "1gbps", "0"], "RATE is like 1gbit"),
        (["shape", "1gbit", "5"], "DELAY is like 0.2ms"),
        (["shape", "1gbit", "0"], "there are no hosts"),
        (["exec", "1", "--", "true"], "there are no hosts"),
        (["exec", "1"], "--help"),
        ([], "--help"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    code, text = Tool(tmp_path, os.environ["PATH"]).ask(*words)
    assert (code, text.count("\n")) == (1, 1)
    assert told in text
    assert "Traceback" not in text


def test_down_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    Tool(tmp_path, os.environ["PATH"]).do("down")
    assert (tmp_path / "precious").exists()


def broken(fresh: Tool, tmp_path: Path, at: int, how: str) -> Tool:
    """Return the tool with an `ip` that does something else at its n-th call."""
    program = tmp_path / "ip"
    calls = tmp_path / "calls"
    program.write_text(
        f"#!/bin/sh\necho >>{calls}\n[ $(wc -l <{calls}) != {at} ] || {{ {how}; }}\n"
        f'exec {shutil.which("ip")} "$@"\n'
    )
    program.chmod(0o755)
    return Tool(fresh.folder, f"{tmp_path}:{fresh.path}")


def test_half_an_up_is_undone(fresh: Tool, tmp_path: Path) -> None:
    tool = broken(fresh, tmp_path, 8, "echo broken >&2; exit 1")
    code, text = tool.ask("up", 3)
    assert code == 1
    assert "ip on h1: broken" in text
    assert not fresh.left()
    assert not fresh.folder.exists()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_an_up_that_is_killed_can_be_undone(fresh: Tool, tmp_path: Path, by: int) -> None:
    waiting = tmp_path / "waiting"
    tool = broken(fresh, tmp_path, 8, f"touch {waiting}; exec sleep 100")
    process = tool.start("up", 3, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not waiting.exists() and process.poll() is None:
        time.sleep(0.01)
    assert len(fresh.left()) >= 3
    process.send_signal(by)
    process.communicate(timeout=30)
    if by == signal.SIGKILL:
        fresh.do("down")
    assert not fresh.left()
    assert not fresh.folder.exists()
