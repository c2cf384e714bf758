"""How the processes of a step meet and report: ``PROGRAM STEP RANK SIZE FOLDER``."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pycomm
from pycomm import Communicator

DOUBLES = "PYCOMM_GPU_DOUBLES" in os.environ


class SkipStep(Exception):
    """There is nothing to check here, for a reason."""


class Meeting:
    """One rank's place in a step.

    Attributes
    ----------
    rank, size : int
        The rank, and how many there are.
    folder : Path
        A folder that all of them see.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder

    def share(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return what `make` returned on rank 0."""
        file = self.folder / name
        if self.rank == 0:
            partial = file.with_suffix(".tmp")
            partial.write_bytes(make())
            partial.rename(file)
        self.await_file(name)
        return file.read_bytes()

    def await_file(self, name: str, timeout: float = 60.0) -> None:
        """Wait until somebody has written a file."""
        moment = time.monotonic() + timeout
        while not (self.folder / name).exists():
            if time.monotonic() > moment:
                raise TimeoutError(f"nobody has written {name}")
            time.sleep(0.005)

    def join(self, name: str = "id", timeout: float = 40.0) -> Communicator:
        """Return the communicator of all ranks, all of them on device 0."""
        token = self.share(name, pycomm.get_unique_id)
        return Communicator.from_unique_id(token, self.rank, self.size, device=0, timeout=timeout)


def main(steps: Mapping[str, Callable[[Meeting], Any]]) -> int:
    """Run this rank's part of a step; what it returns, or why it failed, goes to a file."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    step, rank, size, folder = sys.argv[1:]
    meeting = Meeting(int(rank), int(size), Path(folder))
    code = 0
    try:
        told = steps[step](meeting)
    except SkipStep as reason:
        told = {"skip": str(reason)}
        print(f"skipped: {reason}")
    except BaseException as error:
        traceback.print_exc()
        told, code = {"error": f"{type(error).__name__}: {error}"}, 1
    (meeting.folder / f"{rank}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # another rank may hang, and MPI or CUDA wait for it at the end
    return 0
