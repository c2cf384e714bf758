"""CUDA streams and events: those of pycomm, and those of everybody else.

A stream is a handle, an address that the driver gave out. Three of them are names: 0 and 1 are the
legacy default stream, 2 is the default stream of the calling thread. Handles of others are looked
up anew at each call and never kept, because their owners may destroy them.
"""

import ctypes
import operator
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import (
    CUevent_flags,
    CUresult,
    CUstream_flags,
    CUstreamCaptureStatus,
)
from pycomm.deadline import Deadline, as_timeout
from pycomm.devices import Device, get_device, usable
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommTimeoutError

__all__ = [
    "LEGACY",
    "PER_THREAD",
    "Event",
    "Stream",
    "as_stream",
    "capturing",
    "current_stream",
    "order",
]

LEGACY, PER_THREAD = 1, 2

_READY, _NOT_READY = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_NOT_READY
_DEFAULT = 300.0  # seconds
_own = threading.local()
_QUICK_LOOKS = 1000
_PAUSE = 5e-5  # seconds between looks after that


def _made(device: Device, function: str, flags: int) -> int:
    """Return the handle of what a function of the driver makes in the context of a device."""
    handle = ctypes.c_void_p()
    with device.entered():
        code = getattr(cuda, function)(ctypes.byref(handle), int(flags))
    cuda.check(code, function)
    return handle.value or 0


