"""Runs of the benchmark in threads, with a clock that is set by hand."""

import io

import pycomm
from pycomm.bench.options import parse
from pycomm.bench.sweep import run

SIZES = ["-b", "64", "-e", "4K", "-f", "8", "-n", "2"]


def ticking(step=1e-3):
    """Return a clock that moves by `step` whenever it is read."""
    now = [0.0]

    def clock():
        now[0] += step
        return now[0]

    return clock


def bench(ranks, *argv, clock=ticking, wrap=lambda comm: comm):
    """Run in threads; return the exit codes and what rank 0 printed."""
    options = parse(argv)
    out = io.StringIO()

    def one(comm):
        return run(options, wrap(comm), clock=clock(), out=out)

    return pycomm.run_local(ranks, one), out.getvalue()


def table(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]
