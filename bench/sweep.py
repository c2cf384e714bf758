"""One run: agree, measure row after row, report, and return the exit code on every rank."""

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pycomm
from pycomm.bench import files, peers, plot, report
from pycomm.bench.measure import Memory, Setup, measure_size
from pycomm.bench.options import Options, type_name
from pycomm.bench.progress import Progress
from pycomm.bench.results import Device, Header, Row, Summary, summarize
from pycomm.bench.timing import Clock, split_iterations
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError

if TYPE_CHECKING:
    from pycomm import Communicator

__all__ = ["run"]


def run(
    options: Options,
    comm: "Communicator",
    *,
    clock: Clock = time.perf_counter,
    out: TextIO | None = None,
) -> int:
    """Measure and report.

    Parameters
    ----------
    options : Options
        The same on all ranks.
    comm : pycomm.Communicator
        The ranks to measure.
    clock : callable
        Returns seconds.
    out : file, optional
        Where rank 0 prints the table; standard output if None.

    Returns
    -------
    int
        The exit code, the same on all ranks: 0, 1 for bad results, 2 for what cannot be run.
    """
    out = sys.stdout if out is None else out
    writer = _Writer(options, comm.rank == 0, out)
    memory, problem = None, _why_not(options, comm)
    if problem is None:
        problem = writer.prepare()
    if problem is None:
        try:
            registered = comm if options.registered else None
            memory = Memory.allocate(options.maxbytes if options.case.moves else 0, registered)
        except MemoryError:
            problem = f"no memory for two buffers of {options.maxbytes} bytes (-e)"
    problem = _first_problem(comm, problem)
    if problem is not None or memory is None:
        return _refuse(comm, str(problem), writer)
    with ExitStack() as stack:
        opened: list[peers.Peer] = []
        try:
            for name in options.peers:
                opened.append(peers.open_peer(name, comm))
                stack.callback(opened[-1].close)
        except CommError:
            raise
        except Exception as error:
            problem = f"--compare: {error}"
        problem = _first_problem(comm, problem)
        if problem is not None:
            return _refuse(comm, problem, writer)
        job = Setup(options, comm, memory, tuple(opened), clock)
        try:
            summary = _measure_all(job, writer)
        except (ArgumentTypeError, ArgumentValueError) as error:
            return _refuse(comm, str(error), writer)
        except BaseException as error:
            writer.broke(error)
            raise
    code: int = comm.broadcast_object(writer.finish(summary))
    return code


def _first_problem(comm: "Communicator", problem: str | None) -> str | None:
    """Return what stops the first rank that cannot go on: then no rank begins."""
    problems: list[str | None] = comm.all_gather_object(problem)
    return next((found for found in problems if found is not None), None)


def _refuse(comm: "Communicator", problem: str, writer: "_Writer") -> int:
    """Say on rank 0 why nothing is measured; no rank leaves before it is said."""
    writer.broke(problem)
    if comm.rank == 0:
        print(f"pycomm.bench: error: {problem}", file=sys.stderr, flush=True)
    comm.barrier()
    return 2


def _why_not(options: Options, comm: "Communicator") -> str | None:
    if options.case.rooted and options.root is not None and options.root >= comm.size:
        return f"-r {options.root}: the ranks are 0 to {comm.size - 1}"
    if options.roofline and comm.size < 2:
        return "--roofline: one rank has nothing to add up"
    return next((why for name in options.peers if (why := peers.why_not(name, comm))), None)


def _measure_all(job: Setup, writer: "_Writer") -> Summary:
    options, comm = job.options, job.comm
    header = Header(
        program=f"pycomm.bench {options.case.name}",
        collective=options.case.name,
        ranks=comm.size,
        version=pycomm.__version__,
        devices=tuple(comm.all_gather_object(_device(comm.rank))),
        blocks=len(split_iterations(options.iters)),
        peers=tuple((peer.name, peer.version) for peer in job.peers),
        start_time=files.now(),
    )
    writer.begin(header)
    if not options.case.rooted:
        roots: Sequence[int] = (-1,)
    else:
        roots = range(comm.size) if options.root is None else (options.root,)
    tables = [(dtype, op, root) for dtype, op in options.combinations for root in roots]
    sizes = list(options.sizes())
    progress = Progress(len(tables) * len(sizes), shown=comm.rank == 0)
    rows: list[Row] = []
    try:
        for dtype, op, root in tables:
            writer.table(type_name(dtype))
            for size in sizes:
                for row in measure_size(job, dtype, op, root, size):
                    progress.hide()
                    stamped = replace(row, timestamp=files.now()) if options.timestamps else row
                    rows.append(stamped)
                    writer.row(stamped)
                progress.step(f"{options.case.name} {size} bytes")
    finally:
        progress.hide()
    least = os.environ.get("NCCL_TESTS_MIN_BW")
    return summarize(rows, options.peers, float(least) if least else None)


