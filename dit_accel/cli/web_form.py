"""Values that the page of ``dit-accel app`` offers for a model, and errors in the words of its fields."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dit_accel.errors import ArgumentError, DitAccelError, OutOfMemoryError, headline
from dit_accel.models.families import pipeline_family
from dit_accel.pipeline import makes_video
from dit_accel.presets import Preset, default_preset, load_preset, preset_names
from dit_accel.presets.loading import PLAIN
from dit_accel.tools.advise.identify import identify
from dit_accel.tools.demo import demo_arguments, demo_path, tuning_prompts, unknown_words

EXAMPLES = 3
CANDIDATES = 12  # prompts of a model; the shortest are examples
NUMBERS = {"steps": "num_inference_steps", "height": "height", "width": "width", "num_frames": "num_frames"}
LABELS = {
    "prompt": "Prompt",
    "model": "Model",
    "preset": "Preset",
    "steps": "Steps",
    "seed": "Seed",
    "height": "Height",
    "width": "Width",
    "num_frames": "Frames",
}
IN_WORDS = {"quality": "Nearly identical (quality)", "balanced": "Balanced", "turbo": "Fast (turbo)"}
EXACT = "exact"  # computes all steps, to check an installation


@dataclass(frozen=True)
class Fields:
    """Values that suit a model."""

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


def preset_of(name: str, *, is_video: bool) -> Preset:
    return load_preset(default_preset(name, is_video=is_video))


def target_of(preset: Preset) -> float | None:
    """Return the target error that the preset's loop keeps, calibrated if it has a PSNR; None for a fixed interval."""
    return preset.schedule.bound or None


def words_note(model: str, prompt: str) -> str:
    """Return a note with the words that a demo model does and does not know; empty if it knows all."""
    unknown, known = unknown_words(model, prompt)
    return f"{model} does not know **{', '.join(unknown)}**. It knows: {', '.join(known)}." if unknown else ""


def in_the_pages_words(error: Exception) -> str:
    """Return an error's message with the page's labels instead of names of options and arguments."""
    if isinstance(error, OutOfMemoryError):
        return (
            "Out of memory. Enter a smaller height, width or number of frames, or start the page again with "
            "dit-accel app --offload model."
        )
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
    names = [name for name in preset_names() if load_preset(name).model in ("any", family)]
    others = [name for name in names if name not in PLAIN and not name.startswith("video-")]
    loops = [name for name in others if load_preset(name).schedule.measures]
    yield from ((IN_WORDS[name], name) for name in PLAIN)
    yield from ((f"Sparse attention: {name}", name) for name in loops)
    yield (f"Every step computed ({EXACT})", EXACT)
    yield from ((f"Method of a paper: {name}", name) for name in others if name not in (*loops, EXACT))


def _own_numbers(model: str, pipe: Any) -> dict[str, int | None]:
    folder = demo_path(model)
    numbers = demo_arguments(folder) if folder else {}
    if pipe is not None:
        parameters = inspect.signature(pipe.__call__).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        numbers = {name: default for name, default in defaults.items() if isinstance(default, int)} | numbers
        sample, scale = (getattr(pipe, name, None) for name in ("default_sample_size", "vae_scale_factor"))
        if isinstance(sample, int) and isinstance(scale, int):
            numbers = {name: sample * scale for name in ("height", "width") if name in parameters} | numbers
    return {field: numbers.get(argument) for field, argument in NUMBERS.items()}
