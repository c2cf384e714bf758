"""The topology manager: looks, decides once for all ranks, explains, and adapts."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from pycomm.deadline import Deadline, as_timeout
from pycomm.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    MismatchError,
    describe,
)
from pycomm.seat import Seat
from pycomm.topology.adopted import Adopted
from pycomm.topology.decide import Decider, Presence
from pycomm.topology.health import Rules
from pycomm.topology.probes import peer
from pycomm.topology.probes.local import ProbeHost, Prober
from pycomm.topology.probes.place import identity
from pycomm.topology.snapshot import MeasuredPair, Snapshot

if TYPE_CHECKING:
    from pycomm.communicator import Communicator
    from pycomm.topology.samples import Findings

__all__ = ["TopologyManager"]

# Of a job's time, for asking whether there is news. A look costs more and is bound by `overhead`.
_ASKING = 0.001
_TIMES_ASKED = 20  # in an interval, at least
_MOST_CALLS = 1 << 16  # between two times of asking
_NOTHING, _LOOK = range(2)
_ALL_PAIRS = 300  # rounds of a tournament up to which all pairs are measured at the start


class TopologyManager(Adopted):
    """Knows the hosts, links and devices of a communicator, and keeps its plans up to date.

    Collective over the ranks of `comm`, as are `refresh`, `close`, and `group` for those who are in
    the group. Everything that is measured or timed is decided by rank 0 and adopted by all ranks
    before the same call of `comm`. It has a communicator of its own and never talks on `comm`.

    Every `interval` seconds one rank of each host looks at its devices, in a thread that sends
    nothing. Now and then, before a collective on host arrays, all ranks ask rank 0 for news; when
    there is some to collect they do it there, and measure pairs of ranks, while no collective is
    running. Calls on device arrays alone do not ask: call `refresh` between steps then.

    Parameters
    ----------
    comm : Communicator
        The ranks. It may have one manager at a time.
    ttl : float
        Seconds after which what nobody looked at is unknown.
    interval : float
        Seconds between looks, if that keeps their cost below `overhead`; else longer.
    good_probes : int
        How many good looks in a row make what was degraded or down trusted again.
    overhead : float
        The share of the time that looking may take.
    background : bool
        Whether to look beside the program; otherwise at `refresh` only.
    measure : bool
        Whether to measure pairs of ranks.
    probe : callable, optional
        What looks at this host, instead of what pycomm has: ``probe(host, now) -> Findings``.
        Called on the lowest rank of each host. What it raises is noted, and nothing is known then.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument makes no sense, or `comm` has a manager already.
    """

    def __init__(
        self,
        comm: "Communicator",
        ttl: float = 30.0,
        interval: float = 10.0,
        *,
        good_probes: int = 3,
        overhead: float = 0.008,
        background: bool = True,
        measure: bool = True,
        probe: ProbeHost | None = None,
    ) -> None:
        interval, ttl = as_timeout(interval, 10.0), as_timeout(ttl, 30.0)
        overhead, good_probes = _share(overhead), _number(good_probes)
        background, measure = _flag(background, "background"), _flag(measure, "measure")
        if probe is not None and not callable(probe):
            raise ArgumentTypeError(f"probe is a function, not {probe!r}")
        rules = Rules(good_probes=good_probes, ttl=ttl)
        seat = Seat(comm)
        super().__init__(seat)
        self._prober: Prober | None = None
        try:
            self._begin(rules, interval, overhead, background, measure, probe)
        except BaseException as error:
            self._abandon(error)
            raise

    def _begin(
        self,
        rules: Rules,
        interval: float,
        overhead: float,
        background: bool,
        measure: bool,
        probe: ProbeHost | None,
    ) -> None:
        """Meet the other ranks, look for the first time, and adopt what comes of it."""
        seat = self._seat
        # What rank 0 says, and its sending while that is under way.
        self._notice = np.zeros(3, np.int64)
        self._news: Callable[[], bool] | None = None
        self._spent = 0.0
        self._interval, self._overhead = interval, overhead
        self._measures = measure and self._size > 1
        who = identity()
        # Who shares memory is known to the road as well: what either tells apart is apart.
        key = f"{who.key}/{seat.transport.hosts[self._rank]}"
        presence = Presence(key, who.name, seat.device_bus_id())
        settings = f"{rules}, {interval=}, {overhead=}, {background=}, {measure=}"
        told = seat.comm.all_gather_object((presence, seat.ethernet, settings))
        presences, flat, asked = zip(*told, strict=True)
        if len(set(asked)) > 1:
            self._closed = True
            self._give_up()
            listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(asked))
            raise MismatchError(f"the ranks ask for different topology managers: {listed}")
        self._decider = Decider(presences, rules, ethernet=all(flat))
        self._hosts = self._decider.host_ranks
        own = self._decider.hosts[self._rank]
        self._leaders = tuple(host[0] for host in self._hosts)
        self._among_leaders = seat.comm.split_ranks(self._leaders)
        if self._among_leaders is not None:
            every = interval if background else None
            self._prober = Prober(own, probe, every, overhead, lambda: seat.alive)
        self._turn = 0
        # Of rank 0 alone: when and how much.
        self._looked_at = -math.inf
        self._cost = 0.0
        self._asked_at, self._asked_sequence, self._asking = time.monotonic(), seat.sequence, 2e-5
        rounds = peer.tournament(self._hosts)
        everything = len(rounds) <= _ALL_PAIRS
        self._look(rounds if everything else peer.tournament(self._hosts, 0), peer.THOROUGH)
        if background:
            seat.at_boundary(self._ask, seat.sequence + 1)

    # ------------------------------------------------------------------------------------- looking

    @property
    def seconds_spent(self) -> float:
        """Seconds that calls on this rank have spent on news and looks, and waiting for others."""
        return self._spent

    def refresh(self, *, thorough: bool = False) -> Snapshot:
        """Look now, at everything; collective over all ranks, when no work is in flight.

        Parameters
        ----------
        thorough : bool
            Whether to measure all pairs of ranks, and not only one for each two hosts, in turn.
        """
        self._check_open("refresh")
        if not self._seat.open:
            raise CommError("refresh: the communicator is not open any more", operation="refresh")
        if self._prober is not None:
            self._prober.look()
        self._turn += 1
        rounds = peer.tournament(self._hosts, None if thorough else self._turn)
        self._look(rounds, peer.THOROUGH if thorough else peer.BRIEF)
        return self.snapshot

    def _ask(self) -> None:
        """Before a call of the communicator: hear rank 0's news, and start to send the next.

        What rank 0 says here is heard at the next such call, so that nobody waits for it on its
        way.
        """
        seat, began = self._seat, time.monotonic()
        what, calls = _NOTHING, 1
        if self._news is not None:
            self._hear(self._news)
            what, calls, self._turn = map(int, self._notice)
        if what == _LOOK:
            self._look(peer.tournament(self._hosts, self._turn), peer.BRIEF)
        if self._closed:  # by a listener, on all ranks
            return
        if self._rank == 0:
            self._notice[:] = self._next_notice(began, time.monotonic())
        self._news = seat.start_broadcast(self._notice)
        if self._rank == 0:
            now = time.monotonic()
            if what == _NOTHING:
                self._asking += 0.2 * (now - began - self._asking)
            self._asked_at, self._asked_sequence = now, seat.sequence
        seat.at_boundary(self._ask, seat.sequence + calls)
        self._spent += time.monotonic() - began

    def _hear(self, news: Callable[[], bool]) -> None:
        """Wait for what rank 0 says; it has been on its way for some calls."""
        if not news():
            self._seat.wait(news, Deadline(self._seat.timeout), "news of the topology")

    def _next_notice(self, began: float, now: float) -> tuple[int, int, int]:
        """Return what to do at the next time of asking, and after how many calls there is one more.

        Parameters
        ----------
        began, now : float
            When this time of asking began, and now.
        """
        calls = max(1, self._seat.sequence - self._asked_sequence)
        each = max((began - self._asked_at) / calls, 1e-7)
        # Calls may get slower: what is asked often enough now must be so then.
        often = self._interval / _TIMES_ASKED / each
        cheap = self._asking / (_ASKING * each)
        pause = max(1, math.ceil(min(cheap, often, _MOST_CALLS)))
        due = self._looked_at + max(self._interval, self._cost / self._overhead)
        if now < due:
            return _NOTHING, pause, self._turn
        return _LOOK, pause, self._turn + 1

    def _look(self, rounds: peer.Rounds, effort: peer.Effort) -> None:
        """Collect what all hosts saw, measure, let rank 0 decide, and adopt; on all ranks."""
        comm, began = self._seat.comm, time.monotonic()
        reports: list[tuple[str, Findings]] = []
        if self._among_leaders is not None:
            assert self._prober is not None
            told = [self._prober.take()]
            if len(self._leaders) > 1:
                told = self._among_leaders.all_gather_object(told[0])
            for rank, findings in zip(self._leaders, told, strict=True):
                reports += [(self._decider.hosts[rank], one) for one in findings]
        pairs = self._measure(rounds, effort) if self._measures and rounds else []
        made: Snapshot | str = ""
        if self._rank == 0:
            try:
                now = time.monotonic()
                for host, one in reports:
                    self._decider.report(host, one, now)
                self._decider.measured(pairs, now)
                made = self._decider.decide(now)
            except Exception as error:  # the others wait for an answer
                made = f"rank 0 could not make anything of the reports: {describe(error)}"
        snapshot = comm.broadcast_object(made)
        if isinstance(snapshot, str):
            raise CommError(snapshot, operation="topology", rank=self._rank)
        self._looked_at = time.monotonic()
        self._cost = self._looked_at - began
        self._adopt(snapshot)

    def _measure(self, rounds: peer.Rounds, effort: peer.Effort) -> Sequence[MeasuredPair]:
        """Measure pairs, if nothing is in flight on any rank; return what all ranks measured."""
        seat, comm = self._seat, self._seat.comm
        busy = np.array([seat.busy], np.int64)
        if comm.all_reduce(busy, op="max")[0]:
            return []
        found = self._numbers(rounds, effort)
        # What is odd may have met an interrupt: once more, before anybody believes it.
        doubts = self._decider.doubtful(found, time.monotonic()) if self._rank == 0 else {}
        doubts = comm.broadcast_object(doubts)
        if doubts:
            again = self._numbers(peer.one_by_one(tuple(doubts)), peer.CONFIRMING)
            for key, second in again.items():
                low = found[key].bandwidth < doubts[key]
                one = (max if low else min)(found[key].bandwidth, second.bandwidth)
                found[key] = replace(found[key], bandwidth=one)
        return list(found.values())

    def _numbers(
        self, rounds: peer.Rounds, effort: peer.Effort
    ) -> dict[tuple[int, int], MeasuredPair]:
        """Measure pairs; return on all ranks what came of each."""
        seat = self._seat
        deadline = Deadline(min(seat.timeout, 5.0 + 2.0 * len(rounds)))

        def wait(ready: Callable[[], bool], patient: bool) -> None:
            seat.wait(ready, deadline, "topology measurement", patient=patient)

        tag = seat.transport.tag_limit // 2
        samples = peer.measure(seat.transport, rounds, tag, wait, time.monotonic, effort)
        pairs = list(chain.from_iterable(rounds))
        numbers = np.zeros((len(pairs), 2))
        known = {peer.pair_name(*pair): row for row, pair in enumerate(pairs)}
        for sample in samples:
            if sample.measured is None or sample.latency is None:
                raise CommError(f"{sample.subject}: {sample.reason}", rank=self._rank)
            numbers[known[sample.subject]] = sample.latency, sample.measured
        seat.comm.all_reduce(numbers)
        return {
            (a, b): MeasuredPair(a, b, float(latency), float(bandwidth))
            for (a, b), (latency, bandwidth) in zip(pairs, numbers, strict=True)
            if bandwidth > 0
        }

    # ----------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Stop looking, and close the groups that were made; collective, and idempotent.

        The communicator stays as it is, with the plans of the last epoch.
        """
        if self._closed:
            return
        self._closed = True
        if self._prober is not None:
            self._prober.close()
        self._give_up()

    def _give_up(self) -> None:
        """Leave the communicator to itself."""
        self._seat.leave()
        if self._seat.open and self._news is not None:
            self._hear(self._news)
        self._seat.close()

    def __enter__(self) -> "TopologyManager":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """Leave because of an error, and tell those who may be in a look."""
        if self._closed:
            return
        self._closed = True
        if self._prober is not None:
            self._prober.close()
        self._seat.leave()
        self._seat.comm.leave(error)
        self._seat.abort()

    def __repr__(self) -> str:
        return f"<pycomm.TopologyManager of {self._seat.label}: epoch {self.epoch}>"


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"overhead is a share of the time, not {value!r}")
    if not 0 < float(value) <= 1:
        raise ArgumentValueError(f"overhead is a share of the time, not {value}")
    return float(value)


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"good_probes is a number of looks, not {value!r}")
    return int(value)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} is True or False, not {value!r}")
    return bool(value)
