"""Texts and images of the page of ``dit-accel app`` for the state of a run."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.cli.web_form import target_of
from dit_accel.serving.media import Clips, size_note
from dit_accel.serving.playground import Comparison, ComparisonRun
from dit_accel.tools.media.timeline import EXPLANATION, timeline

if TYPE_CHECKING:
    from PIL import Image


def status(run: ComparisonRun) -> str:
    """Return the activity of a run, or its result."""
    end = run.comparison
    if end is None:
        return f"{run.activity[:1].upper()}{html.escape(run.activity[1:])} …"
    rounded = size_note(run.wish.size, run.outputs["accelerated"].results[0])
    notes = [*([f"Note: {rounded}."] if rounded else []), *end.report.notes]
    computed = f"{end.report.computed_fraction or 1.0:.0%}"
    result = f"Denoising **{end.speedup:.2f}×** as fast, {_quality(end)}, {computed} computed."
    return "  \n".join([f"Done: {_settings(end)}.", result, *map(html.escape, notes)])


def figures(run: ComparisonRun) -> str:
    """Return a table with the seconds of each stage; empty before the end."""
    end = run.comparison
    if end is None:
        return ""
    plain, fast = run.outputs["plain"], run.outputs["accelerated"]
    kept = " (cached)" if run.is_kept else ""
    rows = [["seconds", f"plain{kept}", "accelerated", "speed-up"], ["---", *["---:"] * 3]]
    for stage, seconds in plain.stages.items():
        faster = f"{end.speedup:.2f}×" if stage == "denoising" else ""
        rows.append([stage, f"{seconds:.2f}", f"{fast.stages[stage]:.2f}", faster])
    whole = f"{plain.seconds / fast.seconds:.2f}×"
    rows.append(["**whole call**", f"{plain.seconds:.2f}", f"{fast.seconds:.2f}", whole])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    decoded = f"\n\nDecoded {html.escape(end.report.decoding, quote=False)}." if end.report.decoding else ""
    return f"{table}{decoded}"


def timelines(run: ComparisonRun) -> str:
    """Return timelines of both sides as HTML, with an explanation; empty before the first step."""
    drawn = [timeline(side.capitalize(), steps, run.total) for side, steps in run.steps.items() if steps]
    return "".join([*drawn, f"<p>{EXPLANATION}</p>"] if drawn else [])


def images(run: ComparisonRun) -> tuple[Image.Image, Image.Image]:
    """Return the plain and the accelerated image of a finished run; of videos, their middle frames."""
    plain, fast = map(run.medium.still, _results(run))
    return plain, fast


def video(run: ComparisonRun, folder: Path) -> str | None:
    """Write both videos side by side with the accelerated sound, and return the file; None for images."""
    from dit_accel.tools.media.strips import comparison_clip

    end = run.comparison
    if end is None or not isinstance(run.medium, Clips):
        return None
    file = folder / "comparison.mp4"
    labels = ("plain", f"{end.preset.name}, {end.speedup:.2f} times as fast")
    run.medium.write(comparison_clip(*_results(run), labels), file, run.outputs["accelerated"].sound(0))
    return str(file)


def caption(run: ComparisonRun) -> str:
    end = run.comparison
    return f"{end.speedup:.2f}×, {_quality(end)}, {_settings(end)}. {run.wish.model}: {run.wish.prompt}"


def _quality(end: Comparison) -> str:
    return "identical" if math.isinf(end.psnr) else f"PSNR {end.psnr:.1f} dB"


def _settings(end: Comparison) -> str:
    target = target_of(end.preset)
    return end.preset.name if target is None else f"{end.preset.name}, target_error {target:g}"


def _results(run: ComparisonRun) -> list[Any]:
    return [run.outputs[side].results[0] for side in ("plain", "accelerated")]
