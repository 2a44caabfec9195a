"""Values that the page of ``dit-accel app`` offers for a model, and texts of errors and of a run."""

import html
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from dit_accel.errors import ArgumentError, DitAccelError, OutOfMemoryError, headline
from dit_accel.models import call_number
from dit_accel.models.families import pipeline_family
from dit_accel.pipeline import makes_video
from dit_accel.presets import Preset, load_preset, preset_names
from dit_accel.presets.loading import LEVELS
from dit_accel.serving.media import Clips, size_note
from dit_accel.serving.playground import Comparison, ComparisonRun
from dit_accel.tools.advise.identify import identify
from dit_accel.tools.demo import demo_arguments, demo_path, tuning_prompts, unknown_words
from dit_accel.tools.media.strips import comparison_clip
from dit_accel.tools.media.timeline import EXPLANATION, timeline

EXAMPLES = 3
CANDIDATES = 12  # prompts of a model; the shortest are examples
NUMBERS = {"steps": "num_inference_steps", "height": "height", "width": "width", "num_frames": "num_frames"}
LABELS = {name: name.capitalize() for name in ("prompt", "model", "preset", "steps", "seed", "height", "width")}
LABELS["num_frames"] = "Frames"
IN_WORDS = {"quality": "Nearly identical (quality)", "balanced": "Balanced", "turbo": "Fast (turbo)"}
EXACT = "exact"  # computes all steps, to check an installation


@dataclass(frozen=True)
class Fields:
    examples: list[str]  # prompts
    presets: list[tuple[str, str]]  # labels and names
    is_video: bool
    numbers: dict[str, int | None]  # steps, height, width and num_frames; None = known only to the pipeline


def fields_of(model: str, pipe: Any = None) -> Fields:
    """Return the values that suit a model; before it is loaded, only a demo model's sizes and steps are known."""
    if pipe is None:
        identity = identify(os.path.expanduser(model))
        family, is_video = identity.family, identity.is_video
    else:
        facts = pipeline_family(pipe)
        family, is_video = "any" if facts is None else facts.name, makes_video(pipe)
    examples = sorted(tuning_prompts(model)[:CANDIDATES], key=len)[:EXAMPLES]
    return Fields(examples, list(_presets(family)), is_video, _own_numbers(model, pipe))


def target_of(preset: Preset) -> float | None:
    """Return the target error that the preset's loop keeps, calibrated if it has a PSNR; None for a fixed interval."""
    return preset.schedule.bound or None


def words_note(model: str, prompt: str) -> str:
    unknown, known = unknown_words(model, prompt)
    return f"{model} does not know **{', '.join(unknown)}**. It knows: {', '.join(known)}." if unknown else ""


def in_the_pages_words(error: Exception) -> str:
    """Return an error's message with the page's labels instead of names of options and arguments."""
    if isinstance(error, OutOfMemoryError):
        restart = "start the page again with dit-accel app --offload model"
        return f"Out of memory. Enter a smaller height, width or number of frames, or {restart}."
    if isinstance(error, ArgumentError) and error.field == "image":
        return "Model: it needs an input image, and this page has no field for one. Use dit-accel generate --image."
    if isinstance(error, ArgumentError):
        return f"{LABELS.get(error.field, error.field)}: {error.rule}"
    if not isinstance(error, DitAccelError):
        return f"{headline(error)}. The terminal of dit-accel app has the details."
    message = str(error)
    return message[:1].upper() + message[1:]


def _presets(family: str) -> Iterator[tuple[str, str]]:
    """Yield label and name: three in words, others of this family, and methods of papers last."""
    names = [n for n in preset_names() if load_preset(n).model in ("any", family) and not n.startswith("video-")]
    others = [name for name in names if name not in LEVELS and not name.endswith("-8bit")]
    loops = [name for name in others if load_preset(name).schedule.measures]
    yield from ((IN_WORDS[name], name) for name in LEVELS)
    yield from ((f"Layers in 8 bits: {name}", name) for name in names if name.endswith("-8bit"))
    yield from ((f"Sparse attention: {name}", name) for name in loops)
    yield (f"Every step computed ({EXACT})", EXACT)
    yield from ((f"Method of a paper: {name}", name) for name in others if name not in (*loops, EXACT))


def _own_numbers(model: str, pipe: Any) -> dict[str, int | None]:
    folder = demo_path(model)
    numbers = demo_arguments(folder) if folder else {}
    value = numbers.get if pipe is None else partial(call_number, pipe, numbers)
    return {field: value(argument) for field, argument in NUMBERS.items()}


def status(run: ComparisonRun) -> str:
    if (end := run.comparison) is None:
        return f"{run.activity[:1].upper()}{html.escape(run.activity[1:])} …"
    rounded = size_note(run.wish.size, run.outputs["accelerated"].results[0])
    notes = [*([f"Note: {rounded}."] if rounded else []), *end.report.notes]
    computed = f"{end.report.computed_fraction or 1.0:.0%}"
    result = f"Denoising **{end.speedup:.2f}×** as fast, {_quality(end)}, {computed} computed."
    return "  \n".join([f"Done: {_settings(end)}.", result, *map(html.escape, notes)])


def figures(run: ComparisonRun) -> str:
    if (end := run.comparison) is None:
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
    return table + (f"\n\nDecoded {html.escape(end.report.decoding, quote=False)}." if end.report.decoding else "")


def timelines(run: ComparisonRun) -> str:
    drawn = [timeline(side.capitalize(), steps, run.total) for side, steps in run.steps.items() if steps]
    return "".join([*drawn, f"<p>{EXPLANATION}</p>"] if drawn else [])


def images(run: ComparisonRun) -> tuple[Image.Image, Image.Image]:
    plain, fast = map(run.medium.still, _results(run))
    return plain, fast


def video(run: ComparisonRun, folder: Path) -> str | None:
    if run.comparison is None or not isinstance(run.medium, Clips):
        return None
    file = folder / "comparison.mp4"
    labels = tuple(f"{side}: call {output.seconds:.1f} s" for side, output in run.outputs.items())
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
