"""Tables of the results, and for each model a figure and a sheet of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from dit_accel.tools.compare.methods import OURS
from dit_accel.tools.figures import frontier_plot
from scripts.demo_training.exporting import contact_sheet

Row = dict[str, Any]

# Headings and digits of the figures per prompt.
COLUMNS = {
    "psnr": ("PSNR dB", 1),
    "ssim": ("SSIM", 3),
    "lpips": ("LPIPS", 3),
    "sharpness": ("sharpness", 3),
    "contrast": ("contrast", 3),
    "colour": ("colour", 2),
    "histogram": ("histogram", 2),
}
CELL = 192  # pixels of an image in the sheet


def runs_in(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows with figures, by model and steps of its plain runs; the plain run's first, ours next."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted((row for row in rows if "psnr" in row), key=_order):
        found.setdefault((row["model"], row["steps"]), []).append(row)
    return found


def tables(rows: Sequence[Row], left_out: dict[str, str]) -> str:
    """Markdown: for each model the best of each series at each fraction, then every setting, then what failed."""
    parts = []
    for (model, steps), own in runs_in(rows).items():
        parts.append(f"## {model}, {steps} steps")
        if any(row.get("at") for row in own):
            parts.append(_best_table(own))
        parts.append(_settings_table(own))
    told = [f"- Failed: {row['model']}, {row['steps']} steps, {row['name']}: {row['error']}" for row in failed(rows)]
    told += [f"- Left out: {name}, because {reason}." for name, reason in left_out.items()]
    return "\n\n".join([*parts, *(["\n".join(told)] if told else [])]) + "\n"


def failed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "error" in row]


def figure(own: Sequence[Row], path: Path) -> None:
    """Plot the share of prompts with all attributes correct over the computed fraction; PSNR if no attributes exist."""
    readable = own[0]["right"] is not None
    points = [(row["series"], row["computed"], _right(row) if readable else mean(row["psnr"])) for row in own[1:]]
    points = [point for point in points if point[0] != "plain"]
    if not points:
        return
    if not readable:
        frontier_plot(points, path, highlight=OURS)
        return
    label = f"share of {own[0]['prompts']} prompts with all attributes right"
    frontier_plot(points, path, highlight=OURS, y_label=label, plain=_right(own[0]))


def sheet(own: Sequence[Row], at: float | None, path: Path) -> None:
    """Show the first prompt's plain output and the output of every setting at a fraction; None = at any."""
    chosen = [own[0], *(row for row in own if row["series"] != "plain" and (at is None or row.get("at") == at))]
    pictures = torch.from_numpy(np.stack([row["shown"] for row in chosen])).float() / 255
    captions = [_caption(row) for row in chosen]
    contact_sheet(pictures, captions, columns=min(6, len(chosen)), cell=CELL).save(path)


def _caption(row: Row) -> str:
    if row["series"] == "plain":
        return "plain"
    return f"{row['name']}: {row['computed']:.3f} of the work, {row['psnr'][0]:.1f} dB"


def _best_table(own: Sequence[Row]) -> str:
    wanted = sorted({row["at"] for row in own if row.get("at")})
    lines = []
    for series in dict.fromkeys(row["series"] for row in own if row["series"] != "plain"):
        cells = []
        for at in wanted:
            there = [row for row in own if row["series"] == series and row.get("at") == at]
            right = max((_right(row) for row in there if row["right"]), default=None)
            quality = max((mean(row["psnr"]) for row in there), default=None)
            cells.append(" / ".join(part for part in (_number(right, 3), _number(quality, 1)) if part))
        lines.append([series, *cells])
    plain = [row for row in own if row["series"] == "plain"]
    lines += [[f"plain, {row['prompts']} prompts", *[_number(_right(row), 3)] * len(wanted)] for row in plain]
    return _markdown(["best attributes right / best PSNR dB at", *(f"{at:g}" for at in wanted)], lines)


def _settings_table(own: Sequence[Row]) -> str:
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in own)}
    head = ["series", "setting", "computed", "prompts", "right", *(heading for heading, _ in columns.values())]
    lines = [
        [
            row["series"],
            row["name"],
            f"{row['computed']:.3f}",
            str(row["prompts"]),
            _number(_right(row), 3),
            *(_number(mean(row[key]) if key in row else None, digits) for key, (_, digits) in columns.items()),
        ]
        for row in own
    ]
    return _markdown(head, lines)


def _right(row: Row) -> float | None:
    return row["right"] and row["right"].get("all")


def _order(row: Row) -> tuple:
    series = row["series"]
    return series != "plain", not series.startswith(OURS), row.get("at") or 0.0, series, row["computed"]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