class Event:
    """A point in the work of a stream.

    Parameters
    ----------
    device : Device or int
        Whose.
    """

    __slots__ = ("__weakref__", "device", "handle")

    def __init__(self, device: Device | int = 0) -> None:
        self.device = device if isinstance(device, Device) else get_device(device)
        self.handle = _made(self.device, "cuEventCreate", CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def record(self, stream: Any) -> None:
        """Mark what has been given to `stream` so far."""
        handle = as_stream(stream)
        if handle <= PER_THREAD:  # a name, which the current context gives a meaning to
            with self.device.entered():
                code = cuda.cuEventRecord(self.handle, handle)
        else:
            code = cuda.cuEventRecord(self.handle, handle)
        if code:
            raise cuda.error(code, "cuEventRecord")

    def done(self) -> bool:
        """Return whether all of that is complete; True if nothing was ever recorded."""
        code = cuda.cuEventQuery(self.handle)
        if code == _READY:
            return True
        if code == _NOT_READY:
            return False
        raise cuda.error(code, "cuEventQuery")

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until it is.

        Raises
        ------
        CommTimeoutError
            If that takes longer than `timeout` seconds, 300 by default.
        """
        deadline = Deadline(as_timeout(timeout, _DEFAULT))
        looks = 0
        while not self.done():
            looks += 1
            if deadline.passed:
                error = CommTimeoutError(
                    f"a stream of {self.device} has not done its work within {deadline.timeout:g} s"
                )
                error.timeout = deadline.timeout
                raise error
            time.sleep(0 if looks < _QUICK_LOOKS else _PAUSE)

    def __del__(self) -> None:
        # The driver frees an event once it has completed. At the end of the process it does so
        # anyway, and must not be called any more.
        if getattr(self, "handle", 0) and usable():
            cuda.cuEventDestroy_v2(self.handle)


class Stream:
    """A stream of pycomm's own, which does not wait for the default stream.

    Parameters
    ----------
    device : Device or int
        Whose.
    """

    __slots__ = ("__weakref__", "device", "handle")

    def __init__(self, device: Device | int = 0) -> None:
        self.device = device if isinstance(device, Device) else get_device(device)
        self.handle = _made(self.device, "cuStreamCreate", CUstream_flags.CU_STREAM_NON_BLOCKING)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol and the handle."""
        return (0, self.handle)

    def record(self) -> Event:
        """Return an event that marks what has been given to this stream so far."""
        event = Event(self.device)
        event.record(self.handle)
        return event

    def wait(self, other: Any) -> None:
        """Let what is given to this stream from now on wait for an `Event`, or another stream."""
        if isinstance(other, Event):
            cuda.check(cuda.cuStreamWaitEvent(self.handle, other.handle, 0), "cuStreamWaitEvent")
        else:
            order(as_stream(other), self.handle, self.device)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all that was given to this stream is done, at most `timeout` seconds.

        Raises
        ------
        CommTimeoutError
            If that takes longer; 300 s by default.
        """
        self.record().synchronize(timeout)

    def __del__(self) -> None:
        # What the stream still has to do is done nevertheless, says the driver's manual.
        if getattr(self, "handle", 0) and usable():
            cuda.cuStreamDestroy_v2(self.handle)

    def __repr__(self) -> str:
        return f"<pycomm stream {self.handle:#x} of device {self.device.ordinal}>"


def order(first: int, then: int, device: Device) -> None:
    """Let what is given to stream `then` wait for what stream `first` has been given so far."""
    if first == then or (first <= LEGACY and then <= LEGACY):
        return
    # One for each thread and device: a stream waits for what an event marks when it is told to.
    events: dict[int, Event] = _own.__dict__.setdefault("events", {})
    event = events.get(device.ordinal)
    if event is None:
        event = events[device.ordinal] = Event(device)
    event.record(first)
    if then <= PER_THREAD:
        with device.entered():
            code = cuda.cuStreamWaitEvent(then, event.handle, 0)
    else:
        code = cuda.cuStreamWaitEvent(then, event.handle, 0)
    if code:
        raise cuda.error(code, "cuStreamWaitEvent")


def capturing(stream: int) -> bool:
    """Return whether a stream records what it is given into a graph, instead of doing it."""
    if stream in (0, LEGACY):  # which cannot be captured
        return False
    status = ctypes.c_int()
    code = cuda.cuStreamIsCapturing(stream, ctypes.byref(status))
    cuda.check(code, "cuStreamIsCapturing")
    return status.value != CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def as_stream(stream: Any) -> int:
    """Return the handle of a stream.

    Parameters
    ----------
    stream : Stream, int or object
        A handle as CUDA's C API takes it, so 0 is the legacy default stream; an object with a
        ``__cuda_stream__`` method, or with the handle in ``cuda_stream`` (PyTorch) or ``ptr``
        (CuPy).

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is none of these.
    """
    if type(stream) is Stream:
        return stream.handle
    if isinstance(stream, bool):
        raise ArgumentTypeError(f"stream is a stream or its handle, not {stream!r}")
    handle: Any = stream
    if type(stream) is int:
        pass
    elif hasattr(stream, "__cuda_stream__"):
        told = stream.__cuda_stream__  # a method, or its result in early versions of the protocol
        told = told() if callable(told) else told
        try:
            version, handle = told
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"__cuda_stream__ gives (version, handle), not {told!r}"
            ) from None
        if version != 0:
            raise ArgumentTypeError(f"version {version!r} of __cuda_stream__ is not known")
    else:
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                handle = getattr(stream, name)
                break
    try:
        number = operator.index(handle)
    except TypeError:
        raise ArgumentTypeError(
            f"stream is a stream or its handle, not {type(stream).__name__}"
        ) from None
    if not 0 <= number < 1 << 64:
        raise ArgumentValueError(f"stream {number} is no handle")
    return number


def current_stream(x: Any, device: int) -> int | None:
    """Return the stream that the library of array `x` is using now; None if it does not say.

    No library is imported: the array's own module is asked, if it has a ``cuda`` submodule with
    ``current_stream`` (as PyTorch) or ``get_current_stream`` (as CuPy).
    """
    kind = type(x)
    try:
        ask = _asked[kind]
    except KeyError:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        submodule = getattr(module, "cuda", None)
        ask = getattr(submodule, "current_stream", getattr(submodule, "get_current_stream", None))
        _asked[kind] = ask
    return None if ask is None else as_stream(ask(device))


_asked: dict[Any, Callable[[int], Any] | None] = {}
