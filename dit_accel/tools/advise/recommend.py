"""Recommend a preset and a command for a model, GPU and number of steps."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dit_accel.errors import UnsupportedError, require_counts, shown
from dit_accel.tools.advise.cards import CARDS, Card, known_card
from dit_accel.tools.advise.identify import TABLE, Identity, distillation, identify, squeeze
from dit_accel.tools.advise.lines import Lines
from dit_accel.tools.advise.memory import RESERVED, WAYS, Footprint, Placement, count, row_of
from dit_accel.tools.demo import demo_arguments, demo_path, tuning_prompts

NOTHING_TO_SKIP = 4  # steps, of which `balanced` computes 0.99 (docs/results/few-steps-demo-flux.json)
FEW_STEPS = 8
FOUR_BITS = re.compile("nunchaku-lite|nvfp4|nf4|bnb|int4|4-?bit")  # in the name of a model
ARGUMENTS = {"steps": "num_inference_steps", "frames": "num_frames"}  # of a pipeline
MEASURED = "Measured speed-ups, shares of the FLOPs and PSNR: docs/guide/choosing.md; for your model, use --compare."
UNCOUNTED = "The sizes of this model are not known, so its memory is not counted; its folder after --model has them."
PACKED = "Weights in 4 bits run as they are (docs/reference/concepts.md, What works with it)."


@dataclass(frozen=True)
class Recommendation:
    """Presets and lines to copy."""

    model: Identity
    choices: list[tuple[str, str]]  # presets, the recommended one first, and when to use them
    notes: tuple[str, ...]
    python: str = ""  # empty if the pipeline does not fit the GPU
    shell: str = ""  # empty if no command can run the pipeline
    gib: float | None = None  # peak of the GPU's memory, by count; None = unknown


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
        steps: number of steps; None = the number in the name of a distilled model or LoRA, or the pipeline's default.
        height, width: in pixels.
        loras: weights of LoRAs, by folder, file or id on the Hub.
        quantized, distilled: True if the model's own weights are quantised, or if it is distilled for few steps.
        gpus: number of GPUs that share one image or video.

    Raises:
        UnsupportedError: ``model`` or ``gpu`` is unknown, diffusers can't load the model, or a number is below 1.
    """
    counts = {"steps": steps, "height": height, "width": width, "frames": frames}
    require_counts(gpus=gpus, **{name: count for name, count in counts.items() if count is not None})
    card = None if gpu is None else CARDS.get(known_card(gpu) or "")
    if gpu is not None and card is None:
        raise UnsupportedError(f"gpu must be one of {', '.join(CARDS)}, got {shown(gpu)}; leave it out for another GPU")
    identity = identify(model)
    makes_images = not identity.is_video and identity.facts is not None and identity.facts.makes == "images"
    if (frames or 1) > 1 and (makes_images or re.search("[ti]2i|text2image", identity.name.lower())):
        raise UnsupportedError(f"frames must be left out: {identity.title} makes images, got frames={frames}")
    names = [(identity.is_distilled, identity.steps), *map(distillation, loras)]
    few = distilled or any(is_distilled for is_distilled, _ in names)
    steps = steps or next((number for _, number in names if number), None) or _default_steps(identity, few=few)
    is_packed = FOUR_BITS.search(model.lower()) is not None
    memory = count(identity, (height, width, frames), few=few, quantized=quantized or is_packed)
    fuses = card is None or (card.capability or (0, 0)) >= (8, 0)
    rounds = card is not None and fuses and not (quantized or is_packed)
    plan, on_memory = _planned(memory, card, rounds=rounds and gpus == 1 and not identity.is_modular)
    rounds = rounds and (plan is None or plan.way != "group")  # which uploads the weights in bf16 all the same
    sharing, on_sharing = _shared(identity, gpus, plan, few=few)
    kind = "choices" if steps is None or steps > NOTHING_TO_SKIP else "few_steps" if fuses else "few_steps_unfused"
    choices = TABLE[kind] + (TABLE["in_8_bits"][kind] if rounds and not identity.is_video else [])
    if plan is not None and plan.in_8_bits:
        first = dict(zip((f"{choices[0][0]}-8bit", choices[0][0]), TABLE["first_in_8_bits"], strict=True))
        choices = [*(first | dict(choices) | first).items()]
    gains = (card is None or rounds) and not (quantized or is_packed or identity.is_video)
    notes = (MEASURED, *_on_steps(steps, few=few, rounds=gains), *on_sharing, on_memory, *[PACKED] * is_packed)
    notes += () if fuses else (f"Fused kernels don't run on the {card.title}, so steps are computed by plain torch.",)
    if plan is None:
        return Recommendation(identity, choices, notes)
    call, device = _call(identity, counts | {"steps": steps}, few=few), card.device if card else "cuda"
    dtype, on_dtype = _dtype(identity, card)
    lines = Lines(identity, choices[0][0], call, plan, loras, device, dtype, sharing, gpus)
    notes += (*on_dtype, *_on_lines(lines))
    return Recommendation(identity, choices, notes, lines.python(), lines.shell(), plan.gib)


