"""The CUDA devices of this process: who they are, and their contexts.

A device is known by its UUID, which the driver tells and which is the same in every process. The
numbers that CUDA gives to devices depend on ``CUDA_VISIBLE_DEVICES``, and its text is never read
here: what it means is the driver's business.

pycomm works in the primary context of a device, as all frameworks do. Every entry into it is
undone: the context stack of the caller is the same after a call as before.
"""

import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache, cached_property

from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import (
    CUdevice_attribute,
    CUpointer_attribute,
    CUresult,
    CUstreamCaptureMode,
    CUuuid,
)
from pycomm.errors import ArgumentValueError, CommError

__all__ = [
    "Device",
    "Entered",
    "current_context",
    "current_device",
    "device_count",
    "device_of",
    "enter",
    "get_device",
    "leave",
    "relax",
    "restore",
    "usable",
]

_PCI_ID_LENGTH = 32
_NAME_LENGTH = 256
_DEEPEST = 8  # contexts of ours on the stack at a time, and more
_start = threading.Lock()
_started = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)


def usable() -> bool:
    """Return whether the driver may be called: not when the interpreter ends, nor after a fork."""
    return not _forked and not sys.is_finalizing()


@dataclass(frozen=True)
class Device:
    """One CUDA device.

    Attributes
    ----------
    ordinal : int
        Its number in this process.
    uuid : str
        ``GPU-`` and its UUID, equal in all processes; of a MIG slice that of the slice.
    pci : str
        Its PCI bus id, as ``0000:1b:00.0``.
    name : str
        What its maker calls it.
    capability : tuple of int
        Its compute capability, (major, minor).
    """

    ordinal: int
    uuid: str
    pci: str
    name: str
    capability: tuple[int, int]

    @cached_property
    def context(self) -> int:
        """Its primary context, retained from now on for as long as the process lives."""
        context = ctypes.c_void_p()
        cuda.check(
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.ordinal),
            "cuDevicePrimaryCtxRetain",
        )
        return context.value or 0

    def attribute(self, which: CUdevice_attribute) -> int:
        """Return what the driver says about it."""
        return _attribute(self.ordinal, which)

    def entered(self) -> "Entered":
        """Return a ``with`` statement's scope in which its context is the current one."""
        return Entered(self.context)

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid}, {self.pci})"


class Entered:
    """A scope in which a context is the current one of this thread."""

    __slots__ = ("_context",)

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        enter(self._context)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        leave()


def relax() -> None:
    """Let this thread call the driver while others capture graphs, which it has no part in.

    Without this, to free memory or to look at an event would spoil what they capture.
    """
    mode = ctypes.c_int(CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def enter(context: int) -> None:
    """Make a context the current one of this thread, until `leave`."""
    code = cuda.cuCtxPushCurrent_v2(context)
    if code:
        raise cuda.error(code, "cuCtxPushCurrent")


def leave() -> None:
    """Make that context the current one that was it before."""
    # It fails only where there is none, that is, where somebody else has taken ours off the stack.
    cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _init() -> bool:
    """Start the driver; return whether it has any device for this process."""
    global _started
    if _forked:
        raise CommError("CUDA was in use when this process was forked, and cannot be used in it")
    if not _started:
        with _start:
            code = cuda.cuInit(0)
            if code == CUresult.CUDA_ERROR_NO_DEVICE:
                return False
            cuda.check(code, "cuInit")
            _started = True
    return True


def device_count() -> int:
    """Return how many devices this process sees; CUDA_VISIBLE_DEVICES may hide all of them.

    Raises
    ------
    LibraryNotFoundError
        If there is no CUDA driver.
    CUDAError
        If the driver refuses to start.
    """
    if not _init():
        return 0
    count = ctypes.c_int()
    cuda.check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return count.value


@cache
def get_device(ordinal: int) -> Device:
    """Return a device by its number in this process.

    Raises
    ------
    ArgumentValueError
        If there is none of this number.
    """
    count = device_count()
    if not 0 <= ordinal < count:
        raise ArgumentValueError(
            f"no CUDA device {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES says which)"
        )
    handle = ctypes.c_int()
    cuda.check(cuda.cuDeviceGet(ctypes.byref(handle), ordinal), "cuDeviceGet")
    uuid = CUuuid()
    cuda.check(cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle), "cuDeviceGetUuid")
    digits = bytes(uuid).hex()
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    pci = ctypes.create_string_buffer(_PCI_ID_LENGTH)
    cuda.check(cuda.cuDeviceGetPCIBusId(pci, len(pci), handle), "cuDeviceGetPCIBusId")
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    cuda.check(cuda.cuDeviceGetName(name, len(name), handle), "cuDeviceGetName")
    capability = (
        _attribute(handle.value, CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        _attribute(handle.value, CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
    return Device(
        ordinal,
        "GPU-" + "-".join(groups),
        pci.value.decode(),
        name.value.decode(errors="replace"),
        capability,
    )


def _attribute(handle: int, which: CUdevice_attribute) -> int:
    value = ctypes.c_int()
    cuda.check(
        cuda.cuDeviceGetAttribute(ctypes.byref(value), int(which), handle), "cuDeviceGetAttribute"
    )
    return value.value


def current_context() -> int:
    """Return the context that is current in this thread, 0 without one."""
    if not _started:
        return 0
    context = ctypes.c_void_p()
    cuda.check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    return context.value or 0


def restore(context: int) -> None:
    """Take contexts off the stack until this one is current: after an interruption."""
    for _ in range(_DEEPEST):
        if current_context() == context:
            return
        leave()


def current_device() -> int | None:
    """Return the number of the device whose context is current in this thread, None without one."""
    if not _init():
        return None
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    cuda.check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        return None
    cuda.check(cuda.cuCtxGetDevice(ctypes.byref(device)), "cuCtxGetDevice")
    return device.value


def device_of(pointer: int) -> int | None:
    """Return the number of the device that a pointer belongs to; None if it is not CUDA's."""
    if not _init():
        return None
    ordinal = ctypes.c_int(-1)
    code = cuda.cuPointerGetAttribute(
        ctypes.byref(ordinal), int(CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL), pointer
    )
    return ordinal.value if code == 0 and ordinal.value >= 0 else None
