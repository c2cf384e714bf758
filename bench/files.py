"""What is written to files: JSON with nccl-tests' keys, and CSV."""

import csv
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from pycomm.bench.options import Options
from pycomm.bench.results import Compression, Header, PeerResult, Row, Side, Summary
from pycomm.bench.timing import IterationStats

__all__ = ["TIME_FORMAT", "now", "open_new", "to_json", "write_csv", "write_json"]

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"

# The version of nccl-tests' JSON layout that is followed.
_JSON_VERSION = 2

# Of the environment only what steers communication is kept: the rest may hold secrets.
_ENVIRONMENT = ("PYCOMM_", "NCCL_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "OMP_")


def now() -> str:
    """Return the time of day as nccl-tests writes it."""
    return time.strftime(TIME_FORMAT)


def open_new(path: str) -> TextIO:
    """Open a file that does not exist yet: `path`, or with ``.0``, ``.1``, ... if taken."""
    number = 0
    candidate = Path(path)
    while True:
        try:
            return candidate.open("x", encoding="utf-8")
        except FileExistsError:
            candidate = Path(f"{path}.{number}")
            number += 1


def _boolean(value: object) -> str:
    return "true" if value else "false"


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "time": side.seconds * 1e6,
        "alg_bw": side.algbw,
        "bus_bw": side.busbw,
        "nwrong": side.wrong,
        "rank_times": [seconds * 1e6 for seconds in side.per_rank],
    }


def _iterations(stats: IterationStats) -> dict[str, Any]:
    report: dict[str, Any] = {
        "skipped_iterations": 0,
        "min_us": stats.minimum * 1e6,
        "max_us": stats.maximum * 1e6,
        "avg_us": stats.mean * 1e6,
        "p50_us": stats.p50 * 1e6,
        "p95_us": stats.p95 * 1e6,
        "p99_us": stats.p99 * 1e6,
        "stdev_us": stats.stdev * 1e6,
        "cv_pct": stats.cv_percent,
        "times_us": [seconds * 1e6 for seconds in stats.times],
    }
    if len(stats.per_rank) > 1:
        report["per_process_max_times_us"] = [
            [seconds * 1e6 for seconds in times] for times in stats.per_rank
        ]
    return report


def _peer(row: Row, peer: PeerResult) -> dict[str, Any]:
    report: dict[str, Any] = {"name": peer.name}
    for name, _ in row.sides:
        side: Side | None = getattr(peer, name)
        found = _side(side)
        if found is not None:
            del found["nwrong"]
            found["ratio"] = row.peer_ratio(peer, name)
        report[name] = found
    return report


def _compression(found: Compression) -> dict[str, Any]:
    return {
        "compression": found.name,
        "error_feedback": _boolean(found.error_feedback),
        "sent": found.sent,
        "max_error": found.max_error,
        "mean_error": found.mean_error,
    }


def _row(row: Row) -> dict[str, Any]:
    report: dict[str, Any] = {
        "size": row.size,
        "count": row.count,
        "type": row.type,
        "redop": row.redop,
        "root": str(row.root),
    }
    for name, side in row.sides:
        report[name] = _side(side)
        if side is not None and side.iterations is not None:
            report[f"{name}_per_iter"] = _iterations(side.iterations)
    report["actual_iterations"] = row.iterations
    report["experiment_name"] = ""
    report["algorithm"] = row.algorithm
    if row.timestamp:
        report["timestamp"] = row.timestamp
    if row.wire is not None:
        report["wire"] = asdict(row.wire)
    if row.compression is not None:
        report |= _compression(row.compression)
    if row.roofline is not None:
        limit: dict[str, Any] = {"bytes": row.roofline.nbytes}
        for name, _ in row.sides:
            side = getattr(row.roofline, name)
            limit[name] = {"time": side.seconds * 1e6, "reached": row.reached(name)}
        report["roofline"] = limit
    report["peers"] = [_peer(row, peer) for peer in row.peers]
    return report


