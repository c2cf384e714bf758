"""Which road a collective takes: the library's own, or a schedule of `pycomm.algorithms`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pycomm.algorithms.compression import Codec
from pycomm.algorithms.compression.codec import name_of
from pycomm.algorithms.cost import ASSUMED, Model
from pycomm.algorithms.hierarchical import Groups, hosts_of, rail_of
from pycomm.algorithms.registry import RESERVED, SHARED, Algorithm, algorithm_of, names, watch
from pycomm.algorithms.schedule import COLLECTIVES, ROOTED, data_count, spans
from pycomm.algorithms.select import Table, built_in, preferences
from pycomm.call import Call
from pycomm.dtypes import DTYPES, DType, Kind, Op, ReduceOp
from pycomm.encoded_calls import EncodedAllReduce, EncodedExecution
from pycomm.encoded_parts import EncodedParts
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.executor import Execution, Steps
from pycomm.program import Program
from pycomm.recent import Recent
from pycomm.scratch import ScratchPool
from pycomm.shared_calls import SharedExecution
from pycomm.shared_hierarchy import PlainAcross, SharedHierarchy
from pycomm.sharing import SharedHost
from pycomm.transports.base import Native, Tested, Transport

__all__ = ["SEGMENT", "VARIABLE", "Choice", "Choices", "Request", "overrides"]

#: What ``"auto"`` means: a name for all collectives that have it, or ``all_reduce=ring,...``.
VARIABLE = "PYCOMM_ALGORITHM"

_MEMORY = "host"  # the kind of memory whose tables count here
_AVG, _SUM = ReduceOp.AVG, ReduceOp.SUM
# Bytes from which it pays that the ranks of each host meet for an all_reduce across hosts.
_MEETINGS_FROM = 1 << 20
# Collectives that have a way around a slow link, and bytes from which its rate matters.
_AVOIDING = ("all_reduce", "broadcast")
_AVOIDED_FROM = 64 << 10
_LIMIT = 1024  # choices that are remembered
_ROUNDS_LIMIT = 200_000  # rounds of segments that they hold
#: Bytes of a segment: it stays in a second-level cache between its message and its reduction.
SEGMENT = 4 << 20


class Request(NamedTuple):
    """What a choice depends on; equal on all ranks.

    `elements` are those of the smaller side, `root` -1 for collectives without one; `codec` is what
    encodes messages, without its state.
    """

    collective: str
    dtype: DType
    op: Op | None
    elements: int
    root: int
    algorithm: str
    deterministic: bool
    codec: Codec | None = None

    def nbytes(self, size: int) -> int:
        """Return the bytes of the data."""
        return data_count(self.collective, self.elements, size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Choice:
    """What a call runs, and why.

    `native` starts it, or else `execution` does, whose schedule `built_by` has built, or else
    `shared` in the memory of the host, and as `instead` says where that is out of reach, or else
    `encoded`.
    """

    algorithm: str
    why: str
    native: Native | None
    execution: Execution | None
    built_by: Algorithm | None = None
    shared: SharedExecution | SharedHierarchy | None = None
    instead: "Choice | None" = None
    encoded: EncodedExecution | None = None

    def steps(self, call: Call, tags: range) -> Steps:
        """Return the steps of one call that has these tags for itself."""
        if self.shared is not None:
            assert self.instead is not None
            return self.shared.steps(call, tags, partial(self.instead.steps, call, tags))
        if self.execution is not None:
            return self.execution.steps(*call.flat(), tags)
        if self.encoded is not None:
            return self.encoded.steps(call, tags)
        assert self.native is not None
        return _started(self.native, call)


def _started(native: Native, call: Call) -> Steps:
    """Start the library's own collective, as steps."""
    yield Tested(native(call.x, call.out, call.root, call.in_place))


