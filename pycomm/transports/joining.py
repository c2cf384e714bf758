"""How NCCL communicators are made: from a unique id, or out of one that is there."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycomm.bindings.nccl import nccl
from pycomm.bindings.nccl_types import (
    NCCL_SHRINK_ABORT,
    NCCL_SPLIT_NOCOLOR,
    NCCL_UNIQUE_ID_BYTES,
    config,
    ncclUniqueId,
)
from pycomm.deadline import Deadline
from pycomm.devices import Device, relax
from pycomm.errors import ArgumentTypeError, ArgumentValueError, NCCLError
from pycomm.transports.nccl import IN_PROGRESS, SUCCESS, NCCLComm, late, state_of

__all__ = ["Making", "begin", "create", "shrink", "split", "unique_id"]

_PAUSE = 1e-4  # seconds between looks at a communicator in the making


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
        if code not in (SUCCESS, IN_PROGRESS):
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
            code = state_of(address)
            if code == IN_PROGRESS:
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
                    raise late(self.comm, self._function, deadline)
                time.sleep(_PAUSE)
        except BaseException:
            self.abandon()
            raise
        return self.comm

    def abandon(self) -> None:
        """Give it up; once is enough."""
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.handle = self._handle.value or 0
            comm.abort()


class _Blocking(Making):
    """A communicator in the making by NCCL before 2.14, which returns once all ranks have come."""

    def __init__(self, token: ncclUniqueId, comm: NCCLComm) -> None:
        self.comm = comm
        self._function, self._parent, self._nothing = "ncclCommInitRank", None, False
        self._handle = ctypes.c_void_p()
        self._code = IN_PROGRESS
        arguments = (ctypes.byref(self._handle), comm.size, token, comm.rank)

        def run() -> None:
            relax()
            with comm.device.entered():
                self._code = nccl.ncclCommInitRank(*arguments)

        # Nothing can end it if they do not come: it is left behind, and the process goes on.
        threading.Thread(target=run, name=self._function, daemon=True).start()

    def test(self) -> bool:
        """Return whether it is made."""
        if self._code == IN_PROGRESS:
            return False
        if self._code:
            raise nccl.error(self._code, self._function)
        return super().test()

    def abandon(self) -> None:
        """Give it up, if it is there."""
        if self._code == SUCCESS:
            super().abandon()


def create(
    token: bytes, rank: int, size: int, device: Device, deadline: Deadline, name: str
) -> NCCLComm:
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
    return begin(token, rank, size, device, name).wait(deadline)


def begin(token: bytes, rank: int, size: int, device: Device, name: str) -> Making:
    """Begin what `create` does, without waiting."""
    if not isinstance(token, bytes | bytearray | memoryview):
        raise ArgumentTypeError(f"a unique id is bytes, not {type(token).__name__}")
    raw = bytes(token)
    if len(raw) != NCCL_UNIQUE_ID_BYTES:
        raise ArgumentValueError(f"a unique id has {NCCL_UNIQUE_ID_BYTES} bytes, not {len(raw)}")
    made = ncclUniqueId.from_buffer_copy(raw)
    if not nccl.has("ncclCommInitRankConfig"):
        return _Blocking(made, NCCLComm(0, rank, size, device))
    settings = _settings(name)

    def start(handle: Any) -> int:
        init = nccl.ncclCommInitRankConfig
        return int(init(handle, size, made, rank, ctypes.byref(settings)))

    return Making(start, "ncclCommInitRankConfig", NCCLComm(0, rank, size, device))


def split(comm: NCCLComm, color: int | None, key: int, rank: int, size: int, name: str) -> Making:
    """Begin making that of the ranks with equal `color`; collective over all ranks.

    Without a color nothing is made: its `comm` is None in the end.
    """
    settings = _settings(name)
    number = NCCL_SPLIT_NOCOLOR if color is None else color

    def start(handle: Any) -> int:
        return int(nccl.ncclCommSplit(comm.handle, number, key, handle, ctypes.byref(settings)))

    made = NCCLComm(0, rank, size, comm.device)
    return Making(start, "ncclCommSplit", made, comm, nothing=color is None)


def shrink(comm: NCCLComm, exclude: Sequence[int], rank: int, size: int, name: str) -> Making:
    """Begin making that of all ranks but `exclude`; collective over those only.

    What was under way is given up.

    Raises
    ------
    UnsupportedError
        If NCCL is older than 2.27.
    """
    settings = _settings(name)
    listed = (ctypes.c_int * len(exclude))(*exclude)
    function = nccl.ncclCommShrink

    def start(handle: Any) -> int:
        settled = ctypes.byref(settings)
        return int(function(comm.handle, listed, len(exclude), handle, settled, NCCL_SHRINK_ABORT))

    return Making(start, "ncclCommShrink", NCCLComm(0, rank, size, comm.device), comm)


def _settings(name: str) -> Any:
    return config(blocking=0, commName=name.encode())
