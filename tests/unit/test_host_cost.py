"""The script that measures what a call costs on the host: it runs, and prints all of its rows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "_host_cost.py"
ROWS = (
    "comm.all_reduce(x), DeviceArray",
    "comm.all_reduce(x), DeviceArray, no context current",
    "comm.all_reduce(x), interface, stream 1",
    "comm.all_reduce(x), interface, own stream",
    "comm.all_reduce(x), interface, new each time",
    "comm.all_reduce(x), DLPack",
    "comm.all_reduce(x, out), DeviceArray",
    "comm.all_reduce(x, stream=s), DeviceArray",
    "plan()",
    "plan(), no context current",
    "ctypes, argtypes, ints",
    "ctypes, argtypes, ready objects",
    "row nccl.ncclAllReduce, ints",
    "row nccl.ncclAllReduce, ready objects",
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_all_rows(tmp_path):
    report = tmp_path / "cost.json"
    words = ["--rounds", "2", "--repeats", "3", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert set(ROWS) <= found["medians"].keys()
    assert all(len(values) == 2 for values in found["rounds_ns"].values())
    for row in ROWS:
        assert any(line.startswith(row) for line in done.stdout.splitlines()), done.stdout
    # Present with its rows, or absent with a reason.
    assert "nccl4py" in done.stdout


def test_wrong_flags_are_refused():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "at least 1" in done.stderr
