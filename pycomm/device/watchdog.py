"""What looks after device operations, which nobody waits for: deadlines, and errors of NCCL.

A device operation is given to a stream, and the call returns. If a peer never comes, the stream
stands still, and so does the program at its next synchronisation. So a thread watches: it looks at
an event behind each operation, and at what NCCL says about the communicator. When a deadline
passes, or NCCL reports an error, it ends what is under way, which lets the stream go on, and the
next call raises the error.
"""

import atexit
import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import CUresult
from pycomm.bindings.nccl import nccl
from pycomm.devices import relax
from pycomm.errors import CommError, NCCLTimeoutError
from pycomm.streams import Event
from pycomm.transports.nccl import IN_PROGRESS, SUCCESS, NCCLComm

__all__ = ["Mark", "Watch"]

_log = logging.getLogger("pycomm")

_LOOK_EVERY = 0.05  # seconds; deadlines may be that much late
_FINE = (SUCCESS, IN_PROGRESS)


class Mark:
    """An event behind some operations of one stream.

    It is moved behind each further operation, until the watching thread takes it: the earlier ones
    are done when the later ones are.

    Attributes
    ----------
    stream, timeout : int, float
        Whose operations it marks, and the seconds that they may take.
    prepared : object
        The event's handle as an argument that needs no conversion.
    sequence, last : int or None
        The numbers of the first and of the last of them.
    done : bool
        Whether it marks nothing any more.
    """

    __slots__ = (
        "_event", "done", "handle", "keep", "last", "moment", "operation", "prepared", "sequence",
        "stream", "timeout",
    )  # fmt: skip
    stream: int
    timeout: float
    moment: float
    operation: str
    sequence: int | None
    last: int | None

    def __init__(self, event: Event) -> None:
        self._event = event
        self.handle = event.handle
        self.prepared = ctypes.c_void_p.from_param(event.handle)
        self.done = False
        self.keep: dict[int, Any] = {}  # by identity: one array may be given often


class Watch:
    """Watches the operations of one communicator.

    Attributes
    ----------
    current : Mark or None
        The mark that the next operation moves, if it goes to the same stream.
    """

    def __init__(self, comm: NCCLComm, label: str) -> None:
        self.comm = comm
        self.label = label
        self._marks: deque[Mark] = deque()
        self._free: list[Mark] = []
        self.current: Mark | None = None
        self._looking = threading.Lock()
        self._stopped = False
        with _lock:
            _watches.add(self)
        _ensure_thread()

    def record(
        self,
        stream: int,
        operation: str,
        sequence: int | None,
        timeout: float,
        keep: Iterable[Any] = (),
    ) -> None:
        """Watch what has just been given to `stream`; its context must be the current one.

        Parameters
        ----------
        stream : int
            A handle.
        operation, sequence : str, int
            What it was.
        timeout : float
            Seconds that it may take.
        keep : iterable
            What must live until it is done.
        """
        while True:
            mark = self.mark(stream, operation, sequence, timeout)
            for one in keep:
                mark.keep[id(one)] = one
            code = cuda.cuEventRecord(mark.handle, stream)
            if code:
                raise cuda.error(code, "cuEventRecord")
            if not mark.done:  # else the watching thread was quicker than anybody could expect
                return

    def mark(self, stream: int, operation: str, sequence: int | None, timeout: float) -> Mark:
        """Return the mark to move behind an operation."""
        mark = self.current
        if mark is None or mark.stream != stream or mark.done or mark.timeout != timeout:
            mark = self._free.pop() if self._free else Mark(Event(self.comm.device))
            mark.done, mark.stream, mark.timeout = False, stream, timeout
            mark.operation, mark.sequence = operation, sequence
            mark.moment = time.monotonic() + timeout
            self.current = mark
            self._marks.append(mark)
            _in_flight.add(self)
        mark.last = sequence
        return mark

    def stop(self) -> None:
        """Watch no longer: the communicator is about to end."""
        with self._looking:
            self._stopped = True
        with _lock:
            _watches.discard(self)
        _in_flight.discard(self)

    def look(self) -> None:
        """Look whether all is well; called by the watching thread."""
        with self._looking:
            if not self._stopped and self.comm.error is None and self.comm.handle:
                self._look()

    def _look(self) -> None:
        comm = self.comm
        now = time.monotonic()
        for _ in range(len(self._marks)):
            mark = self._marks.popleft()
            if mark is self.current:
                # Whoever is about to move it has the time until the next look to do so. What it
                # marks has begun by now.
                self.current = None
                mark.moment = now + mark.timeout
                self._marks.append(mark)
                continue
            code = cuda.cuEventQuery(mark.handle)
            if code == CUresult.CUDA_ERROR_NOT_READY and now >= mark.moment:
                comm.fail(self._timed_out(mark))
                return
            if code == CUresult.CUDA_ERROR_NOT_READY:
                self._marks.append(mark)
                continue
            # Done; or captured into a graph, or lost with its context, and never to be known.
            mark.done = True
            mark.keep = {}
            self._free.append(mark)
        if not self._marks:
            _in_flight.discard(self)
            if self._marks:  # given in between
                _in_flight.add(self)
        code = comm.state()
        if code not in _FINE and comm.error is None:
            comm.fail(self._broken(code))

    def _broken(self, code: int) -> CommError:
        error = nccl.error(code, "ncclCommGetAsyncError", self.comm.handle)
        error.rank = self.comm.rank
        oldest = self._marks[0] if self._marks else self.current
        if oldest is not None:
            error.operation, error.sequence = oldest.operation, oldest.sequence
        return error

    def _timed_out(self, mark: Mark) -> CommError:
        comm = self.comm
        called = (
            f"{mark.operation}" if mark.sequence is None else f"{mark.operation} #{mark.sequence}"
        )
        if mark.last != mark.sequence:
            called += f", or a later call up to #{mark.last},"
        error = NCCLTimeoutError(
            f"{called} on rank {comm.rank} of {comm.size} ({self.label}): no end "
            f"on its stream within {mark.timeout:g} s, so it was given up: some rank has not made "
            "this call, or what the stream had to do before has not ended. The communicator is "
            "broken now: call abort() or shrink(); a longer wait is timeout=seconds",
            operation=mark.operation,
            sequence=mark.sequence,
            rank=comm.rank,
        )
        error.timeout = mark.timeout
        return error


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()
# What is under way is watched also when nobody holds its communicator any more.
_in_flight: set[Watch] = set()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_stop = threading.Event()


def _ensure_thread() -> None:
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():
            _stop.clear()
            _thread = threading.Thread(target=_run, name="pycomm watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    relax()
    while not _stop.wait(_LOOK_EVERY):
        with _lock:
            watches = list(_watches)
        for watch in watches:
            try:
                watch.look()
            except Exception:  # of one communicator, which the others do not depend on
                _log.exception("what watches %s went wrong", watch.label)


@atexit.register
def _end() -> None:
    """Stop watching before the interpreter goes: nothing may call the driver after that."""
    _stop.set()
    thread = _thread
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)
