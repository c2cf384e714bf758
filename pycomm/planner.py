"""How plans are made: the methods of a communicator, with calls planned instead of run."""

from typing import TYPE_CHECKING, Any, cast

from pycomm.algorithms.schedule import COLLECTIVES
from pycomm.call import Call
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.member import Member
from pycomm.movement import Movement
from pycomm.plans import Plan
from pycomm.reductions import Reductions

if TYPE_CHECKING:
    from pycomm.device.plans import DevicePlan

__all__ = ["Planning"]


class Planning(Member):
    """The method that makes plans; see `Communicator`."""

    def plan(
        self,
        collective: str,
        x: Any = None,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        **options: Any,
    ) -> "Plan | DevicePlan":
        """Return a plan: `collective` on these arrays, decided once and run again and again.

        Making a plan sends nothing, but for the first use of a device, which is collective as
        running it is. A new array for the output is made
        once, and overwritten by each run.

        Parameters
        ----------
        collective : str
            The name of a method, such as ``"all_reduce"``.
        x, out : array, optional
            As for that method. The plan holds them.
        algorithm, timeout, options
            As for that method: `op`, `root`, `deterministic`, `compression`, `key`, `stream`.

        Returns
        -------
        Plan or DevicePlan
            Call it to run the collective, print it to see how that is done.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            What the method raises.
        """
        if collective not in COLLECTIVES:
            raise ArgumentValueError(
                f"no collective {collective!r} to plan; known: {', '.join(COLLECTIVES)}"
            )
        arrays = () if collective == "barrier" else (x, out)
        planner = _Planner(self._engine)
        method = getattr(planner, collective)
        return cast(
            "Plan | DevicePlan", method(*arrays, algorithm=algorithm, timeout=timeout, **options)
        )


class _Planner(Reductions, Movement):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine = _PlansOnly(engine)  # type: ignore[assignment]


class _PlansOnly:
    """In place of an engine: takes calls that were checked, and plans them."""

    quick = None

    def __init__(self, engine: Engine) -> None:
        self._real = engine

    def known(self, key: object) -> None:
        """Remember nothing: a plan is made anew each time."""

    def run(
        self,
        call: Call,
        algorithm: str,
        timeout: float | None,
        async_op: bool,
        key: object = None,  # noqa: ARG002 - see known
        stream: Any = None,
    ) -> Any:
        if async_op:
            raise ArgumentValueError("async_op belongs to the calls of a plan, not to its making")
        if call.on_device:
            return self._real.on_device().plan(call, algorithm, timeout, stream)
        if stream is not None:
            raise ArgumentTypeError("stream= is for device arrays; these are on the host")
        return Plan(self._real, call, algorithm, timeout)
