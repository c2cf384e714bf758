"""Ranks without MPI, on devices: jobs of several processes that meet by a unique id."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doubles.build import NCCL_VERSION, build, with_kernels

RANK = Path(__file__).with_name("device_rank.py")
ROOT = RANK.parent.parent.parent

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def job(
    tmp_path: Path,
    scenario: str,
    size: int,
    silent: tuple[int, ...] = (),
    version: int = NCCL_VERSION,
) -> list[Any]:
    """Return what each rank returned; a rank that fails fails the test with its output."""
    environ = os.environ | with_kernels(version).environment()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), scenario, str(rank), str(size), str(tmp_path)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = []
    for process in ranks:
        try:
            outputs.append(process.communicate(timeout=70)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append("killed: " + process.communicate()[0])
    results = []
    for rank, output in enumerate(outputs):
        file = tmp_path / f"{rank}.json"
        if rank not in silent:
            assert file.exists(), f"rank {rank}:\n{output}"
        results.append(json.loads(file.read_text()) if file.exists() else None)
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_host_and_device_arrays_on_one_communicator(tmp_path: Path, size: int) -> None:
    assert job(tmp_path, "mixed", size) == [[rank, size, 1] for rank in range(size)]


@pytest.mark.parametrize("version", [20909, 21805, 22707])
def test_old_libraries(tmp_path: Path, version: int) -> None:
    size = 2
    for rank, found in enumerate(job(tmp_path, "old_library", size, version=version)):
        for name in ("bfloat16", "float32"):
            for algorithm in ("native", "auto", "ring", "direct", "hierarchical"):
                value, error = found[f"{name} {algorithm}"]
                if (version, name, algorithm) == (20909, "bfloat16", "native"):
                    assert "NCCL has bfloat16 from 2.10 on, and this is 2.9.9" in error
                else:
                    assert (value, error) == (size, "nothing was raised"), (name, algorithm)
        assert found["all_to_all"] == [0, 0, 1, 1]
        assert found["gather"] == ([0, 0, 0, 0, 1, 1, 1, 1] if rank == 0 else [])
        assert found["scatter"] == [0, 0]
        assert "UnsupportedError" in found["hint"]["kinds"]
        assert "2.31" in found["hint"]["text"]
        assert found["avg"] == ["nothing was raised", 0.5]
        if rank == 0:
            assert ("UnsupportedError" in found["shrink"]["kinds"]) == (version < 22700)


def test_a_rank_that_never_joins(tmp_path: Path) -> None:
    first, second, _ = job(tmp_path, "never_joins", 3)
    for error, total in (first, second):
        assert {"NCCLTimeoutError", "CommTimeoutError", "TimeoutError"} <= set(error["kinds"])
        assert 2.5 < error["seconds"] < 9
        assert "no end within 3 s" in error["text"]
        assert total == 2


def test_a_rank_that_dies(tmp_path: Path) -> None:
    results = job(tmp_path, "dies", 3, silent=(2,))[:2]
    for rank, (error, (total, new_rank, gathered), again, state) in enumerate(results):
        assert "NCCLRemoteError" in error["kinds"], error
        assert error["seconds"] < 5
        assert "all_reduce" in again["text"] or "broken" in again["text"]
        assert (total, new_rank, gathered) == (2, rank, [0, 1])
        assert "aborted" in state


def test_a_rank_that_stays_away(tmp_path: Path) -> None:
    for rank, (error, total, _) in enumerate(job(tmp_path, "stays_away", 3)):
        assert total == 3
        if rank == 2 and not error["kinds"]:
            continue  # it had nothing under way
        assert {"NCCLTimeoutError", "CommTimeoutError"} <= set(error["kinds"]), error
        assert "all_reduce #" in error["text"]


def test_an_error_that_nccl_reports(tmp_path: Path) -> None:
    for error, total in job(tmp_path, "async_error", 2):
        assert "NCCLError" in error["kinds"], error
        assert total == 2


def test_the_collector_does_not_disarm_the_deadline(tmp_path: Path) -> None:
    error, _ = job(tmp_path, "collected", 2)
    assert "NCCLTimeoutError" in error["kinds"], error


def test_a_communicator_is_dropped_with_something_stuck(tmp_path: Path) -> None:
    (collected, freed), _ = job(tmp_path, "dropped", 2)
    assert collected < 2
    assert freed < 6


def test_a_process_ends_with_something_stuck(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert job(tmp_path, "leaves_stuck", 2) == [True, True]
    assert time.monotonic() - begin < 20


def test_works_of_a_shrunk_communicator_have_failed(tmp_path: Path) -> None:
    for error, total in job(tmp_path, "shrunk_in_flight", 3, silent=(2,))[:2]:
        assert "CommError" in error["kinds"]
        assert "shrunk" in error["text"]
        assert total == 2


def test_host_arrays_are_no_part_of_a_group(tmp_path: Path) -> None:
    for error, messages, total in job(tmp_path, "grouped_hosts", 2):
        assert "ArgumentValueError" in error["kinds"]
        assert "ArgumentValueError" in messages["kinds"]
        assert total == 3


def test_host_arrays_do_not_wait_for_the_default_stream(tmp_path: Path) -> None:
    assert max(job(tmp_path, "busy_default_stream", 2)) < 4


def test_the_end_is_bounded(tmp_path: Path) -> None:
    for error, seconds in job(tmp_path, "slow_end", 2):
        assert "CommTimeoutError" in error["kinds"]
        assert seconds < 12


VISIBLE = """
import json
from pycomm.devices import device_count, get_device
print(json.dumps([get_device(number).uuid for number in range(device_count())]))
"""


def visible(**variables: str) -> list[str]:
    """Return the devices that a process sees."""
    environ = os.environ | build().environment() | variables
    line = [sys.executable, "-c", VISIBLE]
    told = subprocess.run(line, env=environ, check=True, capture_output=True, text=True, timeout=60)
    found: list[str] = json.loads(told.stdout)
    return found


def test_devices_are_known_by_what_the_driver_says() -> None:
    all_of_them = visible()
    assert len(set(all_of_them)) == 4
    third = all_of_them[3]
    for text, numbers in {
        "3,1": [3, 1],
        third: [3],
        third[:24]: [3],
        " 1 , 0": [1, 0],
        "1,-1,2": [1],
        "-1": [],
        "": [],
        "0,9": [0],
        "MIG-" + third[4:]: [],
    }.items():
        found = visible(CUDA_VISIBLE_DEVICES=text)
        assert found == [all_of_them[number] for number in numbers], text
