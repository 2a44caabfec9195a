"""Which preset, for which model, card and length: everything follows from what was measured, and says where.

Shares of steps, PSNR and times of steps are those of the presets' headers (:mod:`dit_accel.presets.measured`); the few
figures that no preset has stand here, and a test holds them to the files of ``docs/results``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import NamedTuple

from dit_accel.errors import UnsupportedError, require_counts, shown
from dit_accel.presets import Run, measured
from dit_accel.tools.identify import Identity, identify

TIMED_GPU = "H200"  # the only one that whole steps were timed on
TIMED = {  # in the presets' headers
    "flux": "FLUX.1-dev",
    "qwen_image": "Qwen-Image",
    "flux2": "FLUX.2-dev",
    "hunyuan_video": "HunyuanVideo",
    "wan": "Wan 2.1 1.3B",
}
SPARGE = {"hunyuan_video": "hunyuan-sparge-balanced", "wan": "wan21-sparge-balanced"}
LONG_CLIP = 13_312  # tokens of the longest clip that a trained model has, and tiles were measured on
FEW_STEPS = 8
FLOAT8_SINCE = (8, 9)  # compute capability from which matrix products of float8 run
QUANTIZED = 0.65  # of the peak, at most, since weights are most of it and halve
NO_GAIN = 0.95  # of the work; what computes more is as fast as the plain run


class Card(NamedTuple):
    title: str
    memory_gib: int
    capability: tuple[int, int]


CARDS = {
    "t4": Card("T4", 16, (7, 5)),
    "3090": Card("RTX 3090", 24, (8, 6)),
    "4090": Card("RTX 4090", 24, (8, 9)),
    "5090": Card("RTX 5090", 32, (12, 0)),
    "l40s": Card("L40S", 48, (8, 9)),
    "a100-40gb": Card("A100 of 40 GB", 40, (8, 0)),
    "a100": Card("A100", 80, (8, 0)),
    "h100": Card("H100", 80, (9, 0)),
    "h200": Card("H200", 141, (9, 0)),
}
PEAK_GIB = {  # of the transformer alone in bf16, at the sizes that were timed: (family, part of the id): GiB, file
    ("flux", ""): (22.7, "docs/results/speed-flux.md"),
    ("qwen_image", ""): (38.5, "docs/results/speed-qwen-image.md"),
    ("flux2", "klein-4b"): (7.8, "docs/results/speed-flux2-klein-4b.md"),
    ("flux2", "dev"): (61.2, "docs/results/speed-flux2.md"),
    ("hunyuan_video", ""): (27.4, "docs/results/speed-hunyuan.md"),
    ("wan", "1.3b"): (4.2, "docs/results/speed-wan-1.3b.md"),
    ("wan", "14b"): (34.2, "docs/results/speed-wan-i2v-14b.md"),
}
SHARED_AMONG_TWO = {  # way, times faster than one GPU, what was run (docs/results/parallel.md, parallel-images.md)
    "flux": ("ulysses=2", 1.59, "14 of 50 steps, FLUX.1-dev at 1024 x 1024"),
    "qwen_image": ("ulysses=2", 1.46, "14 of 50 steps, Qwen-Image at 1024 x 1024"),
    "flux2": ("ulysses=2", 1.73, "14 of 50 steps, FLUX.2-dev at 1024 x 1024"),
    "hunyuan_video": ("ulysses=2", 1.83, "14 of 50 steps, HunyuanVideo at 33K tokens"),
    "wan": ("branches=2", 1.97, "14 of 50 steps, Wan 2.1 1.3B at 33K tokens"),
}
HAS_PLAN = ("flux", "wan", "qwen_image", "hunyuan_video", "ltx", "flux2")  # docs/guide/scaling.md


@dataclass(frozen=True)
class Choice:
    """A preset, and what it measured nearest to what was asked for.

    Args:
        preset: as ``accelerate_pipeline`` takes it.
        run: share of the work and PSNR; None where nothing was measured.
        speedup: least and most, reckoned from the steps of an H200; None where that can't be.
        use: when to take it.
        timed: model and size whose steps the speed-up is reckoned from.
    """

    preset: str
    run: Run | None
    speedup: tuple[float, float] | None
    use: str
    timed: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What to run.

    Args:
        choices: the first is the recommended one.
        measured_on: models, dtype and prompts behind the first one's figures, with the pages that have them.
        notes: what it costs, what was not measured, and what goes with card, LoRA and so on; whole sentences.
        python, shell: lines to copy.
    """

    model: Identity
    choices: tuple[Choice, ...]
    measured_on: str
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
    lora: bool = False,
    quantized: bool = False,
    distilled: bool = False,
    gpus: int = 1,
) -> Recommendation:
    """The preset for a model, what it should gain and what it costs.

    Args:
        model: a family's name, a shipped demo model, a folder of a diffusers pipeline, or an id on the hub.
        gpu: a name of :data:`CARDS`; None where there is none.
        steps: of the schedule; None = 50, or 8 where the model is distilled.
        height, width: in pixels.
        frames: of a clip.
        lora, quantized, distilled: what else is so.
        gpus: how many are to share one picture or clip.

    Raises:
        UnsupportedError: ``model`` or ``gpu`` is unknown, or a number is below 1.
    """
    counts = {"steps": steps, "height": height, "width": width, "frames": frames}
    require_counts(gpus=gpus, **{name: count for name, count in counts.items() if count is not None})
    if gpu is not None and gpu not in CARDS:
        raise UnsupportedError(
            f"gpu must be one of {', '.join(CARDS)}, got {shown(gpu)}; leave it out for another card, of which nothing "
            "is known"
        )
    identity = identify(model)
    if (frames or 1) > 1 and identity.makes_images_alone:
        raise UnsupportedError(f"frames must be left out: {identity.title} makes images, got frames={frames}")
    few = distilled or identity.is_distilled
    count = steps or (FEW_STEPS if few else 50)
    is_video = identity.is_video or (frames or 1) > 1
    tokens = token_count(identity.family, height, width, frames)
    choices = _choices(identity.family, count, is_video=is_video, is_long=tokens is not None and tokens >= LONG_CLIP)
    card = None if gpu is None else CARDS[gpu]
    notes = [
        *_notes_on_quality(choices[0], count, is_given=steps is not None, is_video=is_video, family=identity.family),
        *_notes_on_speed(choices[0], identity, card),
        *_notes_on_memory(identity, card, quantized=quantized),
        *_notes_on_tiles(choices[-1].preset),
        *_notes_on_weights(lora=lora, quantized=quantized),
    ]
    way = None
    if gpus > 1:
        way, note = _shared(identity.family, gpus)
        notes.append(note)
    sizes = {"--steps": count if few else steps, "--height": height, "--width": width, "--num-frames": frames}
    name = identity.name if identity.is_loadable else "MODEL"
    options = [word for option, number in sizes.items() if number for word in (option, str(number))]
    if gpus == 1:
        options += _fitted(identity, card, quantized=quantized)
    start = ["dit-accel", "generate"]
    if not identity.is_loadable:
        notes.append("Put the model's id on the hub, or its folder, in the place of MODEL.")
    if way:
        start = ["torchrun", "--nproc-per-node", str(gpus), "-m", "dit_accel", "generate", "--parallel", way]
    shell = [*start, "--model", name, "--prompt", "a fox", "--preset", choices[0].preset, *options]
    return Recommendation(
        model=identity,
        choices=choices,
        measured_on=measured(_measured_name(choices[0].preset, is_video=is_video)).on,
        notes=tuple(notes),
        python=f'from dit_accel import accelerate_pipeline\naccelerate_pipeline(pipe, "{choices[0].preset}")',
        shell=shlex.join([*shell, *([] if way else ["--compare"])]),
    )


