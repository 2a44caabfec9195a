"""Plot speed-up against sparsity with the ideal line: a panel per op and shape, as in FlashOmni's figures 6, 8, 10, 11.

Two more kinds of panels are over sequence length: the overhead of tile prediction, as in SpargeAttn's table 3, and the
mask families, as in OmniAttention's figures 4 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dit_accel.tools.figures import GREY, SERIES_COLOURS, SERIES_MARKERS, new_figure, tidy_axes
from scripts.bench.kernels.report import Document, Row, grouped, shape_label
from scripts.bench.kernels.sparge import PAPER_SHARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
LineKey = tuple[str, Hashable, Hashable]  # label, key of the colour, key of the dashes

COLUMNS = 3
WINDOWS = "gemm_o_window"
PLOTTED = ("attention", "gemm_q", "gemm_o_dispatch", WINDOWS, "slices", "sparge attention")
PREDICTION = "sparge prediction"
MASKS, MASKS_OVER = "attention masks", "flex"
DASHES = ("-", "--", ":")
DASHES_OF_KINDS = {"rows": "--", "both": ":"}
SPARSE_BASELINES = ("flex",)
DOTTED = {"color": GREY, "linewidth": 0.9, "linestyle": (0, (1, 1)), "zorder": 1}


class Line(NamedTuple):
    """Line through points sorted by x; without a label it is not in the legend."""

    label: str | None
    points: Iterable[Point]
    style: dict[str, Any]


class Panel(NamedTuple):
    """Lines on one pair of axes; ``log``: the logarithmic axes, ``level``: y of a dotted horizontal line."""

    title: str
    x: str
    y: str
    lines: list[Line]
    legend: str = "best"
    log: str = ""
    level: float | None = None


def speedup_plot(document: Document, path: Path) -> bool:
    """Write the plot; return False and write nothing unless two sparsities were measured."""
    rows = [row for row in document["results"] if row["speedup"]]
    panels = [*_sparsity_panels(rows), *_share_panels(rows), *_mask_panels(rows)]
    if not panels:
        return False
    columns, count = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    figure = new_figure(5.2 * columns, 4.2 * count)
    grid = figure.subplots(count, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path)
    return True


def _draw(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(*zip(*sorted(line.points), strict=True), label=line.label, **line.style)
    if panel.level is not None:
        axes.axhline(panel.level, **DOTTED)
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
    if "y" in panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc=panel.legend)
    tidy_axes(axes, grid="both")


def _sparsity_panels(rows: list[Row]) -> Iterator[Panel]:
    """Speed-up by sparsity: a panel for each op and shape with at least two sparsities."""
    plotted = [row for row in rows if row["op"] in PLOTTED]
    for (op, shape), own in grouped(plotted, lambda row: (row["op"], shape_label(row["shape"]))).items():
        if len({row["sparsity"] for row in own}) > 1:
            over = next(iter(own[0]["speedup"]))
            lines = _attention_lines(own, over) if op == "attention" else _projection_lines(own, over)
            y = f"speed-up over {over}"
            yield Panel(f"{op}, {shape}", "sparsity (share left out)", y, lines + _ideals(own), "upper left")


def _share_panels(rows: list[Row]) -> Iterator[Panel]:
    """Overhead as a share of dense attention's time by tokens: a line per part, and the paper's figures."""
    predicted = [row for row in rows if row["op"] == PREDICTION]
    if not _have_lengths(predicted):
        return
    over = next(iter(predicted[0]["speedup"]))

    def key(row: Row) -> LineKey:
        part = row["kind"].split(" (")[0]
        return part, part, None

    lines = _lines(predicted, key, lambda row: (row["shape"]["tokens"], 1 / row["speedup"][over]))
    lines.append(Line("SpargeAttn, table 3", PAPER_SHARES.items(), {"color": GREY, "linestyle": ":"}))
    title = f"{PREDICTION}, heads={predicted[0]['shape']['heads']}"
    yield Panel(title, "tokens", f"share of {over}'s time", lines, log="xy")


def _mask_panels(rows: list[Row]) -> Iterator[Panel]:
    """Speed-up by tokens: a panel per block size and timing method; colours are families, dashes are backends."""
    masked = [row for row in rows if row["op"] == MASKS and MASKS_OVER in row["speedup"]]
    hows = {True: "called from Python", False: "GPU time"}
    panels = grouped(masked, lambda row: (row["shape"]["block"], hows[row["kind"].endswith("called")]))

    def key(row: Row) -> LineKey:
        family = row["kind"].split(" ")[0]
        return f"{family}, {row['backend']}", family, row["backend"]

    for (block, how), own in panels.items():
        if _have_lengths(own):
            lines = _lines(own, key, lambda row: (row["shape"]["tokens"], row["speedup"][MASKS_OVER]))
            title, y = f"{MASKS}, block {block}, {how}", f"speed-up over {MASKS_OVER}"
            yield Panel(title, "tokens", y, lines, "lower right", log="x", level=1.0)


def _have_lengths(rows: list[Row]) -> bool:
    return len({row["shape"]["tokens"] for row in rows}) > 1


def _attention_lines(rows: list[Row], over: str) -> list[Line]:
    """Lines of attention, each from the dense point: colours are backends, dashes kinds; sparse baselines by tiles."""
    lines = []
    backends = grouped(rows, lambda row: row["backend"])
    for number, (backend, of_backend) in enumerate(backends.items()):
        own = [row for row in of_backend if over in row["speedup"]]
        for kind in dict.fromkeys(row["kind"] for row in own if row["kind"] != "dense"):
            points = [(row["sparsity"], row["speedup"][over]) for row in own if row["kind"] in ("dense", kind)]
            lines.append(_line(f"{backend}, {kind}", number, points, DASHES_OF_KINDS.get(kind, "-")))
    for number, name in enumerate(SPARSE_BASELINES, start=len(backends)):
        points = {
            (row["sparsity"], row["baselines_ms"][over] / row["baselines_ms"][name])
            for row in rows
            if row["kind"] in ("dense", "tiles") and {over, name} <= row["baselines_ms"].keys()
        }
        if points:
            lines.append(_line(f"{name}, tiles", number, points))
    return lines


def _projection_lines(rows: list[Row], over: str) -> list[Line]:
    """Line per backend and kind. In windows the colour is N and the dashes are D."""
    splits = 1 if rows[0]["op"] == WINDOWS else 0

    def key(row: Row) -> LineKey:
        first, *rest = row["kind"].split(maxsplit=splits)
        return f"{row['backend']} {row['kind']}", (row["backend"], first), tuple(rest)

    return _lines(rows, key, lambda row: (row["sparsity"], row["speedup"][over]))


def _lines(rows: list[Row], key: Callable[[Row], LineKey], point: Callable[[Row], Point]) -> list[Line]:
    """Line per key, through the points of its rows."""
    lines = grouped(rows, key)
    _, colours, dashes = (list(dict.fromkeys(part)) for part in zip(*lines, strict=True))
    return [
        _line(label, colours.index(colour), [point(row) for row in own], DASHES[dashes.index(dash) % len(DASHES)])
        for (label, colour, dash), own in lines.items()
    ]


def _line(label: str, number: int, points: Iterable[Point], dashes: str = "-") -> Line:
    colour, marker = (values[number % len(values)] for values in (SERIES_COLOURS, SERIES_MARKERS))
    style = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.5}
    return Line(label, points, style)


def _ideals(rows: list[Row]) -> list[Line]:
    """Ideal lines: 1 / (1 − sparsity); for windows one line for each N and D."""
    highest = max(row["sparsity"] for row in rows)
    lines = [[(highest * i / 100, 1 / (1 - highest * i / 100)) for i in range(101)]]
    if rows[0]["op"] == WINDOWS:
        by_kind = grouped(rows, lambda row: row["kind"]).values()
        lines = [{(row["sparsity"], row["ideal"]) for row in own} for own in by_kind]
    return [Line(None if number else "ideal", points, DOTTED) for number, points in enumerate(lines)]
