"""One size: check the results, then time pycomm and its peers in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import pycomm
from pycomm.bench import compression, roofline
from pycomm.bench.cases import Case, Counts, Placement, bind, bus_factor, place, planned
from pycomm.bench.compression import Trial, Variant
from pycomm.bench.correctness import (
    Pattern,
    expected_result,
    poison,
    premul_factor,
    wrong_elements,
)
from pycomm.bench.options import Options, type_name
from pycomm.bench.peers import Peer
from pycomm.bench.results import PeerResult, Roofline, Row, Side, Wire, make_side
from pycomm.bench.timing import (
    Clock,
    Contender,
    combine,
    iteration_stats,
    measure,
    median_of_blocks,
    split_iterations,
    stepper,
)
from pycomm.dtypes import DType

if TYPE_CHECKING:
    from pycomm import Communicator

__all__ = ["Memory", "Setup", "measure_size"]

Array = NDArray[Any]
Call = Callable[..., Any]

_ALIGNMENT = 64
_ROOFLINE = "roofline"  # among the peers that are timed

# A peer that is much slower gets fewer iterations: about this many seconds a row and side.
_PEER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The two buffers that all rows of a run use, in bytes."""

    send: Array
    recv: Array

    @classmethod
    def allocate(cls, nbytes: int, comm: "Communicator | None" = None) -> "Memory":
        """Return two aligned buffers of `nbytes`, in registered memory if there is a `comm`."""

        def one() -> Array:
            if comm is not None:
                registered: Array = comm.zeros(nbytes, np.uint8)  # begins with a page
                return registered
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            return raw[start : start + nbytes]

        return cls(one(), one())

    def typed(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return the buffers as arrays of `dtype`, without what is left over at the end."""
        usable = len(self.send) // dtype.itemsize * dtype.itemsize
        return self.send[:usable].view(dtype), self.recv[:usable].view(dtype)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rows of a run have in common."""

    options: Options
    comm: "Communicator"
    memory: Memory
    peers: tuple[Peer, ...]
    clock: Clock


@dataclass(frozen=True, slots=True)
class _Entry:
    """One thing to be timed: by whom, on which side, and how many wrong elements it produced."""

    owner: str | Variant
    peer: bool
    in_place: bool
    contender: Contender
    wrong: int | None


def measure_size(job: Setup, dtype: DType, op: str | None, root: int, nbytes: int) -> list[Row]:
    """Measure one size and return a row for each algorithm and compression, the same on all ranks.

    Parameters
    ----------
    job : Setup
        The run.
    dtype, op, root
        What is measured; `op` is None and `root` -1 where the collective takes none.
    nbytes : int
        The size asked for; counts are rounded down from it.
    """
    options, comm, case = job.options, job.comm, job.options.case
    counts = case.counts(nbytes, dtype.itemsize, comm.size)
    send, recv = job.memory.typed(dtype.numpy)
    sides = {
        in_place: place(case, comm.rank, root, counts, send, recv, in_place=in_place)
        for in_place in ((False, True) if case.in_place else (False,))
    }
    argument = pycomm.premul_sum(premul_factor(comm.rank)) if op == "mulsum" else op
    rows = compression.variants(
        case, comm, sides[False], options.algorithms, options.compressions,
        feedback=options.error_feedback, op=argument, root=root,
    )  # fmt: skip
    entries: list[_Entry] = []
    wires, compressions = {}, {}
    for variant in rows:
        calls = {
            in_place: bind(
                case, comm, placement, op=argument, root=root, **variant.arguments(in_place)
            )
            for in_place, placement in sides.items()
        }
        for in_place, call in calls.items():
            wrong = _check(job, variant, sides[in_place], call, dtype, op, root, counts)
            contender = _contender(options, comm, call)
            entries.append(_Entry(variant, False, in_place, contender, wrong))
        if options.verify or options.compressed:
            wires[variant] = _wire(comm, case, sides[False], argument, root, variant)
        if options.compressed:
            trial = Trial(case, op, counts, comm.rank, comm.size)
            compressions[variant] = compression.compressed(
                comm, trial, variant, sides[False], calls[False], wires[variant].sent
            )
    # Reductions in place are repeated on their own results: with these, and with nothing to be fed
    # back, they change nothing.
    for variant in rows:
        variant.reset()
    for buffer in (send[: counts.send], recv[: counts.recv]):
        buffer.fill(1 if op == "prod" else 0)
    for peer in job.peers:
        for in_place, placement in sides.items():
            call_peer = peer.bind(case, placement, op=op, root=root, in_place=in_place)
            seconds = _try(job, call_peer)
            if call_peer is not None and seconds is not None:
                contender = _contender(options, comm, call_peer, seconds)
                entries.append(_Entry(peer.name, True, in_place, contender, None))
    if options.roofline and counts.send >= comm.size:
        for in_place, source in ((False, send), (True, recv)):
            run = roofline.work(source[: counts.send], recv[: counts.send], comm.size)
            entries.append(_Entry(_ROOFLINE, True, in_place, _contender(options, comm, run), None))
    for entry in entries:
        most = sum(entry.contender.blocks) if entry.peer else options.warmup_iters
        for _ in range(min(options.warmup_iters, most)):
            entry.contender.step()
    nbytes = max(counts.send, counts.recv) * dtype.itemsize
    measured = _time(job, entries, nbytes, bus_factor(case, comm.size))
    peers = tuple(
        PeerResult(
            peer.name,
            measured.get((True, peer.name, False)),
            measured.get((True, peer.name, True)),
        )
        for peer in job.peers
    )
    limit = None
    if (True, _ROOFLINE, False) in measured:
        sides_of_it = (measured[True, _ROOFLINE, in_place] for in_place in (False, True))
        limit = Roofline(roofline.moved_bytes(nbytes), *sides_of_it)
    return [
        Row(
            size=nbytes,
            count=counts.param,
            type=type_name(dtype) if case.moves else "none",
            redop=op or "none",
            root=root,
            algorithm=variant.algorithm,
            out_of_place=measured[False, variant, False],
            in_place=measured.get((False, variant, True)),
            peers=peers,
            iterations=options.iters,
            wire=wires[variant] if options.verify else None,
            roofline=limit,
            compression=compressions.get(variant),
        )
        for variant in rows
    ]


def _check(
    job: Setup,
    variant: Variant,
    placement: Placement,
    call: Call,
    dtype: DType,
    op: str | None,
    root: int,
    counts: Counts,
) -> int | None:
    """Return the wrong elements of this rank in all checks, None if there is nothing to check."""
    case: Case = job.options.case
    if not job.options.check or not case.moves:
        return None
    comm = job.comm
    if variant.name != "none":
        trials = [
            Trial(case, op, counts, comm.rank, comm.size, repeat)
            for repeat in range(job.options.check)
        ]
        return compression.count_wrong(trials, variant, placement, call)
    wrong = 0
    for repeat in range(job.options.check):
        pattern = Pattern(dtype, op, comm.size, repeat)
        expected = None
        if placement.result is not None:
            expected = expected_result(case, pattern, comm.rank, root, counts)
            poison(placement.result, expected)
        if placement.source is not None:
            placement.source[...] = pattern.input(comm.rank, 0, placement.source.size)
        call()
        if placement.result is not None and expected is not None:
            wrong += wrong_elements(placement.result, expected, op)
    return wrong


def _wire(
    comm: "Communicator",
    case: Case,
    placement: Placement,
    op: Any,
    root: int,
    variant: Variant,
) -> Wire:
    """Count the bytes of one call over all ranks, and what their schedules say."""
    plan = planned(case, comm, placement, op=op, root=root, **variant.arguments(False))
    before = comm.bytes_sent
    bind(case, comm, placement, op=op, root=root, **variant.arguments(False))()
    sent = comm.bytes_sent - before
    found = comm.all_gather_object((sent, plan.bytes_sent))
    if plan.bytes_sent is None:
        return Wire(plan.algorithm, None, None)
    return Wire(plan.algorithm, sum(one[0] for one in found), sum(one[1] for one in found))


def _contender(
    options: Options, comm: "Communicator", call: Call, seconds: float | None = None
) -> Contender:
    """Return `call` as something to time; `seconds` is what a peer needed for a first call."""
    blocks = split_iterations(options.iters)
    if seconds is not None and seconds > 0:
        most = max(1, int(_PEER_SECONDS / seconds / len(blocks)))
        blocks = tuple(min(count, most) for count in blocks)
    barrier = comm.barrier
    step = stepper(
        call,
        aggregate=options.agg_iters,
        barrier=barrier if options.blocking == 1 else None,
        wait_each=options.blocking in (1, 2),
    )
    return Contender(step, blocks, settle=barrier if options.blocking == 3 else None)


def _try(job: Setup, call: Call | None) -> float | None:
    """Return how long the second of two calls takes on rank 0, None if a rank cannot make them.

    What a peer cannot do it refuses before it sends anything, on all ranks alike.
    """
    if not all(job.comm.all_gather_object(call is not None)) or call is None:
        return None
    seconds: float | None = None
    try:
        call()
        start = job.clock()
        call()
        seconds = job.clock() - start
    except Exception:
        seconds = None
    found: list[float | None] = job.comm.all_gather_object(seconds)
    return None if None in found else found[0]


def _time(
    job: Setup, entries: list[_Entry], nbytes: int, factor: float
) -> dict[tuple[bool, str | Variant, bool], Side]:
    """Time all entries in turn; (peer?, name, in place?) -> what was measured over all ranks."""
    options, comm = job.options, job.comm
    blocks, iterations = measure(
        [entry.contender for entry in entries],
        barrier=comm.barrier,
        clock=job.clock,
        each=options.per_iter,
    )
    blocks /= options.agg_iters
    mine = (blocks, iterations, [entry.wrong for entry in entries])
    everyone = comm.all_gather_object(mine)
    sides = {}
    for index, entry in enumerate(entries):
        per_rank = np.stack([theirs[0][index] for theirs in everyone])
        stats = None
        if options.per_iter:
            seconds = np.stack([theirs[1][index] for theirs in everyone])
            stats = iteration_stats(seconds / options.agg_iters)
        wrong = None if entry.wrong is None else sum(theirs[2][index] for theirs in everyone)
        sides[entry.peer, entry.owner, entry.in_place] = make_side(
            median_of_blocks(combine(per_rank, options.average)),
            nbytes,
            factor,
            wrong=wrong,
            per_rank=[median_of_blocks(row) for row in per_rank],
            iterations=stats,
        )
    return sides
