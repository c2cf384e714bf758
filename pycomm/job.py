"""Running one command with all that it starts, and leaving none of it behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pycomm.bindings._process import end_with_parent

__all__ = ["kill_session", "noted_signals", "run_job"]

GRACE = 3.0  # seconds between asking a job to end and killing it: less than `timeout -k 5` gives


def run_job(line: Sequence[str], env: Mapping[str, str], timeout: float | None) -> int:
    """Run a command in a session of its own, pass signals on, and leave none of it behind.

    Returns
    -------
    int
        The exit code of the command, 128 plus the number of a signal that ended it or that was
        passed on to it, 124 if it was not done after `timeout` seconds.
    """
    with noted_signals() as received:
        # Its own session, so that everything started in it can be found and ended: launchers put
        # ranks into process groups of their own.
        child = subprocess.Popen(  # noqa: S603  # the command is what the user asked for
            list(line), env=dict(env), start_new_session=True, preexec_fn=end_with_parent
        )
        deadline = None if timeout is None else time.monotonic() + timeout
        kill_at = None
        code = None
        try:
            while child.poll() is None:
                now = time.monotonic()
                if received and kill_at is None:
                    code = 128 + received[0]
                    child.send_signal(received[0])
                    kill_at = now + GRACE
                elif deadline is not None and now >= deadline and kill_at is None:
                    code = 124
                    sys.stderr.write(f"pycomm run: not done after {timeout:g} s, ending it\n")
                    child.terminate()
                    kill_at = now + GRACE
                if kill_at is not None and now >= kill_at:
                    break
                try:
                    child.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.returncode != 0 or code is not None:
                kill_session(child.pid)
            child.wait()
    if code is not None:
        return code
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of ending this process."""
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the handler's shape
        received.append(signum)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored stays so: `nohup` relies on it.
    watched = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_session(session: int) -> None:
    """Kill every process of a session and wait until they are gone."""
    deadline = time.monotonic() + GRACE
    while living := _members(session):
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)


def _members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name, in brackets, may hold anything: fields are counted after it.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found
