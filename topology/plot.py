"""The picture of a topology or snapshot: hosts, NUMA nodes, GPUs, NICs and how links are.

`picture` says where everything is; this draws it. States have colours that stay apart for
colour-blind readers, and line styles for black and white.
"""

import importlib.util
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any

from pycomm.errors import ArgumentValueError, LibraryNotFoundError
from pycomm.topology.graph import State, Topology
from pycomm.topology.picture import Box, Line, Picture, arrange
from pycomm.topology.snapshot import Snapshot

__all__ = ["check_path", "plot"]

_FORMATS: dict[str, dict[str, None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
_COLOURS = {
    State.UP: "#009E73",
    State.DEGRADED: "#E69F00",
    State.DOWN: "#C8102E",
    State.UNKNOWN: "#9A9A9A",
}
_DASHES: dict[State, Any] = {
    State.UP: "solid",
    State.DEGRADED: (0, (4, 1.6)),
    State.DOWN: (0, (1, 1.2)),
    State.UNKNOWN: (0, (6, 1.2, 1.2, 1.2)),
}
#: Fill and edge of boxes; edges of None go by the state.
_FILLS = {
    "host": ("#FFFFFF", "#444444"),
    "numa": ("#F3F5F7", "#AAB2BA"),
    "gpu": ("#DCEBF7", None),
    "nic": ("#FBEFD9", None),
    "nvswitch": ("#D9EAD3", "#3B6B35"),
    "pci": ("#E3E3E8", "#6B6B76"),
    "rank": ("#ECE3F3", "#6B4E84"),
}
_INK, _FONT = "#222222", "DejaVu Sans"
_MOST_DOTS = 16000
_MARGIN, _HEAD, _LEGEND_ROW = 0.25, 0.5, 0.24


def check_path(path: str | Path) -> Path:
    """Return where to draw, or raise as `plot` does if nothing can be drawn there."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise ArgumentValueError(f"{path}: the name must end in {', '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise LibraryNotFoundError(
            "a plot needs matplotlib: pip install 'pycomm-collectives[bench]'"
        )
    return path


def plot(shown: Topology | Snapshot, path: str | Path) -> None:
    """Draw a topology, or a snapshot with its ranks and what was measured between hosts.

    Equal topologies give equal files: there is no time in them.

    Parameters
    ----------
    shown : Topology or Snapshot
        What to draw.
    path : str or Path
        A file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises
    ------
    ArgumentValueError
        If the name ends in something else, or the file cannot be written.
    LibraryNotFoundError
        If there is no matplotlib.
    """
    path = check_path(path)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = arrange(shown)
    legend = _legend(picture)
    with mpl.rc_context({"svg.hashsalt": "pycomm", "font.family": _FONT}):
        sheet = _Sheet(picture, legend)
        # A figure of its own, not one of pyplot's: nothing global changes, no display is needed.
        figure = Figure(figsize=(sheet.width, sheet.height), dpi=sheet.dpi, facecolor="white")
        FigureCanvasAgg(figure)
        sheet.draw(figure.add_axes((0, 0, 1, 1)))
        try:
            figure.savefig(path, metadata=_FORMATS[path.suffix.lower()])
        except OSError as error:
            raise ArgumentValueError(f"{path}: {error.strerror or error}") from None


@lru_cache(maxsize=1024)
def _wide(text: str, size: float, *, bold: bool = False) -> float:
    """Return how wide a text is, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    font = FontProperties(family=_FONT, weight="bold" if bold else "normal", size=size)
    # Control points of curves lie a little outside of them, which does no harm.
    return float(TextPath((0, 0), text, prop=font).vertices[:, 0].max(initial=0.0)) / 72


def _fitted(text: str, size: float, width: float, *, bold: bool = False) -> float:
    """Return the size at which a text fits, `size` at most."""
    return size * min(1.0, width / max(_wide(text, size, bold=bold), 0.01))


def _legend(picture: Picture) -> list[tuple[State | None, str, str]]:
    """Return the entries of the legend: a state, or a label, and what it means."""
    found = {line.state for line in picture.lines}
    found |= {box.state for box in picture.boxes if _FILLS[box.kind][1] is None}
    entries: list[tuple[State | None, str, str]] = [
        (state, "", state.value) for state in State if state in found
    ]
    entries += [(None, label, text) for label, text in picture.meanings.items() if label != "down"]
    if len({line.weight for line in picture.lines if line.state is not State.DOWN}) > 1:
        entries.append((None, "wider", "carries more"))
    return entries


def _key(state: State | None, label: str) -> float:
    """Return how wide the sign of an entry of the legend is, with the space behind it."""
    return 0.45 if state else _wide(label, 8, bold=True) + 0.1


class _Sheet:
    """The whole page, in inches from the lower left."""

    def __init__(self, picture: Picture, legend: list[tuple[State | None, str, str]]) -> None:
        self._picture = picture
        title = _wide(picture.title, 13, bold=True)
        self.width = max(picture.width, min(title, 12.0), 4.2) + 2 * _MARGIN
        self._rows = self._broken(legend)
        letters = int((self.width - 2 * _MARGIN) / _wide("n", 7.5))
        self._remarks = [
            line for text in picture.remarks for line in textwrap.wrap(text, letters)
        ]  # fmt: skip
        foot = _LEGEND_ROW * len(self._rows) + 0.19 * len(self._remarks)
        self._floor = _MARGIN + foot + (0.18 if foot else 0.0)
        self.height = self._floor + picture.height + _HEAD + _MARGIN

    @property
    def dpi(self) -> float:
        """Dots per inch; fewer where the picture would have more than anybody can show."""
        return min(150.0, _MOST_DOTS / max(self.width, self.height))

    def _broken(
        self, legend: list[tuple[State | None, str, str]]
    ) -> list[list[tuple[float, State | None, str, str]]]:
        """Return the legend in rows that fit, each entry with its place."""
        rows: list[list[tuple[float, State | None, str, str]]] = []
        x = self.width
        for state, label, text in legend:
            wide = _key(state, label) + _wide(text, 8) + 0.3
            if x + wide > self.width - _MARGIN + 0.3:
                rows.append([])
                x = _MARGIN
            rows[-1].append((x, state, label, text))
            x += wide
        return rows

    def draw(self, axes: Any) -> None:
        """Draw everything."""
        axes.set_xlim(0, self.width)
        axes.set_ylim(0, self.height)
        axes.set_axis_off()
        title = self._picture.title
        axes.text(
            self.width / 2, self.height - _MARGIN - 0.12, title, ha="center", va="center",
            fontsize=_fitted(title, 13, self.width - 2 * _MARGIN, bold=True),
            fontweight="bold", color=_INK,
        )  # fmt: skip
        dx, dy = (self.width - self._picture.width) / 2, self._floor
        for box in self._picture.boxes:
            self._box(axes, box, dx, dy)
        for line in self._picture.lines:
            self._line(axes, line, dx, dy)
        self._foot(axes)

    def _foot(self, axes: Any) -> None:
        y = _MARGIN + 0.19 * len(self._remarks) + _LEGEND_ROW * len(self._rows) - 0.08
        for row in self._rows:
            for x, state, label, text in row:
                if state is not None:
                    axes.plot(
                        [x, x + 0.36], [y, y], color=_COLOURS[state], lw=2.4,
                        ls=_DASHES[state], solid_capstyle="butt",
                    )  # fmt: skip
                else:
                    axes.text(x, y, label, va="center", fontsize=8, fontweight="bold", color=_INK)
                shift = x + _key(state, label)
                axes.text(shift, y, text, va="center", fontsize=8, color=_INK)
            y -= _LEGEND_ROW
        for remark in self._remarks:
            axes.text(_MARGIN, y, remark, va="center", fontsize=7.5, color=_INK)
            y -= 0.19

    def _box(self, axes: Any, box: Box, dx: float, dy: float) -> None:
        from matplotlib.patches import FancyBboxPatch

        fill, edge = _FILLS[box.kind]
        outer = box.kind in ("host", "numa")
        x, y = box.x + dx, box.y + dy
        axes.add_patch(
            FancyBboxPatch(
                (x, y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.05",
                facecolor=fill, edgecolor=edge or _COLOURS[box.state],
                linewidth=1.0 if edge else 2.0, linestyle="solid" if edge else _DASHES[box.state],
                hatch="////" if box.state is State.DOWN and not edge else None,
                zorder={"host": 1, "numa": 2, "pci": 5}.get(box.kind, 4),
            )
        )  # fmt: skip
        middle = x + box.width / 2
        if outer:
            self._frame_title(axes, box, x, y)
            return
        lines = [(box.title, {"gpu": 10.0, "nvswitch": 9.0, "pci": 7.0}.get(box.kind, 8.0), True)]
        lines += [(text, 6.6, False) for text in box.details]
        step = box.height / (len(lines) + 0.35)
        top = y + box.height - step * 0.68
        white = {"facecolor": fill, "edgecolor": "none", "pad": 0.2}
        for at, (text, size, bold) in enumerate(lines):
            axes.text(
                middle, top - step * at if len(lines) > 1 else y + box.height / 2, text,
                ha="center", va="center", color=_INK, zorder=6,
                fontsize=_fitted(text, size, box.width - 0.08, bold=bold),
                fontweight="bold" if bold else "normal",
                bbox=white if box.state is State.DOWN and not edge else None,
            )  # fmt: skip

    def _frame_title(self, axes: Any, box: Box, x: float, y: float) -> None:
        """Write the name of a host at the top, of a NUMA node at the bottom."""
        if box.kind == "host":
            top = y + box.height - 0.2
            axes.text(
                x + 0.14, top, box.title, va="center", fontsize=11, fontweight="bold", color=_INK,
                zorder=6,
            )  # fmt: skip
            for text in box.details:
                axes.text(x + 0.14, top - 0.3, text, va="center", fontsize=8, color=_INK, zorder=6)
            return
        text = " · ".join((box.title, *box.details))
        axes.text(
            x + box.width / 2, y + 0.15, text, ha="center", va="center", color="#55606B",
            fontsize=_fitted(text, 8, box.width - 0.16), zorder=6,
        )  # fmt: skip

    def _line(self, axes: Any, line: Line, dx: float, dy: float) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        start, end = (line.x0 + dx, line.y0 + dy), (line.x1 + dx, line.y1 + dy)
        if line.rise:
            # A curve whose inner points are 4/3 as high as its top.
            lift = line.rise * 4 / 3
            points = [start, (start[0], start[1] + lift), (end[0], end[1] + lift), end]
            codes = [Curve.MOVETO, *[Curve.CURVE4] * 3]
            top = (start[1] + end[1]) / 2 + line.rise
            # A label that would hide most of the arc goes above it.
            if _wide(line.label, 7) > 0.35 * abs(end[0] - start[0]):
                top += 0.1 if line.rise > 0 else 0.17
            at, side = ((start[0] + end[0]) / 2, top), "center"
        else:
            points, codes = [start, end], [Curve.MOVETO, Curve.LINETO]
            at, side = (end[0] + 0.07, end[1] - 0.18), "left"
        axes.add_patch(
            PathPatch(
                Curve(points, codes), facecolor="none", edgecolor=_COLOURS[line.state],
                linewidth=line.weight, linestyle=_DASHES[line.state], capstyle="butt", zorder=3,
            )
        )  # fmt: skip
        if line.label:
            axes.text(
                *at, line.label, ha=side, va="center", fontsize=7, color=_INK, zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6} if line.rise else None,
            )  # fmt: skip