def _default_steps(model: Identity, *, few: bool) -> int | None:
    """Return the number of steps that a demo model or the pipeline has by default; None = unknown."""
    if folder := demo_path(model.name):
        return demo_arguments(folder).get("num_inference_steps")
    return None if few or model.facts is None or set(model.inputs) - {"image"} else model.facts.steps


def _call(model: Identity, counts: Mapping[str, int | None], *, few: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call; a model distilled for few steps runs without guidance."""
    without = "frames" if "pose_video" in model.inputs else ""  # as many as the pose video has
    call: dict[str, Any] = {"prompt": tuning_prompts(model.name)[0] if demo_path(model.name) else "a fox"}
    call |= {ARGUMENTS.get(name, name): counts[name] for name in counts if counts[name] and name != without}
    if model.facts is None:
        return call
    off = {} if model.facts.unguided is None else {"guidance_scale": model.facts.unguided}
    return call | (off if few else dict(model.facts.guided))


def _dtype(model: Identity, card: Card | None) -> tuple[str, list[str]]:
    """Return the dtype of the lines, and notes; float16 on cards without bf16 if diffusers' pages use it."""
    if card is None or card.capability is None or card.capability >= (8, 0):
        return "bfloat16", []
    known, name = TABLE["in_float16"], squeeze(model.name)
    survives = model.family in known["families"] or any(part in name for part in known["names"])
    dtype = "float16" if survives and "fill" not in name else "bfloat16"
    notes = [known[dtype]] + ([known["volta"]] if card.capability < (7, 5) else [])
    return dtype, [note.format(card.title) for note in notes]


def _on_steps(steps: int | None, *, few: bool, rounds: bool) -> list[str]:
    if steps is None:
        which = "add --steps with the number on the model's page" if few else "the pipeline's default is used"
        return [f"No number of steps was given: {which}."]
    faster = "" if not rounds else ": exact-8bit makes steps faster, in more memory (docs/guide/choosing.md)"
    return [f"With {steps} steps forecasts save little{faster}."] if steps <= FEW_STEPS else []


def _on_lines(lines: Lines) -> tuple[str, ...]:
    model, why = lines.model, lines.why_no_shell()
    notes = [TABLE["any"]] if model.family == "any" else []
    notes += [] if model.is_loadable else ["Replace MODEL by the model's id on the Hub, or its folder."]
    notes += [f"Use Python: {why}."] if why else []
    option = row_of(model).get("rewrites") if lines.plan.way in ("text", "group") else None
    notes += [TABLE["rewrites"].format(option)] if option else []
    return (*notes, *([f"Replace {' and '.join(model.inputs)} by your files."] if model.inputs else []))


def _planned(memory: Footprint | None, card: Card | None, *, rounds: bool) -> tuple[Placement | None, str]:
    """Return how the pipeline fits the card, all of it if that is unknown, and a note; None = it does not fit."""
    if memory is None:
        return Placement(), UNCOUNTED
    counted = f"Memory by count, in GiB with 16 bits a number: {memory}."
    if memory.counted_as:
        counted = f"The name gives no known size, so {memory.counted_as} is counted. {counted}"
    if card is None or card.memory_gib is None:
        return Placement(), f"{counted} Your GPU's memory is not known." if card else counted
    counted = f"{counted} The {card.title} has {card.memory_gib - RESERVED:g}"
    if (plan := memory.plan(card, rounds=rounds)) is None:
        offloading = ", and offloading frees none" if card.is_unified else " even with offloading"
        return None, f"{counted}, which is too little{offloading}: use another GPU, or a smaller size."
    waiting = sum(memory.texts) if plan.way == "text" and not plan.in_8_bits else memory.weights
    reason = f"{'with layers in 8 bits ' * plan.in_8_bits}{WAYS[plan.way]['reason'].format(waiting)}"
    reason += "; the autoencoder decodes in tiles" if plan.in_tiles else ""
    if plan.in_8_bits:
        plain = memory.plan(card)
        reason += f"; in bf16 {f'use --offload {plain.way}' if plain else 'it does not fit'}"
    return plan, f"{counted}, so {reason}."


def _shared(model: Identity, gpus: int, plan: Placement | None, *, few: bool) -> tuple[str | None, list[str]]:
    """Return how GPUs share an image or video, and notes; models distilled for few steps have no second branch."""
    page = "docs/guide/scaling.md"
    if gpus == 1:
        return None, []
    sharing = () if model.facts is None else model.facts.sharing
    if "ulysses" not in sharing:
        return None, [f"This model's tokens can't be split, so the command is for one GPU; see branches=2 in {page}."]
    if plan is not None and plan.way != "whole":
        return None, [f"Each GPU would hold the whole pipeline, which does not fit, so the lines are for one ({page})."]
    branches = 2 if "branches" in sharing and gpus % 2 == 0 and not few else 1
    ways = {"ulysses": gpus // branches, "branches": branches}
    way = ",".join(f"{name}={count}" for name, count in ways.items() if count > 1)
    notes = [f"Each GPU holds the whole pipeline, and in Python joins a process group first ({page})."]
    if ways["ulysses"] > 1:
        notes.append(f"It is fastest if the numbers of tokens and attention heads divide by {ways['ulysses']}.")
    return way, notes
