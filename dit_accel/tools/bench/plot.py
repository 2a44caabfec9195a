"""Speed-up against sparsity with the ideal line, a panel an op and shape, like figures 6, 8, 10 and 11 of FlashOmni.

What predicting tiles costs gets a panel by sequence length, as SpargeAttn's table 3 has it, and so do families of
masks, as OmniAttention's figures 4 to 8 have them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dit_accel.tools.bench.report import Document, shape_label
from dit_accel.tools.bench.sparge import PAPER_SHARES
from dit_accel.tools.figures import GREY, SERIES_COLOURS, SERIES_MARKERS, new_figure, tidy_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

COLUMNS = 3
WINDOWS = "gemm_o_window"
PLOTTED = ("attention", "gemm_q", "gemm_o_dispatch", WINDOWS, "slices", "sparge attention")
PREDICTION = "sparge prediction"
MASKS, MASKS_OVER = "attention masks", "flex"
WINDOW_DASHES = ("-", "--", ":")
DASHES = {"rows": "--", "both": ":"}
SPARSE_BASELINES = ("flex",)


class Line(NamedTuple):
    """One method's ``(sparsity, speed-up)`` points by ascending sparsity."""

    label: str
    colour: str
    marker: str
    dashes: str
    points: list[tuple[float, float]]


def speedup_plot(document: Document, path: Path) -> bool:
    """Writes the plot; False, and no file, where nothing was measured at two sparsities."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in document["results"]:
        if row["op"] in PLOTTED and row["speedup"]:
            panels.setdefault((row["op"], shape_label(row["shape"])), []).append(row)
    panels = {key: rows for key, rows in panels.items() if len({row["sparsity"] for row in rows}) > 1}
    predicted = [row for row in document["results"] if row["op"] == PREDICTION and row["speedup"]]
    drawings = [partial(_draw, title=f"{op}, {shape}", rows=rows) for (op, shape), rows in panels.items()]
    if len({row["shape"]["tokens"] for row in predicted}) > 1:
        drawings.append(partial(_draw_shares, rows=predicted))
    for (block, how), rows in _masked_rows(document).items():
        if len({row["shape"]["tokens"] for row in rows}) > 1:
            drawings.append(partial(_draw_masks, title=f"{MASKS}, block {block}, {how}", rows=rows))
    if not drawings:
        return False
    count = -(-len(drawings) // COLUMNS)
    figure = new_figure(5.2 * min(COLUMNS, len(drawings)), 4.2 * count)
    grid = figure.subplots(count, min(COLUMNS, len(drawings)), squeeze=False).flatten()
    for axes, draw in zip(grid, drawings, strict=False):
        draw(axes)
    for axes in grid[len(drawings) :]:
        axes.set_axis_off()
    figure.savefig(path)
    return True


def _draw(axes: Axes, title: str, rows: list[Row]) -> None:
    over = next(iter(rows[0]["speedup"]))
    lines = _attention_lines(rows, over) if rows[0]["op"] == "attention" else _projection_lines(rows, over)
    for line in lines:
        axes.plot(
            *zip(*line.points, strict=True),
            color=line.colour,
            marker=line.marker,
            linestyle=line.dashes,
            label=line.label,
            markersize=4,
            linewidth=1.5,
        )
    for number, points in enumerate(_ideals(rows)):
        style = {"color": GREY, "linewidth": 0.9, "linestyle": (0, (1, 1)), "zorder": 1}
        axes.plot(*zip(*points, strict=True), label="ideal" if number == 0 else None, **style)
    axes.set_xlabel("sparsity (share left out)")
    axes.set_ylabel(f"speed-up over {over}")
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7, loc="upper left")
    tidy_axes(axes, grid="both")


def _draw_shares(axes: Axes, rows: list[Row]) -> None:
    """Shares of dense attention's time by tokens: a line a part, and what the paper printed."""
    over = next(iter(rows[0]["speedup"]))
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        part = row["kind"].split(" (")[0]
        points.setdefault(part, []).append((row["shape"]["tokens"], 1 / row["speedup"][over]))
    for number, (part, shares) in enumerate(points.items()):
        line = _line(part, number, "-", shares)
        axes.plot(*zip(*line.points, strict=True), color=line.colour, marker=line.marker, label=part, markersize=4)
    axes.plot(*zip(*PAPER_SHARES.items(), strict=True), color=GREY, linestyle=":", label="SpargeAttn, table 3")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"share of {over}'s time")
    axes.set_title(f"{PREDICTION}, heads={rows[0]['shape']['heads']}", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    tidy_axes(axes, grid="both")


def _masked_rows(document: Document) -> dict[tuple[str, str], list[Row]]:
    """Rows of masks by block and by what was timed: the GPU's work, or calls from Python."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in document["results"]:
        if row["op"] == MASKS and MASKS_OVER in row["speedup"]:
            how = "called from Python" if row["kind"].endswith("called") else "GPU time"
            panels.setdefault((row["shape"]["block"], how), []).append(row)
    return panels


def _draw_masks(axes: Axes, title: str, rows: list[Row]) -> None:
    """Speed-up by tokens: a colour a family and dashes a backend."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        family = row["kind"].split(" ")[0]
        points.setdefault((family, row["backend"]), []).append((row["shape"]["tokens"], row["speedup"][MASKS_OVER]))
    families, backends = (list(dict.fromkeys(names)) for names in zip(*points, strict=True))
    for (family, backend), speedups in points.items():
        dashes = WINDOW_DASHES[backends.index(backend) % len(WINDOW_DASHES)]
        line = _line(f"{family}, {backend}", families.index(family), dashes, speedups)
        axes.plot(
            *zip(*line.points, strict=True),
            color=line.colour,
            marker=line.marker,
            linestyle=dashes,
            label=line.label,
            markersize=4,
        )
    axes.axhline(1.0, color=GREY, linewidth=0.9, linestyle=(0, (1, 1)))
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"speed-up over {MASKS_OVER}")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    tidy_axes(axes, grid="both")


