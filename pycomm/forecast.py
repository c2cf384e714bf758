"""``pycomm simulate``: what algorithms would take on machines that are described, not there."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pycomm.algorithms.cost import Link, Model, predict
from pycomm.algorithms.registry import Algorithm, algorithm_of, names
from pycomm.algorithms.schedule import COLLECTIVES, ROOTED
from pycomm.algorithms.verify import verify
from pycomm.choice import SEGMENT
from pycomm.errors import ArgumentValueError, LibraryNotFoundError
from pycomm.units import format_bytes, format_seconds, parse_size

__all__ = [
    "Forecast",
    "add_arguments",
    "forecast",
    "parse_link",
    "parse_rate",
    "plot",
    "run",
    "to_text",
]

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|b|B)/s", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)", re.ASCII)
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}

# Messages of all ranks and segments that a forecast works through, so that it ends within seconds.
_MESSAGES = 3_000_000
_SEGMENTS = 64
_RANKS = 2048


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one algorithm would do: rounds and bytes of the rank that has most, and the time.

    Bandwidths are those of nccl-tests, in bytes a second.
    """

    algorithm: str
    rounds: int
    bytes_sent: int
    largest_hop: int
    segments: int
    seconds: float
    algorithm_bandwidth: float


def parse_rate(text: str) -> float:
    """Return the bytes a second of a rate such as ``300GB/s`` or ``100Gbit/s``."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ArgumentValueError(f"{text!r} is not a rate, such as 300GB/s or 100Gbit/s")
    return float(match[1]) * _DECIMAL[match[2].upper()] / (1 if match[3] == "B" else 8)


def parse_link(text: str) -> Link:
    """Return the link that ``300GB/s,2us`` describes: its rate and latency."""
    rate, separator, latency = text.partition(",")
    match = _TIME.fullmatch(latency.strip())
    if not separator or match is None:
        raise ArgumentValueError(f"{text!r} is not a link, such as 300GB/s,2us")
    return Link(float(match[1]) * _UNITS[match[2]], parse_rate(rate))


def forecast(
    collective: str,
    chosen: Sequence[str],
    hosts: int,
    per_host: int,
    nbytes: int,
    model: Model,
    *,
    check: bool = False,
) -> list[Forecast]:
    """Return what algorithms would take, fastest first.

    Parameters
    ----------
    collective : str
        What to do.
    chosen : sequence of str
        By which algorithms.
    hosts, per_host : int
        How many hosts of how many ranks.
    nbytes : int
        Size of the data in bytes.
    model : Model
        What messages and reductions cost.
    check : bool
        Also prove the schedules right.

    Raises
    ------
    ArgumentValueError
        If there is no such algorithm.
    ScheduleError
        If a schedule is wrong.
    """
    size = hosts * per_host
    groups: tuple[Any, ...] = tuple(
        tuple(range(host * per_host, (host + 1) * per_host)) for host in range(hosts)
    )
    found = [
        _one(algorithm, size, groups, nbytes, model, check)
        for algorithm in [algorithm_of(collective, name) for name in chosen]
    ]
    return sorted(found, key=lambda one: one.seconds)


def _one(
    algorithm: Algorithm,
    size: int,
    groups: tuple[Any, ...],
    nbytes: int,
    model: Model,
    check: bool,
) -> Forecast:
    root = 0 if algorithm.collective in ROOTED else -1
    schedules = algorithm.schedules(size, root, groups if len(groups) > 1 else groups[0])
    if check:
        verify(schedules)
    messages = sum(len(steps) for one in schedules for steps in one.rounds)
    most = max(1, min(_SEGMENTS, _MESSAGES // max(1, messages)))
    segments = min(schedules[0].segments(nbytes, algorithm.segment_of(SEGMENT, len(groups))), most)
    seconds = predict(schedules, nbytes, model, groups, segments=segments)
    return Forecast(
        algorithm.name,
        max(one.steps for one in schedules),
        max(one.elements_sent(nbytes) for one in schedules),
        max(one.largest_hop(nbytes) for one in schedules),
        segments,
        seconds,
        nbytes / seconds if seconds else 0.0,
    )


def to_text(title: str, found: Sequence[Forecast]) -> str:
    """Return a table."""
    head = ("algorithm", "rounds", "sent/rank", "largest hop", "segments", "time", "algbw")
    rows = [
        (
            one.algorithm,
            str(one.rounds),
            format_bytes(one.bytes_sent),
            format_bytes(one.largest_hop),
            str(one.segments),
            format_seconds(one.seconds),
            f"{one.algorithm_bandwidth / 1e9:.2f} GB/s",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        return "  ".join(cells).rstrip()

    return "\n".join([title, line(head), *map(line, rows)])


def plot(path: Path, title: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    """Write a picture of time against size, one curve an algorithm.

    Raises
    ------
    LibraryNotFoundError
        If matplotlib is not there.
    ArgumentValueError
        If the file cannot be written, or its ending names no kind of picture.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise LibraryNotFoundError(
            "--plot needs matplotlib: pip install 'pycomm-collectives[bench]'"
        ) from None
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in sorted(curves.items()):
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("predicted seconds")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentValueError(f"{path} cannot be drawn: {error}") from None
    finally:
        pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pycomm simulate``."""
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--hosts", type=int, default=1, metavar="N")
    parser.add_argument("--per-host", type=int, default=8, metavar="N", help="ranks a host")
    parser.add_argument(
        "--size", default="64M", help="bytes of data; K, M and G are powers of 1024"
    )
    parser.add_argument(
        "--inside", default="10GB/s,1us", metavar="RATE,LATENCY", help="between ranks of a host"
    )
    parser.add_argument(
        "--across", default="10Gbit/s,20us", metavar="RATE,LATENCY", help="between hosts"
    )
    parser.add_argument(
        "--nics", type=int, default=0, metavar="N", help="NICs a host has; default: one a rank"
    )
    parser.add_argument("--reduce", default="1TB/s", metavar="RATE", help="how fast a rank reduces")
    parser.add_argument(
        "--algorithm", default="all", metavar="NAMES", help="all, or names with commas"
    )
    parser.add_argument("--verify", action="store_true", help="prove the schedules right, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=Path("simulate.png"), metavar="FILE",
        help="draw time against size, 1 KiB to --size; default: simulate.png",
    )  # fmt: skip


def run(options: argparse.Namespace) -> str:
    """Return what ``pycomm simulate`` prints."""
    hosts, per_host = options.hosts, options.per_host
    if hosts < 1 or per_host < 1 or options.nics < 0:
        raise ArgumentValueError("--hosts and --per-host are at least 1, --nics at least 0")
    if hosts * per_host > _RANKS:
        raise ArgumentValueError(
            f"{hosts} x {per_host} ranks: schedules of more than {_RANKS} need too much memory here"
        )
    model = Model(
        parse_link(options.inside), parse_link(options.across), parse_rate(options.reduce),
        options.nics,
    )  # fmt: skip
    known = names(options.collective)
    chosen = known if options.algorithm == "all" else tuple(options.algorithm.split(","))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ArgumentValueError(
            f"no algorithm {unknown[0]!r} for {options.collective}; known: {', '.join(known)}"
        )
    nbytes = 0 if options.collective == "barrier" else parse_size(options.size)

    def at(size: int, *, check: bool = False) -> list[Forecast]:
        return forecast(options.collective, chosen, hosts, per_host, size, model, check=check)

    found = at(nbytes, check=options.verify)
    title = f"{options.collective} of {format_bytes(nbytes)} on {hosts} x {per_host} ranks"
    if options.plot is not None:
        curves: dict[str, list[tuple[int, float]]] = {name: [] for name in chosen}
        size = 1 << 10
        while size <= max(nbytes, 1 << 10):
            for one in at(size):
                curves[one.algorithm].append((size, one.seconds))
            size *= 4
        plot(options.plot, title, curves)
    if options.json:
        return json.dumps([asdict(one) for one in found], indent=1)
    proof = "; schedules proved right" if options.verify else ""
    return to_text(title + proof, found)
