"""Report of a comparison: tables, frontiers, our lead, and plots."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dit_accel.tools.measure.compare.methods import OURS
from dit_accel.tools.measure.metrics import IDENTICAL
from dit_accel.tools.measure.repeats import DISTURBED, Spread, disturbed, speedup_of
from dit_accel.tools.media.figures import best_settings, frontier_plot

Row = dict[str, Any]

# Metrics that not every comparison has: heading and decimals.
FURTHER_METRICS = {"call_seconds": ("call s", 2), "peak_gib": ("peak GiB", 1), "ms_ssim": ("MS-SSIM", 4)}
FURTHER_METRICS |= {"flip": ("FLIP", 4), "lpips": ("LPIPS", 4), "text_kept": ("text kept", 3)}
FURTHER_METRICS |= {"si_sdr_db": ("SI-SDR dB", 1), "rms_ratio_db": ("RMS ratio dB", 2)}
FAR = 0.2  # distance of two settings' fractions between which PSNR is not interpolated for other methods
FRACTIONS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)


def frontier(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Return computed fraction and PSNR of the best rows, by ascending fraction, leaving out plain outputs."""
    return best_settings([(row["computed_fraction"], row["psnr_db"]) for row in approximations(rows)])


def at(points: Sequence[tuple[float, float]], fraction: float) -> float | None:
    """Interpolate a frontier's PSNR linearly at a computed fraction; None below it, its last PSNR beyond it."""
    if not points or fraction < points[0][0]:
        return None
    return float(np.interp(fraction, *zip(*points, strict=True)))


def margins(rows: Sequence[Row]) -> list[Row]:
    """Return each of our settings' PSNR lead in dB at equal computed fraction; None if no other method is as cheap."""
    rivals = _frontiers(row for row in rows if not row["ours"]).values()
    leads = []
    for row in measured(rows):
        if row["ours"]:
            rival = _best_at(rivals, row["computed_fraction"])
            lead = None if rival is None else row["psnr_db"] - rival
            leads.append({"name": row["name"], "rival_db": rival, "lead_db": lead})
    return leads


def frontier_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the PSNR of each series' frontier at `FRACTIONS`, and our lead over the best other series."""
    frontiers = _frontiers(rows)
    levels = {series: [at(points, fraction) for fraction in FRACTIONS] for series, points in frontiers.items()}
    rivals = [points for series, points in frontiers.items() if series != OURS]
    pairs = [(at(frontiers.get(OURS, []), fraction), _best_at(rivals, fraction)) for fraction in FRACTIONS]
    leads = [None if ours is None or rival is None else ours - rival for ours, rival in pairs]
    return {"fractions": list(FRACTIONS), "psnr_db": levels, "lead_db": leads}


