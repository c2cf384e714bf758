"""What the kernel offers for child processes and Python does not."""

import ctypes
import signal

__all__ = ["end_with_parent"]

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent dies.

    To be called in the child, before its program starts. Not every system offers it; then the
    child simply lives on.
    """
    libc = ctypes.CDLL(None)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
        prctl.restype = ctypes.c_int
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
