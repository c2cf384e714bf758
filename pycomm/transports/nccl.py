"""NCCL communicators: made, watched, split, shrunk and given up, each under a deadline.

From NCCL 2.14 on all of them are non-blocking: NCCL returns at once, and says later whether it
worked. So nothing here waits inside NCCL, where no deadline is seen; what does wait there, whatever
it was told, does so in a thread of its own.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable

from pycomm.bindings.nccl import nccl
from pycomm.bindings.nccl_types import (
    NCCL_WIN_COLL_SYMMETRIC,
    ncclScalarResidence_t,
)
from pycomm.deadline import Deadline
from pycomm.devices import Device, enter, leave, relax
from pycomm.errors import (
    CommError,
    NCCLTimeoutError,
)

__all__ = ["IN_PROGRESS", "SUCCESS", "NCCLComm", "late", "state_of"]

_log = logging.getLogger("pycomm")

#: What NCCL says of a call that it has taken over, or is about to.
SUCCESS, IN_PROGRESS = 0, 7
#: Seconds that NCCL gets to give a communicator up before it is left to a thread of its own.
_ABORT = 5.0
_HELD = 1.0  # and a thread that is inside NCCL to come out
_PAUSE = 1e-4  # seconds between looks at a communicator that is busy
_WINDOWS_SINCE = "ncclCommWindowRegister"


class NCCLComm:
    """One rank's end of a NCCL communicator.

    Attributes
    ----------
    handle : int
        The ``ncclComm_t``, for other libraries; 0 once it is closed.
    rank, size : int
        The rank in it, and the number of ranks.
    device : Device
        Its device.
    error : CommError or None
        What it failed with; only `shrink` and `abort` are possible after that.
    """

    def __init__(self, handle: int, rank: int, size: int, device: Device) -> None:
        self.handle, self.rank, self.size, self.device = handle, rank, size, device
        self.error: CommError | None = None
        #: How deep its thread is inside NCCL with it. No lock: whoever comes sets this and then
        #: looks for an error, whoever ends it sets the error and then looks at this; so one of
        #: them sees the other.
        self.busy = 0
        self.thread = 0
        self._memory: list[tuple[int, int]] = []  # (pointer, window)

    # ------------------------------------------------------------------------------ watching

    def state(self) -> int:
        """Return the code of what the communicator has come to: 0, 7 while it is busy, or worse."""
        return state_of(self.handle)

    def look(self) -> CommError | None:
        """Return what it has failed with so far, also if nobody has noticed yet."""
        if self.error is None and self.handle:
            code = state_of(self.handle)
            if code not in (SUCCESS, IN_PROGRESS):
                self.fail(nccl.error(code, "ncclCommGetAsyncError", self.handle))
        return self.error

    def settle(self, code: int, function: str, deadline: Deadline) -> None:
        """Wait until a call that returned `code` has been taken over by NCCL.

        Raises
        ------
        NCCLError
            If it was refused.
        NCCLTimeoutError
            If that takes longer than the deadline.
        """
        if code == SUCCESS:
            return
        if code != IN_PROGRESS:
            raise nccl.error(code, function, self.handle)
        while (code := state_of(self.handle)) == IN_PROGRESS:
            if deadline.passed:
                raise late(self, function, deadline)
            time.sleep(_PAUSE)
        if code:
            raise nccl.error(code, function, self.handle)

    # ------------------------------------------------------------------------------ things it has

    def begin_factor(self, dtype: int, scalar: bytes) -> int:
        """Return a new operation of NCCL's that multiplies by a scalar of a dtype, then sums."""
        made = ctypes.c_int()
        code = nccl.ncclRedOpCreatePreMulSum(
            ctypes.byref(made), ctypes.create_string_buffer(scalar, len(scalar)), dtype,
            int(ncclScalarResidence_t.ncclScalarHostImmediate), self.handle,
        )  # fmt: skip
        if code:
            raise nccl.error(code, "ncclRedOpCreatePreMulSum", self.handle)
        return made.value

    def end_factor(self, operation: int) -> None:
        """Free such an operation, once the call that uses it has returned."""
        if self.handle:
            nccl.ncclRedOpDestroy(operation, self.handle)

    def allocate(self, nbytes: int, deadline: Deadline) -> int:
        """Return memory that NCCL reaches without copies; collective, with equal `nbytes`."""
        pointer, window = ctypes.c_void_p(), ctypes.c_void_p()
        windows = nccl.has(_WINDOWS_SINCE)
        function = _WINDOWS_SINCE if windows else "ncclCommRegister"
        with self.device.entered():
            nccl.check(nccl.ncclMemAlloc(ctypes.byref(pointer), nbytes), "ncclMemAlloc")

        def register() -> None:
            options = (NCCL_WIN_COLL_SYMMETRIC,) if windows else ()
            start = getattr(nccl, function)
            code = start(self.handle, pointer, nbytes, ctypes.byref(window), *options)
            self.settle(code, function, deadline)

        # Freed with the communicator, also where it cannot be registered.
        place = len(self._memory)
        self._memory.append((pointer.value or 0, 0))
        # Also on a communicator that does not block, NCCL waits here until all ranks have come.
        self._bounded(register, deadline.left, function)
        self._memory[place] = pointer.value or 0, window.value or 0
        return pointer.value or 0

    # ------------------------------------------------------------------------------ its end

    def close(self, deadline: Deadline) -> None:
        """Finish what was given to it and free it; collective. Given up if that takes too long."""
        if not self.handle:
            return
        try:
            self._bounded(self._finalize, deadline.left, "ncclCommFinalize")
        except BaseException:
            self.abort()
            raise
        self.handle = 0

    def _free(self) -> None:
        """Free the memory that was registered; as long as nobody has given up waiting for it."""
        while self._memory and self.handle:
            pointer, window = self._memory.pop()
            if window and nccl.has(_WINDOWS_SINCE):
                nccl.ncclCommWindowDeregister(self.handle, window)
            elif window:
                nccl.ncclCommDeregister(self.handle, window)
            nccl.ncclMemFree(pointer)

    def _finalize(self) -> None:
        handle = self.handle
        self._free()
        if not self.handle:
            return
        code = nccl.ncclCommFinalize(handle) if nccl.has("ncclCommFinalize") else SUCCESS
        while code == IN_PROGRESS and self.handle:
            time.sleep(_PAUSE)
            code = state_of(handle)
        if not self.handle:
            return
        if code:
            raise nccl.error(code, "ncclCommFinalize", handle)
        nccl.check(nccl.ncclCommDestroy(handle), "ncclCommDestroy")

    def inside(self) -> "_Inside":
        """Return a scope in which its thread may call NCCL with it, in its device's context.

        Entering raises what it has failed with.
        """
        return _Inside(self)

    def fail(self, error: CommError) -> None:
        """End all that is under way because of `error`, which the next call is to raise.

        Where NCCL can revoke a communicator (2.28.7), it can still be shrunk after that; elsewhere
        it is given up.
        """
        self.error = error
        # A thread that hangs inside NCCL has to be freed, not waited for.
        moment = time.monotonic() + (0 if threading.get_ident() == self.thread else _HELD)
        while self.busy and time.monotonic() < moment:
            time.sleep(_PAUSE)
        if not self._revoked():
            self.abort()

    def _revoked(self) -> bool:
        if not self.handle or not nccl.has("ncclCommRevoke"):
            return False
        handle = self.handle
        code = nccl.ncclCommRevoke(handle, 0)
        moment = time.monotonic() + _ABORT
        while code == IN_PROGRESS and time.monotonic() < moment:
            time.sleep(_PAUSE)
            code = state_of(handle)
        return bool(code == SUCCESS)

    def abort(self) -> None:
        """Give it up, and with it all that is under way; at most a few seconds, then elsewhere."""
        handle, self.handle = self.handle, 0
        if not handle:
            return
        memory, self._memory = self._memory, []

        def give_up() -> None:
            with self.device.entered():
                nccl.ncclCommAbort(handle)
                for pointer, _ in memory:
                    nccl.ncclMemFree(pointer)

        try:
            self._bounded(give_up, _ABORT, "ncclCommAbort")
        except CommError as error:
            _log.warning("%s; it goes on by itself", error)

    def _bounded(self, function: Callable[[], None], seconds: float, name: str) -> None:
        """Run a function of NCCL that may block for ever, but wait only so long for it."""
        failed: list[BaseException] = []

        def run() -> None:
            relax()
            try:
                with self.device.entered():
                    function()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        thread.join(max(seconds, 0.01))
        if thread.is_alive():
            error = NCCLTimeoutError(
                f"{name} on rank {self.rank} of {self.size}: no end within {seconds:g} s",
                rank=self.rank,
            )
            error.timeout = seconds
            raise error
        if failed:
            raise failed[0]


