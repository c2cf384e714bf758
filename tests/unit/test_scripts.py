"""The runner of the tests must see failures: of one rank alone, hangs, deaths, and no tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pycomm.errors import LibraryNotFoundError
from pycomm.launch import find_mpirun, probe

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
    import os, time
    import pytest
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
"""


@pytest.fixture
def run_tests(tmp_path):
    """Return a function that runs the runner on one file of MPI tests, on two ranks."""
    try:
        find_mpirun(probe())
    except LibraryNotFoundError as error:
        pytest.skip(f"no MPI to start ranks with: {str(error).splitlines()[0]}")

    def run(body, *words, limit=20, job_limit=30):
        (tmp_path / "test_it.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
        line = [sys.executable, str(ROOT / "scripts" / "_run_tests.py"), "--ranks", "2"]
        limits = {"PYCOMM_TEST_LIMIT": str(limit), "PYCOMM_TEST_JOB_LIMIT": str(job_limit)}
        answer = subprocess.run(
            [*line, "--plain=", "--device=", "--alone=", "--mpi", str(tmp_path), *words],
            env=os.environ | limits,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )
        return answer.returncode, answer.stdout

    return run


def test_a_good_run_shows_rank_0_only_and_counts_each_test_once(run_tests):
    code, output = run_tests(
        """
        def test_good(): comm.barrier()
        def test_skipped(): pytest.skip("why")
        @pytest.mark.skipif(comm.rank == 0, reason="on one rank")
        def test_half(): pass
        """
    )
    assert code == 0, output
    assert output.splitlines()[-1] == "2 passed, 0 failed, 1 skipped"
    assert "output of rank" not in output


def test_a_failure_on_one_rank_only_fails_the_run_and_shows_that_rank(run_tests):
    code, output = run_tests(
        """
        def test_good(): comm.barrier()
        def test_one_rank():
            print("the words of", comm.rank)
            assert comm.rank == 0, "wrong here"
        def test_after(): comm.barrier()
        """
    )
    assert code == 1
    assert output.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    shown = output.partition("output of rank 1 of 2")[2]
    assert "the words of 1" in shown
    assert "wrong here" in shown
    assert "rank 1 failed" in output.splitlines()[-2]
    assert "test_one_rank" in output.splitlines()[-2]


def test_a_hang_on_one_rank_shows_every_ranks_stack_and_ends(run_tests):
    code, output = run_tests(
        """
        def hangs_here(): time.sleep(100)
        def waits_for_the_other(): comm.barrier()
        def test_hang(): hangs_here() if comm.rank == 1 else None
        def test_next(): waits_for_the_other()
        """,
        limit=2,
    )
    assert code == 1
    first = output.partition("stack of rank 0 of 2")[2].partition("stack of rank 1 of 2")
    assert "waits_for_the_other" in first[0]
    assert "hangs_here" in first[2]
    assert "rank 1 hangs in" in output
    assert output.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_job_over_its_limit_is_ended_with_stacks(run_tests):
    code, output = run_tests(
        """
        @pytest.mark.parametrize("i", range(100))
        def test_slow(i): time.sleep(0.2)
        """,
        job_limit=2,
    )
    assert code == 1
    assert "took longer than 2 s" in output
    assert "stack of rank 1 of 2" in output


def test_a_rank_that_dies_fails_the_run(run_tests):
    code, output = run_tests(
        """
        def test_good(): pass
        def test_dies():
            if comm.rank == 1:
                os._exit(3)
            comm.barrier()
        """
    )
    assert code == 1
    assert "rank 1 did not finish" in output
    assert output.splitlines()[-1].split(", ")[1] == "1 failed"


def test_a_file_that_one_rank_cannot_import_fails_the_run(run_tests):
    code, output = run_tests(
        """
        if comm.rank == 1:
            raise RuntimeError("cannot be read here")
        def test_good(): pass
        """
    )
    assert code == 1
    assert "cannot be read here" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_run_of_no_tests_is_a_failure(run_tests):
    code, output = run_tests("def test_good(): pass", "-k", "nothing")
    assert code == 1
    assert output.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"
