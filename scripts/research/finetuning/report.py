"""Results of the experiment as JSON, as a Markdown table and as a sheet of images."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.tables import write_table

from .table import Experiment


def write_report(stem: Path, rows: list[dict[str, Any]], experiment: Experiment, origin: dict[str, Any]) -> None:
    """Write STEM.json, STEM.md and STEM.png, and print the table."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    sizes = asdict(experiment.sizes)
    sizes["training"] = {key: value for key, value in sizes["training"].items() if value != math.inf}  # JSON has none
    document = {"sizes": sizes, "call": experiment.call, **origin, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_table(stem.with_suffix(".md"), table(rows) + "\n")
    experiment.sheet([row["variant"] for row in rows[1:]]).save(stem.with_suffix(".png"), optimize=True)
    print(table(rows))
    for row in rows[1:]:
        print(f"{row['variant']:10s} {row['steps']} steps in {row['seconds']:.0f} s")
    print(f"total: {origin['seconds']} s")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown; the dense model has only figures before fine-tuning."""
    lines = [
        "| attention | critical tiles | steps | PSNR dB before | after | velocity MSE before | after "
        "| flow loss before | after | all attributes right before | after |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        columns = [(_decibels, "psnr_db"), (_error, "velocity_mse"), (_error, "flow_loss"), (_share, "agreement")]
        cells = [
            form(row[when].get(key)) if when in row else "" for form, key in columns for when in ("before", "after")
        ]
        lines.append(f"| {row['variant']} | {row['critical']:.0%} | {row.get('steps', '')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _decibels(value: float | None) -> str:
    return "∞" if value is None else f"{value:.1f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def _share(value: dict[str, float]) -> str:
    return f"{value['all']:.0%}"
