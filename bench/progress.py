"""A progress bar on standard error, for people who watch a terminal."""

import importlib.util
import os
import sys
from typing import Any

__all__ = ["TERMINAL", "Progress"]

#: The environment variable by which a launcher says that standard error ends at a terminal.
TERMINAL = "PYCOMM_BENCH_TERMINAL"


class Progress:
    """A bar that is drawn between measurements only, so that it never disturbs one.

    Parameters
    ----------
    total : int
        Number of rows.
    shown : bool
        False on all ranks but one; the bar also stays away where standard error is no terminal.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar: Any = None
        # Under mpirun the ranks write to a pipe: `pycomm bench` says that a terminal is at its end.
        told = os.environ.get(TERMINAL) == "1"
        if not shown or not (told or sys.stderr.isatty()):
            return
        if importlib.util.find_spec("rich") is None:
            print(
                "pycomm.bench: for a progress bar: pip install 'pycomm-collectives[bench]'",
                file=sys.stderr,
            )
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(
            console=Console(stderr=True, force_terminal=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("measuring", total=total)

    def hide(self) -> None:
        """Take the bar away, for a line of output or at the end."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """Count one more row and show what comes next."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=what)
            self._bar.start()
            self._bar.refresh()
