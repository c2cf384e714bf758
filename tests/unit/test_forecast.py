"""``pycomm simulate``: what it reads and prints."""

import json
from pathlib import Path

import pytest

from pycomm import ArgumentValueError
from pycomm.algorithms import Link, names
from pycomm.cli import main
from pycomm.forecast import parse_link, parse_rate
from pycomm.units import format_bytes, format_seconds, parse_size


def test_sizes_rates_and_links() -> None:
    assert [parse_size(text) for text in ("8", "64K", "1.5M", "1GiB", "2gb")] == [
        8, 65536, 3 << 19, 1 << 30, 2 << 30,
    ]  # fmt: skip
    assert parse_rate("300GB/s") == 3e11
    assert parse_rate("100Gbit/s") == parse_rate("100Gb/s") == 1.25e10
    assert parse_link("50GB/s,8us") == Link(8e-6, 5e10)
    assert parse_link("1Gbit/s, 0.2ms") == Link(2e-4, 1.25e8)
    for parse, texts in (
        (parse_size, ("", "x", "1X", "-1")),
        (parse_rate, ("", "3", "0GB/s", "3GB")),
        (parse_link, ("3GB/s", "3GB/s,", "3GB/s,2", "2us,3GB/s")),
    ):
        for text in texts:
            with pytest.raises(ArgumentValueError):
                parse(text)


def test_sizes_and_times_as_text() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 31)] == [
        "0 B", "1023 B", "1.5 KiB", "5 MiB", "6 GiB",
    ]  # fmt: skip
    assert [format_seconds(t) for t in (0, 2e-6, 0.0123, 7.5)] == [
        "0 µs",
        "2 µs",
        "12.3 ms",
        "7.5 s",
    ]


ARGUMENTS = ["simulate", "all_reduce", "--hosts", "4", "--per-host", "2", "--size", "1M"]


def test_the_table_has_all_algorithms_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--verify"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "all_reduce of 1 MiB on 4 x 2 ranks; schedules proved right"
    assert head.split() == [
        "algorithm", "rounds", "sent/rank", "largest", "hop", "segments", "time", "algbw",
    ]  # fmt: skip
    assert {row.split()[0] for row in rows} == set(names("all_reduce"))


def test_json_and_some_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--algorithm", "ring,hierarchical", "--json"]
    link = ["--inside", "100GB/s,1us", "--across", "1GB/s,10us"]
    assert main([*ARGUMENTS, *chosen, *link]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["algorithm"] for one in found} == {"ring", "hierarchical"}
    assert found[0]["seconds"] <= found[1]["seconds"]
    ring = next(one for one in found if one["algorithm"] == "ring")
    assert (ring["rounds"], ring["largest_hop"]) == (14, 1 << 17)
    assert ring["bytes_sent"] == 14 << 17
    # Ranks that share a NIC wait for each other.
    assert main([*ARGUMENTS, *chosen, *link, "--nics", "1"]) == 0
    shared = json.loads(capsys.readouterr().out)
    times = {one["algorithm"]: one["seconds"] for one in shared}
    assert times["hierarchical"] > next(
        one["seconds"] for one in found if one["algorithm"] == "hierarchical"
    )


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    file = tmp_path / "time.svg"
    assert main([*ARGUMENTS, "--algorithm", "ring,direct", "--plot", str(file)]) == 0
    assert "ring" in capsys.readouterr().out
    assert file.read_text().startswith("<?xml")


def test_a_picture_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*ARGUMENTS, "--algorithm", "ring,direct", "--plot"]) == 0
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm", "magic"], ["--algorithm", "native"], ["--plot", "/none/x.png"],
        ["--plot", "x.badly"], ["--hosts", "0"], ["--hosts", "1000000000"],
        ["--per-host", "-1"], ["--nics", "-1"],
        ["--size", "big"], ["--inside", "fast"], ["--reduce", "0GB/s"],
    ],
)  # fmt: skip
def test_refusals(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, *words]) == 2
    assert "pycomm:" in capsys.readouterr().err