def _frontiers(rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    rows = list(rows)
    return {series: frontier(row for row in rows if row["series"] == series) for series in _series(rows)}


def _best_at(frontiers: Iterable[Sequence[tuple[float, float]]], fraction: float) -> float | None:
    """Return the best PSNR at a fraction; between settings far apart the better one's, as lines fall below curves."""
    levels = []
    for points in frontiers:
        above = next((point for point in points if point[0] >= fraction), None)
        below = max((point for point in points if point[0] <= fraction), default=None)
        if below is not None:
            far = above is not None and above[0] - below[0] > FAR
            levels.append(above[1] if above and far else at(points, fraction))
    return max((level for level in levels if level is not None), default=None)


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


def approximations(rows: Iterable[Row]) -> list[Row]:
    """Return the measured rows whose images differ from the plain ones; rows of sound alone have no PSNR."""
    return [row for row in measured(rows) if row.get("psnr_db", IDENTICAL) < IDENTICAL]


def table(document: dict[str, Any]) -> str:
    """Format the comparison as Markdown: frontiers side by side, then every setting, then remarks."""
    rows = document["results"]
    levels = frontier_table(rows)
    head = ["PSNR dB at computed fraction", *(f"{fraction:g}" for fraction in levels["fractions"])]
    lines = [[series, *(_number(value, 1) for value in line)] for series, line in levels["psnr_db"].items()]
    lines.append([f"**lead of {OURS}**", *(_number(value, 1, "+") for value in levels["lead_db"])])
    frontiers = _markdown(head, lines) if any("psnr_db" in row for row in rows) else ""
    parts = [frontiers, _markdown(*settings_table(document))]
    parts.append("\n".join(f"- {remark}" for remark in remarks(document)))
    return "\n\n".join(part for part in parts if part)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def settings_table(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of every measured setting, cheapest first within a series."""
    rows = document["results"]
    further = {key: form for key, form in FURTHER_METRICS.items() if any(key in row for row in rows)}
    head = ["series", "setting", "computed", "seconds", "speed-up", "PSNR dB", "worst dB", "SSIM"]
    head += [name for name, _ in further.values()]
    order = _series(rows)
    lines = []
    for row in sorted(measured(rows), key=lambda row: (order.index(row["series"]), row["computed_fraction"])):
        cells = [row["series"], row["name"], f"{row['computed_fraction']:.3f}", _number(row["seconds"], 2)]
        cells.append("–" if row["seconds"] is None else str(speedup_of(row)))
        worst = min(row.get("psnr_db_each", ()), default=None)
        values = [(row.get("psnr_db"), 1), (worst, 1), (row.get("ssim"), 4)]
        values += [(row.get(key), digits) for key, (_, digits) in further.items()]
        lines.append(cells + [_number(*value) for value in values])
    return head, lines


def remarks(document: dict[str, Any]) -> list[str]:
    """Return remarks: failed and unavailable methods, reloads, and disturbed times."""
    rows = document["results"]
    found = [f"Failed: {row['name']}: {row['error']}" for row in rows if "error" in row]
    found += [f"Left out: {name}, because {reason}." for name, reason in document["left_out"].items()]
    if reloaded := ", ".join(row["name"] for row in rows if row["reloaded"]):
        found.append(f"Pipeline reloaded, because plain runs had changed, after {reloaded}.")
    # Spread of a row's speed-ups beyond the spread of work between prompts.
    timed = [row for row in rows if "seconds_each" in row]
    widths = ((speedup_of(row).width, Spread.of(row["computed_fraction_each"]).width) for row in timed)
    apart = {row["name"]: (1 + time) / (1 + work) - 1 for row, (time, work) in zip(timed, widths, strict=True)}
    if shaken := {name: width for name, width in apart.items() if width > DISTURBED}:
        names = ", ".join(shaken) if len(shaken) <= 5 else f"{len(shaken)} of {len(apart)} settings"
        found.append(disturbed(f"Times of {names}", max(shaken.values())))
    for key, (name, _) in FURTHER_METRICS.items():
        if (reason := document["plain"].get(key)) is not None:
            found.append(f"No column {name}: {reason}.")
    return found


def figures(document: dict[str, Any], path: Path) -> list[Path]:
    """Plot PSNR over computed fraction and, to NAME-time, over times if there are any; return the written paths."""
    rows = approximations(document["results"])
    order = _series(rows)
    rows.sort(key=lambda row: order.index(row["series"]))
    frontier_plot([(row["series"], row["computed_fraction"], row["psnr_db"]) for row in rows], path, highlight=OURS)
    timed = [row for row in rows if row["seconds"] is not None]
    shares = [(row["series"], 1 / speedup_of(row).median, row["psnr_db"]) for row in timed]
    if not timed:
        return [path]
    label = "transformer time relative to the plain run (less is faster)"
    of_times = path.with_stem(f"{path.stem}-time")
    frontier_plot(shares, of_times, highlight=OURS, x_label=label)
    return [path, of_times]


def _series(rows: Iterable[Row]) -> list[str]:
    """Return the series in order of first occurrence, ours first."""
    return sorted(dict.fromkeys(row["series"] for row in rows), key=lambda series: series != OURS)


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}"