def token_count(family: str, height: int | None, width: int | None, frames: int | None) -> int | None:
    """Image or video tokens of a call; None where the size was not given or the family's packing is not known here."""
    if family not in TIMED or height is None or width is None:
        return None
    if family == "flux":
        return (height // 16) * (width // 16)
    return None if frames is None else ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def _measured_name(preset: str, *, is_video: bool) -> str:
    return f"video-{preset}" if is_video and preset in ("quality", "balanced", "turbo") else preset


def _choices(family: str, steps: int, *, is_video: bool, is_long: bool) -> tuple[Choice, ...]:
    """Presets in the order in which to try them."""
    uses = {
        "balanced": "first choice",
        "quality": "closer to the plain result",
        "turbo": "faster; small details may move",
    }
    if is_long and family in SPARGE:
        uses[SPARGE[family]] = "for long clips, where turbo is too slow"
    names = {preset: _measured_name(preset, is_video=is_video) for preset in uses}
    return tuple(
        replace(choice_of(names[preset], steps=steps, use=use, family=family), preset=preset)
        for preset, use in uses.items()
    )


def choice_of(name: str, *, steps: int, use: str, family: str | None = None) -> Choice:
    """A shipped preset with what it measured.

    Args:
        name: of its file.
        steps: of the schedule; the nearest that was measured counts.
        use: when to take it.
        family: whose steps count as timed; None = of any that the preset names.
    """
    figures = measured(name)
    run = figures.nearest(steps)
    model = "" if family is None else TIMED.get(family, "none")
    timed = [step for step in figures.steps if step.what.startswith(model)]
    ends = [timed[0].speedup(share) for share in run.computed] if run and timed else []
    speedups = [end for end in ends if end is not None]
    gain = (min(speedups), max(speedups)) if speedups else None
    return Choice(name, run, gain, use, timed[0].what if timed else "")


def _notes_on_quality(choice: Choice, steps: int, *, is_given: bool, is_video: bool, family: str) -> list[str]:
    run = choice.run
    if run is None:
        return []
    notes = [
        "PSNR is against all steps computed, on small models that the project trains; see your own with --compare.",
        "At 40 dB values differ by 2.6 of 255 (root mean square), at 50 dB by 0.8, at 30 dB by 8.",
    ]
    if not is_given:
        notes.append(f"No number of steps was given; {steps} are assumed.")
    if run.steps != steps:
        notes.append(f"{steps} steps were not measured; the figures are of {run.steps}, the nearest.")
    if steps <= FEW_STEPS and is_video:
        notes.append("Few steps were not measured on video models.")
    if min(run.computed) >= NO_GAIN:
        notes.append(
            f"Of {run.steps} steps next to none can be left out; what is gained is what a computed step gains."
        )
    elif steps <= FEW_STEPS:
        notes.append("A distilled model takes the same presets (docs/guide/choosing.md, Few steps).")
    if family == "any":
        notes.append(
            "These presets run on any transformer that takes a timestep (docs/reference/transformers.md says which ran "
            "in tests); pipelines with a UNet, such as Stable Diffusion XL's, can't be accelerated."
        )
    return notes


def _notes_on_speed(choice: Choice, model: Identity, card: Card | None) -> list[str]:
    share = "the loop leaves out the same steps on any card, and a forecast step is one weighted sum"
    if choice.speedup is None:
        return [f"Speed was not measured on {model.title}; {share}."]
    notes = [f"The speed-up is reckoned from steps of {choice.timed} that were timed on one {TIMED_GPU}."]
    if card is None or card.title != TIMED_GPU:
        where = "your card" if card is None else f"the {card.title}"
        notes.append(f"Nothing was timed on {where}; {share}.")
    if card is not None and card.capability < (8, 0):
        notes.append("Fused kernels need compute capability 8.0, so there computed steps run without them.")
    return notes


def _peak(model: Identity) -> tuple[float, str] | None:
    found = (peak for (family, part), peak in PEAK_GIB.items() if family == model.family and part in model.name.lower())
    return next(found, None)


def _fitted(model: Identity, card: Card | None, *, quantized: bool) -> list[str]:
    """Options by which a pipeline fits a card that the transformer fills by half or more."""
    peak = _peak(model)
    if peak is None or card is None or quantized or _transformers(model) * peak[0] <= card.memory_gib / 2:
        return []
    if peak[0] <= card.memory_gib:
        return ["--offload", "model"]
    if QUANTIZED * peak[0] <= card.memory_gib:
        return ["--quantize", "float8" if card.capability >= FLOAT8_SINCE else "int8", "--offload", "model"]
    return ["--offload", "sequential"]


def _transformers(model: Identity) -> int:
    """How many of that size a pipeline holds: two where experts for high and low noise take turns."""
    return 2 if "a14b" in model.name.lower() else 1


def _notes_on_memory(model: Identity, card: Card | None, *, quantized: bool) -> list[str]:
    notes = ["What is remembered takes a few MiB of the GPU's memory (docs/reference/presets.md, Memory)."]
    peak, options = _peak(model), _fitted(model, card, quantized=quantized)
    if peak is None or card is None or quantized:
        return notes
    pair = "" if _transformers(model) == 1 else ", of which this model has two"
    what = (
        f"A transformer of this size came to {peak[0]} GiB in bf16 ({peak[1]}){pair}; the {card.title} has "
        f"{card.memory_gib}"
    )
    if "sequential" in options:
        return [*notes, f"{what}: keep its layers in host memory while others run, which is slow."]
    parts = "keep the pipeline's parts in host memory while others run"
    if "--quantize" in options:
        return [*notes, f"{what}: quantise it, by which its weights halve, and {parts}.", *_notes_on_quantized()]
    return [*notes, f"{what}: {parts}." if options else f"{what}."]


def _notes_on_tiles(preset: str) -> list[str]:
    if preset not in SPARGE.values():
        return []
    return [
        f"{preset} was measured {measured(preset).on}. Its residual keeps an attention output for each block and "
        "branch (12 GB for HunyuanVideo at 33K tokens; docs/reference/concepts.md, What attention leaves out)."
    ]


def _notes_on_weights(*, lora: bool, quantized: bool) -> list[str]:
    page = "docs/reference/concepts.md, What works beside it"
    notes = []
    if lora:
        notes.append(f"A LoRA may be loaded, fused or swapped before or after ({page}); its speed was not measured.")
    return [*notes, *_notes_on_quantized()] if quantized else notes


def _notes_on_quantized() -> list[str]:
    page = "docs/reference/concepts.md, What works beside it"
    return [f"Quantised layers run as they are ({page}); neither speed nor PSNR was measured with them."]


def _shared(family: str, gpus: int) -> tuple[str | None, str]:
    """How GPUs share a picture or clip, and what is known of it."""
    page = "docs/guide/scaling.md"
    if gpus == 2 and family in SHARED_AMONG_TWO:
        way, times, what = SHARED_AMONG_TWO[family]
        return way, f"Two H200s by {way} were {times} times as fast as one ({what}; {page})."
    if family == "wan" and gpus % 2 == 0:
        return f"ulysses={gpus // 2},branches=2", f"{gpus} GPUs were not measured ({page})."
    if family in HAS_PLAN:
        return f"ulysses={gpus}", f"{gpus} GPUs were not measured on this model; heads must divide by {gpus} ({page})."
    return None, f"There is no plan of how this model's tokens are shared; see branches=2 in {page}."
