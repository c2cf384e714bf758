"""NVML as a probe calls it: nothing raises, and of each GPU it is remembered what was refused.

The module is `pynvml` of nvidia-ml-py, or whatever has its functions. Any call may be refused with
any code, and an old module or driver lacks some of them altogether: "not supported" is an answer,
anything else leaves the GPU unknown.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any

from pycomm.topology.graph import State

__all__ = ["Device", "Nvml", "Port", "Refusal", "Seen", "open_nvml"]

# The numbers of nvml.h are fixed. Taken from here, an older module without their names will do.
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25

_LOST = (NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED)
_ABSENT = (NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND)
_SEVERITY = {State.UNKNOWN: 0, State.DEGRADED: 1, State.DOWN: 2}
#: So many refusals are worth a reader's time.
_MOST_REASONS = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is none; `code` None where no code of NVML came with it."""

    call: str
    code: int | None
    text: str

    @property
    def lost(self) -> bool:
        """Whether it says that the GPU is gone until somebody resets it."""
        return self.code in _LOST

    @property
    def absent(self) -> bool:
        """Whether it says that the GPU, the driver or the module does not have such a thing."""
        return self.code in _ABSENT

    def __str__(self) -> str:
        return f"{self.call}: {self.text}"


class Nvml:
    """The functions of a module, asked by name."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return what the function returns, or a `Refusal`."""
        function = getattr(self.module, call, None)
        if function is None:
            return Refusal(call, NVML_ERROR_FUNCTION_NOT_FOUND, "not in this version of nvidia-ml")
        try:
            return function(*arguments)
        except Exception as error:
            # Not its own class of errors alone: a call with a struct of another version fails in
            # ctypes, and a library that is half there fails in the loader.
            code = getattr(error, "value", None)
            return Refusal(call, code if isinstance(code, int) else None, _text(error))


def _text(error: Exception) -> str:
    """Return what an error says; one of NVML asks the library for its text."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def open_nvml(module: Any) -> tuple[Nvml | None, str]:
    """Return NVML, initialised, or None and why not; whoever gets it ends it by nvmlShutdown."""
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except Exception as error:
            return None, f"nvidia-ml-py cannot be imported: {_text(error)}"
    nvml = Nvml(module)
    refusal = nvml.ask("nvmlInit")
    return (None, str(refusal)) if isinstance(refusal, Refusal) else (nvml, "")


class Device:
    """One GPU, with what it refused.

    Attributes
    ----------
    lost : Refusal or None
        The one that says the GPU is gone; nothing more is asked then.
    failed : list of Refusal
        Those that say neither this nor that something is not supported.
    """

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self.lost: Refusal | None = None
        self.failed: list[Refusal] = []

    def ask(self, call: str, *arguments: Any, needed: bool = False) -> Any:
        """Return the answer about this GPU or a `Refusal`, which is remembered.

        With `needed`, that it is not supported is a failure too.
        """
        if self.lost is not None:
            return self.lost
        answer = self.nvml.ask(call, self.handle, *arguments)
        if isinstance(answer, Refusal):
            self.blame(answer, needed)
        return answer

    def blame(self, refusal: Refusal, needed: bool = False) -> None:
        """Remember a refusal."""
        if refusal.lost:
            self.lost = refusal
        elif needed or not refusal.absent:
            self.failed.append(refusal)


@dataclass(slots=True)
class Port:
    """One NVLink of a GPU; `up` None if NVML does not tell."""

    number: int
    up: bool | None
    kind: int | None = None
    bus: str | None = None


@dataclass(slots=True)
class Seen:
    """What has been seen of one GPU.

    Attributes
    ----------
    blind : str
        Why its NVLinks are unknown.
    fabric : bool
        Whether it says to be part of a fabric, well or not.
    faults : list of (State, str)
        What is wrong with it.
    remark : str
        What is worth saying and no fault.
    """

    name: str
    index: int
    device: Device
    product: str = ""
    bus: str | None = None
    attributes: list[tuple[str, str]] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    rate: float | None = None
    blind: str = ""
    fabric: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    faults: list[tuple[State, str]] = field(default_factory=list)
    remark: str = ""

    @property
    def up(self) -> list[Port]:
        """The NVLinks that are up."""
        return [port for port in self.ports if port.up]

    def verdict(self) -> tuple[State, str]:
        """Return its state and why: the worst first, unknown only where nothing is known bad."""
        faults = list(self.faults)
        if self.device.lost is not None:
            faults.insert(0, (State.DOWN, str(self.device.lost)))
        faults += [(State.UNKNOWN, why) for why in self._doubts()]
        if not faults:
            return State.UP, self.remark
        faults.sort(key=lambda fault: -_SEVERITY[fault[0]])
        return faults[0][0], "; ".join(dict.fromkeys(why for _, why in faults))

    def _doubts(self) -> list[str]:
        """Return what NVML did not tell and should have."""
        told = list(dict.fromkeys(map(str, self.device.failed)))
        more = len(told) - _MOST_REASONS
        return told[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])
