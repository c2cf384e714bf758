"""Runs the tests: plain ones in one process, those of MPI and of devices on several ranks.

``python scripts/_run_tests.py [--ranks 1,2,3,4] [--plain PATHS] [--alone PATHS] [--mpi PATHS]
[--device PATHS] [pytest arguments]``

Tests of devices, and of the doubles, have processes of their own: what stands in for a GPU is
loaded there, and nothing else must see it. What needs one rank only runs with one rank only.

Every job is watched. A rank that stays in one test for longer than PYCOMM_TEST_LIMIT seconds
(default 90), or a job that takes longer than PYCOMM_TEST_JOB_LIMIT (default 400), is a failure: all
ranks are asked for their stacks, which are printed, and the job is ended. A rank that fails has its
output printed. A test counts once for a job: failed if it failed on any rank. The last line is the
count over all jobs.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["TestRun", "main"]

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code when it collected nothing


@dataclass
class TestRun:
    """One run of pytest on `ranks` ranks; 0 means one process without MPI."""

    title: str
    ranks: int
    arguments: list[str]
    limit: float
    job_limit: float
    may_be_empty: bool
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def processes(self) -> int:
        """How many processes run pytest."""
        return max(1, self.ranks)

    def run(self) -> None:
        """Run it, show what went wrong, and fill `failures` and `counts`."""
        begin = time.monotonic()
        say(f"==== {self.title} ====")
        with tempfile.TemporaryDirectory(prefix="pycomm-tests-") as name:
            folder = Path(name)
            line = [str(ROOT / "scripts" / "_rank.py"), name, *self.arguments]
            if self.ranks:
                line = ["-m", "pycomm", "run", "-n", str(self.ranks), *line]
            environ = os.environ | {"PYCOMM_TEST_FOLDER": name}
            process = subprocess.Popen(  # noqa: S603  # this interpreter
                [sys.executable, *line], stdin=subprocess.DEVNULL, env=environ
            )
            try:
                self.watch(process, folder)
            finally:
                end(process)
            self.judge(process.returncode, folder)
        seconds = time.monotonic() - begin
        say(f"{self.title}: {summary(self.counts)} in {seconds:.0f} s")

    def watch(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Wait for the end, or for a rank that hangs."""
        begin = time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            idle: dict[str, Any] = {"moment": begin, "what": "its start"}
            states = [read(folder / f"{rank}.now") or idle for rank in range(self.processes)]
            latest = max(state["moment"] for state in states)
            for rank, state in enumerate(states):
                # A rank that is done may wait for the others: all of them leave MPI together.
                done = (folder / f"{rank}.json").exists()
                if now - (latest if done else state["moment"]) > self.limit:
                    self.failures.append(
                        f"rank {rank} hangs in {state['what']}: over the limit of {self.limit:g} s"
                    )
            if not self.failures and now - begin > self.job_limit:
                self.failures.append(f"the job took longer than {self.job_limit:g} s")
            if self.failures:
                self.show_stacks(folder)
                return

    def show_stacks(self, folder: Path) -> None:
        """Ask every rank for its stack and print them all."""
        for rank in range(self.processes):
            if state := read(folder / f"{rank}.now"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state["pid"], signal.SIGUSR1)
        time.sleep(1.0)  # to write them takes a moment on a busy machine
        for failure in self.failures:
            say(failure)
        for rank in range(self.processes):
            state = read(folder / f"{rank}.now") or {"what": "its start"}
            stack = folder / f"{rank}.stack"
            text = stack.read_text(errors="replace") if stack.exists() else ""
            say(f"---- stack of rank {rank} of {self.processes}, in {state['what']} ----")
            say(text or "no stack: the process had not begun or had ended")

    def judge(self, code: int, folder: Path) -> None:
        """Count the outcomes of all ranks and show the output of those that failed."""
        hung = bool(self.failures)
        outcomes: dict[str, set[str]] = {}
        for rank in range(self.processes):
            report = read(folder / f"{rank}.json")
            failed = []
            if report is None:
                state = read(folder / f"{rank}.now") or {"what": "its start"}
                failed.append(f"did not finish {state['what']}")
            else:
                for nodeid, outcome in report["outcomes"].items():
                    outcomes.setdefault(nodeid, set()).add(outcome)
                    if outcome == "failed":
                        failed.append(f"failed {nodeid}")
                fine = (0, NO_TESTS) if self.may_be_empty else (0,)
                if not failed and report["code"] not in fine:
                    failed.append(f"ended with pytest's exit code {report['code']}")
            output = folder / f"{rank}.out"
            if failed and output.exists():
                say(f"---- output of rank {rank} of {self.processes} ----")
                say(output.read_text(errors="replace").rstrip())
                say(f"---- end of the output of rank {rank} ----")
            if report is not None or not hung:  # that a job ended by us did not finish is no news
                self.failures += [f"rank {rank} {text}" for text in failed]
        for seen in outcomes.values():
            # Skipped on one rank and passed on another: the test did run.
            worst = next(name for name in ("failed", "passed", "skipped") if name in seen)
            self.counts[worst] += 1
        if code != 0 and not self.failures:
            self.failures.append(f"the job ended with exit code {code} after its tests")
        if self.failures and not self.counts["failed"]:
            self.counts["failed"] = 1  # no test is to blame: the job itself counts as one


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job that is still running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read(path: Path) -> dict[str, Any] | None:
    """Return a record that a rank wrote, None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def say(text: str) -> None:
    """Print, in order with what the jobs print."""
    print(text, flush=True)  # noqa: T201  # this is a command line


def summary(counts: Counter[str]) -> str:
    """Return the line that counts tests."""
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))


def plain_folders() -> list[str]:
    """Return the folders that pytest runs by itself, all but those of MPI."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(settings["tool"]["pytest"]["ini_options"]["testpaths"])


