"""The command line: nccl-tests' flags with their meaning and defaults, read into one record."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pycomm.bench.cases import CASES, Case, find_case
from pycomm.bench.compression import NAMES, unfit
from pycomm.dtypes import DTYPES, DType, as_dtype, as_op, check_op, premul_sum

__all__ = ["OPS", "Options", "Stop", "parse", "parse_size", "type_name"]

# nccl-tests' names of element types and operations, in the order in which "all" runs them.
_TYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
    "f8e4m3": "float8_e4m3",
    "f8e5m2": "float8_e5m2",
}
_TYPE_NAMES = {ours: theirs for theirs, ours in _TYPES.items()}
OPS = ("sum", "prod", "max", "min", "avg", "mulsum")
PEERS = ("mpi4py", "gloo")

_SIZE = re.compile(r"(\d+(?:\.\d*)?)([kmg]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Stop(Exception):
    """The command line ends the run: `text` is to be shown, `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of one run."""

    case: Case
    minbytes: int
    maxbytes: int
    stepbytes: int
    stepfactor: int | None
    iters: int
    warmup_iters: int
    agg_iters: int
    check: int
    combinations: tuple[tuple[DType, str | None], ...]
    root: int | None
    average: int
    blocking: int
    per_iter: bool
    timestamps: bool
    timeout: float | None
    algorithms: tuple[str | None, ...]
    verify: bool
    registered: bool
    roofline: bool
    compressions: tuple[str, ...]
    error_feedback: bool
    peers: tuple[str, ...]
    style: str
    json: str | None
    csv: str | None
    plot: str | None
    title: str | None
    arguments: tuple[str, ...]

    @property
    def compressed(self) -> bool:
        """Whether any compression was asked for, so that the rows tell of it."""
        return self.compressions != ("none",)

    def sizes(self) -> Iterator[int]:
        """Yield the sizes in bytes; a single 0 for a collective that moves nothing."""
        if not self.case.moves:
            yield 0
            return
        size = self.minbytes
        while size <= self.maxbytes:
            yield size
            size = size * self.stepfactor if self.stepfactor else size + max(1, self.stepbytes)


def type_name(dtype: DType) -> str:
    """Return nccl-tests' name of `dtype`, pycomm's where NCCL has no such type."""
    return _TYPE_NAMES.get(dtype.name, dtype.name)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``8``, ``512k``, ``1.5M`` or ``2G`` stands for."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write bytes, or a number with K, M or G (powers of 1024)"
        )
    return (
        int(float(match[1]) * _UNITS[match[2].lower()])
        if "." in match[1]
        else (int(match[1]) * _UNITS[match[2].lower()])
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Stop(f"{self.format_usage()}{self.prog}: error: {message}\n", 2)


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Stop(parser.format_help(), 0)


def _integer(least: int) -> Any:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _only(allowed: str, why: str) -> Any:
    def check(text: str) -> str:
        if text != allowed:
            raise argparse.ArgumentTypeError(f"only {allowed} is possible here: {why}")
        return text

    return check


def _names(known: Sequence[str] | None = None) -> Any:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not found:
            raise argparse.ArgumentTypeError("no name given")
        for name in found:
            if known is not None and name not in known:
                listed = ", ".join(known)
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; known: {listed}")
        return found

    return names


def _case(text: str) -> Case:
    case = find_case(text)
    if case is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a collective; known: {', '.join(CASES)}")
    return case


def _root(text: str) -> int | None:
    return None if text == "all" else int(_integer(0)(text))


def _build() -> _Parser:
    parser = _Parser(
        prog="pycomm.bench",
        add_help=False,
        allow_abbrev=False,
        description="Measure a collective; flags and columns are those of nccl-tests.",
    )
    add = parser.add_argument
    add("case", metavar="COLLECTIVE", type=_case, help=", ".join(CASES))
    add("-h", "--help", action=_Help, nargs=0, help="show this text")
    size: dict[str, Any] = {"type": parse_size, "metavar": "SIZE"}
    add("-b", "--minbytes", default=32 << 20, help="smallest size, K M G are binary (32M)", **size)
    add("-e", "--maxbytes", default=32 << 20, help="largest size (32M)", **size)
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-i", "--stepbytes", default=1 << 20, help="add between sizes (1M)", **size)
    step.add_argument("-f", "--stepfactor", type=_integer(2), help="or multiply by this (off)")
    add("-n", "--iters", type=_integer(1), default=20, help="timed iterations (20)")
    add("-w", "--warmup_iters", type=_integer(0), default=1, help="iterations before them (1)")
    add("-m", "--agg_iters", type=_integer(1), default=1, help="calls in flight together (1)")
    add("-c", "--check", type=_integer(0), default=1, help="checks of the results a row (1)")
    add("-o", "--op", default="sum", choices=(*OPS, "all"), help="reduce operation (sum)")
    add(
        "-d",
        "--datatype",
        default="float",
        metavar="TYPE",
        help=f"{' '.join(_TYPES)} all, or a NumPy name (float)",
    )
    add("-r", "--root", type=_root, default=0, metavar="RANK", help="root rank or 'all' (0)")
    add(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=1,
        help="time over ranks: 0 rank 0, 1 average, 2 min, 3 max (1)",
    )
    add(
        "-z",
        "--blocking",
        type=int,
        choices=range(4),
        default=0,
        help="1 barrier after each call, 2 wait for each call, 3 barrier not timed (0)",
    )
    add(
        "-I",
        "--per_iter_timing",
        type=int,
        choices=(0, 1),
        default=0,
        help="statistics over single iterations (0)",
    )
    add(
        "-S",
        "--report_timestamps",
        type=int,
        choices=(0, 1),
        default=0,
        help="the time of day in each row (0)",
    )
    add("-T", "--timeout", type=_seconds, help="seconds a call may take (pycomm's default)")
    add("--algorithm", type=_names(), metavar="NAME[,NAME]", help="algorithms to compare")
    add(
        "--verify",
        action="store_true",
        help="count the bytes sent, and compare with the schedules",
    )
    add(
        "-R",
        "--local_register",
        type=int,
        choices=range(3),
        default=0,
        help="1 or 2: buffers in registered memory (0)",
    )
    add("--registered", action="store_true", help="the same as -R 1")
    add(
        "--roofline",
        action="store_true",
        help="of all_reduce: how near it is to what the machine's memory allows",
    )
    add(
        "--compression",
        type=_names(NAMES),
        default=("none",),
        metavar="NAME[,NAME]",
        help=f"what messages are encoded with: {', '.join(NAMES)} (none)",
    )
    add("--error-feedback", action="store_true", help="feed back what compression rounds away")
    add(
        "--compare",
        type=_names(PEERS),
        default=(),
        metavar="PEER[,PEER]",
        help=f"measure these in the same run: {', '.join(PEERS)}",
    )
    add(
        "--format",
        dest="style",
        choices=("nccl", "osu"),
        default="nccl",
        help="columns of nccl-tests or of the OSU micro-benchmarks (nccl)",
    )
    add("-J", "--json", "--output_file", metavar="FILE", help="write JSON with nccl-tests' keys")
    add("--csv", metavar="FILE", help="write one line a size and side")
    add("--plot", metavar="FILE", help="draw latency and bandwidth (png, svg, pdf)")
    add("--title", help="title of the plot")
    devices = "a rank is one process with host memory"
    for short, name, allowed in (
        ("-t", "--nthreads", "1"),
        ("-g", "--ngpus", "1"),
        ("-G", "--cudagraph", "0"),
        ("-C", "--report_cputime", "0"),
    ):
        add(short, name, type=_only(allowed, devices), help=argparse.SUPPRESS)
    return parser


def _combinations(
    parser: _Parser, case: Case, datatype: str, op: str
) -> tuple[tuple[DType, str | None], ...]:
    """Return the element types and operations to run; "all" leaves out what has no meaning."""
    if datatype == "all":
        dtypes = [DTYPES[name] for name in _TYPES.values()]
    else:
        try:
            dtypes = [as_dtype(_TYPES.get(datatype, datatype))]
        except TypeError as error:
            parser.error(f"argument -d/--datatype: {error}")
    if not case.reduces:
        return tuple((dtype, None) for dtype in dtypes)
    found: list[tuple[DType, str | None]] = []
    reason = ""
    for dtype in dtypes:
        for name in OPS if op == "all" else (op,):
            try:
                check_op(premul_sum(2) if name == "mulsum" else as_op(name), dtype)
            except (TypeError, ValueError) as error:
                reason = str(error)
            else:
                found.append((dtype, name))
    if not found:
        parser.error(f"argument -o/--op: {reason}")
    return tuple(found)


def parse(argv: Sequence[str]) -> Options:
    """Read a command line.

    Raises
    ------
    Stop
        If help was asked for (code 0) or an argument cannot be used (code 2).
    """
    parser = _build()
    seen = parser.parse_args(list(argv))
    case: Case = seen.case
    if seen.minbytes > seen.maxbytes:
        parser.error(
            f"argument -b/--minbytes: {seen.minbytes} is more than the largest size, "
            f"{seen.maxbytes} (-e/--maxbytes)"
        )
    if seen.stepfactor and not seen.minbytes and case.moves:
        parser.error("argument -b/--minbytes: 0 cannot be multiplied up; use -i, or start at 1")
    if not seen.stepfactor and not seen.stepbytes and seen.minbytes != seen.maxbytes:
        parser.error("argument -i/--stepbytes: 0 never reaches the largest size")
    if case.name == "send_recv" and seen.algorithm:
        parser.error(f"argument --algorithm: {case.name} has one algorithm only")
    if case.name == "send_recv" and seen.verify:
        parser.error(f"argument --verify: {case.name} has no schedule")
    if seen.roofline and (case.name != "all_reduce" or seen.op != "sum"):
        parser.error("argument --roofline: it is that of all_reduce with op sum")
    if seen.roofline and seen.style == "osu":
        parser.error("argument --roofline: the osu columns have no place for it")
    if seen.style == "osu" and seen.verify:
        parser.error("argument --verify: the osu columns have no place for it")
    if seen.plot and not case.moves:
        parser.error(f"argument --plot: {case.name} has no sizes to draw")
    if seen.agg_iters > 1 and seen.compare:
        parser.error("argument --compare: peers are measured with blocking calls; leave out -m")
    if seen.style == "osu" and seen.algorithm and len(seen.algorithm) > 1:
        parser.error("argument --format: the osu columns show one algorithm; name one")
    combinations = _combinations(parser, case, seen.datatype, seen.op)
    why = unfit(case, combinations, seen.compression, seen.error_feedback, seen.style)
    if why is not None:
        parser.error(why)
    return Options(
        case=case,
        minbytes=seen.minbytes,
        maxbytes=seen.maxbytes,
        stepbytes=seen.stepbytes,
        stepfactor=seen.stepfactor,
        iters=seen.iters,
        warmup_iters=seen.warmup_iters,
        agg_iters=seen.agg_iters,
        check=seen.check,
        combinations=combinations,
        root=seen.root,
        average=seen.average,
        blocking=seen.blocking,
        per_iter=bool(seen.per_iter_timing),
        timestamps=bool(seen.report_timestamps),
        timeout=seen.timeout,
        algorithms=seen.algorithm or (None,),
        verify=seen.verify,
        registered=seen.registered or seen.local_register > 0,
        roofline=seen.roofline,
        compressions=seen.compression,
        error_feedback=seen.error_feedback,
        peers=seen.compare,
        style=seen.style,
        json=seen.json,
        csv=seen.csv,
        plot=seen.plot,
        title=seen.title,
        arguments=tuple(argv),
    )