def _device(rank: int) -> Device:
    return Device(rank, os.getpid(), socket.gethostname(), _cpu_model())


def _cpu_model() -> str:
    """Return the name of the processor as Linux gives it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _try_to_write(path: Path) -> None:
    """Raise `OSError` if `path` cannot be written; leave what is there as it is."""
    fresh = not path.exists()
    path.open("a", encoding="utf-8").close()
    if fresh:
        path.unlink()


class _Writer:
    """Everything that is reported, by rank 0 only; the other ranks call it for nothing."""

    def __init__(self, options: Options, active: bool, out: TextIO) -> None:
        self._options = options
        self._active = active
        self._out = out
        self._json: TextIO | None = None
        self._header: Header | None = None
        self._rows: list[Row] = []

    def prepare(self) -> str | None:
        """Return why the files cannot be written, None if they can; before anything is measured."""
        if not self._active:
            return None
        options = self._options
        least = os.environ.get("NCCL_TESTS_MIN_BW")
        try:
            float(least or 0)
        except ValueError:
            return f"NCCL_TESTS_MIN_BW={least} is not a number"
        why = None if options.plot is None else plot.why_no_plot(options.plot)
        if why is not None:
            return why
        try:
            for name in (options.csv, options.plot):
                if name is not None:
                    _try_to_write(Path(name))
            if options.json is not None:
                self._json = files.open_new(options.json)
        except OSError as error:
            return f"{error.filename} cannot be written: {error.strerror}"
        return None

    def _print(self, lines: Iterator[str] | Sequence[str]) -> None:
        for line in lines:
            print(line, file=self._out)
        self._out.flush()

    def begin(self, header: Header) -> None:
        self._header = header
        if not self._active:
            return
        if self._json is not None:
            self._print([f"# Writing JSON output to {self._json.name}"])
        if self._options.style == "nccl":
            self._print(report.preamble(self._options, header))
            self._print(report.nccl_header(self._options, header))

    def table(self, type_name: str) -> None:
        if self._active and self._options.style == "osu" and self._header is not None:
            self._print(report.osu_header(self._options, self._header, type_name))

    def row(self, row: Row) -> None:
        self._rows.append(row)
        if not self._active or self._header is None:
            return
        if self._options.style == "nccl":
            self._print([report.nccl_row(self._options, row)])
            limit = report.roofline_line(row)
            if limit is not None:
                self._print([limit])
        else:
            self._print([report.osu_row(self._options, row, self._header.ranks)])

    def broke(self, why: object) -> None:
        """Keep in the JSON file what there is, or take the empty file away."""
        if self._json is None:
            return
        with self._json:
            if self._header is None:
                Path(self._json.name).unlink()
                return
            errors = [str(why) or type(why).__name__]
            found = files.to_json(self._options, self._header, self._rows, None, errors)
            files.write_json(self._json, found)

    def finish(self, summary: Summary) -> int:
        """Print the last lines, write the files, and return the exit code."""
        if not self._active or self._header is None:
            return 0
        options, header, rows = self._options, self._header, self._rows
        if options.style == "nccl":
            self._print(report.nccl_footer(header, summary))
        code = 0 if summary.okay else 1
        try:
            if self._json is not None:
                with self._json:
                    files.write_json(self._json, files.to_json(options, header, rows, summary))
            if options.csv is not None:
                with Path(options.csv).open("w", encoding="utf-8", newline="") as stream:
                    files.write_csv(stream, header, rows)
            if options.plot is not None:
                plot.draw(options.plot, options, header, rows)
        except OSError as error:
            print(f"pycomm.bench: error: {error}", file=sys.stderr, flush=True)
            code = 1
        return code
