"""The topology manager on three hosts whose links are shaped, slowed, cut and healed."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts.harness import Hosts, Tool

HOSTS = pytest.mark.parametrize("hosts", [3], indirect=True, ids=["3 hosts"])
RATE = 125e6  # bytes per second of 1 Gbit/s
INTERVAL = 3.0  # seconds; as in rank.py


def await_(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return what a condition says once it is true."""
    ends = time.monotonic() + seconds
    while not (said := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(str(condition))
        time.sleep(0.02)
    return said


class Links:
    """What happens to links while the job runs, and what it says then."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.seen: dict[str, Any] = {}

    def slow_and_heal(self, folder: Path) -> None:
        try:
            await_(lambda: len(list(folder.glob("ready-*"))) == 6)
            began = time.monotonic()
            self.hosts.tool.do("slow", 2, "100mbit")
            slow = await_(lambda: self.event(folder, "degraded"))
            self.seen["slow"] = slow["at"] - began, slow["links"]
            began = time.monotonic()
            self.hosts.tool.do("heal", 2)
            fine = await_(lambda: self.event(folder, "up"))
            self.seen["fine"] = fine["at"] - began, fine["links"]
        except TimeoutError as error:
            self.seen["error"] = str(error)
            self.seen["events"] = [path.read_text() for path in folder.glob("event-*.json")]
        finally:
            self.hosts.tool.do("heal", 2)
            (folder / "stop").touch()

    @staticmethod
    def event(folder: Path, state: str) -> dict[str, Any] | None:
        """Return the last event if both links of host 2 are in this state then."""
        events = sorted(folder.glob("event-*.json"), key=lambda path: int(path.stem[6:]))
        if not events:
            return None
        event: dict[str, Any] = json.loads(events[-1].read_text())
        links = [event["links"][name][0] for name in ("h1 - h2", "h2 - h3")]
        return event if links == [state, state] else None

    def cut(self, folder: Path) -> None:
        try:
            await_(lambda: len(list(folder.glob("ready-*"))) == 6)
            self.seen["cut"] = time.monotonic()
            self.hosts.tool.do("cut", 3)
            await_(lambda: len(list(folder.glob("done-*"))) == 6)
        except TimeoutError as error:
            self.seen["error"] = str(error)
        finally:
            self.hosts.tool.do("heal", 3)
            (folder / "healed").touch()


@HOSTS
def test_links_are_measured_and_followed(hosts: Hosts) -> None:
    links = Links(hosts)
    with hosts.shaped("1gbit", "0.2ms"):
        told = hosts.run("topology", 2, limit=150, beside=links.slow_and_heal)
    assert "error" not in links.seen, links.seen
    first = told[0]
    assert all(one["hashes"] == first["hashes"] for one in told)
    assert first["groups"]["host"] == [[0, 1], [2, 3], [4, 5]]
    assert first["groups"]["rail"] == [[0, 2, 4], [1, 3, 5]]
    assert first["groups"]["near"] == first["groups"]["fast"] == first["groups"]["host"]
    assert first["names"] == ["h1", "h1", "h2", "h2", "h3", "h3"]
    crossing = [pair for pair in first["pairs"] if pair[0] // 2 != pair[1] // 2]
    assert len(crossing) == 12
    off = {tuple(pair[:2]): pair[3] / RATE for pair in crossing if not 0.8 < pair[3] / RATE < 1.2}
    assert not off
    seconds, states = links.seen["slow"]
    assert seconds < 2 * INTERVAL
    assert re.search(
        r"measured [\d.]+ MB/s, [1-4]\d% of what it usually carries", states["h1 - h2"][1]
    )
    assert states["h1 - h3"][0] == "up"
    seconds, states = links.seen["fine"]
    assert seconds > 2 * INTERVAL  # three good looks
    assert "3 good looks in a row" in states["h1 - h2"][1]


@HOSTS
def test_survivors_of_a_cut_go_on(hosts: Hosts) -> None:
    links = Links(hosts)
    told = hosts.run("survivors", 2, limit=60, beside=links.cut)
    assert "error" not in links.seen, links.seen
    for rank, one in enumerate(told):
        assert one["at"] - links.seen["cut"] < 3 + 2
        assert "no end within 3 s" in one["error"]
        assert one["missing"] == ([4, 5] if rank < 4 else [0, 1, 2, 3])
        if rank < 4:
            assert (one["sum"], one["size"], one["lost"]) == (6.0, 4, [4, 5])
        else:
            assert "hears only [4, 5] of 6 ranks" in one["refused"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slow", "1", "100mbit"], "there are no hosts"),
        (["cut", "1"], "there are no hosts"),
        (["heal", "x"], "--help"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    code, text = Tool(tmp_path, os.environ["PATH"]).ask(*words)
    assert (code, text.count("\n")) == (1, 1)
    assert told in text


@HOSTS
def test_a_cut_host_sees_no_carrier(hosts: Hosts) -> None:
    look = ("exec", 3, "--", "cat", "/sys/class/net/eth0/carrier")
    assert hosts.tool.do(*look) == "1\n"
    hosts.tool.do("cut", 3)
    try:
        assert hosts.tool.do(*look) == "0\n"
    finally:
        hosts.tool.do("heal", 3)
    assert hosts.tool.do(*look) == "1\n"
    code, text = hosts.tool.ask("slow", 9, "1gbit")
    assert (code, text) == (1, "hosts: there is no host 9\n")
