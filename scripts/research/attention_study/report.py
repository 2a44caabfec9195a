"""Tables and plot of the measured curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dit_accel.sparse.token_order import TOKEN_ORDERS
from dit_accel.tools.figures import SERIES_COLOURS, SERIES_MARKERS, new_figure, tidy_axes

from .curves import (
    AVERAGE_QUERY,
    JUDGES,
    METHODS,
    SLICES_ABOVE,
    SPARGE,
    TARGETS,
    TILES_ABOVE,
    TRUE_MASS,
    WITH_MEANS,
    judged,
)

PAPER_LEVEL = 0.5  # c of FG-Attn's table 1
JUDGED_AT = 0.12  # lost mass at which similarity thresholds are compared
JUDGED = [judged(theta) for theta in JUDGES]

Results = list[dict[str, Any]]


def tables(results: Results) -> str:
    """All three tables as Markdown, each with a caption."""
    named = [each for method in METHODS for each in (method.name, method.name + WITH_MEANS)]
    named += [SLICES_ABOVE, TRUE_MASS]
    by_method = sorted(
        (r for r in results if r["method"] in named),
        key=lambda r: (TOKEN_ORDERS.index(r["order"]), -_width(r), named.index(r["method"])),
    )
    by_level = sorted(
        (r for r in results if r["method"] in (TILES_ABOVE, SLICES_ABOVE)),
        key=lambda r: (TOKEN_ORDERS.index(r["order"]), r["method"] == SLICES_ABOVE, -_width(r)),
    )
    errors = [f"{target:.0%} error" for target in TARGETS]
    paragraphs = [
        "Skipped share of vision's (query, key) pairs at a given mean relative L1 error.",
        _table(
            ["order", "tile", "method", *errors],
            [[r["order"], r["tile"], r["method"], *map(_percent, r["sparsity_at"])] for r in by_method],
        ),
        f"SpargeAttn's similarity threshold, where a row may lose {JUDGED_AT:.0%} of its mass.",
        _table(
            ["order", "tile", "method", "skipped", "mean error", "worst error"],
            [
                [r["order"], r["tile"], r["method"], *_at(r, JUDGED_AT, "sparsity", "error", "worst")]
                for r in by_method
                if r["method"] in JUDGED
            ],
        ),
        "FG-Attn's table 1: tiles without a probability above c/N, for the paper's c = 0.5 and for the c of an error.",
        _table(
            ["order", "tile", "c = 0.5", "error at c = 0.5", *errors],
            [
                [r["order"], r["tile"], *_at(r, PAPER_LEVEL, "sparsity", "error"), *map(_percent, r["sparsity_at"])]
                for r in by_level
            ],
        ),
    ]
    return "\n\n".join(paragraphs) + "\n"


def plot(results: Results, title: str, path: Path) -> None:
    """Plot error against sparsity: SpargeAttn's similarity thresholds and orders, all methods, and tile sizes."""
    orders = [order for order in TOKEN_ORDERS if any(r["order"] == order for r in results)]
    curves = {(r["method"], r["order"], r["tile"]): r for r in results}
    by_level = [key for key in curves if key[0] in (TILES_ABOVE, SLICES_ABOVE) and key[1] == orders[0]]
    methods = [(SPARGE, 64), ("top-k", 64), (TRUE_MASS, 64), (AVERAGE_QUERY, 1), (SLICES_ABOVE, 1)]
    panels = {
        "SpargeAttn, blocks of 64": {
            f"{name}, {order}": (name, order, "64 x 64") for name in (SPARGE, judged(0.4)) for order in orders
        },
        f"Blocks of 64, {orders[0]}": {name: (name, orders[0], f"64 x {width}") for name, width in methods},
        f"Tiles with any score above c/N, {orders[0]}": {
            key[2]: key for key in sorted(by_level, key=lambda key: (key[0] == SLICES_ABOVE, -_width(curves[key])))
        },
    }
    figure = new_figure(15.0, 4.8)
    for axes, (heading, lines) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        for number, (label, curve) in enumerate((label, curves[key]) for label, key in lines.items() if key in curves):
            axes.plot(
                curve["sparsity"],
                curve["error"],
                color=SERIES_COLOURS[number % len(SERIES_COLOURS)],
                marker=SERIES_MARKERS[number % len(SERIES_MARKERS)],
                markersize=4,
                linewidth=1.5,
                label=label,
            )
        axes.set_title(heading, loc="left")
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 1.0)
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of (query, key) pairs skipped")
        if axes.lines:
            axes.legend(frameon=False, loc="lower right", fontsize=8)
        tidy_axes(axes, grid="both")
    figure.axes[0].set_ylabel(f"relative L1 error, {title}")
    figure.savefig(path)


def _at(curve: dict[str, Any], threshold: float, *keys: str) -> list[str]:
    place = list(curve["thresholds"]).index(threshold)
    return [_percent(curve[key][place]) for key in keys]


def _width(curve: dict[str, Any]) -> int:
    return int(curve["tile"].split()[0])


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
