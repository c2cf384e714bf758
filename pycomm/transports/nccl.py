"""NCCL communicators: made, watched, split, shrunk and given up, each under a deadline.

From NCCL 2.14 on all of them are non-blocking: NCCL returns at once, and says later whether it
worked. So nothing here waits inside NCCL, where no deadline is seen; what does wait there, whatever
it was told, does so in a thread of its own.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycomm.bindings.nccl import nccl
from pycomm.bindings.nccl_types import (
    NCCL_SHRINK_ABORT,
    NCCL_SPLIT_NOCOLOR,
    NCCL_UNIQUE_ID_BYTES,
    NCCL_WIN_COLL_SYMMETRIC,
    config,
    ncclScalarResidence_t,
    ncclUniqueId,
)
from pycomm.deadline import Deadline
from pycomm.devices import Device, enter, leave
from pycomm.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    NCCLError,
    NCCLTimeoutError,
)

__all__ = ["Making", "NCCLComm", "unique_id"]

_log = logging.getLogger("pycomm")

_SUCCESS, _IN_PROGRESS = 0, 7
#: Seconds that NCCL gets to give a communicator up before it is left to a thread of its own.
_ABORT = 5.0
_HELD = 1.0  # and a thread that is inside NCCL to come out
_PAUSE = 1e-4  # seconds between looks at a communicator that is busy
_WINDOWS_SINCE = "ncclCommWindowRegister"


def unique_id() -> bytes:
    """Return a new unique id: 128 bytes that all ranks of one new communicator need.

    Raises
    ------
    LibraryNotFoundError
        If there is no libnccl.
    NCCLError
        If it cannot make one; without a network interface, for instance.
    """
    made = ncclUniqueId()
    nccl.check(nccl.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
    return bytes(made)


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

    # ------------------------------------------------------------------------------ making

    @classmethod
    def create(
        cls, token: bytes, rank: int, size: int, device: Device, deadline: Deadline, name: str
    ) -> "NCCLComm":
        """Meet the other ranks and return this one's end; collective.

        Parameters
        ----------
        token : bytes
            What `unique_id` returned on one of them.
        rank, size, device
            This rank's place.
        deadline : Deadline
            Until when all have to come.
        name : str
            What the communicator is called in NCCL's log.

        Raises
        ------
        NCCLTimeoutError
            If not all come in time.
        NCCLError
            If NCCL cannot do it.
        """
        return cls.begin(token, rank, size, device, name).wait(deadline)

    @classmethod
    def begin(cls, token: bytes, rank: int, size: int, device: Device, name: str) -> "Making":
        """Begin what `create` does, without waiting."""
        if not isinstance(token, bytes | bytearray | memoryview):
            raise ArgumentTypeError(f"a unique id is bytes, not {type(token).__name__}")
        raw = bytes(token)
        if len(raw) != NCCL_UNIQUE_ID_BYTES:
            raise ArgumentValueError(
                f"a unique id has {NCCL_UNIQUE_ID_BYTES} bytes, not {len(raw)}"
            )
        made = ncclUniqueId.from_buffer_copy(raw)
        if not nccl.has("ncclCommInitRankConfig"):
            return _Blocking(made, cls(0, rank, size, device))
        settings = _settings(name)

        def start(handle: Any) -> int:
            init = nccl.ncclCommInitRankConfig
            return int(init(handle, size, made, rank, ctypes.byref(settings)))

        return Making(start, "ncclCommInitRankConfig", cls(0, rank, size, device))

    def split(self, color: int | None, key: int, rank: int, size: int, name: str) -> "Making":
        """Begin making that of the ranks with equal `color`; collective over all ranks.

        Without a color nothing is made: its `comm` is None in the end.
        """
        settings = _settings(name)
        number = NCCL_SPLIT_NOCOLOR if color is None else color

        def start(handle: Any) -> int:
            split = nccl.ncclCommSplit
            return int(split(self.handle, number, key, handle, ctypes.byref(settings)))

        made = NCCLComm(0, rank, size, self.device)
        return Making(start, "ncclCommSplit", made, self, nothing=color is None)

    def shrink(self, exclude: Sequence[int], rank: int, size: int, name: str) -> "Making":
        """Begin making that of all ranks but `exclude`; collective over those only.

        What was under way is given up.

        Raises
        ------
        UnsupportedError
            If NCCL is older than 2.27.
        """
        settings = _settings(name)
        listed = (ctypes.c_int * len(exclude))(*exclude)
        shrink = nccl.ncclCommShrink

        def start(handle: Any) -> int:
            settled = ctypes.byref(settings)
            return int(
                shrink(self.handle, listed, len(exclude), handle, settled, NCCL_SHRINK_ABORT)
            )

        return Making(start, "ncclCommShrink", NCCLComm(0, rank, size, self.device), self)

    # ------------------------------------------------------------------------------ watching

    def state(self) -> int:
        """Return the code of what the communicator has come to: 0, 7 while it is busy, or worse."""
        return _state(self.handle)

    def look(self) -> CommError | None:
        """Return what it has failed with so far, also if nobody has noticed yet."""
        if self.error is None and self.handle:
            code = _state(self.handle)
            if code not in (_SUCCESS, _IN_PROGRESS):
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
        if code == _SUCCESS:
            return
        if code != _IN_PROGRESS:
            raise nccl.error(code, function, self.handle)
        while (code := _state(self.handle)) == _IN_PROGRESS:
            if deadline.passed:
                raise _late(self, function, deadline)
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
            with self.device.entered():
                self._free()
                self._bounded(self._finalize, deadline.left, "ncclCommFinalize")
        except BaseException:
            self.abort()
            raise
        self.handle = 0

    def _free(self) -> None:
        """Free the memory that was registered."""
        for pointer, window in self._memory:
            if window and nccl.has(_WINDOWS_SINCE):
                nccl.ncclCommWindowDeregister(self.handle, window)
            elif window:
                nccl.ncclCommDeregister(self.handle, window)
            nccl.ncclMemFree(pointer)
        self._memory.clear()

    def _finalize(self) -> None:
        handle = self.handle
        code = nccl.ncclCommFinalize(handle) if nccl.has("ncclCommFinalize") else _SUCCESS
        while code == _IN_PROGRESS:
            time.sleep(_PAUSE)
            code = _state(handle)
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

        Where NCCL can revoke a communicator (2.29), it can still be shrunk after that; elsewhere it
        is given up.
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
        while code == _IN_PROGRESS and time.monotonic() < moment:
            time.sleep(_PAUSE)
            code = _state(handle)
        return bool(code == _SUCCESS)

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


class Making:
    """A communicator in the making: the `Pending` of what creates one.

    Attributes
    ----------
    comm : NCCLComm or None
        The new one, once `test` has returned True.
    """

    def __init__(
        self,
        start: Callable[[Any], int],
        function: str,
        comm: NCCLComm,
        parent: NCCLComm | None = None,
        *,
        nothing: bool = False,
    ) -> None:
        self.comm: NCCLComm | None = comm
        self._function, self._parent, self._nothing = function, parent, nothing
        # NCCL may write the address of what it makes at any time until it is made.
        self._handle = ctypes.c_void_p()
        with comm.device.entered():
            code = start(ctypes.byref(self._handle))
        if code not in (_SUCCESS, _IN_PROGRESS):
            error = nccl.error(code, function)
            self.abandon()
            raise error

    def test(self) -> bool:
        """Return whether it is made.

        Raises
        ------
        NCCLError
            If it cannot be made.
        """
        assert self.comm is not None
        parent = 0 if self._parent is None else self._parent.handle
        for address in filter(None, (parent, self._handle.value or 0)):
            code = _state(address)
            if code == _IN_PROGRESS:
                return False
            if code:
                raise nccl.error(code, self._function, address)
        self.comm.handle = self._handle.value or 0
        if self._nothing:
            self.comm = None
        elif not self.comm.handle:
            # Seen where ranks were given different ids.
            raise NCCLError(
                f"{self._function} reports success and gives no communicator: do all ranks pass "
                "the same unique id?",
                rank=self.comm.rank,
            )
        return True

    def wait(self, deadline: Deadline) -> NCCLComm:
        """Wait until it is made, and return it.

        Raises
        ------
        NCCLTimeoutError
            If not all ranks come in time.
        """
        assert self.comm is not None
        try:
            while not self.test():
                if deadline.passed:
                    raise _late(self.comm, self._function, deadline)
                time.sleep(_PAUSE)
        except BaseException:
            self.abandon()
            raise
        return self.comm

    def abandon(self) -> None:
        """Give it up."""
        if self.comm is not None:
            self.comm.handle = self._handle.value or 0
            self.comm.abort()


class _Blocking(Making):
    """A communicator in the making by NCCL before 2.14, which returns once all ranks have come."""

    def __init__(self, token: ncclUniqueId, comm: NCCLComm) -> None:
        self.comm = comm
        self._function, self._parent, self._nothing = "ncclCommInitRank", None, False
        self._handle = ctypes.c_void_p()
        self._code = _IN_PROGRESS
        arguments = (ctypes.byref(self._handle), comm.size, token, comm.rank)

        def run() -> None:
            with comm.device.entered():
                self._code = nccl.ncclCommInitRank(*arguments)

        # Nothing can end it if they do not come: it is left behind, and the process goes on.
        threading.Thread(target=run, name=self._function, daemon=True).start()

    def test(self) -> bool:
        """Return whether it is made."""
        if self._code == _IN_PROGRESS:
            return False
        if self._code:
            raise nccl.error(self._code, self._function)
        return super().test()

    def abandon(self) -> None:
        """Give it up, if it is there."""
        if self._code == _SUCCESS:
            super().abandon()


def _settings(name: str) -> Any:
    return config(blocking=0, commName=name.encode())


def _late(comm: NCCLComm, function: str, deadline: Deadline) -> NCCLTimeoutError:
    error = NCCLTimeoutError(
        f"{function} on rank {comm.rank} of {comm.size}: no end within {deadline.timeout:g} s: not "
        "all ranks have come, or they cannot reach each other (NCCL_DEBUG=INFO tells more, "
        "NCCL_SOCKET_IFNAME chooses the network)",
        rank=comm.rank,
    )
    error.timeout = deadline.timeout
    return error


def _state(handle: int) -> int:
    found = ctypes.c_int()
    code: int = nccl.ncclCommGetAsyncError(handle, ctypes.byref(found))
    return code or found.value
