"""The script for a machine with a GPU, here over the doubles: every step runs and is reported."""

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = [
    "found", "compile", "kernels", "arrays", "collectives", "algorithms", "compression", "streams",
    "graph", "split", "deadline", "missing", "bandwidth:pycomm", "bandwidth:plan",
]  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def run(*words: str, doubles: bool = True) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(
        [str(ROOT / "tests" / "gpu" / "run.sh"), *(["--doubles"] if doubles else []), *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


def test_all_steps_pass_on_the_doubles(tmp_path: Path) -> None:
    code, output = run("--json", str(tmp_path / "gpu.json"))
    assert code == 0, output
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["name"] for one in report["steps"]] == STEPS
    assert {one["outcome"] for one in report["steps"]} == {"passed"}, output
    by_name = {one["name"]: one["told"] for one in report["steps"]}
    assert by_name["graph"][0]["launches"]["native"] == 3
    assert "nccl:ring" in by_name["algorithms"][0]
    for library in ("pycomm", "plan"):
        rows = by_name[f"bandwidth:{library}"][0]["rows"]
        assert [row["bytes"] for row in rows] == [8, 4096, 65536]
        assert all(row["us"] > 0 for row in rows)


def test_a_step_that_hangs_shows_its_stacks_and_stops_nothing(tmp_path: Path) -> None:
    code, output = run("--hang", "--only", "hang,split", "--json", str(tmp_path / "gpu.json"))
    assert code == 1, output
    report = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = {one["name"]: one["outcome"] for one in report["steps"]}
    assert outcomes == {"found": "passed", "hang": "hung", "split": "passed"}, output
    assert output.count("in await_file") == 2, output  # of both processes
    assert "not passed: hang" in output


def test_an_unknown_step_is_refused() -> None:
    code, output = run("--only", "nonsense")
    assert code == 2
    assert "nonsense" in output


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        code, output = run("--json", str(tmp_path / "gpu.json"), doubles=False)
        assert code == 2, output
        assert "libcuda not found" in output
        assert "1 steps" in output
    else:
        pytest.skip("a CUDA driver is here")