class _Inside:
    """The scope of `NCCLComm.inside`."""

    __slots__ = ("_comm",)

    def __init__(self, comm: NCCLComm) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        comm = self._comm
        comm.thread = threading.get_ident()
        comm.busy += 1
        try:
            if comm.error is not None:
                raise comm.error
            if not comm.handle:
                raise CommError("the communicator was aborted", rank=comm.rank)
            enter(comm.device.context)
        except BaseException:
            comm.busy -= 1
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._comm.busy -= 1
        leave()


def state_of(handle: int) -> int:
    """Return the code of what a communicator has come to."""
    found = ctypes.c_int()
    code: int = nccl.ncclCommGetAsyncError(handle, ctypes.byref(found))
    return code or found.value


def late(comm: NCCLComm, function: str, deadline: Deadline) -> NCCLTimeoutError:
    """Return the error of a function of NCCL's that has not ended in time."""
    error = NCCLTimeoutError(
        f"{function} on rank {comm.rank} of {comm.size}: no end within {deadline.timeout:g} s: not "
        "all ranks have come, or they cannot reach each other (NCCL_DEBUG=INFO tells more, "
        "NCCL_SOCKET_IFNAME chooses the network)",
        rank=comm.rank,
    )
    error.timeout = deadline.timeout
    return error
