"""What all ranks of a communicator have adopted of a topology, and the groups that follow."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycomm.deadline import as_timeout
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError
from pycomm.topology.explain import explain
from pycomm.topology.snapshot import Decision, Groups, Snapshot, measured_model
from pycomm.topology.survivors import agree

if TYPE_CHECKING:
    from pycomm.communicator import Communicator
    from pycomm.seat import Seat

__all__ = ["TAGS", "Adopted"]

_log = logging.getLogger("pycomm")

#: What groups are for: tag -> the kind of group, and why that one.
TAGS: dict[str, tuple[str, str]] = {
    "nvlink_local": ("nvlink", "GPUs that reach each other over NVLink"),
    "host_local": ("host", "ranks that share memory"),
    "gradient_sync": (
        "gradient_sync",
        "the nearest ranks, over NVLink or inside of a host: never across a network switch",
    ),
    "rail_local": ("rail", "ranks near NICs of one number: each rail carries its own slice"),
    "inter_host": ("leaders", "one rank of each host"),
    "checkpoint_broadcast": ("healthy", "all ranks that are well, who have met at a barrier"),
}


class Adopted:
    """What is known, groups, and what happens when it changes; see `TopologyManager`."""

    def __init__(self, seat: "Seat") -> None:
        self._seat = seat
        self._rank, self._size = seat.comm.rank, seat.comm.size
        self._snapshot: Snapshot | None = None
        self._groups: dict[str, tuple[tuple[int, ...], Communicator]] = {}
        self._listeners: list[Callable[[Snapshot, Snapshot], Any]] = []
        self._closed = False
        self._healed = 0

    # -------------------------------------------------------------------------------- what is known

    @property
    def snapshot(self) -> Snapshot:
        """What all ranks have adopted last."""
        assert self._snapshot is not None
        return self._snapshot

    @property
    def epoch(self) -> int:
        """The number of the snapshot's plans; grows when plans change."""
        return self.snapshot.epoch

    def groups(self, name: str) -> Groups | None:
        """Return all groups of a kind, as tuples of ranks of the communicator.

        Parameters
        ----------
        name : str
            ``"world"``, ``"host"``, ``"leaders"``, ``"numa"``, ``"nvlink"``, ``"rail"``, ``"near"``
            and ``"fast"`` (clusters by measured latency and bandwidth), ``"healthy"``, or
            ``"gradient_sync"``.

        Returns
        -------
        tuple of tuple of int, or None
            None if nobody can tell; `explain` says why.
        """
        return self._decision(name).groups

    def _decision(self, name: str) -> Decision:
        decision = self.snapshot.decision(name)
        if decision is None:
            known = ", ".join(one.name for one in self.snapshot.decisions)
            raise ArgumentValueError(f"there are no groups {name!r}; known: {known}")
        return decision

    def explain(self) -> str:
        """Return the reason of every decision, a sentence a line."""
        return explain(self.snapshot)

    def on_change(self, function: Callable[[Snapshot, Snapshot], Any]) -> None:
        """Have ``function(before, after)`` called on this rank whenever a new epoch is adopted.

        It is called before the same collective on all ranks, and may not call any itself. What it
        raises is logged.
        """
        self._check_open("on_change")
        if not callable(function):
            raise ArgumentTypeError(f"on_change takes a function, not {function!r}")
        self._listeners.append(function)

    # ------------------------------------------------------------------------------------- groups

    def group(self, name: str, *, timeout: float | None = None) -> "Communicator | None":
        """Return the communicator of this rank's group of a kind; None if it is in none.

        Collective over the ranks of the group, in the same order on all of them. It is made once
        and kept while its ranks stay the same; it is closed when all ranks adopt a change of them,
        or the manager is closed, and a new one made at the next call. ``"healthy"`` also works when
        the communicator has broken: those who are left agree on who they are, and the others are
        given up.

        Parameters
        ----------
        name : str
            As for `groups`.
        timeout : float, optional
            Seconds to wait for the others; of survivors at most, by default 5.

        Raises
        ------
        ArgumentValueError
            If there are no such groups, or nobody can tell them.
        CommError
            If this rank is on the smaller side of a network that has split.
        """
        self._check_open("group")
        if name == "healthy" and self._seat.lost:
            return self._of_survivors(timeout)
        decision = self._decision(name)
        if decision.groups is None:
            raise ArgumentValueError(f"the groups {name!r} are unknown: {decision.reason}")
        own = next((one for one in decision.groups if self._rank in one), None)
        if own is None:
            return None
        known = self._groups.get(name)
        if known is not None and not known[1].closed:
            return known[1]
        made = self._seat.comm.split_ranks(own, timeout=timeout)
        assert made is not None
        self._groups[name] = (own, made)
        return made

    def _retire(self, snapshot: Snapshot) -> None:
        """Close the groups whose ranks are others now; on all ranks at the same point."""
        for name in sorted(self._groups):  # the same order everywhere, however they were made
            members, group = self._groups[name]
            decision = snapshot.decision(name)
            if decision is not None and members in (decision.groups or ()):
                continue
            del self._groups[name]
            if set(members) & set(snapshot.lost):
                group.abort()
            else:
                group.close()

    def get_group_by_tag(self, tag: str, *, timeout: float | None = None) -> "Communicator | None":
        """Return the communicator of the group that a purpose wants, as `group` does.

        Parameters
        ----------
        tag : str
            One of `TAGS`: ``"nvlink_local"``, ``"host_local"``, ``"gradient_sync"``,
            ``"rail_local"``, ``"inter_host"``, ``"checkpoint_broadcast"``.
        """
        if not isinstance(tag, str) or tag not in TAGS:
            raise ArgumentValueError(f"there is no tag {tag!r}; known: {', '.join(TAGS)}")
        comm = self.group(TAGS[tag][0], timeout=timeout)
        if tag == "checkpoint_broadcast" and comm is not None:
            comm.barrier(timeout=timeout)
        return comm

    def _of_survivors(self, timeout: float | None) -> "Communicator":
        """Make the communicator of those who are left after a failure."""
        seat, patience = self._seat, as_timeout(timeout, 5.0)
        tag, self._healed = 9 * self._healed, self._healed + 1
        gone = seat.gone() | set(self.snapshot.lost)
        left = agree(seat.reserve, gone, patience, seat.idle_wait, tag)
        made = seat.survivors(left, patience + 2.0, tag + 8)
        lost = tuple(rank for rank in range(self._size) if rank not in left)
        names = ", ".join(map(str, lost))
        why = f"ranks {names} do not answer" if lost else "all ranks answer"
        self._adopt(self.snapshot.without(lost, why))
        return made

    def _adopt(self, snapshot: Snapshot) -> None:
        """Go by a snapshot from now on, as all ranks do at this point."""
        before, self._snapshot = self._snapshot, snapshot
        if before is not None and before.epoch == snapshot.epoch:
            return
        if self._seat.open:
            measured = bool(snapshot.pairs)
            roads = snapshot.roads if measured else self._seat.roads
            source = f"topology of epoch {snapshot.epoch}"
            self._seat.follow(
                snapshot.order, roads, measured_model(snapshot, self._seat.model), source
            )
        if before is None:
            return
        self._retire(snapshot)
        for function in self._listeners:
            try:
                function(before, snapshot)
            except Exception:
                _log.exception("on_change of the topology manager")

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise CommError(f"{operation}: this topology manager is closed", operation=operation)
