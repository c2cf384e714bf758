"""``pycomm tune``: measures which algorithm is best where on the machine at hand.

All ranks measure, rank 0 decides and writes the file.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isqrt
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import pycomm
from pycomm.algorithms.cost import Link, Model
from pycomm.algorithms.hierarchical import hosts_of
from pycomm.algorithms.registry import SHARED, algorithm_of, names
from pycomm.algorithms.schedule import PARTED
from pycomm.algorithms.select import Rule
from pycomm.communicator import Communicator
from pycomm.dtypes import DTYPES, ReduceOp
from pycomm.errors import ArgumentValueError, CommError
from pycomm.kernels.host import reduce_arrays
from pycomm.tuning import VARIABLE, Entry, check_writable, default_path, machine, write
from pycomm.units import parse_size

__all__ = ["COLLECTIVES", "Options", "decide", "main", "measure", "parse"]

#: What is measured. Gather and scatter have one algorithm beside the library's own, and go by it.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")

_BLOCKS = 9  # the median of so many blocks counts
_BLOCK_SECONDS = 0.006
_MOST_CALLS = 200  # a block
# What takes so many times as long as the best, and so many seconds, is not measured for larger
# sizes: it would take most of the time.
_HOPELESS, _SLOW = 4.0, 0.002
_CLEARLY = 0.97  # what is that much faster takes over from the algorithm of smaller sizes
_UNEQUAL = 1.5  # roads of ranks differ if the fastest has that many times the slowest's bandwidth
_LONG = 4 << 20  # bytes of the messages that tell the bandwidth
_SHARED, _REGISTERED = SHARED

Call = Callable[[], Any]


def _timed(comm: Communicator, calls: Sequence[Call]) -> list[float]:
    """Return the seconds each call takes on the slowest rank: medians of blocks, taken in turn."""
    first = np.empty(len(calls))
    for index, call in enumerate(calls):
        call()
        comm.barrier()
        start = time.perf_counter()
        call()
        first[index] = time.perf_counter() - start
    comm.all_reduce(first, op="max")
    counts = [int(np.clip(_BLOCK_SECONDS / seconds, 1, _MOST_CALLS)) for seconds in first]
    blocks = np.empty((len(calls), _BLOCKS))
    for block in range(_BLOCKS):
        for index, call in enumerate(calls):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(counts[index]):
                call()
            blocks[index, block] = (time.perf_counter() - start) / counts[index]
    comm.all_reduce(blocks, op="max")
    return [float(seconds) for seconds in np.median(blocks, axis=1)]


def _candidates(comm: Communicator, collective: str) -> list[str]:
    several = comm.local_size < comm.size
    own = [
        name for name in names(collective) if several or not algorithm_of(collective, name).grouped
    ]
    return ["native", *own] if several else ["native", *own, *SHARED]


def _call(comm: Communicator, collective: str, nbytes: int, name: str) -> Call | None:
    """Return one call on `nbytes` of float32, None if it cannot be."""
    zeros = comm.zeros if name == _REGISTERED else np.zeros
    count = max(1, nbytes // 4)
    if collective in PARTED:
        count = max(1, count // comm.size)
    many = comm.size if collective in ("reduce_scatter", "all_to_all") else 1
    x = zeros(count * many, np.float32)
    out = None
    if collective in ("all_gather", "all_to_all"):
        out = zeros(count * comm.size, np.float32)
    elif collective == "reduce_scatter":
        out = zeros(count, np.float32)
    try:
        plan = comm.plan(collective, x, out, algorithm=name)
    except ArgumentValueError:
        return None
    del plan
    method = getattr(comm, collective)
    return lambda: method(x, out, algorithm=name)


def measure(
    comm: Communicator,
    sizes: Sequence[int],
    collectives: Sequence[str] = COLLECTIVES,
    say: Callable[[str], None] = lambda _: None,
) -> Entry | None:
    """Measure on all ranks.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    sizes : sequence of int
        Bytes of data, ascending.
    collectives : sequence of str
        What to measure.
    say : callable
        Gets a line of text for each size on rank 0.

    Returns
    -------
    Entry or None
        What rank 0 has decided, on rank 0.
    """
    choices = comm._engine.choices
    table = {}
    for collective in collectives:
        times: list[dict[str, float]] = []
        left = _candidates(comm, collective)
        for nbytes in sizes:
            calls = {name: _call(comm, collective, nbytes, name) for name in left}
            able = {name: call for name, call in calls.items() if call is not None}
            found = dict(zip(able, _timed(comm, list(able.values())), strict=True))
            times.append(found)
            best = min(found.values())
            left = [name for name in left if found.get(name, 0.0) <= max(_HOPELESS * best, _SLOW)]
            ranked = sorted(found, key=lambda name: found[name])
            listed = "  ".join(f"{name} {found[name] * 1e6:.1f}" for name in ranked)
            say(f"{collective:>14} {nbytes:>10} bytes, µs:  {listed}")
        table[collective] = decide(sizes, times, choices.table[collective])
    model, bandwidths = _fit(comm)
    layout = tuple(len(host) for host in hosts_of(choices.groups))
    return Entry(layout, {"host": table}, model, bandwidths) if comm.rank == 0 else None


def decide(
    sizes: Sequence[int], times: Sequence[dict[str, float]], beyond: Sequence[Rule]
) -> tuple[Rule, ...]:
    """Return rules from the seconds that algorithms took at each size.

    An algorithm stays the best until another is clearly faster: measurements have noise. The limit
    between two sizes is their geometric mean; from twice the last size on, the rules of `beyond`
    count. What was measured on registered arrays counts for those alone: it comes first where it is
    clearly faster than the best for any array, unless that is the same way through memory.
    """
    rules: list[Rule] = []
    for index, found in enumerate(times):
        ranked = sorted(found.keys() - {_REGISTERED}, key=lambda name: (found[name], name))
        before = _unregistered(rules[-1].names) if rules else ranked[0]
        if before in found and found[ranked[0]] > _CLEARLY * found[before]:
            ranked.remove(before)
            ranked.insert(0, before)
        registered = found.get(_REGISTERED, inf) < _CLEARLY * found[ranked[0]]
        if registered and ranked[0] != _SHARED:
            ranked.insert(0, _REGISTERED)
        last = index + 1 == len(sizes)
        limit = 2 * sizes[index] if last else isqrt(sizes[index] * sizes[index + 1])
        same = bool(rules) and rules[-1].names[0] == ranked[0]
        if same and _unregistered(rules[-1].names) == _unregistered(ranked):
            rules[-1] = Rule(limit, tuple(ranked))
        else:
            rules.append(Rule(limit, tuple(ranked)))
    return (*rules, *(rule for rule in beyond if rule.limit > rules[-1].limit))


def _unregistered(ranked: Sequence[str]) -> str:
    """Return the best algorithm for arrays that are not registered."""
    return next(name for name in ranked if name != _REGISTERED)


def _fit(comm: Communicator) -> tuple[Model, tuple[float, ...] | None]:
    """Return a cost model from rings and direct exchanges, all ranks talking at once.

    And how fast each rank's road to other hosts is, if they differ.
    """
    own = _link(comm.host, comm.host) if comm.local_size > 1 else None
    # Hosts may have different numbers of ranks: all take part in what follows.
    inside = next((link for link in comm.all_gather_object(own) if link is not None), None)
    across, nics = None, 0
    bandwidths: tuple[float, ...] | None = None
    if comm.local_size < comm.size:
        leaders = comm.split(0 if comm.local_rank == 0 else None)
        alone = None if leaders is None else _link(leaders, leaders)
        comm.barrier()
        across = comm.broadcast_object(alone)
        rails = comm.split(comm.local_rank)
        assert rails is not None
        nics = 1
        if all(size > 1 for size in comm.all_gather_object(rails.size)):
            # Ranks that share a NIC get a part of its bandwidth when all of them talk.
            speeds = comm.all_gather_object(_link(rails, comm).bandwidth)
            nics = max(1, round(comm.local_size * speeds[0] / across.bandwidth))
            if max(speeds) > _UNEQUAL * min(speeds):
                bandwidths = tuple(speeds)
    x = np.ones(_LONG // 4, np.float32)
    total = np.empty_like(x)

    def reduce() -> None:
        reduce_arrays([x, x], total, DTYPES["float32"], ReduceOp.SUM)

    (seconds,) = _timed(comm, [reduce])
    inside = inside or across
    if inside is None:
        inside = Link(1e-6, 1e10)  # one rank alone: there is nothing to send
    return Model(inside, across or inside, _LONG / seconds, nics), bandwidths


def _link(group: Communicator, comm: Communicator) -> Link:
    """Return latency, bandwidth and overhead between the ranks of a group, one of those of `comm`.

    All ranks of `comm` measure in their groups at the same time.
    """
    size = group.size
    little, much = np.zeros(2, np.uint8), np.zeros(_LONG, np.uint8)
    outs = [np.empty(part.size * size, np.uint8) for part in (little, much)]
    step, shot, long = _timed(
        comm,
        [
            lambda: group.all_gather(little, outs[0], algorithm="ring"),
            lambda: group.all_gather(little, outs[0], algorithm="direct"),
            lambda: group.all_gather(much, outs[1], algorithm="ring"),
        ],
    )
    step, long = step / (size - 1), long / (size - 1)
    # A ring has one message after the other, a direct exchange all of them at once.
    overhead = step / 2 if size == 2 else min(max((shot - step) / (size - 2), 0.0), 0.9 * step)
    return Link(step - overhead, _LONG / max(long - step, 1e-9), overhead)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and where to write it."""

    path: Path
    sizes: tuple[int, ...]
    collectives: tuple[str, ...]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Read the command line.

    Raises
    ------
    ArgumentValueError
        If it cannot be used.
    """
    parser = _Parser(prog="pycomm tune", add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("-e", "--maxbytes", type=parse_size, default=16 << 20)
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    seen = parser.parse_args(list(argv))
    chosen = tuple(seen.collectives.split(","))
    unknown = [name for name in chosen if name not in COLLECTIVES]
    if unknown:
        raise ArgumentValueError(f"--collectives are {', '.join(COLLECTIVES)}, not {unknown[0]!r}")
    if seen.maxbytes < 64:
        raise ArgumentValueError("-e: sizes begin with 64 bytes")
    named = environ.get(VARIABLE, "")
    path = seen.output or (Path(named) if named and named.lower() != "off" else None)
    path = path or default_path(environ)
    if path is None:
        raise ArgumentValueError("there is no home to write to: name a file, -o FILE")
    sizes = tuple(64 << 2 * step for step in range(24) if 64 << 2 * step <= seen.maxbytes)
    return Options(path, sizes, chosen)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentValueError(f"tune: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the ranks that are there, and write the file on rank 0.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, `sys.argv` without the program if None. All ranks give the same.

    Returns
    -------
    int
        0, 1 if the communication failed or the file cannot be written, 2 for wrong arguments.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except ArgumentValueError as error:
        print(f"pycomm: {error}", file=sys.stderr, flush=True)
        return 2
    os.environ[VARIABLE] = "off"  # what is there already has no say in what is measured
    try:
        with pycomm.init() as comm:
            return _run(comm, options)
    except CommError as error:
        print(f"pycomm tune: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _run(comm: Communicator, options: Options) -> int:
    path = options.path

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, flush=True)

    problem = _agreed(comm, lambda: check_writable(path))
    if comm.size < 2:
        problem = "one rank has nothing to choose: measure with two or more"
    if problem is not None:
        say(f"pycomm tune: {problem}")
        return 2
    entry = measure(comm, options.sizes, options.collectives, say)

    def finish() -> None:
        assert entry is not None
        write(path, entry, machine(comm._engine.transport.library))
        layout = ", ".join(map(str, entry.layout))
        say(f"wrote {path} for a layout of {layout} ranks a host")

    problem = _agreed(comm, finish)
    if problem is not None:
        say(f"pycomm tune: {problem}")
    return 0 if problem is None else 1


def _agreed(comm: Communicator, work: Callable[[], None]) -> str | None:
    """Do something on rank 0; return on all ranks what went wrong."""
    problem = None
    if comm.rank == 0:
        try:
            work()
        except (ArgumentValueError, OSError) as error:
            problem = str(error)
    told: str | None = comm.broadcast_object(problem)
    return told


if __name__ == "__main__":
    sys.exit(main())
