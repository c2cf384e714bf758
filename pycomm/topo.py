"""``pycomm topo``: what this machine, a file or the hosts of a job are made of, and how that is.

Without a launcher this host is looked at; under one all ranks take part and rank 0 prints.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pycomm
from pycomm.bootstrap.detect import detect
from pycomm.communicator import Communicator
from pycomm.errors import ArgumentValueError, CommError
from pycomm.topology.graph import Topology
from pycomm.topology.health import Health
from pycomm.topology.manager import TopologyManager
from pycomm.topology.matrix import host_part
from pycomm.topology.merge import merge
from pycomm.topology.nvlink import apply, read_nvlink
from pycomm.topology.plot import check_path, plot
from pycomm.topology.probes.local import ProbeHost, Prober, probe_host
from pycomm.topology.probes.place import identity
from pycomm.topology.probes.ras import RasStatus, ras_lines, ras_status
from pycomm.topology.show import changes, snapshot_text, to_dict, to_text
from pycomm.topology.snapshot import Snapshot
from pycomm.topology.sources import read_any
from pycomm.topology.xml_writer import write_xml

__all__ = ["add_arguments", "local", "run", "together"]

_INTERVAL = 5.0
_MOST_BYTES = 64 << 20
# NCCL waits for its own ranks that are silent, 5 s or more.
_RAS_SECONDS = 12.0
_RAS_ADDRESS = ("127.0.0.1", 28028)

Wait = Callable[[float], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pycomm topo`` to a parser."""
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        action="append",
        default=[],
        metavar="FILE",
        help="read a file instead of looking at this host: XML of NCCL (NCCL_TOPO_DUMP_FILE), the "
        "text of `nvidia-smi topo -m`, or JSON of this command; - is standard input; several are "
        "shown as hosts named after their files",
    )
    add(
        "--nvlink",
        metavar="FILE",
        help="with one --from: what `nvidia-smi nvlink -s` says of the links of that host",
    )
    add("--host", metavar="NAME", help="only this host, where there are several")
    add("--json", action="store_true", help="print JSON")
    add(
        "--xml",
        metavar="FILE",
        help="write what NCCL reads from NCCL_TOPO_FILE; - is standard output, with nothing else",
    )
    add("--plot", metavar="FILE", help="draw it: .png, .svg or .pdf; needs matplotlib")
    add(
        "--ras",
        action="store_true",
        help="also ask NCCL in a job on this host what it says of its ranks (RAS, NCCL_RAS_ADDR); "
        "NCCL before 2.29.2 may crash when it is asked",
    )
    add(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_INTERVAL,
        metavar="SECONDS",
        help=f"look again every so often, {_INTERVAL:g} by default, and print what has changed; a "
        "state gets better only after several good looks; with --json a line for each change",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"a positive number of seconds, not {text!r}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Do what the command line says.

    Returns
    -------
    int
        0; 1 if the communication failed; 130 after Ctrl-C.

    Raises
    ------
    ArgumentValueError
        If the arguments contradict each other, or a file cannot be read or written.
    LibraryNotFoundError
        If a library that is needed is not there.
    """
    _check(options)
    around = detect(os.environ)
    try:
        if options.source:
            # The ranks of a job would all read and print the same.
            if around is None or around.rank == 0:
                topology = _read_all(options.source)
                if options.nvlink is not None:
                    text = _octets(options.nvlink).decode(errors="replace")
                    topology = apply(topology, read_nvlink(text, source=options.nvlink))
                _show(options, _chosen(topology, options.host))
            return 0
        if around is None:
            return local(options)
        return _job(options)
    except KeyboardInterrupt:
        return 130


def _check(options: argparse.Namespace) -> None:
    """Refuse arguments that contradict each other."""
    if options.watch is not None:
        other = {"--from": options.source, "--xml": options.xml, "--plot": options.plot}
        other["--ras"] = options.ras
        given = [name for name, value in other.items() if value]
        if given:
            raise ArgumentValueError(f"--watch looks again and again: leave out {given[0]}")
    if options.nvlink is not None and len(options.source) != 1:
        raise ArgumentValueError("--nvlink belongs to one file that --from names")
    if options.ras and (options.json or options.source or options.xml == "-"):
        raise ArgumentValueError("--ras is about this host, and text: leave out the others")
    if options.ras and detect(os.environ) is not None:
        raise ArgumentValueError("--ras asks from outside of a job: leave out mpirun")
    if options.xml == "-" and options.json:
        raise ArgumentValueError("--xml - and --json both print: leave out one")
    if options.plot is not None:
        check_path(options.plot)  # before anything is looked at
    if [*options.source, options.nvlink].count("-") > 1:
        raise ArgumentValueError("standard input can be read once only")


# Names and notes come from files of others: no control character of theirs is for a terminal.
_PLAIN = {code: "?" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def _say(text: str) -> None:
    print(text.translate(_PLAIN), flush=True)


# ----------------------------------------------------------------------------------------- files


def _read_all(sources: list[str]) -> Topology:
    """Return what files describe, several of them as hosts named after them."""
    names: list[str] = []
    for source in sources:
        stem = "stdin" if source == "-" else Path(source).stem or "host"
        number = sum(name.partition("#")[0] == stem for name in names)
        names.append(f"{stem}#{number + 1}" if number else stem)
    parts = [_read(source, name) for source, name in zip(sources, names, strict=True)]
    return parts[0] if len(parts) == 1 else merge(parts)


def _read(source: str, host: str) -> Topology:
    """Return the topology in a file, or in what comes in if it is called ``-``."""
    where = "standard input" if source == "-" else source
    return read_any(_octets(source), source=where, host=host)


def _octets(source: str) -> bytes:
    """Return what is in a file, or what comes in if it is called ``-``."""
    where = "standard input" if source == "-" else source
    try:
        if source == "-" and sys.stdin is None:
            raise ValueError("it is closed")
        if source == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentValueError(f"{where}: {why}") from None
    if len(data) > _MOST_BYTES:
        raise ArgumentValueError(f"{where}: more than {_MOST_BYTES >> 20} MiB are no topology")
    return data


# --------------------------------------------------------------------------------------- showing


def _chosen(topology: Topology, host: str | None) -> Topology:
    """Return the host that was asked for, or all."""
    if host is None:
        return topology
    known = [one.name for one in topology.hosts]
    if host not in known:
        raise ArgumentValueError(f"there is no host {host!r}; known: {', '.join(known) or 'none'}")
    return host_part(topology, host)


def _show(options: argparse.Namespace, shown: Topology | Snapshot, more: str = "") -> None:
    """Write what was asked for to files, and print."""
    topology = shown if isinstance(shown, Topology) else _chosen(shown.topology, options.host)
    if options.xml is not None:
        _write_xml(options.xml, topology)
        if options.xml == "-":
            return
    if options.plot is not None:
        plot(shown if options.host is None else topology, options.plot)
        sys.stderr.write(f"wrote {options.plot}\n")
    if options.json:
        _say(json.dumps(to_dict(shown), indent=2))
        return
    if isinstance(shown, Snapshot):
        _say(snapshot_text(shown) + "\n")
    _say(to_text(topology) + more)


def _write_xml(path: str, topology: Topology) -> None:
    if len(topology.hosts) > 1:
        names = ", ".join(host.name for host in topology.hosts)
        raise ArgumentValueError(f"NCCL reads the topology of one host: --host, one of {names}")
    # Bridges and tunnels are nowhere on PCI, and NCCL does not use them.
    real = tuple(nic for nic in topology.nics if not nic.virtual)
    text = write_xml(replace(topology, nics=real))
    if path == "-":
        _say(text.rstrip("\n"))
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentValueError(f"{path}: {error.strerror or error}") from None
    sys.stderr.write(f"wrote {path}\n")


# ------------------------------------------------------------------------------------- this host


def local(
    options: argparse.Namespace,
    probe: ProbeHost = probe_host,
    wait: Wait = time.sleep,
    ask: Callable[..., RasStatus] = ras_status,
) -> int:
    """Look at this host and print; with ``--watch`` again and again.

    Parameters
    ----------
    options : Namespace
        The command line.
    probe, wait, ask : callable
        What looks at this host, passes the time between looks, and asks NCCL.
    """
    host = identity().name
    health = Health()
    prober = Prober(host, probe, None)

    def look() -> Topology:
        now = time.monotonic()
        topology = Topology()
        for findings in prober.take():
            topology = findings.topology
            for sample in findings.samples:
                health.add(sample, now)
        return _with_notes(health.judged(topology, now), os.environ)

    before = _chosen(look(), options.host)
    if options.watch is None:
        status = _asked_ras(os.environ, ask) if options.ras else None
        _show(options, before, "\n".join(["", "", *lines]) if (lines := ras_lines(status)) else "")
        return 0

    def again() -> Topology:
        prober.look()
        return look()

    _watch(options, before, again, wait)
    return 0


def _with_notes(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """Return a topology with a note on what NCCL itself has found, if it has written that down."""
    dump = environ.get("NCCL_TOPO_DUMP_FILE", "")
    try:
        there = bool(dump) and Path(dump).is_file()
    except (OSError, ValueError):
        there = False
    if not there:
        return topology
    note = f"NCCL has written what it found: pycomm topo --from {dump}"
    return replace(topology, notes=(*topology.notes, note))


def _watch(
    options: argparse.Namespace, before: Topology, again: Callable[[], Topology], wait: Wait
) -> None:
    """Print a topology, then what changes, until Ctrl-C."""

    def tell(topology: Topology, lines: list[str]) -> None:
        if options.json:
            _say(json.dumps({"changes": lines, **to_dict(topology)}))
        else:
            clock = time.strftime("%H:%M:%S")
            _say("\n".join(f"{clock}  {line}" for line in lines) if lines else to_text(topology))

    tell(before, [])
    while True:
        wait(options.watch)
        after = _chosen(again(), options.host)
        if found := changes(before, after):
            tell(after, found)
        before = after


# ----------------------------------------------------------------------------------------- a job


def _job(options: argparse.Namespace) -> int:
    """Take part as a rank that a launcher has started."""
    try:
        with pycomm.init() as comm:
            problem = together(comm, options)
    except CommError as error:
        sys.stderr.write(f"pycomm topo: {type(error).__name__}: {error}\n")
        return 1
    if problem is None:
        return 0
    sys.stderr.write(f"pycomm: {problem}\n" * (comm.rank == 0))
    return 2


def together(
    comm: Communicator,
    options: argparse.Namespace,
    probe: ProbeHost | None = None,
    wait: Wait = time.sleep,
) -> str | None:
    """Look at all hosts of a communicator, and print on rank 0; collective.

    Returns
    -------
    str or None
        What was wrong with the arguments, the same on all ranks.
    """
    with TopologyManager(comm, background=False, probe=probe) as manager:
        first = manager.snapshot
        problem = None
        if comm.rank == 0:
            try:
                chosen = _chosen(first.topology, options.host)
                if options.watch is None:
                    _show(options, first)
            except ArgumentValueError as error:
                problem = str(error)
        told: str | None = comm.broadcast_object(problem)
        if told is not None or options.watch is None:
            return told
        if comm.rank == 0 and not options.json:
            _say(snapshot_text(first) + "\n")

        def again() -> Topology:
            return manager.refresh().topology

        if comm.rank == 0:
            _watch(options, chosen, again, wait)
        while True:
            wait(options.watch)
            again()


def _asked_ras(environ: Mapping[str, str], ask: Callable[..., RasStatus]) -> RasStatus:
    """Return what NCCL says of a job on this host."""
    if environ.get("NCCL_RAS_ENABLE") == "0":
        return RasStatus(reason="NCCL_RAS_ENABLE=0 tells NCCL not to answer")
    host, _, port = environ.get("NCCL_RAS_ADDR", "").rpartition(":")
    address = _RAS_ADDRESS
    with suppress(ValueError):
        address = (host.replace("localhost", "127.0.0.1") or _RAS_ADDRESS[0], int(port))
    return ask(address, timeout=_RAS_SECONDS)