def split_paths(words: list[str], folders: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Split pytest's arguments: paths of plain tests, those in each of `folders`, and a rest."""
    # `-k bench` is no path although there is a folder of that name: a path has a separator.
    paths = [word for word in words if "/" in word and Path(word.partition("::")[0]).exists()]
    rest = [word for word in words if word not in paths]
    found = []
    for names in folders:
        places = [Path(name).resolve() for name in names]
        found.append(
            [
                path
                for path in paths
                if any(Path(path.partition("::")[0]).resolve().is_relative_to(p) for p in places)
            ]
        )
    plain = [path for path in paths if not any(path in inside for inside in found)]
    return [plain, *found], rest


def main(argv: list[str]) -> int:
    """Run all jobs; 0 if every test passed and there was one."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--plain", default=",".join(plain_folders()))
    parser.add_argument("--mpi", default="tests/mpi")
    parser.add_argument("--device", default="tests/device")
    parser.add_argument("--alone", default="tests/doubles")
    options, words = parser.parse_known_args(argv)
    plain = [path for path in options.plain.split(",") if path]
    mpi = [path for path in options.mpi.split(",") if path]
    device = [path for path in options.device.split(",") if path]
    alone = [path for path in options.alone.split(",") if path]
    chosen, rest = split_paths(words, [mpi, device, alone])
    if any(chosen):
        plain, mpi, device, alone = chosen
    limit = float(os.environ.get("PYCOMM_TEST_LIMIT", "90"))
    job_limit = float(os.environ.get("PYCOMM_TEST_JOB_LIMIT", "400"))

    # What is selected by hand may lie in one job only.
    limits = (limit, job_limit, bool(rest))
    # mpirun gives its ranks a terminal of their own, whatever ours is.
    rest = ["-q", f"--color={'yes' if sys.stdout.isatty() else 'no'}", *rest]
    jobs = []
    if plain:
        jobs.append(TestRun("plain tests", 0, [*plain, *rest], *limits))
    if alone:
        jobs.append(TestRun("tests of the doubles", 0, [*alone, *rest], *limits))
    if mpi:
        for ranks in (int(word) for word in options.ranks.split(",")):
            title = f"MPI tests on {ranks} rank{'s' if ranks > 1 else ''}"
            jobs.append(TestRun(title, ranks, ["--with-mpi", *mpi, *rest], *limits))
    if device:
        for ranks in (int(word) for word in options.ranks.split(",")):
            title = f"device tests on {ranks} rank{'s' if ranks > 1 else ''}"
            chosen_by = ["--with-mpi", *["-m", "mpi"] * (ranks > 1)]
            jobs.append(TestRun(title, ranks, [*chosen_by, *device, *rest], *limits))
    # As Ctrl-C does: an exception, so that the job of the moment is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for job in jobs:
        job.run()

    counts: Counter[str] = sum((job.counts for job in jobs), Counter())
    for job in jobs:
        for failure in job.failures:
            say(f"{job.title}: {failure}")
    say(summary(counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
