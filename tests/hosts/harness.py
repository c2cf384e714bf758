"""`scripts/hosts` as tests use it, and jobs on the hosts that it makes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Tool:
    """`scripts/hosts` for one folder of its own."""

    folder: Path
    path: str

    def start(self, *words: object, **keywords: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "hosts"), *map(str, words)],
            env=os.environ | {"PYCOMM_HOSTS": str(self.folder), "PATH": self.path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            **keywords,
        )

    def ask(self, *words: object) -> tuple[int, str]:
        """Run a command that ends by itself; return its exit code and what it printed."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            text, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"hosts {words} hangs")
        return process.returncode, text

    def do(self, *words: object) -> str:
        """Run a command that must succeed; return what it printed."""
        code, text = self.ask(*words)
        assert code == 0, f"hosts {words}: {text}"
        return text

    def left(self) -> list[int]:
        """Return the processes that hold hosts of this folder open."""
        mark = f"PYCOMM_HOSTS_HOLDER={self.folder}\0".encode()
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                if mark in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found


@dataclass(frozen=True)
class Hosts:
    """Some hosts that are up."""

    count: int
    tool: Tool

    def run(
        self,
        scenario: str,
        ranks: int,
        *options: str,
        limit: int = 30,
        beside: Callable[[Path], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run a scenario of rank.py on `ranks` ranks a host; return what each rank reports.

        Meanwhile ``beside(folder)`` runs in a thread, `folder` being the one the ranks write into.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            program = [sys.executable, Path(__file__).with_name("rank.py"), scenario, name, limit]
            with (folder / "mpirun.out").open("w") as output:
                process = self.tool.start(
                    "run", "-n", ranks, *options, "--", *program, stdout=output, stderr=output
                )
                helper = threading.Thread(target=beside or (lambda _: None), args=(folder,))
                helper.start()
                try:
                    code = process.wait(limit + 2)  # ranks write their stacks after `limit`
                except subprocess.TimeoutExpired:
                    code = -1
                finally:
                    self.end(process)
                    helper.join()
            if code != 0:
                outputs = sorted(folder.glob("*.out"))
                texts = [f"---- {path.stem} ----\n{path.read_text()}" for path in outputs]
                how = "hangs" if code < 0 else f"ended with {code}"
                pytest.fail("\n".join([f"{scenario} {how}", *texts]), pytrace=False)
            size = ranks * self.count
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]

    def end(self, process: subprocess.Popen[str]) -> None:
        """End mpirun if it still runs, and whatever is left of it on the hosts."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for index in range(1, self.count + 1):
                self.tool.ask("exec", index, "--", "sh", "-c", "kill -KILL -1")

    @contextmanager
    def shaped(self, rate: str, delay: str) -> Iterator[None]:
        """Give the links a rate and a delay for a while."""
        self.tool.do("shape", rate, delay)
        try:
            yield
        finally:
            self.tool.do("shape", "none", "0")