def _attention_lines(rows: list[Row], over: str) -> list[Line]:
    """A colour a backend and dashes a kind; what is dense begins every kind's line. Sparse baselines by tiles."""
    lines = []
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    for number, backend in enumerate(backends):
        own = [row for row in rows if row["backend"] == backend and over in row["speedup"]]
        for kind in dict.fromkeys(row["kind"] for row in own if row["kind"] != "dense"):
            points = [(row["sparsity"], row["speedup"][over]) for row in own if row["kind"] in ("dense", kind)]
            lines.append(_line(f"{backend}, {kind}", number, DASHES.get(kind, "-"), points))
    for number, name in enumerate(SPARSE_BASELINES, start=len(backends)):
        points = {
            (row["sparsity"], row["baselines_ms"][over] / row["baselines_ms"][name])
            for row in rows
            if row["kind"] in ("dense", "tiles") and {over, name} <= row["baselines_ms"].keys()
        }
        if points:
            lines.append(_line(f"{name}, tiles", number, "-", list(points)))
    return lines


def _projection_lines(rows: list[Row], over: str) -> list[Line]:
    """A line a backend and kind. Windows have a colour an N and dashes a D."""
    points: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        key = (
            (row["backend"], *row["kind"].split(maxsplit=1)) if row["op"] == WINDOWS else (row["backend"], row["kind"])
        )
        points.setdefault(key, []).append((row["sparsity"], row["speedup"][over]))
    colours = list(dict.fromkeys(key[:2] for key in points))
    dashes = list(dict.fromkeys(key[2:] for key in points))
    return [
        _line(" ".join(key), colours.index(key[:2]), WINDOW_DASHES[dashes.index(key[2:]) % len(WINDOW_DASHES)], values)
        for key, values in points.items()
    ]


def _line(label: str, number: int, dashes: str, points: list[tuple[float, float]]) -> Line:
    colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
    return Line(label, colour, SERIES_MARKERS[number % len(SERIES_MARKERS)], dashes, sorted(points))


def _ideals(rows: list[Row]) -> list[list[tuple[float, float]]]:
    """The ideal lines: 1 / (1 − sparsity), or of windows one each N and D."""
    if rows[0]["op"] != WINDOWS:
        highest = max(row["sparsity"] for row in rows)
        return [[(highest * i / 100, 1 / (1 - highest * i / 100)) for i in range(101)]]
    points: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["kind"], set()).add((row["sparsity"], row["ideal"]))
    return [sorted(values) for values in points.values()]
