"""Recommend a preset and a command for a model, GPU and number of steps."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dit_accel.errors import UnsupportedError, require_counts, shown
from dit_accel.presets import load_preset, preset_names
from dit_accel.tools.advise.cards import CARDS, FLOAT8_SINCE, Card, known_card
from dit_accel.tools.advise.identify import Identity, identify
from dit_accel.tools.advise.lines import IMAGE, call_of, inputs_of, python_lines, shell_line
from dit_accel.tools.demo import demo_arguments, demo_path

LONG_CLIP = 13_312  # tokens of the longest video of a trained model that tiles were measured on
NOTHING_TO_SKIP = 4  # steps, of which `balanced` computes 0.99 (docs/results/few-steps-demo-flux.json)
FEW_STEPS = 8
MEASURED = (
    "Measured speed-ups, shares of the FLOPs and PSNR: docs/guide/choosing.md, What was measured. For your model, use "
    "--compare."
)
QUANTIZED = 0.65  # of the peak memory, at most: weights are most of it, and quantisation halves them


class Peak(NamedTuple):
    """Peak memory of a plain transformer in bf16, which decides on ``--offload``."""

    family: str
    part: str  # of the ids of the family's models that have this peak
    transformers: int  # in a pipeline
    gib: float  # of one transformer
    source: str  # file in docs/results with the measurement


PEAKS = tuple(Peak(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


class Choice(NamedTuple):
    """A preset for ``accelerate_pipeline``, and when to use it."""

    preset: str
    use: str


@dataclass(frozen=True)
class Recommendation:
    """Presets, the recommended one first, and lines to copy; ``shell`` is empty if no command can run the pipeline."""

    model: Identity
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    python: str
    shell: str


def recommend(
    model: str,
    *,
    gpu: str | None = None,
    steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    loras: Mapping[str, float] = MappingProxyType({}),
    quantized: bool = False,
    distilled: bool = False,
    gpus: int = 1,
) -> Recommendation:
    """Recommend a preset for a model, and the command that runs it.

    Args:
        model: a family's name, a shipped demo model, a folder of a diffusers pipeline, or an id on the Hub.
        gpu: name of a GPU, such as ``rtx4090`` or ``h100``; None = unknown GPU.
        steps: number of steps; None = the number in a distilled model's name, or the pipeline's default.
        height, width: in pixels.
        loras: weights of LoRAs, by folder, file or id on the Hub.
        quantized, distilled: True if the model's own weights are quantised, or if it is distilled for few steps.
        gpus: number of GPUs that share one image or video.

    Raises:
        UnsupportedError: ``model`` or ``gpu`` is unknown, or a number is below 1.
    """
    counts = {"steps": steps, "height": height, "width": width, "frames": frames}
    require_counts(gpus=gpus, **{name: count for name, count in counts.items() if count is not None})
    name = None if gpu is None else known_card(gpu)
    if gpu is not None and name is None:
        raise UnsupportedError(f"gpu must be one of {', '.join(CARDS)}, got {shown(gpu)}; leave it out for another GPU")
    card = None if name is None else CARDS[name]
    identity = identify(model)
    makes_images = not identity.is_video and identity.facts is not None and identity.facts.makes == "images"
    if (frames or 1) > 1 and (makes_images or re.search("[ti]2i", identity.name.lower())):
        raise UnsupportedError(f"frames must be left out: {identity.title} makes images, got frames={frames}")
    few = distilled or identity.is_distilled
    steps = steps or identity.steps or _default_steps(identity, few=few)
    size = (height, width, frames)
    choices = _choices(identity, size, steps)
    way, on_sharing = _shared(identity, gpus, few=few)
    options, on_memory = _fitted(identity, card, quantized=quantized, is_shared=bool(way))
    call, preset = call_of(identity, steps=steps, size=size, few=few), choices[0].preset
    shell = shell_line(identity, preset, call, way, loras, gpus=gpus, options=options)
    notes = (MEASURED, *_on_steps(steps, few=few), *on_sharing, *on_memory, *_on_model(identity, card, shell))
    return Recommendation(identity, choices, notes, python_lines(identity, preset, call, way, loras), shell)


def _default_steps(model: Identity, *, few: bool) -> int | None:
    """Return the number of steps that a demo model or the pipeline has by default; None = unknown."""
    if folder := demo_path(model.name):
        return demo_arguments(folder).get("num_inference_steps")
    return None if few or model.facts is None or set(inputs_of(model)) - {"image"} else model.facts.steps


def _choices(model: Identity, size: tuple[int | None, ...], steps: int | None) -> tuple[Choice, ...]:
    if steps is not None and steps <= NOTHING_TO_SKIP:
        return (
            Choice("exact", "first choice: computes every step, with fused kernels"),
            Choice("turbo", "may leave out a step; details change"),
        )
    choices = (
        Choice("balanced", "first choice"),
        Choice("quality", "closer to the plain result"),
        Choice("turbo", "faster; small details may change"),
    )
    height, width, frames = (side or 0 for side in size)
    if not model.is_video or ((frames - 1) // 4 + 1) * (height // 16) * (width // 16) < LONG_CLIP:
        return choices
    for preset in map(load_preset, preset_names()):
        if preset.model == model.family and preset.schedule.measures and preset.skip.policy == "sparge":
            return (*choices, Choice(preset.name, "for long videos, if turbo is too slow"))
    return choices


def _on_steps(steps: int | None, *, few: bool) -> list[str]:
    if steps is None:
        which = "add --steps with the number on the model's page" if few else "the pipeline's default is used"
        return [f"No number of steps was given: {which}."]
    rest = "--set linear.dtype=int8 makes computed steps faster (docs/guide/choosing.md, Few steps)."
    if steps <= NOTHING_TO_SKIP:
        return [f"Of {steps} steps there is none to forecast without loss: {rest}"]
    if steps <= FEW_STEPS:
        return [f"Most or all of {steps} steps are computed, so forecasts save little: {rest}"]
    return []


def _on_model(model: Identity, card: Card | None, shell: str) -> list[str]:
    notes, inputs = [], inputs_of(model)
    if card is not None and card.capability < (8, 0):
        notes.append("Fused kernels need compute capability 8.0, so computed steps run without them.")
    if model.family == "any":
        notes.append(
            "These presets run on any transformer that takes a timestep (docs/reference/transformers.md lists tested "
            "ones), but not on a UNet."
        )
    if not model.is_loadable:
        notes.append("Replace MODEL by the model's id on the Hub, or its folder.")
    if model.is_modular:
        notes.append("diffusers has this model as a modular pipeline, which dit-accel generate can't load: use Python.")
    elif inputs:
        notes.append(
            f"Replace {IMAGE} by your image." if shell else f"dit-accel generate takes no {inputs[-1]}, so use Python."
        )
    return notes


def _fitted(model: Identity, card: Card | None, *, quantized: bool, is_shared: bool) -> tuple[list[str], list[str]]:
    """Return options that make a pipeline fit its GPU, and notes on them."""
    if card is None or quantized:
        return [], []
    peaks, name = [peak for peak in PEAKS if peak.family == model.family], model.name.lower()
    peak = next((peak for peak in peaks if peak.part in name), None)
    if peak is None and not model.is_loadable and len({peak.gib for peak in peaks}) == 1:
        peak = peaks[0]  # of a family's name, whose measured models all have the same
    if is_shared or peak is None:
        return [], ["Memory was not measured for this setup; if it does not fit, use --offload or --quantize."]
    if peak.transformers * peak.gib <= card.memory_gib / 2:
        return [], []
    options, parts = ["--offload", "model"], "Keep the pipeline's other models in host memory while one runs"
    why = f"the {card.title} has little memory for this transformer (docs/results/{peak.source}.json)"
    if peak.gib <= card.memory_gib:
        return options, [f"{parts}: {why}."]
    if QUANTIZED * peak.gib <= card.memory_gib:
        kind = "float8" if card.capability >= FLOAT8_SINCE else "int8"
        return ["--quantize", kind, *options], [f"{parts}, and quantise it: {why}."]
    page = "docs/guide/troubleshooting.md, Out of memory"
    return ["--offload", "group"], [
        f"Keep its blocks in host memory while others run: {why}. Forecast steps upload nothing ({page})."
    ]


def _shared(model: Identity, gpus: int, *, few: bool) -> tuple[str | None, list[str]]:
    """Return how GPUs share an image or video, and notes; models distilled for few steps have no second branch."""
    page = "docs/guide/scaling.md"
    if gpus == 1:
        return None, []
    sharing = () if model.facts is None else model.facts.sharing
    if "ulysses" not in sharing:
        return None, [f"This model's tokens can't be split, so the command is for one GPU; see branches=2 in {page}."]
    branches = 2 if "branches" in sharing and gpus % 2 == 0 and not few else 1
    ways = {"ulysses": gpus // branches, "branches": branches}
    way = ",".join(f"{name}={count}" for name, count in ways.items() if count > 1)
    notes = [f"Each GPU holds the whole pipeline ({page})."]
    if ways["ulysses"] > 1:
        notes.append(f"It is fastest if the numbers of tokens and attention heads divide by {ways['ulysses']}.")
    return way, notes
