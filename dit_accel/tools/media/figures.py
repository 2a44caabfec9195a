"""Plots of a run: step modes, densities, symbols over the image, speed against quality.

Each function writes one file, and raises `UnsupportedError` if matplotlib (extra `plots`) is missing. No display is
needed, and the caller's pyplot state is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dit_accel.errors import ShapeError
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import whole_file

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

    from dit_accel.kernels.layout import TokenLayout
    from dit_accel.kernels.symbols import SparseSymbols
    from dit_accel.loop.report import RunReport

# Okabe and Ito's palette, safe for common forms of colour blindness.
STEP_COLOURS = {"computed": "#0072B2", "forecast": "#BFD9E6"}
STEP_KINDS = {"full": "computed", "update": "computed", "dispatch": "forecast"}  # of the modes
SERIES_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
SERIES_MARKERS = "osD^vP*"
WELL_KNOWN = ("FirstBlockCache", "SeaCache", "TaylorSeer lite (diffusers)", "DBCache + TaylorSeer (cache-dit)")
WELL_KNOWN += ("fewer steps, UniPC",)
ERROR_COLOUR = "#D55E00"
GREY = "#444444"
COMPUTED = "computed fraction of FLOPs (less is faster)"
Point = tuple[str, float, float]
SHARES = {"cmap": "cividis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}  # of heat maps


def timeline_figure(report: RunReport, path: str | Path) -> None:
    """Plot the time of each step, and the measured errors of forecasts and, with a probe, of attention."""
    figure = new_figure(9.0, 4.6)
    times, errors = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
    milliseconds = [1000 * step.seconds for step in report.steps]
    for kind, colour in STEP_COLOURS.items():
        if chosen := [step.index for step in report.steps if STEP_KINDS[step.mode] == kind]:
            label = f"{kind} ({len(chosen)})"
            times.bar(chosen, [milliseconds[i] for i in chosen], width=0.82, color=colour, label=label)
        for index in chosen:
            errors.axvspan(index - 0.41, index + 0.41, color=colour, alpha=0.28, linewidth=0)
    times.set_ylabel("transformer\ntime (ms)")
    times.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, borderaxespad=0.1)
    times.set_title(f"{report.preset}: {report.computed_fraction:.0%} of the blocks' FLOPs", loc="left")
    measured = {step.index: step.error for step in report.steps if step.error is not None}
    probed: dict[int, float] = {}
    for record in report.attentions:
        if record.error is not None:
            probed[record.step] = max(record.error, probed.get(record.step, 0.0))
    if measured:
        style = {"color": ERROR_COLOUR, "marker": "o", "markersize": 5, "linewidth": 1.6}
        errors.plot(*zip(*measured.items(), strict=True), **style, label="forecast")
    if probed:
        style = {"color": GREY, "marker": "s", "markersize": 4, "linewidth": 1.2}
        errors.plot(*zip(*probed.items(), strict=True), **style, label="attention of the worst block (probe)")
        errors.legend(frameon=False, loc="best", fontsize=8)
    if not measured and not probed:
        note = "no forecast error was measured in this run"
        errors.text(0.5, 0.5, note, transform=errors.transAxes, ha="center", va="center", color=GREY)
        errors.set_yticks([])
    if any(error > 0 for error in (*measured.values(), *probed.values())):
        log_scale(errors)
    errors.set(xlabel="denoising step", ylabel="measured error\n(relative L2)", xlim=(-0.6, len(report.steps) - 0.4))
    errors.xaxis.get_major_locator().set_params(integer=True)
    tidy_axes(times, grid="y")
    tidy_axes(errors, grid="y")
    save(figure, path)


def save(figure: Figure, path: str | Path) -> None:
    with whole_file(Path(path)) as part:
        figure.savefig(part)


def density_figure(report: RunReport, path: str | Path) -> None:
    """Plot a heat map of the computed share of FLOPs by layer and step."""
    density = np.array(report.density, dtype=float).reshape(len(report.layers), -1)
    height = float(np.clip(1.6 + 0.2 * len(report.layers), 2.6, 12.0))
    figure = new_figure(9.0, height)
    axes = figure.subplots()
    image = axes.imshow(density, aspect="auto", **SHARES)
    every = -(-len(report.layers) // 50)
    axes.set_yticks(range(0, len(report.layers), every), report.layers[::every], fontsize=8 if height > 4 else 9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("denoising step")
    axes.set_title(f"{report.preset}: computed share of each layer", loc="left")
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=6 * height)
    bar.set_label("computed share of FLOPs")
    bar.outline.set_visible(False)
    tidy_axes(axes)
    save(figure, path)


def heads_computed(symbols: SparseSymbols) -> np.ndarray:
    """Return the fraction of computed heads, mean over the batch: float64 ``[Tq]``, from ``cache_bits``."""
    bits = np.unpackbits(symbols.cache_bits.cpu().numpy(), axis=-1, count=symbols.heads, bitorder="little")
    return bits.mean(axis=(0, 2))


def token_grid(layout: TokenLayout, width: int, height: int, frames: int = 1) -> tuple[int, int]:
    """Return the rows and columns of the vision tokens of an image, or of each latent frame of a video.

    Tokens that don't fill grids of this shape, such as reference tokens, are a ShapeError.
    """
    tokens, rest = divmod(layout.vision, frames)
    rows = round((tokens * height / width) ** 0.5)
    columns = tokens // max(rows, 1)
    if rest or rows * columns != tokens or rows * width != columns * height:
        grid = f"{frames} grid(s) of a {width} x {height} image; symbol maps need outputs without reference tokens"
        raise ShapeError(f"{layout.vision} vision tokens don't fill {grid}")
    return rows, columns


def symbol_map(
    image: Image.Image,
    layout: TokenLayout,
    symbols: SparseSymbols,
    path: str | Path,
    title: str,
    *,
    frame: int = 0,
    frames: int = 1,
    order: torch.Tensor | None = None,
) -> None:
    """Plot an image twice: plain, and under a map of the share of heads computed at the last UPDATE.

    Blocks that hold text count as computed. Of a video the image is that of latent frame ``frame``, of ``frames``;
    ``order`` is that of its vision tokens (:mod:`dit_accel.sparse.token_order`). Errors: see :func:`token_grid`.
    """
    rows, columns = token_grid(layout, *image.size, frames)
    tokens = np.repeat(heads_computed(symbols), layout.block)[layout.vision_start :][: layout.vision]
    if order is not None:
        ordered, tokens = tokens, np.empty_like(tokens)
        tokens[order.numpy()] = ordered
    tokens = tokens.reshape(frames, rows, columns)[frame]
    width, height = image.size
    figure = new_figure(9.6, 4.2 * height / width + 0.45)
    plain, painted = figure.subplots(1, 2)
    extent = (0, width, height, 0)
    plain.imshow(image, extent=extent)
    plain.set_title("image", loc="left")
    painted.imshow(image.convert("L"), extent=extent, cmap="gray", vmin=0, vmax=255)
    heat = painted.imshow(tokens, extent=extent, alpha=0.65, **SHARES)
    painted.set_title(f"{title}: {tokens.mean():.0%} computed", loc="left")
    for axes in (plain, painted):
        axes.set_axis_off()
    bar = figure.colorbar(heat, cax=painted.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.set_label("share of computed heads")
    bar.solids.set_alpha(1)
    bar.outline.set_visible(False)
    save(figure, path)


def frontier_plot(points: Sequence[Point], path: Path, *, highlight: str, x_label: str = COMPUTED) -> None:
    """Plot settings, each a method, a computed fraction and a PSNR in dB, in one colour per method.

    A line joins a method's best settings: no setting with a smaller fraction has the same or better quality. The line
    of ``highlight`` is the thickest. Of more methods than colours, those that are not `WELL_KNOWN` are grey lines.
    """
    methods = list(dict.fromkeys(method for method, _, _ in points))
    crowded = len(methods) > len(SERIES_COLOURS)
    named = [name for name in methods if name in (highlight, *WELL_KNOWN)] if crowded else methods
    others = [name for name in methods if name not in named]
    figure = new_figure(7.2, 4.8)
    axes = figure.subplots()
    for method in methods:
        settings = [(fraction, quality) for name, fraction, quality in points if name == method]
        line = zip(*best_settings(settings), strict=True)
        if method in others:
            label = f"other methods ({len(others)})" if method == others[-1] else None
            axes.plot(*line, color="#CCCCCC", linewidth=1.0, marker=".", label=label, zorder=1)
            continue
        number, weight = named.index(method), 2.8 if method == highlight else 1.2
        style = {"color": SERIES_COLOURS[number], "marker": SERIES_MARKERS[number], "markersize": 4 + weight}
        style["zorder"] = 3 if method == highlight else 2
        axes.plot(*line, **style, linewidth=weight, label=method)
        axes.plot(*zip(*settings, strict=True), **style, linestyle="none")
    axes.set(xlabel=x_label, ylabel="PSNR compared with the plain run (dB)")
    axes.legend(frameon=False, loc="best", fontsize=9)
    tidy_axes(axes, grid="both")
    save(figure, path)


def best_settings(settings: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of ``(fraction, psnr)`` pairs, by ascending fraction and PSNR."""
    best: list[tuple[float, float]] = []
    for fraction, quality in sorted(settings, key=lambda pair: (pair[0], -pair[1])):
        if not best or quality > best[-1][1]:
            best.append((fraction, quality))
    return best


def new_figure(width: float, height: float) -> Figure:
    require_extra("matplotlib", "a figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy_axes(axes: Axes, grid: str | None = None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor="black")
    if grid:
        axes.grid(axis=grid, color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)


def log_scale(axes: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5 times powers of ten as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
