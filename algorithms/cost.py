"""The cost model: how long a schedule takes, from latency, bandwidth and the speed of reducing.

A message of m bytes between ranks that are both ready takes ``latency + overhead + m / bandwidth``
(alpha and beta of the usual model, here one pair inside hosts and one across). It occupies the
sender's way out and the receiver's way in for ``overhead + m / bandwidth``: inside a host each rank
has its own, across hosts the ranks of a host share its NICs, the rank with local number i using NIC
i modulo their number. A way carries messages one after the other as they get ready, without gaps:
that one way waits for another is not modelled. Reducing m bytes takes ``m / reduce_bandwidth``
(gamma) of the rank's time once the round's messages are there. Hockney, "The communication
challenge for MPP", 1994.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from pycomm.algorithms.hierarchical import Groups, hosts_of
from pycomm.algorithms.matching import Matcher
from pycomm.algorithms.schedule import Chunks, Recv, Schedule, chunk_sizes
from pycomm.errors import ScheduleError

__all__ = ["ASSUMED", "Link", "Model", "predict"]


class Link(NamedTuple):
    """A kind of link: `latency` and `overhead` in seconds, `bandwidth` in bytes a second."""

    latency: float
    bandwidth: float
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """What messages and reductions cost.

    Attributes
    ----------
    inside, across : Link
        Between ranks of one host, and of several.
    reduce_bandwidth : float
        Bytes of input a rank reduces in a second.
    nics : int
        NICs a host has, each with the bandwidth of `across`; 0 for one a rank.
    """

    inside: Link
    across: Link
    reduce_bandwidth: float
    nics: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the model as a dict that goes to JSON."""
        links = {
            name: [link.latency, link.bandwidth, link.overhead]
            for name, link in (("inside", self.inside), ("across", self.across))
        }
        return {**links, "reduce_bandwidth": self.reduce_bandwidth, "nics": self.nics}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Model":
        """Return the model that `to_dict` wrote.

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is none.
        """
        model = cls(
            Link(*map(float, told["inside"])),
            Link(*map(float, told["across"])),
            float(told["reduce_bandwidth"]),
            int(told["nics"]),
        )
        rates = (model.inside.bandwidth, model.across.bandwidth, model.reduce_bandwidth)
        times = [time for link in (model.inside, model.across) for time in link[::2]]
        if not all(0 < rate < float("inf") for rate in rates) or model.nics < 0:
            raise ValueError("rates must be positive")
        if not all(0 <= time < float("inf") for time in times):
            raise ValueError("times must not be negative")
        return model


#: For machines where nothing was measured: ranks of one host on its memory, hosts on 10 Gbit/s.
ASSUMED = Model(Link(5e-6, 4e9, 5e-6), Link(50e-6, 1.2e9, 10e-6), 4e9, nics=1)


class _Clock(Matcher):
    """All schedules, with clocks; one copy a segment."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        nbytes: int,
        model: Model,
        groups: Groups,
        segments: int,
        window: int,
    ) -> None:
        super().__init__(schedules, segments)
        size = self.size
        self._heap = [
            (0.0, segment * size + rank)
            for segment in range(min(window, segments))
            for rank in range(size)
        ]
        self._window = window
        self._segments = segments
        self._now = 0.0
        self.finish = 0.0
        # Bytes of each chunk in each segment.
        pieces = [chunk_sizes(bytes_, segments) for bytes_ in schedules[0].sizes(nbytes)]
        self._bytes = [[piece[segment] for piece in pieces] for segment in range(segments)]
        self._set_links(model, groups)
        self._gamma = 1 / model.reduce_bandwidth
        self._until = [0.0] * (size * segments)  # when the messages of an actor's round are there
        self._reducing = [0.0] * (size * segments)  # seconds of reduction in an actor's round
        self._busy = [0.0] * size  # until when a rank reduces

    def _set_links(self, model: Model, groups: Groups) -> None:
        hosts = hosts_of(groups)
        self._host = [0] * self.size
        # Ways in and out: first one a rank for its host, then the NICs.
        self._nic = [0] * self.size
        ports = self.size
        for number, host in enumerate(hosts):
            nics = min(model.nics, len(host)) or len(host)
            for place, rank in enumerate(host):
                self._host[rank] = number
                self._nic[rank] = ports + place % nics
            ports += nics
        self._out = [0.0] * ports
        self._in = [0.0] * ports
        self._inside = (model.inside.latency, 1 / model.inside.bandwidth, model.inside.overhead)
        self._across = (model.across.latency, 1 / model.across.bandwidth, model.across.overhead)

    def take(self) -> int | None:
        """Return the actor whose round is over first."""
        if not self._heap:
            return None
        self._now, actor = heappop(self._heap)
        return actor

    def meet(self, sender: int, receiver: int, sent: Chunks, recv: Recv) -> None:
        """Let a message take its turn on its way; both sides are ready now."""
        size = self.size
        source, target = sender % size, receiver % size
        sizes = self._bytes[sender // size]
        nbytes = sizes[sent[0]] if len(sent) == 1 else sum(sizes[chunk] for chunk in sent)
        if self._host[source] == self._host[target]:
            latency, beta, overhead = self._inside
            way_out, way_in = source, target
        else:
            latency, beta, overhead = self._across
            way_out, way_in = self._nic[source], self._nic[target]
        # Comparisons instead of max(), which takes three times as long: of a thousand ranks this
        # runs millions of times.
        busy, now = overhead + nbytes * beta, self._now
        out = self._out[way_out]
        out = self._out[way_out] = (out if out > now else now) + busy
        into = self._in[way_in]
        into = self._in[way_in] = (into if into > now else now) + busy
        left = out if out > into else into
        until = self._until
        if until[sender] < left:
            until[sender] = left
        if until[receiver] < left + latency:
            until[receiver] = left + latency
        if recv.reduce:
            self._reducing[receiver] += nbytes * self._gamma

    def over(self, actor: int) -> None:
        """Reduce, and begin the next round after that."""
        until = self._until[actor]
        if self._reducing[actor]:
            rank = actor % self.size
            until = self._busy[rank] = max(until, self._busy[rank]) + self._reducing[actor]
            self._reducing[actor] = 0.0
        heappush(self._heap, (until if until > self._now else self._now, actor))

    def end(self, actor: int) -> None:
        """Begin the segment that takes the place of this one."""
        self.finish = max(self.finish, self._now)
        following = actor + self._window * self.size
        if following < self._segments * self.size:
            heappush(self._heap, (self._now, following))


def predict(
    schedules: Sequence[Schedule],
    nbytes: int,
    model: Model,
    groups: Groups | None = None,
    *,
    segments: int = 1,
    window: int = 4,
) -> float:
    """Return the seconds until the last rank is done.

    Parameters
    ----------
    schedules : sequence of Schedule
        One a rank, in rank order.
    nbytes : int
        Size of the data; of all parts together where it has parts.
    model : Model
        What things cost.
    groups : nested tuple of int, optional
        The ranks host by host; all on one host if None.
    segments, window : int
        Into how many segments each chunk is cut, and how many of them are under way at a time.

    Raises
    ------
    ScheduleError
        If the schedules do not fit each other, or there are no segments.
    """
    if segments < 1 or window < 1:
        raise ScheduleError(f"no {segments} segments with {window} under way")
    if groups is None:
        groups = tuple(range(len(schedules)))
    clock = _Clock(schedules, nbytes, model, groups, segments, window)
    clock.run()
    return clock.finish
