"""Runs pytest in one process of a job that `_run_tests.py` started, and keeps a record for it.

``python scripts/_rank.py FOLDER [pytest arguments]``, on every rank. Into FOLDER go, K being the
rank: ``K.now`` (process, moment, and what it is doing), ``K.json`` (outcomes), ``K.stack`` (its
stack, written on SIGUSR1) and, except for rank 0, ``K.out`` (what it prints).

The exit code is 0 also when tests fail, since mpirun would end the other ranks: the record tells.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pycomm.bootstrap.detect import detect

__all__ = ["Recorder", "main"]

# The worst of the phases of one test (set-up, call, tear-down) is its outcome.
SEVERITY = {"passed": 0, "skipped": 1, "failed": 2}


class Recorder:
    """A pytest plugin that writes down what this rank does and how its tests end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.outcomes: dict[str, str] = {}

    def say(self, what: str) -> None:
        """Write down what this rank is doing since now."""
        record = {"pid": os.getpid(), "moment": time.monotonic(), "what": what}
        self.write("now", record)

    def write(self, kind: str, record: object) -> None:
        """Write one file; a reader sees the old one or the new one."""
        half = self.folder / f"{self.rank}.{kind}.half"
        half.write_text(json.dumps(record))
        half.replace(self.folder / f"{self.rank}.{kind}")

    def note(self, nodeid: str, outcome: str) -> None:
        """Keep the worst outcome of a test."""
        known = self.outcomes.get(nodeid, "passed")
        self.outcomes[nodeid] = max(known, outcome, key=SEVERITY.__getitem__)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep pytest-mpi from printing what it knows of MPI at the end: 10 lines a run, a NUL too.

        `pycomm info` says it better.
        """
        for plugin in session.config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which test begins."""
        self.say(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of one phase."""
        self.note(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected, or skips itself, as one test."""
        if report.outcome != "passed":
            self.note(report.nodeid, report.outcome)

    def pytest_unconfigure(self) -> None:
        """Say that the tests are over."""
        self.say("the end, after the tests")


def main(argv: list[str]) -> int:
    """Run pytest with a record in the folder `argv[0]`."""
    folder = Path(argv[0])
    around = detect(os.environ)
    rank = 0 if around is None else around.rank
    if rank > 0:
        # One rank's progress is enough on the terminal; the others are shown when they fail.
        output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    recorder = Recorder(folder, rank)
    stack = (folder / f"{rank}.stack").open("w")  # open as long as a signal may come
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    recorder.say("the beginning, before the tests")
    # Ranks share a disk: no common cache, and a folder for temporary files each.
    own = ["-p", "no:cacheprovider", f"--basetemp={folder / f'{rank}.tmp'}"]
    code = pytest.main([*own, *argv[1:]], plugins=[recorder])
    sys.stdout.flush()
    recorder.write("json", {"code": int(code), "outcomes": recorder.outcomes})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