def _config(options: Options, header: Header) -> dict[str, Any]:
    step = (
        {"step_factor": options.stepfactor}
        if options.stepfactor
        else {"step_bytes": options.stepbytes}
    )
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": options.minbytes,
        "maximum_bytes": options.maxbytes,
        **step,
        "warmup_iters": options.warmup_iters,
        "iterations": options.iters,
        "aggregated_iterations": options.agg_iters,
        "validation": options.check,
        "graph": 0,
        "blocking_collectives": _boolean(options.blocking),
        "per_iter_timing": _boolean(options.per_iter),
        "per_iter_skip": 0,
        "parallel_init": "false",
        "devices": [
            {
                "rank": device.rank,
                "group": 0,
                "pid": device.pid,
                "hostname": device.hostname,
                "device": 0,
                "device_hex": "host",
                "device_info": device.cpu,
            }
            for device in header.devices
        ],
    }


def to_json(
    options: Options,
    header: Header,
    rows: Sequence[Row],
    summary: Summary | None,
    errors: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the run in nccl-tests' JSON keys, and what pycomm adds under ``"pycomm"``.

    Parameters
    ----------
    options, header, rows
        The run.
    summary : Summary or None
        Its end; None if it did not reach it.
    errors : sequence of str
        What went wrong.
    """
    report: dict[str, Any] = {
        "version": _JSON_VERSION,
        "start_time": header.start_time,
        "args": [header.program, *options.arguments],
        "env": [
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT)
        ],
        "nccl_version": 0,
        "config": _config(options, header),
        "results": [_row(row) for row in rows],
    }
    added: dict[str, Any] = {
        "version": header.version,
        "collective": header.collective,
        "ranks": header.ranks,
        "blocks": header.blocks,
        "average": options.average,
        "peers": [{"name": name, "version": version} for name, version in header.peers],
    }
    if summary is not None:
        okay = summary.bandwidth_okay
        report["out_of_bounds"] = {"count": summary.wrong, "okay": _boolean(not summary.wrong)}
        report["average_bus_bandwidth"] = {
            "bandwidth": summary.bandwidth,
            "okay": "unchecked" if okay is None else _boolean(okay),
        }
        means = {name: mean for name, mean, _ in summary.peer_ratios}
        for peer in added["peers"]:
            peer["ratio"] = means.get(peer["name"])
    added["registered"] = options.registered
    report["pycomm"] = added
    report["errors"] = list(errors)
    report["end_time"] = now()
    return report


def write_json(stream: TextIO, report: dict[str, Any]) -> None:
    """Write `report`; a number that JSON cannot hold is a mistake and raises `ValueError`."""
    json.dump(report, stream, indent=1, allow_nan=False)
    stream.write("\n")


def write_csv(stream: TextIO, header: Header, rows: Sequence[Row]) -> None:
    """Write one line for each side of each row."""
    writer = csv.writer(stream, lineterminator="\n")
    columns = ["collective", "ranks", "size", "count", "type", "redop", "root", "algorithm", "side"]
    columns += ["time_us", "algbw_gbs", "busbw_gbs", "wrong"]
    for name, _ in header.peers:
        columns += [f"{name}_time_us", f"{name}_ratio"]
    # A run has these in all rows or in none.
    if rows and rows[0].compression is not None:
        columns += _compression(rows[0].compression)
    writer.writerow(columns)
    for row in rows:
        for name, side in row.sides:
            if side is None:
                continue
            line: list[Any] = [header.collective, header.ranks, row.size, row.count, row.type]
            line += [row.redop, row.root, row.algorithm or "", name]
            line += [f"{side.seconds * 1e6:.3f}", f"{side.algbw:.6g}", f"{side.busbw:.6g}"]
            line.append("" if side.wrong is None else side.wrong)
            for peer in row.peers:
                other: Side | None = getattr(peer, name)
                times = row.peer_ratio(peer, name)
                line.append("" if other is None else f"{other.seconds * 1e6:.3f}")
                line.append("" if times is None else f"{times:.4g}")
            if row.compression is not None:
                told = _compression(row.compression).values()
                line += ["" if value is None else value for value in told]
            writer.writerow(line)
