"""What the documents show runs: the README's example, and the examples in docstrings."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pycomm import start

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [None, 3])
def test_the_example_of_the_readme(tmp_path: Path, ranks: int | None) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    script = tmp_path / "hello.py"
    script.write_text(code[1])
    if ranks is not None:
        pytest.importorskip("mpi4py", reason="needs MPI")
    launcher = [] if ranks is None else ["-m", "pycomm", "run", "-n", str(ranks)]
    ended = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stderr
    total = sum(range(ranks or 1))
    assert ended.stdout.startswith(f"[{total}. {total}. {total}. {total}.] [1. 1. 1.] ")
    assert "{'lr': 0.1}" in ended.stdout


@pytest.mark.parametrize("module", [start, sys.modules["pycomm.algorithms.simulate"]])
def test_the_examples_of_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried >= 3
    assert not failed