def _groups_of(transport: Transport) -> Groups:
    """Return the ranks host by host, in the order of their first ranks; flat for a single host."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(transport.hosts):
        found.setdefault(host, []).append(rank)
    hosts = tuple(tuple(ranks) for ranks in found.values())
    return hosts if len(hosts) > 1 else hosts[0]


class Choices:
    """The choices of one communicator, each made once.

    Only what is equal on all ranks may enter them, or ranks would take different roads.

    Attributes
    ----------
    known : dict
        What `choose` has returned, by its argument.
    recent : Recent
        Whole calls that were made lately.
    table, source : Table, str
        What ``"auto"`` goes by, and where that comes from.
    groups, hosts : Groups, int
        The ranks host by host, and how many hosts that are.
    model, model_source : Model, str
        What predictions go by, and where that comes from.
    bandwidths : tuple of float, optional
        How fast the road of each rank to other hosts is, if that was measured and differs.
    overrides : dict
        What ``"auto"`` means instead, by collective, under "" for all.
    segment : int
        Bytes that a segment of a chunk may have.
    saturated : int
        How many values were too large for a codec so far.
    """

    def __init__(self, transport: Transport, pool: ScratchPool) -> None:
        self._transport = transport
        self._pool = pool
        self.groups = _groups_of(transport)
        self.hosts = len(set(transport.hosts))
        self._built_in: Table = built_in(_MEMORY, self.hosts, crowded=transport.crowded)
        self.table = self._built_in
        self.source = "built-in table"
        self.bandwidths: tuple[float, ...] | None = None
        self.overrides: Mapping[str, str] = {}
        self.model = ASSUMED
        self.model_source = "model that is assumed, not measured"
        self._tuned = False
        # What says that links between hosts differ, if anything does.
        self._avoiding = ""
        self.segment = SEGMENT
        self.saturated = 0
        self.host: SharedHost | None = None
        ranks = {len(host) for host in hosts_of(self.groups)}
        if transport.shares_memory and len(ranks) == 1 and ranks != {1}:
            self.host = SharedHost(transport, self.forget)
        self.known: dict[tuple[object, ...], Choice] = {}
        self.recent = Recent()
        self._rounds = 0
        watch(self)

    def use(
        self,
        tables: Mapping[str, Table],
        model: Model,
        bandwidths: tuple[float, ...] | None,
        source: str,
    ) -> None:
        """Go by what was measured; what was not keeps the built-in rules."""
        self.table = {**self._built_in, **tables.get(_MEMORY, {})}
        self.model = model
        self.bandwidths = bandwidths
        self.source = self.model_source = source
        self._tuned = True
        self.forget()

    def follow(
        self, groups: Groups, bandwidths: tuple[float, ...] | None, model: Model | None, source: str
    ) -> None:
        """Go by a topology that was looked at; equal on all ranks.

        Parameters
        ----------
        groups : Groups
            The ranks host by host, the hosts in the order of a ring.
        bandwidths : tuple of float, optional
            How fast the road of each rank to other hosts is, if that differs.
        model : Model, optional
            What predictions go by from now on, if nothing was measured for this layout before.
        source : str
            Where all of it comes from.
        """
        hosts = hosts_of(groups)
        if sorted(map(sorted, hosts)) != sorted(map(sorted, hosts_of(self.groups))):
            self.host = None  # the library sees other hosts, and memory is shared within those
        self.groups = groups if len(hosts) > 1 else hosts[0]
        self.hosts = len(hosts)
        self.bandwidths = bandwidths
        turned = list(hosts) != sorted(hosts)
        self._avoiding = source if len(hosts) > 1 and (turned or bandwidths is not None) else ""
        if model is not None and not self._tuned:
            self.model, self.model_source = model, source
        self.forget()

    def forget(self) -> None:
        """Make every choice anew: tables or algorithms have changed."""
        self.known.clear()
        self.recent.clear()
        self._rounds = 0

    def choose(self, request: Request) -> Choice:
        """Return what runs such a collective.

        Raises
        ------
        ArgumentValueError
            If the algorithm is unknown, or cannot do this.
        ScheduleError
            If the algorithm is a user's, and wrong.
        """
        if not isinstance(request.algorithm, str):
            raise ArgumentTypeError(f"algorithm is a name, not {request.algorithm!r}")
        if len(self.known) >= _LIMIT or self._rounds > _ROUNDS_LIMIT:
            self.forget()
        if request.codec is not None and request.elements and self._transport.size > 1:
            encoded = self.known[request] = self._encoded(request, request.codec)
            return encoded
        wanted, why = self._wanted(request)
        choice = None
        for name in wanted:
            reason = self._unfit(request, name)
            if reason is None:
                choice = self._made(request, name, why)
                break
            why = f"{why}; not {name}: {reason}"
        if choice is None:
            raise ArgumentValueError(
                f"algorithm {wanted[-1]!r} cannot do {request.collective} here: {reason}"
            )
        if choice.execution is not None:
            program = choice.execution.program
            self._rounds += program.segments * len(program.schedule.rounds)
        self.known[request] = choice
        return choice

    def execution(self, collective: str, name: str, dtype: DType, count: int) -> Execution:
        """Return what runs a collective of pycomm's own that moves data."""
        request = Request(collective, dtype, None, count, -1, name, False)
        return self._execution(request, algorithm_of(collective, name))

    def _wanted(self, request: Request) -> tuple[tuple[str, ...], str]:
        """Return the names to try, in order, and why these."""
        collective, algorithm = request.collective, request.algorithm
        if algorithm != "auto":
            if algorithm not in RESERVED:
                algorithm_of(collective, algorithm)
            return (algorithm,), "asked for"
        nbytes = request.nbytes(self._transport.size)
        wanted, why = preferences(self.table, collective, nbytes), f"{self.source}, {nbytes} bytes"
        # What was measured may not be able to do this: averages of integers, for instance.
        wanted += preferences(self._built_in, collective, nbytes)
        if self._avoiding and nbytes >= _AVOIDED_FROM and collective in _AVOIDING:
            # The one that passes hosts in a given order, and gives each road its share.
            wanted, why = ("hierarchical", *wanted), f"{self._avoiding}: links between hosts differ"
        forced = self.overrides.get(collective) or self.overrides.get("")
        if forced is not None and (forced in RESERVED or forced in names(collective)):
            return (forced, *wanted), f"{VARIABLE} says {forced}"
        return wanted, why

    def _unfit(self, request: Request, name: str) -> str | None:
        """Return why an algorithm cannot do what is requested, None if it can."""
        collective, dtype, op, count = request[:4]
        averages_ints = op is _AVG and dtype.kind is Kind.INT
        if name in SHARED:
            if self.host is None or self.hosts > 1:
                return "the ranks are not processes of one host"
            if self.host.usable is False:
                return "the processes may not map each other's memory"
            return None
        if name != "native":
            if averages_ints and not algorithm_of(collective, name).rounds_once:
                return "it adds integers in steps, and an average needs their whole sum in 64 bits"
            return None
        if count == 0 and collective != "barrier":
            # An MPI may return from an empty collective at once, on one rank alone if only its
            # count is 0: the next call of that rank would be paired with this one of the others.
            return None
        ordered = op is not None and dtype.kind not in (Kind.INT, Kind.BOOL)
        if request.deterministic and ordered:
            return "the library promises no order of reduction, and deterministic=True needs one"
        if self._transport.native(collective, dtype, op, count) is None:
            what = f"{count} elements of {dtype.name}"
            return f"the library has none for {what}" + ("" if op is None else f" with op '{op}'")
        return None

    def _made(self, request: Request, name: str, why: str, *, in_turn: bool = False) -> Choice:
        collective, dtype, op, count = request[:4]
        if count == 0 and collective != "barrier":
            # Nothing to move, but all have to come.
            execution = self.execution("barrier", "dissemination", dtype, 0)
            built_by = algorithm_of("barrier", "dissemination")
            return Choice("dissemination", "there is no data", None, execution, built_by)
        if name in SHARED:
            nbytes = request.nbytes(self._transport.size)
            others = preferences(self.table, collective, nbytes)
            others += preferences(self._built_in, collective, nbytes)
            instead = next(
                one for one in others if one not in SHARED and self._unfit(request, one) is None
            )
            why_other = "memory is out of reach, or not registered"
            other = self._made(request, instead, why_other, in_turn=True)
            assert self.host is not None
            shared = SharedExecution(
                self.host, collective, dtype, op, request.root, count,
                registered=name == "registered",
            )  # fmt: skip
            return Choice(name, why, None, None, shared=shared, instead=other)
        if name == "native":
            native = self._transport.native(collective, dtype, op, count, in_turn=in_turn)
            return Choice(name, why, native, None)
        built_by = algorithm_of(collective, name)
        choice = Choice(name, why, None, self._execution(request, built_by), built_by)
        if (name, collective) != ("hierarchical", "all_reduce"):
            return choice
        # In the memory of each host, where all hosts are alike.
        plain = self.hosts > 1 and self.bandwidths is None and op is not _AVG
        if not plain or not self._pays_to_meet(request):
            return choice
        assert self.host is not None
        assert op is not None
        transport, segment = self._transport, built_by.segment_of(self.segment, self.hosts)
        here, rail = rail_of(transport.rank, self.groups)
        start, stop = spans(count, len(here))[here.index(transport.rank)]
        across = PlainAcross(transport, self._pool, rail, dtype, op, stop - start, segment)
        inside = SharedHierarchy(self.host, dtype, op, count, across)
        return Choice(name, why, None, None, built_by, shared=inside, instead=choice)

    def _pays_to_meet(self, request: Request) -> bool:
        """Return whether the ranks of each host can and should do their stages in memory."""
        long = request.nbytes(self._transport.size) >= _MEETINGS_FROM
        return long and self.host is not None and self.host.usable is not False

    def _encoded(self, request: Request, codec: Codec) -> Choice:
        """Return what runs a collective whose messages are encoded."""
        collective, dtype, op, count = request[:4]
        here = {len(ranks) for ranks in hosts_of(self.groups)}
        alike = self.hosts > 1 and len(here) == 1 and here != {1}
        seats = ("hierarchical", "direct") if alike else ("direct",)
        name, why = request.algorithm, "asked for"
        if name == "auto":
            name, why = seats[0], f"{self.hosts} host{'s' * (self.hosts > 1)}"
            forced = self.overrides.get(collective) or self.overrides.get("")
            if forced is not None and forced in seats:
                name, why = forced, f"{VARIABLE} says {forced}"
            elif forced is not None:
                why += f"; {VARIABLE} says {forced}, which has no seat for a codec"
        if name not in seats:
            raise ArgumentValueError(
                f"algorithm {name!r} has no seat for a codec in {collective} here, "
                f"{' and '.join(seats)} {'have' if len(seats) > 1 else 'has'} one"
            )
        facts = self._transport, self._pool
        groups = self.groups if name == "hierarchical" else None
        if collective != "all_reduce":
            parts = EncodedParts(
                *facts, groups, collective, codec, op, count, self.segment, self._note
            )
            return Choice(name, why, None, None, encoded=parts)
        assert op is not None
        layers = EncodedAllReduce(*facts, groups, codec, op, count, self.segment, self._note)
        choice = Choice(name, why, None, None, encoded=layers)
        if groups is None or not self._pays_to_meet(request):
            return choice
        assert self.host is not None
        said = f"{name_of(codec)}, {op}"
        inside = SharedHierarchy(self.host, dtype, _SUM, count, layers.across, said)
        return Choice(name, why, None, None, shared=inside, instead=choice)

    def _note(self, values: int) -> None:
        self.saturated += values

    def _execution(self, request: Request, algorithm: Algorithm) -> Execution:
        transport, dtype, op = self._transport, request.dtype, request.op
        average = op is _AVG and not algorithm.rounds_once
        widened = average and dtype is DTYPES["float16"]
        if widened:
            dtype = DTYPES["float32"]
        root = request.root if request.collective in ROOTED else -1
        schedule = algorithm.schedule(
            transport.rank, transport.size, root, self.groups, self.bandwidths
        )
        program = Program(
            schedule,
            data_count(request.collective, request.elements, transport.size),
            dtype.itemsize,
            algorithm.segment_of(self.segment, self.hosts),
        )
        return Execution(
            program, transport, self._pool, dtype, _SUM if average else op,
            scaled=average and not widened, widened=widened,
        )  # fmt: skip


def overrides(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the algorithm that a variable names for each collective, under "" that for all.

    Raises
    ------
    ArgumentValueError
        If it names something else.
    """
    text = environ.get(VARIABLE, "")
    found = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        collective, separator, name = part.rpartition("=")
        known: set[str] = set()
        if not separator:
            known = {one for each in COLLECTIVES for one in names(each)}
        elif collective in COLLECTIVES:
            known = set(names(collective))
        if name not in known and (name not in RESERVED or (separator and not known)):
            raise ArgumentValueError(
                f"{VARIABLE}={text}: {part!r} is neither an algorithm nor collective=algorithm"
            )
        if name != "auto":
            found[collective] = name
    return found
