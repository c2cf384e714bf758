"""The command line: ``pycomm run``, ``bench``, ``tune``, ``simulate``, ``topo``, ``info``."""

import argparse
import os
import sys
from collections.abc import Sequence

import pycomm
from pycomm import forecast
from pycomm.bootstrap.detect import detect
from pycomm.errors import ArgumentValueError, LibraryNotFoundError, ScheduleError
from pycomm.launch import launch, program_command, script_command, usable_cores

__all__ = ["main", "split_bench"]

RUN_USAGE = "pycomm run -n N [-v] [--timeout SECONDS] (SCRIPT | -m MODULE | -- PROGRAM) [ARGUMENTS]"
TUNE_TEXT = """\
usage: pycomm tune [--ranks N] [-v] [-o FILE] [-e BYTES] [--collectives NAMES]

Starts N ranks (default: one for each core) that measure which algorithm is best for which size.
Started by mpirun already, it measures with the ranks that are there. Rank 0 writes what was found
to FILE, by default the one that PYCOMM_TUNING names or ~/.config/pycomm/tuning.json; programs
started later go by it.

  -o, --output FILE     where to write
  -e, --maxbytes BYTES  the largest size to measure, 16 MiB by default
  --collectives NAMES   what to measure, with commas between
"""
BENCH_TEXT = """\
usage: pycomm bench [--ranks N] [-v] COLLECTIVE [flags]

Starts N ranks (-np N means the same; default: one for each core) that measure COLLECTIVE.
Started by mpirun already, it measures with the ranks that are there. The flags:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 2 for wrong arguments, 1 for what is missing."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # The benchmark has flags of its own, in any order: argparse would take some for its own.
        if words[:1] == ["bench"]:
            return _bench(words[1:])
        if words[:1] == ["tune"]:
            return _tune(words[1:])
        if words[:1] == ["topo"]:
            return _topo(words[1:])
        options = _parser().parse_args(words)
        if options.subcommand == "run":
            return _run(options)
        if options.subcommand == "simulate":
            print(forecast.run(options))
            return 0
        return _info(options)
    except ArgumentValueError as error:
        print(f"pycomm: {error}", file=sys.stderr)
        return 2
    except (LibraryNotFoundError, ScheduleError) as error:
        print(f"pycomm: {error}", file=sys.stderr)
        return 1


def split_bench(words: Sequence[str]) -> tuple[int | None, bool, list[str]]:
    """Split what follows ``pycomm bench`` into ranks, verbose, and what the benchmark gets.

    ``--ranks N``, ``--ranks=N`` and ``-np N`` may stand anywhere, ``-v`` only in front: behind
    the collective it is the benchmark's.
    """
    ranks: int | None = None
    verbose = False
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("--ranks", "-np"):
            ranks = _as_ranks(queue.pop(0) if queue else "")
        elif word.startswith("--ranks="):
            ranks = _as_ranks(word.partition("=")[2])
        elif word in ("-v", "--verbose") and not rest:
            verbose = True
        else:
            rest.append(word)
    return ranks, verbose, rest


def _as_ranks(text: str) -> int:
    try:
        ranks = int(text)
    except ValueError:
        raise ArgumentValueError(f"the number of ranks is a whole number, not {text!r}") from None
    if ranks < 1:
        raise ArgumentValueError(f"the number of ranks must be at least 1, not {ranks}")
    return ranks


def _bench(words: Sequence[str]) -> int:
    ranks, verbose, rest = split_bench(words)
    if not rest or "-h" in rest or "--help" in rest:
        from pycomm.bench.cli import main as bench_main

        print(BENCH_TEXT)
        return bench_main(["--help"])
    if detect(os.environ) is not None:
        if ranks is not None:
            raise ArgumentValueError(
                "the ranks of this job are started already: leave out --ranks (or start "
                "`pycomm bench --ranks N` without mpirun)"
            )
        from pycomm.bench.cli import main as bench_main

        return bench_main(rest)
    ranks = usable_cores() if ranks is None else ranks
    if sys.stderr.isatty():
        from pycomm.bench.progress import TERMINAL

        os.environ[TERMINAL] = "1"
    # Not from the current folder: in a checkout its pycomm/ would hide the installed one.
    return launch([sys.executable, "-P", "-m", "pycomm.bench", *rest], ranks, verbose=verbose)


def _tune(words: Sequence[str]) -> int:
    ranks, verbose, rest = split_bench(words)
    if "-h" in rest or "--help" in rest:
        print(TUNE_TEXT, end="")
        return 0
    from pycomm.tune import parse as parse_tune

    if detect(os.environ) is not None:
        if ranks is not None:
            raise ArgumentValueError("the ranks of this job are started already: leave out --ranks")
        from pycomm.tune import main as tune_main

        return tune_main(rest)
    parse_tune(rest, os.environ)  # to be told once what is wrong, not by every rank
    ranks = usable_cores() if ranks is None else ranks
    return launch([sys.executable, "-P", "-m", "pycomm.tune", *rest], ranks, verbose=verbose)


def _topo(words: Sequence[str]) -> int:
    from pycomm import topo  # takes a while to import, for which `pycomm run` need not wait

    parser = argparse.ArgumentParser(
        prog="pycomm topo",
        description="Looks at this host and prints its GPUs, NICs and links as `nvidia-smi topo "
        "-m` does, which groups follow, which NIC is near, and what is not well. Under mpirun all "
        "ranks take part, and rank 0 prints what was measured between them too.",
    )
    topo.add_arguments(parser)
    return topo.run(parser.parse_args(words))


def _run(options: argparse.Namespace) -> int:
    words: list[str] = options.words
    if options.module:
        argv = [sys.executable, "-m", *options.module]
    elif not words:
        raise ArgumentValueError(f"no program to start; usage: {RUN_USAGE}")
    elif words[0] == "--":
        argv = program_command(words[1:])
    else:
        argv = script_command(words[0], words[1:])
    return launch(argv, options.ranks, verbose=options.verbose, timeout=options.timeout)


def _info(options: argparse.Namespace) -> int:
    from pycomm.info import collect, to_json, to_text

    found = collect()
    print(to_json(found) if options.json else to_text(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycomm", description="Communication between the ranks of a parallel program."
    )
    parser.add_argument("--version", action="version", version=f"pycomm {pycomm.__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        usage=RUN_USAGE,
        help="start a program on several ranks of this machine",
        description="Starts the mpirun that belongs to the installed mpi4py, also as root and "
        "with more ranks than cores. Variables for Open MPI that are set already are left alone.",
    )
    run.add_argument("-n", "-np", "--ranks", type=_ranks_option, required=True, metavar="N")
    run.add_argument("-v", "--verbose", action="store_true", help="print the command")
    run.add_argument(
        "--timeout", type=_seconds_option, metavar="SECONDS", help="end the job after that time"
    )
    run.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does"
    )
    run.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    commands.add_parser("bench", help="measure a collective: pycomm bench --ranks 4 all_reduce")

    commands.add_parser("tune", help="measure which algorithm is best: pycomm tune --ranks 4")

    simulate = commands.add_parser(
        "simulate",
        help="say what algorithms would take on a machine that is described",
        description="Prints what each algorithm would do and take, by the model of "
        "pycomm.algorithms.cost; on one core, without any network.",
    )
    forecast.add_arguments(simulate)

    commands.add_parser("topo", help="say what this machine or job is made of, and how that is")

    info = commands.add_parser("info", help="say what was found, where, and which version")
    info.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ranks_option(text: str) -> int:
    try:
        return _as_ranks(text)
    except ArgumentValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds_option(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds, not {text!r}")
    return seconds
