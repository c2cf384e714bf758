"""The short way of device calls: what was decided once, for arrays that say the same of themselves.

On the long way a call costs more than NCCL takes to accept it. But where shape, element type and
all arguments are those of an earlier call, only the pointers are new. So a recipe is kept for what
arrays say, not for arrays: nothing is held, and a new array of an old shape goes the short way too.
What could have changed is looked at each time: on which device the pointer is, its alignment, the
stream, and the state of the communicator.

Arguments are prepared objects of ctypes, which functions without declared types pass on as they
are: to convert a number takes as long as to pass two.
"""

import ctypes
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, Protocol

from pycomm import dlpack
from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import CUpointer_attribute
from pycomm.device.choice import Bound
from pycomm.device.together import opened
from pycomm.device.watchdog import Watch
from pycomm.device_arrays import DeviceArray
from pycomm.engine import Engine
from pycomm.errors import CommError
from pycomm.streams import LEGACY, PER_THREAD, as_stream, capturing, current_stream, order
from pycomm.transports.nccl import NCCLComm

__all__ = ["Launcher", "Quick", "launcher"]

_MOST = 512  # recipes
_pointer = ctypes.c_void_p.from_param


class Failing(Protocol):
    """What puts an unusual answer right, or fails: `pycomm.device.side.DeviceSide`."""

    def unusual(
        self,
        code: int,
        recorded: bool,
        handle: int,
        operation: str,
        timeout: float,
        keep: tuple[Any, ...],
    ) -> None:
        """Go on after a call that NCCL or the driver did not simply accept."""

    def interrupted(self, error: BaseException, operation: str, context: int | None = None) -> None:
        """Give up after Ctrl-C, say."""


#: ``launch(function, given, handle, stream, operation, timeout) -> bool``.
Launcher = Callable[..., bool]


def launcher(side: Failing, engine: Engine, comm: NCCLComm, watch: Watch) -> Launcher:
    """Return what gives prepared calls of NCCL to streams; a closure, which is quickest to call."""
    context = comm.device.context
    own, current = _pointer(context), ctypes.c_void_p()
    at = ctypes.byref(current)
    get, push, pop = map(
        cuda.bare, ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    )
    record, ask = map(cuda.bare, ("cuEventRecord", "cuStreamIsCapturing"))
    status = ctypes.c_int()
    told = ctypes.byref(status)

    def launch(
        function: Callable[..., int],
        given: tuple[Any, ...],
        handle: int,
        stream: Any,
        operation: str,
        timeout: float,
        keep: tuple[Any, ...] = (),
    ) -> bool:
        """Call ``function(*given)``; return whether that was done: False asks for the long way.

        Parameters
        ----------
        function, given : callable, tuple
            A bare function of NCCL, and its prepared arguments, the stream among them.
        handle, stream : int, object
            The stream, as a number and as a prepared argument.
        operation : str
            What it is.
        timeout : float
            Seconds that it may take.
        keep : tuple
            What must live until it is done.
        """
        if engine.owner is not None or engine.state != "open" or opened:
            return False
        engine.owner = comm.thread = get_ident()
        comm.busy += 1  # before the look at what it has failed with, see NCCLComm
        try:
            if comm.error is not None or not comm.handle:
                return False
            # It is captured, so that there is nothing to watch; or it is none any more.
            if handle > LEGACY and (ask(stream, told) or status.value):
                return False
            mark = watch.current
            if mark is None or mark.stream != handle or mark.done or mark.timeout != timeout:
                mark = watch.mark(handle, operation, engine.sequence, timeout)
            if keep:
                mark.keep |= {id(one): one for one in keep}
            get(at)
            if current.value == context:
                code = function(*given)
                recorded = -1 if code else record(mark.prepared, stream)
            else:
                push(own)
                try:
                    code = function(*given)
                    recorded = -1 if code else record(mark.prepared, stream)
                finally:
                    pop(at)
            mark.last = engine.sequence
            engine.sequence += 1
            if recorded or mark.done:
                side.unusual(code or max(recorded, 0), not code, handle, operation, timeout, keep)
            return True
        except CommError:
            raise
        except BaseException as error:
            side.interrupted(error, operation)
            raise
        finally:
            comm.busy -= 1
            engine.owner = None

    return launch


class Recipe(NamedTuple):
    """A call that only needs pointers and a stream.

    `rest` are the prepared arguments after the two pointers; `read` and `written` the bytes that
    they point to.
    """

    function: Callable[..., int]
    rest: tuple[Any, ...]
    itemsize: int
    read: int
    written: int


#: What an array says: its facts, its pointer, its stream, whether its device is known, and what has
#: to live as long as the pointer is in use.
Said = tuple[Any, int, int, bool, Any]


