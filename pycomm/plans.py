"""Plans: a collective on given arrays, with everything decided once."""

from collections.abc import Callable
from typing import Any

from pycomm.algorithms.cost import predict
from pycomm.algorithms.schedule import ROOTED, Schedule, data_count
from pycomm.call import Call
from pycomm.deadline import as_timeout
from pycomm.engine import Engine
from pycomm.executor import WINDOW, Execution, Steps
from pycomm.units import format_bytes, format_seconds

__all__ = ["Plan"]

_Prepared = Callable[[], Steps] | None

# Predictions take the schedules of all ranks; above this number they would take seconds.
_PREDICTED_RANKS = 256
_PREDICTED_SEGMENTS = 64


class Plan:
    """A collective on given arrays, made by `Communicator.plan`; calling it runs it.

    Algorithm, schedule, memory and requests are decided and made once, at its making. ``print``
    shows them: algorithm and why, steps, bytes, predicted time. It holds the arrays.
    """

    def __init__(self, engine: Engine, call: Call, algorithm: str, timeout: float | None) -> None:
        self._engine = engine
        self._call = call
        self._asked = algorithm
        self._timeout = None if timeout is None else as_timeout(timeout, engine.timeout)
        self._choice = engine.choose(call, algorithm)
        self._work: Any = None
        self._prepared: _Prepared = None
        self._ran = False

    def __call__(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Run the collective on the plan's arrays; collective over all ranks.

        Parameters
        ----------
        timeout : float, optional
            Seconds until `CommTimeoutError`; by default as the plan was made.
        async_op : bool
            Return a `Work` at once. Another run of the plan first waits for it.

        Returns
        -------
        array, None or Work
            What the communicator's method returns: the same output array each time.

        Raises
        ------
        CommError
            What the communicator's method raises.
        """
        if self._work is not None:
            self._work.wait()  # on all ranks, whether or not it is done already on this one
            self._work = None
        engine = self._engine
        if engine.sequence >= engine.boundary_at:
            engine.pass_boundary(self.collective)
        result = engine.start(
            self._call,
            self._choice,
            self._asked,
            self._timeout if timeout is None else timeout,
            async_op,
            None if self._choice.execution is None else self._steps,
        )
        if async_op:
            self._work = result
        return result

    def _steps(self) -> Steps:
        """Return the steps of one run; the first run on all ranks together prepares them."""
        execution = self._choice.execution
        assert execution is not None
        if not self._ran:
            self._ran = True
            tag = self._engine.plan_tag()
            if tag is not None:
                self._prepared = execution.prepared(*self._call.flat(), tag)
        if self._prepared is not None:
            return self._prepared()
        return self._choice.steps(self._call, self._engine.tags())

    @property
    def collective(self) -> str:
        """The collective."""
        return self._call.collective

    @property
    def algorithm(self) -> str:
        """The algorithm that runs."""
        return self._choice.algorithm

    @property
    def why(self) -> str:
        """Why it is that one."""
        return self._choice.why

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of this rank.

        None where there is none: the library underneath does it, or the ranks of a host in their
        memory. Where only the stages inside hosts go through memory, the schedule holds them as
        messages.
        """
        execution = self._execution
        return None if execution is None else execution.program.schedule

    @property
    def _execution(self) -> Execution | None:
        choice = self._choice
        if choice.instead is not None and choice.instead.algorithm == choice.algorithm:
            choice = choice.instead
        return choice.execution

    @property
    def segments(self) -> int:
        """Into how many segments each chunk is cut."""
        if self._choice.encoded is not None:
            return self._choice.encoded.segments
        execution = self._execution
        return 1 if execution is None else execution.program.segments

    @property
    def steps(self) -> int | None:
        """Rounds of this rank that communicate; None where there is no schedule."""
        if self._choice.encoded is not None:
            return self._choice.encoded.rounds
        return None if self.schedule is None else self.schedule.steps

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that this rank sends in messages; None where the library underneath does it."""
        if self._choice.shared is not None:
            return self._choice.shared.bytes_sent
        if self._choice.encoded is not None:
            return self._choice.encoded.bytes_sent
        if self.schedule is None:
            return None
        return self.schedule.elements_sent(self._count) * self._itemsize

    @property
    def predicted_seconds(self) -> float | None:
        """What the cost model says it takes, see `pycomm.algorithms.predict`.

        None where there is no schedule, as with a codec, and above 256 ranks.
        """
        schedule, transport = self.schedule, self._engine.transport
        if schedule is None or transport.size > _PREDICTED_RANKS:
            return None
        root = self._call.root if schedule.collective in ROOTED else -1
        choices, built = self._engine.choices, self._choice.built_by
        assert built is not None
        schedules = built.schedules(transport.size, root, choices.groups, choices.bandwidths)
        nbytes = self._count * self._itemsize
        segments = min(self.segments, _PREDICTED_SEGMENTS)
        return predict(
            schedules, nbytes, choices.model, choices.groups, segments=segments, window=WINDOW
        )

    @property
    def _itemsize(self) -> int:
        """Bytes of an element in messages."""
        execution = self._execution
        return self._call.dtype.itemsize if execution is None else execution.program.itemsize

    @property
    def _count(self) -> int:
        call, size = self._call, self._engine.transport.size
        return data_count(call.collective, call.count, size)

    def __str__(self) -> str:
        call, transport = self._call, self._engine.transport
        hosts = self._engine.choices.hosts
        op = "" if call.op is None else f", {call.asked or call.op}"
        nbytes = self._count * call.dtype.itemsize
        lines = [
            f"{call.collective} of {self._count:,} {call.dtype.name} ({format_bytes(nbytes)}){op}, "
            f"rank {transport.rank} of {transport.size} on {hosts} host{'s' * (hosts > 1)}",
            f"  algorithm  {self.algorithm}: {self.why}",
        ]
        if self._choice.shared is not None:
            lines += self._choice.shared.describe(call.codec)
        elif self._choice.encoded is not None:
            lines += self._choice.encoded.describe(call.codec, hosts)
        elif self.schedule is None:
            lines.append("  steps      those of the library underneath")
        else:
            sent = format_bytes(self.bytes_sent or 0)
            hop = format_bytes(self.schedule.largest_hop(self._count) * self._itemsize)
            cut = f", each in {self.segments} segments" if self.segments > 1 else ""
            lines.append(f"  steps      {self.steps}{cut}")
            lines.append(f"  sends      {sent} from this rank, at most {hop} a hop")
        seconds = self.predicted_seconds
        if seconds is not None:
            source = self._engine.choices.model_source
            lines.append(f"  predicted  {format_seconds(seconds)} by the {source}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<pycomm.Plan {self.collective} by {self.algorithm}>"
