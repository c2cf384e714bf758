"""Communicators of some of the ranks."""

import zlib
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from pycomm.arguments import rank_of
from pycomm.buffers import Buffer
from pycomm.call import Call
from pycomm.deadline import Deadline, as_timeout
from pycomm.dtypes import DTYPES
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError, MismatchError
from pycomm.meeting import meeting
from pycomm.resources import Resources
from pycomm.transports.base import await_transport

__all__ = ["Groups"]


class Groups(Resources):
    """split, split_ranks, shrink and host; see `Communicator`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._host: Self | None = None
        self._children: list[Self] = []
        self._splits = 0

    @property
    def host(self) -> Self:
        """The communicator of the ranks of this host, in rank order.

        Collective over those ranks on first use. It belongs to this communicator and is closed
        with it.
        """
        if self._host is None:
            self._host = self.split_ranks(self._host_ranks)
            assert self._host is not None
        return self._host

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Self | None:
        """Split into communicators of the ranks with equal `color`; collective over all ranks.

        Parameters
        ----------
        color : int or None
            Which group to join; None for no group.
        key : int
            Ranks are numbered by key, equal keys by their rank here.

        Returns
        -------
        Communicator or None
            The new one, closed with this one; None without a color.
        """
        _check_number(key, "key")
        if color is not None:
            _check_number(color, "color")
        own = np.array([color is not None, color or 0, key], np.int64)
        table = np.empty((self._size, 3), np.int64)
        row = DTYPES["int64"]
        call = Call(
            "all_gather", Buffer(own, row, own), Buffer(table, row, table), None, row, 3,
            operation="split",
        )  # fmt: skip
        self._engine.run(call, "auto", timeout, False)
        if color is None:
            return None
        same = [r for r in range(self._size) if table[r, 0] and table[r, 1] == color]
        return self._new_group(sorted(same, key=lambda r: (table[r, 2], r)), timeout)

    def split_ranks(self, ranks: Iterable[int], *, timeout: float | None = None) -> Self | None:
        """Return a communicator of `ranks`, numbered in that order; collective over those only.

        Parameters
        ----------
        ranks : iterable of int
            Ranks of this communicator, without repetition, the same on each of them.

        Returns
        -------
        Communicator or None
            The new one, closed with this one; None, at once, on a rank that is not in `ranks`.

        Raises
        ------
        MismatchError
            If the members give `ranks` in different orders. Other lists than theirs end with
            `CommTimeoutError` on those that wait for a rank that does not come.
        """
        if not isinstance(ranks, Iterable):
            raise ArgumentTypeError(f"ranks are several, not {type(ranks).__name__}")
        members = [rank_of(rank, self._size, "ranks") for rank in ranks]
        if len(set(members)) != len(members) or not members:
            raise ArgumentValueError(f"ranks must be distinct and not empty, not {members}")
        return self._new_group(members, timeout) if self._rank in members else None

    def _new_group(self, members: list[int], timeout: float | None) -> Self:
        """Meet the members, under a deadline, and make their communicator."""
        engine = self._engine
        deadline = Deadline(as_timeout(timeout, engine.timeout))
        span = np.full(2, zlib.crc32(repr(members).encode()), np.uint64)
        # Twice: who passes the second time knows that all have passed the first, and that nobody
        # had given up before. Only then may MPI make the group, which no deadline can stop.
        for _ in range(2):
            steps = meeting(engine.transport, members, engine.meeting_tag, span)
            engine.meet(steps, "split", timeout)
        if span[0] != span[1]:
            raise MismatchError(
                f"split_ranks on rank {self._rank}: the ranks do not all give the same list; here "
                f"it is {members}",
                operation="split_ranks",
                rank=self._rank,
            )
        try:
            transport = await_transport(engine.transport.split(members), deadline, "split")
        except BaseException as error:
            raise engine.fail(error, "split", None) from error.__cause__
        return self.over_transport(transport)

    def over_transport(self, transport: Any) -> Self:
        """Return the communicator over a transport that came out of this one's.

        For pycomm itself. It is closed with this one.
        """
        engine = self._engine
        self._splits += 1
        family, label = engine.waiter.family, f"{engine.label}/{self._splits}"
        child = type(self)(
            Engine(transport, engine.timeout, engine.check, label, family, engine.deterministic)
        )
        child._engine.adopt(engine.tuning, engine.choices.overrides)
        child._wanted = self._wanted
        child._over_nccl(transport)
        self._children = [one for one in self._children if one._engine.state == "open"]
        self._children.append(child)
        return child

    def shrink(self, exclude: Iterable[int] = (), *, timeout: float | None = None) -> Self:
        """Return a communicator of the ranks that are left; collective over those only.

        Also of a communicator that is broken by what went wrong on devices, or whose ranks have
        NCCL only. What was under way there is given up; abort the old one when it is not needed
        any more. A communicator whose messages between hosts have broken down cannot be shrunk.

        Parameters
        ----------
        exclude : iterable of int
            The ranks that do not come, the same on all that do.

        Raises
        ------
        UnsupportedError
            Of ranks with NCCL only, if it is older than 2.27.
        CommTimeoutError
            If not all others come in time.
        """
        engine = self._engine
        if not isinstance(exclude, Iterable):
            raise ArgumentTypeError(f"exclude are several ranks, not {type(exclude).__name__}")
        gone = sorted({rank_of(rank, self._size, "exclude") for rank in exclude})
        if self._rank in gone:
            raise ArgumentValueError(f"this is rank {self._rank}, which is among {gone}")
        if engine.state not in ("open", "broken"):
            raise CommError(f"shrink: {engine.label} is {engine.state}", operation="shrink")
        shrink = getattr(engine.transport, "shrink", None)
        if shrink is not None:
            deadline = Deadline(as_timeout(timeout, engine.timeout))
            self._side.give_up(CommError(f"{engine.label} was shrunk", rank=self._rank))
            transport = shrink(gone, deadline, f"{engine.label}/shrunk")
            if engine.state == "open":
                engine.break_off(CommError("it was shrunk"), "shrink")
            return self.over_transport(transport)
        members = [rank for rank in range(self._size) if rank not in gone]
        return self._new_group(members, timeout)


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{name} is an int, not {type(value).__name__}")
    if not -(2**63) <= int(value) < 2**63:
        raise ArgumentValueError(f"{name}={value} does not fit in 64 bits")