class Quick:
    """The short way of one communicator."""

    def __init__(self, launcher: Launcher, comm: NCCLComm, timeout: float) -> None:
        self._launch, self._timeout = launcher, timeout
        self._device = comm.device
        self._number = comm.device.ordinal
        self._recipes: dict[tuple[Any, ...], Recipe] = {}
        self._streams: dict[int, Any] = {}
        self._ordinal = ctypes.c_int(-1)
        self._ordinal_at = ctypes.byref(self._ordinal)
        self._attribute = cuda.bare("cuPointerGetAttribute")
        which = int(CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        self._which = ctypes.c_int.from_param(which)

    def __call__(self, known: tuple[Any, ...], x: Any, out: Any, stream: Any) -> bool:
        """Make a call; return whether that was done: False asks for the long way.

        Parameters
        ----------
        known : tuple
            The collective, two identities that do not matter here, and all other arguments.
        x, out, stream
            As in the call.
        """
        said = _said(x, self._number)
        if said is None or said[2] == PER_THREAD:
            return False
        facts, source, handle, ours, held = said
        key: tuple[Any, ...] = (known[0], known[3:], facts)
        target, theirs = source, ours
        if out is not None and out is not x:
            other = _said(out, self._number)
            if other is None or other[2] != handle:
                return False
            _, target, _, theirs, also = other
            held = (held, also) if held is not None or also is not None else None
            key = (*key, other[0])
        try:
            recipe = self._recipes.get(key)
        except TypeError:  # not hashable: a wrong argument, or an array of a strange kind
            return False
        if recipe is None:
            return False
        given = _pointer(source)
        if not (ours or self._is_here(given, source, recipe.itemsize)):
            return False
        written = given
        if target != source:
            written = _pointer(target)
            if not (theirs or self._is_here(written, target, recipe.itemsize)):
                return False
            if target < source + recipe.read and source < target + recipe.written:
                return False  # the long way says which overlaps are fine
        elif out is not None and out is not x and known[0] != "all_reduce":
            return False  # the same address, and not the same array
        # Of memory that came by DLPack nobody knows in which order it is freed.
        keep: tuple[Any, ...] = () if held is None else (x, out, held)
        if stream is not None:
            chosen = self._ordered(handle, stream)
            if chosen is None:
                return False
            if chosen != handle:
                # Their owners free memory in the order of their own stream, which may be ahead.
                handle, keep = chosen, (x, out, held)
        ready = self._streams.get(handle)
        if ready is None:
            ready = self._streams[handle] = _pointer(handle)
        return self._launch(
            recipe.function, (given, written, *recipe.rest, ready), handle, ready, known[0],
            self._timeout, keep,
        )  # fmt: skip

    def _ordered(self, handle: int, stream: Any) -> int | None:
        """Return the handle of a stream that waits for another one; None if it takes more."""
        try:
            chosen = as_stream(stream)
            if chosen == PER_THREAD:
                return None
            # What is captured has no past: a graph runs when it is launched.
            if chosen != handle and not capturing(chosen):
                order(handle, chosen, self._device)
        except (TypeError, ValueError, CommError):  # the long way says what is wrong
            return None
        return chosen

    def _is_here(self, prepared: Any, pointer: int, itemsize: int) -> bool:
        """Return whether a pointer is one of this device, and aligned."""
        failed = self._attribute(self._ordinal_at, self._which, prepared)
        return not failed and self._ordinal.value == self._number and not pointer % itemsize

    def remember(self, known: tuple[Any, ...], x: Any, out: Any, bound: Bound) -> None:
        """Keep what was decided for a call, if the short way can make it."""
        if bound.prepared is None or bound.mixed or bound.stream == PER_THREAD:
            return
        said = _said(x, self._number)
        other = None if out is None or out is x else _said(out, self._number)
        if said is None or (other is None and out is not None and out is not x):
            return
        key: tuple[Any, ...] = (known[0], known[3:], said[0])
        key = key if other is None else (*key, other[0])
        try:
            if len(self._recipes) >= _MOST or len(self._streams) >= _MOST:
                self._recipes.clear()
                self._streams.clear()
            function, rest = bound.prepared
            call = bound.call
            assert call.x is not None
            assert call.target is not None
            read, written = call.x.nbytes, call.target.nbytes
            self._recipes[key] = Recipe(function, rest, call.dtype.itemsize, read, written)
        except TypeError:
            return


def _said(x: Any, device: int) -> Said | None:
    """Return what an array says of itself; None if the long way has to ask more."""
    kind = type(x)
    read = _readers.get(kind)
    if read is None:
        read = _nothing
        if hasattr(kind, "__cuda_array_interface__"):
            read = _by_interface
        elif hasattr(kind, "__dlpack__"):
            read = _by_dlpack
        _readers[kind] = read
    return read(x, device)


def _by_interface(x: Any, device: int) -> Said | None:
    try:
        told = x.__cuda_array_interface__
        pointer, readonly = told["data"]
        typestr, handle = told["typestr"], told.get("stream")
        facts = (told["shape"], typestr, told.get("strides"), readonly)
        if "V" in typestr or told.get("mask") is not None or not pointer or handle == 0:
            return None
        if handle is None:
            # Where it names none, its library is asked; without an answer the long way decides.
            handle = current_stream(x, device)
            if handle is None or told["version"] >= 3:
                return None
    except Exception:  # the long way tells what is wrong
        return None
    return facts, pointer, handle, False, None


def _by_dlpack(x: Any, device: int) -> Said | None:
    try:
        stream = current_stream(x, device) or LEGACY
        facts, pointer, capsule = dlpack.peek(x, stream)
    except Exception:  # the long way tells what is wrong
        return None
    return (facts, pointer, stream, False, capsule) if pointer else None


def _own(x: DeviceArray, device: int) -> Said:
    return (x.shape, x.row), x.pointer, LEGACY, x.device == device, None


def _nothing(x: Any, device: int) -> None:  # noqa: ARG001
    return None


_readers: dict[Any, Callable[[Any, int], Said | None]] = {DeviceArray: _own}
