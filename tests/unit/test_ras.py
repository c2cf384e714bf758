"""NCCL's RAS, asked of a thread that answers as NCCL does, or as it should not."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.topology.probes import ras
from pycomm.topology.probes.ras import RasStatus, ras_status, read_ras


def _rank(rank: int, **status: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": f"10.0.0.{rank + 1}",
        "pid": 100 + rank,
        "cuda_dev": 0,
        "nvml_dev": rank,
        "status": {"init_state": 0, "async_error": 0, "abort_flag": False, **status},
        "collective_counts": {"AllReduce": 7, "Broadcast": 1},
    }


def _gone(rank: int, dead: bool) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": f"10.0.0.{rank + 1}",
        "pid": 100 + rank,
        "cuda_dev": 0,
        "nvml_dev": rank,
        "status": {"unresponsive": True, "considered_dead": dead},
    }


def _answer() -> dict[str, Any]:
    return {
        "nccl_version": "2.29.2",
        "timestamp": "2026-05-05 06:16:47",
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "0xabc",
                "secondary_hash": "0x1:0x2",
                "size": 4,
                "ranks_count": 2,
                "missing_ranks_count": 2,
                "ranks": [_rank(0), _rank(1, async_error=6, abort_flag=True)],
                "missing_ranks": [_gone(3, True), _gone(2, False)],
            }
        ],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 1},
    }


def _text() -> str:
    return json.dumps(_answer(), indent=2)


def _without_commas() -> str:
    """Return the answer as NCCL 2.28.9 writes it."""
    head, between, tail = _text().partition('"missing_ranks"')
    for rank in (2, 3):
        tail = tail.replace(f'"nvml_dev": {rank},\n', f'"nvml_dev": {rank}\n')
    return head + between + tail


Talk = Callable[[socket.socket, list[str]], None]


def _like_nccl(text: str, refuse: tuple[str, ...] = (), protocol: int = 2) -> Talk:
    """Return a server that answers each line as NCCL does, in small pieces at the end."""

    def talk(connection: socket.socket, heard: list[str]) -> None:
        for line in connection.makefile("r"):
            heard.append(line)
            if line.startswith(refuse) and refuse:
                connection.sendall(f"ERROR: {line}".encode())
            elif line.startswith("CLIENT PROTOCOL"):
                connection.sendall(f"SERVER PROTOCOL {protocol}\n".encode())
            elif line.endswith("STATUS\n"):
                half = len(text) // 2
                connection.sendall(text[:half].encode())
                connection.sendall(text[half:].encode())
                return
            else:
                connection.sendall(b"OK\n")

    return talk


@contextmanager
def _server(talk: Talk) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """Serve one connection at a port that is free."""
    heard: list[str] = []

    def serve() -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(5)
            with suppress(OSError):  # the other side may hang up
                talk(connection, heard)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname(), heard
        finally:
            thread.join(6)
            assert not thread.is_alive()


def _ask(talk: Talk, timeout: float = 2.0) -> RasStatus:
    with _server(talk) as (address, _):
        return ras_status(address, timeout)


def test_an_answer_is_read() -> None:
    with _server(_like_nccl(_text())) as (address, heard):
        status = ras_status(address, 2.0)
    assert heard == ["CLIENT PROTOCOL 2\n", "TIMEOUT 1\n", "SET FORMAT json\n", "VERBOSE STATUS\n"]
    assert status.known
    assert (status.version, status.timeouts, status.notes) == ("2.29.2", 1, ())
    (communicator,) = status.communicators
    assert (communicator.name, communicator.size) == ("0xabc:0x1:0x2", 4)
    assert communicator.missing == (2, 3)
    assert communicator.unresponsive == (2, 3)
    first, second, dead, _ = communicator.ranks
    assert (first.rank, first.host, first.pid, first.device) == (0, "10.0.0.1", 100, 0)
    assert first.operations == (("AllReduce", 7), ("Broadcast", 1))
    assert (first.error, second.error, second.aborted) == (0, 6, True)
    assert (dead.rank, dead.missing, dead.dead) == (3, True, True)


def test_the_missing_comma_is_put_in_and_noted() -> None:
    text = _without_commas()
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(text)
    status = _ask(_like_nccl(text))
    assert status.known
    assert status.communicators == read_ras(_text()).communicators
    assert "2.28.9" in status.notes[0]


def test_no_other_repair() -> None:
    head, between, tail = _text().partition('"ranks"')
    elsewhere = head + between + tail.replace('"nvml_dev": 0,', '"nvml_dev": 0', 1)
    for text in (elsewhere, _text()[:-3], _text()[:400], "", "[]", "NCCL version 2.24\n" + _text()):
        status = read_ras(text)
        assert not status.known
        assert "the answer of NCCL" in status.reason
        assert status.communicators == ()


def test_what_is_missing_is_none() -> None:
    bare = read_ras('{"communicators": [{}, {"ranks": [{}, 3], "missing_ranks": [{"rank": 1}]}]}')
    assert bare.known
    assert (bare.version, bare.timeouts) == (None, None)
    first, second = bare.communicators
    assert (first.name, first.size, first.ranks) == ("?", None, ())
    assert (second.missing, second.unresponsive) == ((1,), ())
    odd = read_ras('{"communicators_count": 9, "ras": 7, "communicators": [1, {"size": true}]}')
    assert odd.communicators[0].size is None
    assert len(odd.notes) == 2
    beside = '{"communicators": [{"missing_ranks": [{"rank": 1, "unresponsive": true}]}]}'
    assert read_ras(beside).communicators[0].unresponsive == (1,)
    assert not read_ras('{"communicators": {}}').known
    assert not read_ras("[" * 100_000).known


def test_versions_that_cannot_do_all() -> None:
    status = _ask(_like_nccl(_text(), refuse=("TIMEOUT",), protocol=3), 1.0)
    assert status.known
    assert "another version" in status.notes[0]
    assert "cannot wait 0.5 s" in status.notes[1]
    older = _ask(_like_nccl(_text(), refuse=("SET FORMAT",)))
    assert "since 2.28.7" in older.reason


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
    start = time.monotonic()
    status = ras_status(address, 5.0)
    assert time.monotonic() - start < 1
    assert status.reason.startswith(f"no answer from 127.0.0.1:{address[1]}: ")
    assert not ras_status(("not an address", -1), 0.1).known


def test_a_silent_server_does_not_outlast_the_deadline() -> None:
    def silent(connection: socket.socket, heard: list[str]) -> None:
        while connection.recv(100):
            pass

    def slow(connection: socket.socket, heard: list[str]) -> None:
        while connection.recv(100):
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.01)

    def never_ends(connection: socket.socket, heard: list[str]) -> None:
        text = '{"communicators": '
        _like_nccl(text)(connection, heard)
        silent(connection, heard)

    for talk in (silent, slow, never_ends):
        start = time.monotonic()
        status = _ask(talk, 0.2)
        assert "did not answer within 0.2 s" in status.reason
        assert 0.15 < time.monotonic() - start < 2


def test_garbage() -> None:
    def say(words: bytes) -> Talk:
        def talk(connection: socket.socket, heard: list[str]) -> None:
            connection.recv(100)
            connection.sendall(words)

        return talk

    assert "is not NCCL: it says 'HTTP/1.1 400 " in _ask(say(b"HTTP/1.1 400 Bad\r\n\r\n")).reason
    assert "is not NCCL" in _ask(say(b"\xff\x00\n")).reason
    assert "without end" in _ask(say(b"x" * 100_000)).reason
    assert "closed the connection" in _ask(say(b"")).reason
    assert "closed the connection" in _ask(say(b"SERVER PROTOCOL 2\n")).reason
    assert "malformed" in _ask(_like_nccl("\x00\x01 not JSON")).reason


def test_an_answer_may_be_long_but_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    big = _answer()
    big["communicators"][0]["ranks"] = [_rank(rank) for rank in range(4096)]
    status = _ask(_like_nccl(json.dumps(big)), 5.0)
    assert len(status.communicators[0].ranks) == 4098
    monkeypatch.setattr(ras, "_MOST_BYTES", 100_000)
    assert "longer than 100000 bytes" in _ask(_like_nccl(json.dumps(big)), 5.0).reason


@given(st.text(max_size=100), st.integers(0, 2000))
def test_any_text_is_an_answer_or_a_reason(noise: str, at: int) -> None:
    for text in (noise, _text()[:at] + noise, _text()[:at] + noise + _text()[at:]):
        status = read_ras(text)
        assert status.known or status.communicators == ()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["rank", "ranks", "missing_ranks", "status",
                                                       "size", "hash", "collective_counts"]),
                                      inner, max_size=4)))  # fmt: skip
def test_any_json_is_an_answer_or_a_reason(value: Any) -> None:
    assert read_ras(json.dumps({"communicators": value})).known == isinstance(value, list)
