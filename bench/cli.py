"""``python -m pycomm.bench``: from the command line to an exit code."""

import sys
from collections.abc import Sequence
from typing import Any

import pycomm
from pycomm.bench.options import Stop, parse
from pycomm.bench.plot import prepare
from pycomm.bench.sweep import run
from pycomm.errors import CommError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, `sys.argv` without the program if None. All ranks give the same.

    Returns
    -------
    int
        The exit code: 0 for good results, 1 for wrong elements, too little bandwidth
        (``NCCL_TESTS_MIN_BW``) or a failed communication, 2 for arguments that cannot be used.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except Stop as stop:
        return _say(stop)
    if options.plot is not None:
        prepare()  # before MPI is up: it may start processes
    settings: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
    try:
        with pycomm.init(**settings) as comm:
            return run(options, comm)
    except CommError as error:
        print(f"pycomm.bench: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _say(stop: Stop) -> int:
    """Show a text once, on rank 0.

    All ranks stay until it is written: a launcher that sees one of them fail ends the others.
    """
    stream = sys.stderr if stop.code else sys.stdout
    try:
        with pycomm.init() as comm:
            if comm.rank == 0:
                print(stop.text, end="", file=stream, flush=True)
            comm.barrier()
    except CommError:
        print(stop.text, end="", file=stream, flush=True)
    return stop.code
