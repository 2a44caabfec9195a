"""Tables and figure of the study of conditions."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from dit_accel.presets.loading import LEVELS
from dit_accel.tools.media.figures import new_figure, tidy_axes

from .cells import Cell

LOOP = "closed loop"
BUDGET = "closed loop with a budget"
FRACTIONS = (0.2, 0.25, 0.3, 0.4)

Row = dict[str, Any]
Statistic = Callable[[Sequence[float]], float]


def tables(rows: Sequence[Row]) -> str:
    """Tables: the loop and the best other method at several fractions, the leads, and presets cell by cell."""
    lines = [_row("cell", *(f"{share:g}" for share in FRACTIONS)), _row(*["---"] * (len(FRACTIONS) + 1))]
    leads: dict[str, list[float]] = {"mean of prompts": [], "worst prompt": []}
    for cell, in_cell in by_cell(rows).items():
        entries = []
        for share in FRACTIONS:
            ours = [at(in_cell, share, statistic) for statistic in (mean, min)]
            rivals = [row for row in in_cell if row["series"] != LOOP and row["computed"] <= 1.02 * share]
            best = [max((statistic(row["psnr"]) for row in rivals), default=None) for statistic in (mean, min)]
            if ours[0] is None:
                entries.append("")
                continue
            found = [a - b for a, b in zip(ours, best, strict=True) if b is not None]
            for kept, lead in zip(leads.values(), found, strict=False):
                kept.append(lead)
            entries.append(f"{ours[0]:.1f} / {ours[1]:.1f} ({', '.join(f'{lead:+.1f}' for lead in found)})")
        lines.append(_row(cell, *entries))
    for of, found in leads.items():
        if found:
            behind = sum(lead < 0 for lead in found)
            lines.append(
                f"\nLead, {of}: {mean(found):+.1f} dB on average, median {median(found):+.1f}, "
                f"least {min(found):+.1f}; behind in {behind} of {len(found)} places."
            )
    lines += ["", _row("cell", *LEVELS), _row(*["---"] * (len(LEVELS) + 1))]
    for cell, in_cell in by_cell(rows).items():
        output = {
            row["name"]: f"{row['computed']:.3f}, {mean(row['psnr']):.1f} / {min(row['psnr']):.1f}" for row in in_cell
        }
        lines.append(_row(cell, *(output.get(level, "") for level in LEVELS)))
    return "\n".join(lines) + "\n"


def every_setting(rows: Sequence[Row]) -> str:
    """Table of all settings by computed fraction, with the mean and worst PSNR."""
    lines = [_row("cell", "series", "setting", "computed", "PSNR dB", "worst"), _row(*["---"] * 6)]
    for row in sorted(rows, key=lambda row: (json.dumps(row["cell"]), row["computed"])):
        figures = f"{row['computed']:.3f}", f"{mean(row['psnr']):.1f}", f"{min(row['psnr']):.1f}"
        lines.append(_row(Cell(**row["cell"]), row["series"], row["name"], *figures))
    return "\n".join(lines) + "\n"


def budgets(rows: Sequence[Row]) -> str:
    """Table of budgets: mean PSNR in dB, and the lead over the loop with a target error at equal computed fraction."""
    names = list(dict.fromkeys(row["name"] for row in rows if row["series"] == BUDGET))
    lines = [_row("cell", *names), _row(*["---"] * (len(names) + 1))]
    for cell, in_cell in by_cell(rows).items():
        entries = []
        for row in (row for name in names for row in in_cell if row["name"] == name):
            level, loop = mean(row["psnr"]), at(in_cell, row["computed"], mean)
            entries.append(f"{level:.1f}" + ("" if loop is None else f" ({level - loop:+.1f})"))
        lines.append(_row(cell, *entries))
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Plot computed fraction and PSNR of the presets in every cell."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for level in LEVELS:
        for video, marker in ((False, "o"), (True, "^")):
            chosen = [
                row
                for row in rows
                if row["name"] == level and (row["cell"]["model"] in ("demo-wan", "demo-hunyuan")) is video
            ]
            kind = f"{level}, {'videos' if video else 'images'}"
            places = [[row["computed"] for row in chosen], [mean(row["psnr"]) for row in chosen]]
            axes.scatter(*places, marker=marker, s=22, color=f"C{LEVELS.index(level)}", label=kind)
    axes.set(xlabel="computed fraction", ylabel="PSNR against all steps computed, dB")
    axes.legend(frameon=False, ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    tidy_axes(axes, "both")
    figure.savefig(file)


def by_cell(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by cell name."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: json.dumps(row["cell"])):
        found.setdefault(str(Cell(**row["cell"])), []).append(row)
    return found


def at(rows: Sequence[Row], share: float, statistic: Statistic, series: str = LOOP) -> float | None:
    """A series' PSNR in dB at a computed fraction, interpolated between targets; None outside of them."""
    points = sorted((row["computed"], statistic(row["psnr"])) for row in rows if row["series"] == series)
    if not points or not points[0][0] <= share <= points[-1][0]:
        return None
    return float(np.interp(share, *zip(*points, strict=True)))


def _row(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"
