"""The command line: what goes where, and exit codes."""

import subprocess
import sys
from types import ModuleType

import pytest

import pycomm
from pycomm import cli
from pycomm.cli import main, split_bench
from pycomm.errors import ArgumentValueError, LibraryNotFoundError


@pytest.fixture
def launched(monkeypatch):
    """Record the calls of `launch` in place of starting ranks."""
    calls = []

    def launch(argv, ranks, *, verbose=False, timeout=None):
        calls.append((list(argv), ranks, verbose, timeout))
        return 17

    monkeypatch.setattr(cli, "launch", launch)
    return calls


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.touch()
    return str(path)


class TestRun:
    def test_script_keeps_its_own_flags(self, launched, script):
        assert main(["run", "-n", "4", script, "-n", "9", "-v", "--", "--timeout"]) == 17
        argv = [sys.executable, script, "-n", "9", "-v", "--", "--timeout"]
        assert launched == [(argv, 4, False, None)]

    def test_options_in_front(self, launched, script):
        main(["run", "-v", "--timeout", "2.5", "--ranks", "3", script])
        assert launched == [([sys.executable, script], 3, True, 2.5)]

    def test_module_as_python_does(self, launched):
        main(["run", "-n", "2", "-v", "-m", "pytest", "-m", "slow", "-v"])
        argv = [sys.executable, "-m", "pytest", "-m", "slow", "-v"]
        assert launched == [(argv, 2, True, None)]

    def test_program_after_two_dashes(self, launched):
        main(["run", "-np", "2", "--", "sh", "-c", "true"])
        assert launched == [(["sh", "-c", "true"], 2, False, None)]

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["-n", "2"], "no program to start"),
            (["-n", "2", "--"], "no program to start"),
            (["-n", "2", "/nowhere/x.py"], "no such script: /nowhere/x.py"),
            (["-n", "2", "--", "surely-no-such-program"], "no such program"),
        ],
    )
    def test_nothing_to_start_is_exit_code_2(self, launched, capsys, words, told):
        assert main(["run", *words]) == 2
        assert told in capsys.readouterr().err
        assert launched == []

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["-n", "0", "x"], "at least 1, not 0"),
            (["-n", "two", "x"], "whole number, not 'two'"),
            (["x"], "-n"),
            (["-n", "2", "--timeout", "0", "x"], "positive number of seconds"),
            (["-n", "2", "--timeout", "inf", "x"], "positive number of seconds"),
        ],
    )
    def test_wrong_options_are_exit_code_2(self, launched, capsys, words, told):
        with pytest.raises(SystemExit) as caught:
            main(["run", *words])
        assert caught.value.code == 2
        assert told in capsys.readouterr().err
        assert launched == []

    def test_a_missing_library_is_exit_code_1(self, monkeypatch, capsys, script):
        def launch(*args, **kwargs):
            raise LibraryNotFoundError("no mpirun, tried /x")

        monkeypatch.setattr(cli, "launch", launch)
        assert main(["run", "-n", "2", script]) == 1
        assert capsys.readouterr().err == "pycomm: no mpirun, tried /x\n"


class TestSplitBench:
    @pytest.mark.parametrize(
        "words",
        [
            ["--ranks", "4", "all_reduce", "-n", "20"],
            ["-np", "4", "all_reduce", "-n", "20"],
            ["all_reduce", "--ranks=4", "-n", "20"],
            ["all_reduce", "-n", "20", "-np", "4"],
        ],
    )
    def test_ranks_anywhere(self, words):
        assert split_bench(words) == (4, False, ["all_reduce", "-n", "20"])

    def test_no_ranks(self):
        assert split_bench(["all_reduce", "-b", "8"]) == (None, False, ["all_reduce", "-b", "8"])

    def test_verbose_only_in_front(self):
        assert split_bench(["-v", "all_reduce", "-v"]) == (None, True, ["all_reduce", "-v"])

    @pytest.mark.parametrize("words", [["--ranks"], ["-np", "x"], ["--ranks=0"], ["-np", "-3"]])
    def test_wrong_ranks(self, words):
        with pytest.raises(ArgumentValueError, match="number of ranks"):
            split_bench(["all_reduce", *words])


@pytest.fixture
def bench(monkeypatch):
    """Put a stand-in for the benchmark in its place and record what it is called with."""
    calls = []
    module = ModuleType("pycomm.bench.cli")
    module.main = lambda words: calls.append(words) or 5
    monkeypatch.setitem(sys.modules, "pycomm.bench", ModuleType("pycomm.bench"))
    monkeypatch.setitem(sys.modules, "pycomm.bench.cli", module)
    return calls


class TestBench:
    def test_starts_ranks_of_its_own(self, launched, bench):
        assert main(["bench", "-v", "--ranks", "3", "all_reduce", "-b", "8"]) == 17
        argv = [sys.executable, "-P", "-m", "pycomm.bench", "all_reduce", "-b", "8"]
        assert launched == [(argv, 3, True, None)]
        assert bench == []

    def test_one_rank_for_each_core_by_default(self, launched, bench, monkeypatch):
        monkeypatch.setattr(cli, "usable_cores", lambda: 6)
        main(["bench", "barrier"])
        assert launched[0][1] == 6

    def test_runs_in_the_job_that_is_there(self, launched, bench, monkeypatch):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert main(["bench", "all_reduce", "-b", "8"]) == 5
        assert bench == [["all_reduce", "-b", "8"]]
        assert launched == []

    def test_ranks_of_a_running_job_cannot_be_chosen(self, launched, bench, monkeypatch, capsys):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert main(["bench", "--ranks", "2", "all_reduce"]) == 2
        assert "started already" in capsys.readouterr().err
        assert bench == launched == []

    @pytest.mark.parametrize("words", [[], ["--help"], ["all_reduce", "-h"]])
    def test_help_starts_no_ranks(self, launched, bench, capsys, words):
        assert main(["bench", *words]) == 5
        assert bench == [["--help"]]
        assert "--ranks" in capsys.readouterr().out
        assert launched == []


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pycomm {pycomm.__version__}\n"


@pytest.mark.parametrize("words", [[], ["no-such-command"]])
def test_without_a_command_the_usage_is_shown(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: pycomm" in capsys.readouterr().err


def test_python_m_pycomm_info_ends_well():
    answer = subprocess.run(
        [sys.executable, "-m", "pycomm", "info"], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    labels = [line[:12].strip() for line in answer.stdout.splitlines()]
    assert {"pycomm", "Python", "NumKong", "MPI", "CUDA driver", "NCCL", "host"} <= set(labels)
