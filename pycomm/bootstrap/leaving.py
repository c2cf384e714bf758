"""What happens when a process ends with open or broken communicators.

An uncaught exception outside of a ``with`` block would leave the other ranks waiting for their
deadline; they are told instead. A broken communicator would let MPI_Finalize wait for peers that
never come; that wait has a deadline too.
"""

import atexit
import os
import sys
import weakref
from typing import Protocol

__all__ = ["look_after_mpi", "watch"]

#: Seconds that MPI gets to shut down after a communicator was given up.
_SHUT_DOWN = 5.0


class Leaver(Protocol):
    """A communicator."""

    def leave(self, reason: BaseException) -> None:
        """Tell the peers, if it is open, and abort."""

    def lose(self, why: str) -> None:
        """Refuse all further use, without a word to anybody."""


_watched: "weakref.WeakSet[Leaver]" = weakref.WeakSet()


def watch(communicator: Leaver) -> None:
    """Look after `communicator` when the interpreter ends."""
    look_after_mpi()
    _watched.add(communicator)


def look_after_mpi() -> None:
    """Bound the time that MPI takes to shut down when the interpreter ends."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _after_fork() -> None:
    """Lose, in a child process, all communicators: they belong to the parent."""
    for communicator in list(_watched):
        communicator.lose("belongs to the process that this one was forked from")
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    # Set by the interpreter when it prints an uncaught exception (last_exc from Python 3.12 on).
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        for communicator in list(_watched):
            communicator.leave(error)
    mpi = sys.modules.get("pycomm.transports.mpi")
    if mpi is not None:
        mpi.shut_down(_SHUT_DOWN)
