"""The text on standard output: nccl-tests' table, or the columns of the OSU micro-benchmarks."""

from collections.abc import Sequence

from pycomm.bench.compression import CALLS
from pycomm.bench.options import Options
from pycomm.bench.results import Compression, Header, Row, Side, Summary

__all__ = [
    "fixed",
    "nccl_footer",
    "nccl_header",
    "nccl_row",
    "osu_header",
    "osu_row",
    "preamble",
    "roofline_line",
]

ALGORITHM_WIDTH = 18
_COMPRESSION_WIDTH = 11


def fixed(value: float, width: int) -> str:
    """Return `value` right-justified in `width`, with fewer decimals the larger it is.

    Two decimals, one, none, then an exponent: nccl-tests' rule, so that columns stay in line.
    """
    digits = 0
    while value >= 10**digits and digits <= width:
        digits += 1
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    if digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def preamble(options: Options, header: Header) -> list[str]:
    """Return the lines about the run and its ranks."""
    factor = options.stepfactor
    step = f"{factor}(factor)" if factor else f"{options.stepbytes}(bytes)"
    lines = [
        f"# pycomm version {header.version} nccl-headers=0 nccl-library=0",
        f"# Collective test starting: {header.program}",
        f"# nThread 1 nGpus 1 minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} "
        f"warmup iters: {options.warmup_iters} iters: {options.iters} "
        f"agg iters: {options.agg_iters} validation: {options.check} graph: 0 unalign: 0",
    ]
    if options.registered:
        lines.append("# Registered memory: the ranks of a host map each other's buffers")
    if options.compressed:
        lines.append("# Compression: errors of one call on random values, over the largest result")
    if options.error_feedback:
        lines.append(f"# Error feedback: errors of the mean of {CALLS} calls on the same values")
    if options.blocking == 1:
        lines.append("# Blocking Enabled: barrier after each iteration")
    elif options.blocking == 2:
        lines.append("# Blocking Enabled: wait for completion after each collective (no barrier)")
    elif options.blocking == 3:
        lines.append("# Blocking Enabled: barrier after each iteration, outside the time taken")
    if options.per_iter:
        lines.append("# Per-Iteration Report: host clock; i_* uses max over ranks")
    lines += ["#", "# Using devices"]
    lines += [
        f"#  Rank {device.rank:2d} Group  0 Pid {device.pid:6d} on {device.hostname:>10s} "
        f"device  0 [host] {device.cpu}"
        for device in header.devices
    ]
    lines += [
        "#",
        f"# Time: median of {header.blocks} blocks of iterations, in turn with all others",
    ]
    lines += [f"# Compared with: {name} {version}" for name, version in header.peers]
    if header.ranks == 1:
        lines.append("# one rank: nothing crosses a link, busbw is 0")
    return lines


def _side_heads(options: Options) -> tuple[list[str], list[str]]:
    names, units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    widths = [7, 6, 6, 6]
    if options.per_iter:
        names += ["i_min", "i_max", "i_p99", "i_cv%"]
        units += ["(us)", "(us)", "(us)", "(%)"]
        widths += [7] * 4
    return (
        [f"{name:>{width}s}" for name, width in zip(names, widths, strict=True)],
        [f"{unit:>{width}s}" for unit, width in zip(units, widths, strict=True)],
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cells)


def nccl_header(options: Options, header: Header) -> list[str]:
    """Return the three lines above the table, and the line that sets them off."""
    left = _line(["# " + " " * 10, " " * 12, " " * 8, " " * 6, " " * 6])
    head = _line([f"# {'size':>10s}", f"{'count':>12s}", f"{'type':>8s}", " redop", "  root"])
    unit = _line([f"# {'(B)':>10s}", f"{'(elements)':>12s}", " " * 8, " " * 6, " " * 6])
    names, units = _side_heads(options)
    if options.per_iter:
        first = (
            f"{left}              out-of-place (+ per-iteration)"
            "                                in-place (+ per-iteration)"
        )
    else:
        first = f"{left}           out-of-place                       in-place          "
    second, third = _line([head, *names, *names]), _line([unit, *units, *units])
    edge = len(second) + (21 if options.timestamps else 0)
    # nccl-tests leaves a place for the time stamp, also where there is none.
    second, third = f"{second} ", f"{third} "
    if options.timestamps:
        second += f"{'timestamp':>19s}"
        third += "%Y-%m-%d %H:%M:%S".rjust(19)
    more = options.verify or options.compressed
    if header.peers or options.algorithms != (None,) or more:
        first, second, third = (line[:edge].ljust(edge) for line in (first, second, third))
    for name, _ in header.peers:
        first += f"  {name:^32s}"
        second += f"  {'time':>7s}  {'ratio':>6s}  {'time':>7s}  {'ratio':>6s}"
        third += f"  {'(us)':>7s}  {'(x)':>6s}  {'(us)':>7s}  {'(x)':>6s}"
    if options.algorithms != (None,):
        second += f"  {'algorithm':>{ALGORITHM_WIDTH}s}"
    if options.verify:
        third = third.ljust(len(second))
        second += f"  {'bytes sent':>14s}  {'scheduled':>14s}  {'ran':>{ALGORITHM_WIDTH}s}"
        third += f"  {'(B)':>14s}  {'(B)':>14s}"
    if options.compressed:
        third = third.ljust(len(second))
        second += f"  {'compression':>{_COMPRESSION_WIDTH}s}  {'sent':>14s}   max err  mean err"
        third += f"  {'':{_COMPRESSION_WIDTH}s}  {'(B)':>14s}"
    return ["#", first, second, third]


