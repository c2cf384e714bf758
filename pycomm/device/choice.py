"""Which way a collective on device arrays goes: NCCL's own, or a schedule, or an encoded one."""

from dataclasses import dataclass
from typing import Any

from pycomm.algorithms.registry import RESERVED, SHARED, algorithm_of, names
from pycomm.algorithms.schedule import ROOTED, data_count
from pycomm.call import Call
from pycomm.choice import VARIABLE, Choices
from pycomm.device.encoded import DeviceEncoded
from pycomm.device.native import Enqueue, Prepared, check_hint, unfit
from pycomm.device.programs import DeviceProgram, wide_of
from pycomm.dtypes import Kind, ReduceOp
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.kernels.cuda import MOST_SOURCES, kernels_of
from pycomm.program import Program
from pycomm.transports.nccl import NCCLComm

__all__ = ["Bound", "DeviceChoice", "DeviceChoices"]

#: Bytes of a segment: work and scratch are on the device, and there is nothing to overlap with.
_SEGMENT = 256 << 20


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a call runs, and why.

    NCCL does it, with `hint` to its own choice of an algorithm, or else `program` does, or
    `encoded`.
    """

    algorithm: str
    why: str
    hint: str | None = None
    program: DeviceProgram | None = None
    encoded: DeviceEncoded | None = None

    @property
    def native(self) -> bool:
        """Whether NCCL does it."""
        return self.program is None and self.encoded is None


class DeviceChoices:
    """The choices of one communicator on its device, each made once."""

    def __init__(self, comm: NCCLComm, choices: Choices, tally: Any) -> None:
        self._comm, self._choices, self._tally = comm, choices, tally
        self._known: dict[tuple[object, ...], DeviceChoice] = {}

    def choose(self, call: Call, algorithm: Any, *, deterministic: bool) -> DeviceChoice:
        """Return what runs `call`.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the algorithm is unknown, or cannot do this.
        """
        if not isinstance(algorithm, str):
            raise ArgumentTypeError(f"algorithm is a name, not {algorithm!r}")
        key = (
            call.collective, call.dtype, call.op, call.count, call.root, algorithm, deterministic,
            call.wire,
        )  # fmt: skip
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= 1024:
                self._known.clear()
            known = self._known[key] = self._choose(call, algorithm, deterministic)
        return known

    def _choose(self, call: Call, algorithm: str, deterministic: bool) -> DeviceChoice:
        if call.codec is not None and call.count and self._comm.size > 1:
            return self._encoded(call, algorithm)
        hint = check_hint(algorithm)
        if hint is not None and deterministic and self._ordered(call):
            raise ArgumentValueError(
                f"algorithm {algorithm!r} promises no order of reduction, and deterministic=True "
                "needs one: 'ring' and 'direct' have one"
            )
        why = "asked for"
        if algorithm == "auto":
            forced = self._choices.overrides.get(call.collective)
            forced = forced or self._choices.overrides.get("")
            if forced is not None and forced in names(call.collective):
                algorithm, why = forced, f"{VARIABLE} says {forced}"
        if hint is not None or algorithm in ("auto", "native"):
            reason = unfit(call.collective, call.dtype, call.op)
            if reason is None and deterministic and self._ordered(call):
                reason = "NCCL promises no order of reduction, and deterministic=True needs one"
            if reason is None:
                name = algorithm if hint is not None else "native"
                return DeviceChoice(name, "NCCL does it itself" if hint is None else why, hint)
            if algorithm != "auto":
                raise ArgumentValueError(
                    f"algorithm {algorithm!r} cannot do {call.collective} here: {reason}"
                )
            return self._program(call, "direct", f"not native: {reason}")
        if algorithm in SHARED:
            raise ArgumentValueError(
                f"algorithm {algorithm!r} is for arrays on the host, x is on a device"
            )
        if algorithm not in RESERVED:
            algorithm_of(call.collective, algorithm)
        return self._program(call, algorithm, why)

    @staticmethod
    def _ordered(call: Call) -> bool:
        """Return whether the order of reduction shows in the result."""
        return call.op is not None and call.dtype.kind not in (Kind.INT, Kind.BOOL)

    def _program(self, call: Call, name: str, why: str) -> DeviceChoice:
        collective, dtype, op = call.collective, call.dtype, call.op
        if name == "direct" and name not in names(collective):
            name = names(collective)[0]
        built_by = algorithm_of(collective, name)
        rounds_once = built_by.rounds_once
        if op is ReduceOp.AVG and dtype.kind is Kind.INT and not rounds_once:
            raise ArgumentValueError(
                f"algorithm {name!r} cannot do {collective} here: it adds integers in steps, and "
                "an average needs their whole sum in 64 bits"
            )
        comm = self._comm
        once = rounds_once and op is not None and (dtype.kind is Kind.HALF or op is ReduceOp.AVG)
        if once and comm.size > MOST_SOURCES:
            raise ArgumentValueError(
                f"algorithm {name!r} rounds {dtype.name} once, which on devices is for up to "
                f"{MOST_SOURCES} ranks, not {comm.size}: use 'ring'"
            )
        root = call.root if collective in ROOTED else -1
        schedule = built_by.schedule(
            comm.rank, comm.size, root, self._choices.groups, self._choices.bandwidths
        )
        program = Program(
            schedule,
            data_count(collective, call.count, comm.size),
            wide_of(dtype, op, rounds_once=rounds_once).itemsize,
            _SEGMENT,
        )
        kernels = kernels_of(comm.device.ordinal)
        made = DeviceProgram(program, comm, kernels, dtype, op, rounds_once=rounds_once)
        return DeviceChoice(name, why, program=made)

    def _encoded(self, call: Call, algorithm: str) -> DeviceChoice:
        if algorithm not in ("auto", "direct"):
            raise ArgumentValueError(
                f"algorithm {algorithm!r} has no seat for a codec in {call.collective} on devices, "
                "'direct' has one"
            )
        assert call.wire is not None
        encoded = DeviceEncoded(
            call.collective, self._comm, kernels_of(self._comm.device.ordinal), call.wire, call.op,
            call.count, self._tally,
        )  # fmt: skip
        why = "asked for" if algorithm != "auto" else "the one with a seat for a codec on devices"
        return DeviceChoice("direct", why, encoded=encoded)


class Bound:
    """A call, bound to its arrays and to what runs it."""

    __slots__ = ("call", "choice", "enqueue", "mixed", "prepared", "stream")

    def __init__(
        self,
        call: Call,
        choice: DeviceChoice,
        enqueue: Enqueue | None,
        prepared: Prepared | None = None,
    ) -> None:
        self.call, self.choice, self.enqueue = call, choice, enqueue
        #: What the short way needs, if it can make such a call.
        self.prepared = prepared
        first, *others = call.device_buffers
        #: The stream of the first array, where the call goes if nobody names another one.
        self.stream: int = first.stream
        #: Whether another one has another stream, which that one has to be ordered with.
        self.mixed = any(one.stream != first.stream and one.produced for one in others)
