"""What happens when a process ends with open or broken communicators.

An uncaught exception outside of a ``with`` block would leave the other ranks waiting for their
deadline; they are told instead. A broken communicator would let MPI_Finalize wait for peers that
never come; that wait has a deadline too.
"""

import atexit
import sys
import weakref
from typing import Protocol

__all__ = ["watch"]

#: Seconds that MPI gets to shut down after a communicator was given up.
_SHUT_DOWN = 5.0


class Leaver(Protocol):
    """A communicator."""

    def leave(self, reason: BaseException) -> None:
        """Tell the peers, if it is open, and abort."""


_watched: "weakref.WeakSet[Leaver]" = weakref.WeakSet()


def watch(communicator: Leaver) -> None:
    """Look after `communicator` when the interpreter ends."""
    if not _watched:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # last registered runs first: before mpi4py's own
    _watched.add(communicator)


def _at_exit() -> None:
    # Set by the interpreter when it prints an uncaught exception (last_exc from Python 3.12 on).
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        for communicator in list(_watched):
            communicator.leave(error)
    mpi = sys.modules.get("pycomm.transports.mpi")
    if mpi is not None:
        mpi.shut_down(_SHUT_DOWN)