def nccl_row(options: Options, row: Row) -> str:
    """Return one line of the table."""
    text = f"{row.size:12d}  {row.count:12d}  {row.type:>8s}  {row.redop:>6s}  {row.root:6d}"
    for _, side in row.sides:
        text += _side(side, options.per_iter)
    if options.timestamps:
        text += f"{row.timestamp:>21s}"
    for peer in row.peers:
        text += _line(["", *_peer(peer.out_of_place, row.peer_ratio(peer, "out_of_place"))])
        text += _line(["", *_peer(peer.in_place, row.peer_ratio(peer, "in_place"))])
    if row.algorithm is not None:
        text += f"  {row.algorithm:>{ALGORITHM_WIDTH}s}"
    if row.wire is not None:
        for count in (row.wire.sent, row.wire.scheduled):
            text += f"  {'N/A' if count is None else count:>14}"
        text += f"  {row.wire.ran:>{ALGORITHM_WIDTH}s}"
    if row.compression is not None:
        text += _compression(row.compression)
    return text


def _compression(found: Compression) -> str:
    sent = "N/A" if found.sent is None else found.sent
    errors = [
        f"{'N/A':>8s}" if error is None else f"{error:8.2e}"
        for error in (found.max_error, found.mean_error)
    ]
    return _line(["", f"{found.name:>{_COMPRESSION_WIDTH}s}", f"{sent:>14}", *errors])


def roofline_line(row: Row) -> str | None:
    """Return what the row reaches of what memory allows, None if that was not measured."""
    limit = row.roofline
    if limit is None:
        return None
    parts = []
    for label, name in (("out of place", "out_of_place"), ("in place", "in_place")):
        side, reached = getattr(limit, name), row.reached(name)
        speed = limit.nbytes / side.seconds / 1e9 if side.seconds > 0 else 0.0
        part = "N/A" if reached is None else f"{reached:.0%}"
        parts.append(
            f"{label} {fixed(side.seconds * 1e6, 7).strip()} us ({speed:.1f} GB/s): {part}"
        )
    return f"#   roofline: {limit.nbytes} B a rank; {', '.join(parts)}"


def _side(side: Side | None, per_iter: bool) -> str:
    if side is None:
        widths = [7, 6, 6, 6] + [7] * 4 * per_iter
        return _line(["", *(f"{'N/A':>{width}s}" for width in widths)])
    wrong = "   N/A" if side.wrong is None else f"{side.wrong:6g}"
    cells = [fixed(side.seconds * 1e6, 7), fixed(side.algbw, 6), fixed(side.busbw, 6), wrong]
    if side.iterations is not None:
        stats = side.iterations
        cells += [fixed(value * 1e6, 7) for value in (stats.minimum, stats.maximum, stats.p99)]
        cells.append(fixed(stats.cv_percent, 7))
    return _line(["", *cells])


def _peer(side: Side | None, times: float | None) -> tuple[str, str]:
    if side is None:
        return "    N/A", "   N/A"
    return fixed(side.seconds * 1e6, 7), "   N/A" if times is None else fixed(times, 6)


def nccl_footer(header: Header, summary: Summary) -> list[str]:
    """Return the lines below the table."""
    verdict = {None: "", True: "OK", False: "FAILED"}[summary.bandwidth_okay]
    lines = [
        f"# {'Out of bounds values':<20s} : {summary.wrong} {'FAILED' if summary.wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20s} : {summary.bandwidth:g} {verdict}",
    ]
    if summary.wires_wrong is not None:
        verdict = "FAILED" if summary.wires_wrong else "OK"
        lines.append(f"# {'Bytes unlike schedule':<20s} : {summary.wires_wrong} {verdict}")
    for name, mean, number in summary.peer_ratios:
        label = f"{name} / pycomm"
        lines.append(f"# {label:<20s} : {mean:.3g}x (geometric mean of {number} times)")
    return [*lines, "#", f"# Collective test concluded: {header.program}", "#"]


def osu_header(options: Options, header: Header, type_name: str) -> list[str]:
    """Return the lines above a table in the layout of the OSU micro-benchmarks."""
    line = f"{'# Size':<10s}{'Avg Latency(us)':>20s}"
    if options.check and options.case.moves:
        line += f"{'Validation':>20s}"
    for name, _ in header.peers:
        line += f"{name + '(us)':>20s}"
    return [
        f"# pycomm {header.collective} Latency Test v{header.version}, {header.ranks} ranks",
        f"# Datatype: {type_name}.",
        line,
    ]


def osu_row(options: Options, row: Row, ranks: int) -> str:
    """Return one line of that table: out of place where there is such a call, as in OSU."""
    name, side = next((name, side) for name, side in row.sides if side is not None)
    # OSU counts the part of one rank, except where a reduction is scattered.
    parts = options.case.recv_parts or (options.case.rooted and options.case.send_parts)
    text = f"{row.size // ranks if parts else row.size:<10d}{side.seconds * 1e6:20.2f}"
    if options.check and options.case.moves:
        text += f"{'Fail' if side.wrong else 'Pass':>20s}"
    for peer in row.peers:
        other: Side | None = getattr(peer, name)
        text += f"{'N/A':>20s}" if other is None else f"{other.seconds * 1e6:20.2f}"
    return text
