"""What a comparison says: tables, frontiers, our lead, and the plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dit_accel.tools.compare.methods import OURS
from dit_accel.tools.figures import best_settings, frontier_plot
from dit_accel.tools.metrics import IDENTICAL
from dit_accel.tools.repeats import DISTURBED, Spread, disturbed, speedup

Row = dict[str, Any]

FRACTIONS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)


def frontier(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Computed fraction and PSNR of the best of some rows, by ascending fraction.

    Equal pictures are left out: a line towards their nominal 100 dB would promise what no setting between reaches.
    """
    return best_settings([(row["computed_fraction"], row["psnr_db"]) for row in approximations(rows)])


def at(points: Sequence[tuple[float, float]], fraction: float) -> float | None:
    """PSNR of a frontier at a computed fraction, between its settings by a straight line, behind the last its last.

    None before its first setting: nothing of it is as cheap.
    """
    if not points or fraction < points[0][0]:
        return None
    return float(np.interp(fraction, *zip(*points, strict=True)))


def margins(rows: Sequence[Row]) -> list[Row]:
    """Each of our settings' lead in dB over the best of the others' frontiers at its own computed fraction, None where
    no other is as cheap.
    """
    rivals = _frontiers(row for row in rows if not row["ours"]).values()
    leads = []
    for row in measured(rows):
        if row["ours"]:
            rival = _best_at(rivals, row["computed_fraction"])
            lead = None if rival is None else row["psnr_db"] - rival
            leads.append({"name": row["name"], "rival_db": rival, "lead_db": lead})
    return leads


def frontier_table(rows: Sequence[Row]) -> dict[str, Any]:
    """PSNR of each series' frontier at `FRACTIONS`, and our lead over the best of the others there; None = none."""
    frontiers = _frontiers(rows)
    levels = {series: [at(points, fraction) for fraction in FRACTIONS] for series, points in frontiers.items()}
    rivals = [points for series, points in frontiers.items() if series != OURS]
    pairs = [(at(frontiers.get(OURS, []), fraction), _best_at(rivals, fraction)) for fraction in FRACTIONS]
    leads = [None if own is None or rival is None else own - rival for own, rival in pairs]
    return {"fractions": list(FRACTIONS), "psnr_db": levels, "lead_db": leads}


def _frontiers(rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    """By series, ours first."""
    rows = list(rows)
    return {series: frontier(row for row in rows if row["series"] == series) for series in _series(rows)}


def _best_at(frontiers: Iterable[Sequence[tuple[float, float]]], fraction: float) -> float | None:
    """The highest PSNR of some frontiers at a computed fraction."""
    return max((level for points in frontiers if (level := at(points, fraction)) is not None), default=None)


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows that hold figures."""
    return [row for row in rows if "error" not in row]


def approximations(rows: Iterable[Row]) -> list[Row]:
    """The measured rows whose pictures are not simply the plain ones."""
    return [row for row in measured(rows) if row["psnr_db"] < IDENTICAL]


def table(document: dict[str, Any]) -> str:
    """The comparison as Markdown: frontiers side by side, then every setting, and what else is to be said."""
    levels = frontier_table(document["results"])
    head = ["PSNR dB at computed fraction", *(f"{fraction:g}" for fraction in levels["fractions"])]
    lines = [[series, *(_number(value, 1) for value in line)] for series, line in levels["psnr_db"].items()]
    lines.append([f"**lead of {OURS}**", *(_number(value, 1, "+") for value in levels["lead_db"])])
    parts = [_markdown(head, lines), _markdown(*settings_table(document))]
    parts.append("\n".join(f"- {remark}" for remark in remarks(document)))
    return "\n\n".join(part for part in parts if part)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def settings_table(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of every setting that was measured, cheapest first within a series."""
    rows = document["results"]
    judged = any("lpips" in row for row in rows)
    head = ["series", "setting", "computed", "seconds", "speed-up", "PSNR dB", "worst dB", "SSIM"]
    head += ["LPIPS"] if judged else []
    order = _series(rows)
    lines = []
    for row in sorted(measured(rows), key=lambda row: (order.index(row["series"]), row["computed_fraction"])):
        cells = [
            row["series"],
            row["name"],
            f"{row['computed_fraction']:.3f}",
            _number(row["seconds"], 2),
            "–" if row["seconds"] is None else str(speedup_of(row, document)),
            f"{row['psnr_db']:.1f}",
            f"{min(row['psnr_db_each']):.1f}",
            f"{row['ssim']:.4f}",
        ]
        lines.append(cells + ([_number(row.get("lpips"), 4)] if judged else []))
    return head, lines


def speedup_of(row: Row, document: dict[str, Any]) -> Spread:
    """Of a row with times: over the plain steps beside each run. Former rows have one time, and one plain run."""
    beside = row.get("plain_seconds_each", [document["plain"]["seconds"]])
    return speedup(beside, row.get("seconds_each", [row["seconds"]]))


def _disturbance(row: Row, document: dict[str, Any]) -> float:
    """How far speed-ups of its repeats lie apart, as a share, beyond what its prompts differ in work."""
    work = Spread.of(row["computed_fraction_each"]).width
    return (1 + speedup_of(row, document).width) / (1 + work) - 1


def remarks(document: dict[str, Any]) -> list[str]:
    """What failed, what was left out, and what is not as it should be."""
    rows = document["results"]
    told = [f"Failed: {row['name']}: {row['error']}" for row in rows if "error" in row]
    told += [f"Left out: {name}, because {reason}." for name, reason in document["left_out"].items()]
    reloaded = ", ".join(row["name"] for row in rows if row["reloaded"])
    if reloaded:
        told.append(f"Loaded anew, because plain runs were others than before, after {reloaded}.")
    apart = {row["name"]: _disturbance(row, document) for row in rows if "seconds_each" in row}
    shaken = {name: width for name, width in apart.items() if width > DISTURBED}
    if shaken:
        names = ", ".join(shaken) if len(shaken) <= 5 else f"{len(shaken)} of {len(apart)} settings"
        told.append(disturbed(f"Times of {names}", max(shaken.values())))
    if document["plain"]["lpips"] is not None:
        told.append(f"No LPIPS: {document['plain']['lpips']}.")
    return told


def figures(document: dict[str, Any], path: Path) -> list[Path]:
    """Writes PSNR over computed fraction to ``path``, and over the transformer's time, if measured, to NAME-time
    beside it; all that was written.
    """
    rows = approximations(document["results"])
    order = _series(rows)
    rows.sort(key=lambda row: order.index(row["series"]))
    points = [(row["series"], row["computed_fraction"], row["psnr_db"]) for row in rows]
    frontier_plot(points, path, highlight=OURS)
    timed = [row for row in rows if row["seconds"] is not None]
    shares = [(row["series"], 1 / speedup_of(row, document).median, row["psnr_db"]) for row in timed]
    if not timed:
        return [path]
    label = "transformer time over that of the plain run (less is faster)"
    beside = path.with_stem(f"{path.stem}-time")
    frontier_plot(shares, beside, highlight=OURS, x_label=label)
    return [path, beside]


def _series(rows: Iterable[Row]) -> list[str]:
    """Series in the order in which they first occur, ours first."""
    return sorted(dict.fromkeys(row["series"] for row in rows), key=lambda series: series != OURS)


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}"
