"""Xids: what the driver writes to the kernel's log when a GPU fails, as events of NVML."""

import ctypes
from collections.abc import Iterable
from typing import Any

from pycomm.topology.graph import State
from pycomm.topology.probes.nvml_calls import Nvml, Refusal, open_nvml

__all__ = ["XidEvents", "judge_xids"]

nvmlEventTypeXidCriticalError = 0x8  # noqa: N816 - its name in nvml.h

#: More than so many events at one look are read at the next.
_MOST_EVENTS = 1000

# NVIDIA's catalogue of Xids (docs.nvidia.com/deploy/xid-errors), by what it recommends: where a
# GPU must be reset before anything runs on it again it is down; where work goes on it is degraded.
_DOWN = {
    62: "the power management controller halted; reset the GPU",
    79: "the GPU has fallen off the bus",
    95: "an uncorrected memory error that could not be contained; reset the GPU",
    119: "the GPU's own processor does not answer; reset the GPU",
    120: "the GPU's own processor failed; reset the GPU",
    140: "an ECC error from which it did not recover; reset the GPU",
    143: "the GPU failed to initialise",
}
_DEGRADED = {
    48: "a double-bit ECC error",
    64: "a bad page or row of memory could not be retired",
    74: "an NVLink error",
    92: "many corrected ECC errors",
    94: "a contained memory error",
    **dict.fromkeys((144, 145, 146, 147, 148, 149, 150), "an NVLink error"),
}
# Errors of programs, mostly, and records of what was put right.
_HARMLESS = {
    13: "an exception in a kernel",
    31: "a memory page fault of a program",
    43: "the GPU stopped the work of a program",
    45: "the work of a program was removed",
    61: "the power management controller hit a breakpoint",
    63: "a bad page or row of memory was retired",
    137: "an access over NVLink that was not allowed",
}


def needs_reset(xid: int) -> bool:
    """Return whether a GPU is of no use after this Xid until it is reset."""
    return xid in _DOWN


def judge_xids(xids: Iterable[int]) -> tuple[list[tuple[State, str]], list[str]]:
    """Return the faults that Xids of one GPU stand for, and what else is worth a note."""
    faults: list[tuple[State, str]] = []
    notes = []
    for xid in dict.fromkeys(xids):
        if xid in _DOWN:
            faults.append((State.DOWN, f"Xid {xid}: {_DOWN[xid]}"))
        elif xid in _DEGRADED:
            faults.append((State.DEGRADED, f"Xid {xid}: {_DEGRADED[xid]}"))
        elif xid in _HARMLESS:
            notes.append(f"Xid {xid}: {_HARMLESS[xid]}; no fault of the GPU")
        else:
            notes.append(f"Xid {xid}, of which nothing is known here")
    return faults, notes


class XidEvents:
    """The Xids of all GPUs since `register`, without waiting for any.

    No method raises. Where events cannot be had, `reason` says why, and `poll` returns nothing.

    Parameters
    ----------
    nvml : module, optional
        What has the functions of `pynvml`, which is the default.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.reason = "not registered"
        self._module = nvml
        self._nvml: Nvml | None = None
        self._events: Any = None
        self._names: list[tuple[Any, str]] = []

    def register(self) -> bool:
        """Begin to collect events of all GPUs that have them; return whether there are any."""
        self.close()
        self._nvml, self.reason = open_nvml(self._module)
        if self._nvml is None:
            return False
        events = self._nvml.ask("nvmlEventSetCreate")
        if isinstance(events, Refusal):
            return self._give_up(str(events))
        self._events = events
        count = self._nvml.ask("nvmlDeviceGetCount")
        if isinstance(count, Refusal):
            return self._give_up(str(count))
        why = "this host has no GPU"
        for index in range(count):
            handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
            refusal = handle
            if not isinstance(handle, Refusal):
                refusal = self._nvml.ask(
                    "nvmlDeviceRegisterEvents", handle, nvmlEventTypeXidCriticalError, events
                )
            if isinstance(refusal, Refusal):
                why = f"gpu{index}: {refusal}"
                continue
            self._names.append((_identity(handle), f"gpu{index}"))
        return bool(self._names) or self._give_up(why)

    def poll(self) -> list[tuple[str, int]]:
        """Return the events since the last look as (name of the GPU, Xid); never blocks."""
        found: list[tuple[str, int]] = []
        while self._nvml is not None and self._events is not None and len(found) < _MOST_EVENTS:
            event = self._nvml.ask("nvmlEventSetWait", self._events, 0)
            if isinstance(event, Refusal):
                break  # nothing more, or a GPU is lost, which the probe itself sees
            if getattr(event, "eventType", 0) & nvmlEventTypeXidCriticalError:
                found.append((self._name(event.device), int(event.eventData)))
        return found

    def close(self) -> None:
        """Give back what NVML keeps for this; closing twice is no error."""
        nvml, events = self._nvml, self._events
        self._nvml = self._events = None
        self._names = []
        self.reason = "not registered"
        if nvml is not None:
            if events is not None:
                nvml.ask("nvmlEventSetFree", events)
            nvml.ask("nvmlShutdown")

    def _give_up(self, why: str) -> bool:
        """Close, and keep the reason."""
        self.close()
        self.reason = why
        return False

    def _name(self, handle: Any) -> str:
        """Return the name of a GPU by its handle: one that is lost does not tell its index."""
        this = _identity(handle)
        return next((name for known, name in self._names if known == this), "gpu?")


def _identity(handle: Any) -> Any:
    """Return what is equal of equal handles: pointers of ctypes compare by their own identity."""
    try:
        return ctypes.addressof(handle.contents)
    except (AttributeError, TypeError, ValueError):
        return handle
