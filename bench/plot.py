"""The picture: latency and bus bandwidth against size, a line for each algorithm and peer."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.bench.options import Options
from pycomm.bench.results import Header, Row, Side

__all__ = ["Series", "collect_series", "draw", "prepare", "size_label", "time_label", "why_no_plot"]

# Colours that stay apart for colour-blind readers (Okabe and Ito), and markers for black and white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the plot; its points are (bytes, seconds, GB/s)."""

    label: str
    points: tuple[tuple[int, float, float], ...]


def prepare() -> None:
    """Let matplotlib look for fonts, for which it may start processes; without it, do nothing."""
    if importlib.util.find_spec("matplotlib") is not None:
        importlib.import_module("matplotlib.font_manager")


def why_no_plot(path: str) -> str | None:
    """Return why no plot can be drawn to `path`, None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'pycomm-collectives[bench]'"
    if Path(path).suffix.lower() not in _FORMATS:
        return f"--plot {path}: the name must end in {', '.join(_FORMATS)}"
    return None


def size_label(nbytes: float) -> str:
    """Return a size as on an axis: ``8 B``, ``64 KiB``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"


def time_label(microseconds: float, *_: object) -> str:
    """Return a time as on an axis, in the unit that needs the fewest digits."""
    for unit in ("µs", "ms"):
        if microseconds < 1000:
            return f"{microseconds:g} {unit}"
        microseconds /= 1000
    return f"{microseconds:g} s"


def _lines(rows: Sequence[Row], side: str) -> Iterator[tuple[str, Row, Side]]:
    """Yield (label, row, measurement) of everything measured on that side."""
    variants = {(row.type, row.redop, row.root) for row in rows}
    for row in rows:
        what = [row.type]
        if row.redop != "none":
            what.append(row.redop)
        if row.root >= 0:
            what.append(f"root {row.root}")
        variant = f" {' '.join(what)}" if len(variants) > 1 else ""
        mine: Side | None = getattr(row, side)
        if mine is not None:
            name = "pycomm" if row.algorithm is None else f"pycomm {row.algorithm}"
            if row.compression is not None and row.compression.name != "none":
                name += f" {row.compression.name}"
            yield name + variant, row, mine
        for peer in row.peers:
            other: Side | None = getattr(peer, side)
            if other is not None:
                yield peer.name + variant, row, other


def collect_series(rows: Sequence[Row]) -> tuple[str, list[Series]]:
    """Return the side that is drawn and its lines.

    Out of place, unless more can be compared in place: some libraries have only that.
    """
    best: tuple[str, list[Series]] = ("out_of_place", [])
    for side in ("out_of_place", "in_place"):
        points: dict[str, dict[int, tuple[int, float, float]]] = {}
        for label, row, measured in _lines(rows, side):
            if row.size and measured.seconds > 0:
                point = (row.size, measured.seconds, measured.busbw)
                points.setdefault(label, {})[row.size] = point
        lines = [Series(label, tuple(found.values())) for label, found in points.items()]
        lines.sort(key=lambda line: not line.label.startswith("pycomm"))
        if len(lines) > len(best[1]):
            best = (side, lines)
    return best


def _title(options: Options, header: Header, rows: Sequence[Row]) -> str:
    if options.title:
        return options.title
    parts = [header.collective]
    types = list(dict.fromkeys(row.type for row in rows))
    ops = list(dict.fromkeys(row.redop for row in rows if row.redop != "none"))
    parts.append(", ".join(" ".join(names) for names in (types, ops) if names))
    parts.append("1 rank" if header.ranks == 1 else f"{header.ranks} ranks")
    hosts = list(dict.fromkeys(device.hostname for device in header.devices))
    parts.append(hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts")
    return " · ".join(parts)


def draw(path: str, options: Options, header: Header, rows: Sequence[Row]) -> None:
    """Draw the rows to `path`.

    Parameters
    ----------
    path : str
        A file that ends in ``.png``, ``.svg`` or ``.pdf``.
    options, header, rows
        The run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    side, lines = collect_series(rows)
    # A figure of its own, not one of pyplot's: nothing global changes, no display is looked for.
    figure = Figure(figsize=(12, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    for index, line in enumerate(lines):
        style = {
            "label": line.label,
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linewidth": 2.0,
            "markersize": 5.0,
        }
        sizes = [point[0] for point in line.points]
        latency.plot(sizes, [seconds * 1e6 for _, seconds, _ in line.points], **style)
        bandwidth.plot(sizes, [busbw for _, _, busbw in line.points], **style)
    sizes = sorted({point[0] for line in lines for point in line.points})
    latency.set_yscale("log")
    _spread(latency.set_ylim, [seconds * 1e6 for line in lines for _, seconds, _ in line.points])
    latency.yaxis.set_major_formatter(time_label)
    latency.set_title("Latency (lower is better)", fontsize=12)
    latency.set_ylabel("time per call")
    bandwidth.set_ylim(bottom=0)
    bandwidth.set_title("Bus bandwidth (higher is better)", fontsize=12)
    bandwidth.set_ylabel("GB/s")
    for axes in (latency, bandwidth):
        _dress(axes, sizes)
    if lines:
        latency.legend(frameon=False, loc="upper left", fontsize=11)
    figure.suptitle(_title(options, header, rows), fontsize=15, fontweight="bold")
    place = side.replace("_", "-")
    figure.supxlabel(
        f"message size    ({place}, median of {header.blocks} blocks; pycomm {header.version})",
        fontsize=10,
        color="#444444",
    )
    figure.savefig(path)


def _spread(set_limits: Callable[[float, float], Any], values: Sequence[float]) -> None:
    """Leave some room on a logarithmic axis, also around values that are all alike."""
    if values:
        set_limits(min(values) / 1.5, max(values) * 1.5)


def _dress(axes: Any, sizes: Sequence[int]) -> None:
    """Set the axis of sizes, with as many ticks as can be read, and take away what is not data."""
    axes.set_xscale("log", base=2)
    _spread(axes.set_xlim, sizes)
    every = max(1, -(-len(sizes) // 8))
    ticks = sizes[::every]
    axes.set_xticks(ticks, [size_label(size) for size in ticks], fontsize=9)
    axes.minorticks_off()
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    for edge in ("left", "bottom"):
        axes.spines[edge].set_color("#888888")
    axes.tick_params(colors="#333333")
    axes.yaxis.labelpad = 8
