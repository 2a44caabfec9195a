"""Recommend a preset and a command for a model, card and length.

A figure is printed only where the same model, steps, GPUs, card and size were measured. ``recommend.json`` names the
file of each figure, and tests compare it with ``docs/results``.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dit_accel.errors import UnsupportedError, require_counts, shown
from dit_accel.presets import load_preset, preset_names
from dit_accel.tools.identify import Identity, identify

LONG_CLIP = 13_312  # tokens of the longest clip that a trained model has, and tiles were measured on
NOTHING_TO_SKIP = 4  # steps, of which `balanced` computes 0.99 (docs/results/few-steps-demo-flux.json)
FEW_STEPS = 8
FLOAT8_SINCE = (8, 9)  # compute capability from which matrix products of float8 run
QUANTIZED = 0.65  # of the peak, at most, since weights are most of it and halve


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


class Timed(NamedTuple):
    """A run of a full-size transformer with random weights, in bf16; a fixed schedule computed 14 of its steps.

    Args:
        model: last part of the id, in small letters.
        size: height, width and frames; None = an image.
        steps: of the schedule.
        gpus, card: how many GPUs, and which.
        way: value of ``--parallel`` on several GPUs.
        times: speed-up, over diffusers on one GPU, over the same run on one GPU on several.
        source: the file in ``docs/results`` that has the figure.
    """

    model: str
    size: tuple[int, int, int | None]
    steps: int
    gpus: int
    card: str
    way: str
    times: float
    source: str

    def fits(self, model: str, gpus: int, gpu: str | None, steps: int | None, size: tuple[int | None, ...]) -> bool:
        """Whether this is the run that is asked for; a side that is not given is the run's."""
        sides = all(side in (None, timed or 1) for side, timed in zip(size, self.size, strict=True))
        return sides and (model, gpus, gpu, steps) == (self.model, self.gpus, self.card, self.steps)

    @property
    def sentence(self) -> str:
        height, width, frames = self.size
        what = f"{height} x {width}" + (f", {frames} frames" if frames else "")
        than = "diffusers" if self.gpus == 1 else f"the same run on one GPU, by {self.way}"
        calls = "twice" if "branches" in self.way else "once"
        return (
            f"With 14 of {self.steps} steps computed the transformer is {self.times:.2f} times as fast as {than}: "
            f"{self.gpus} x {CARDS[self.card].title}, {what}, called {calls} a step, bf16, random weights "
            f"(docs/results/{self.source}.json). A preset decides in each run how many steps it computes."
        )


class Peak(NamedTuple):
    """GiB that a plain transformer in bf16 takes at most, which decides on ``--offload``.

    Args:
        family, part: of models of this family whose ids have this part.
        transformers: how many a pipeline has.
        gib: of one.
        source: the file in ``docs/results`` that has the figure.
    """

    family: str
    part: str
    transformers: int
    gib: float
    source: str


_MEASURED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TIMED = tuple(Timed(**row | {"size": tuple(row["size"])}) for row in _MEASURED["timed"])
PEAKS = tuple(Peak(**row) for row in _MEASURED["peaks"])


class Choice(NamedTuple):
    """A preset as ``accelerate_pipeline`` takes it, and when to use it."""

    preset: str
    use: str


@dataclass(frozen=True)
class Recommendation:
    """What to run.

    Args:
        choices: the first is the recommended one.
        timed: the measured run that is exactly what was asked for; None = there is none.
        notes: whole sentences.
        python, shell: lines to copy.
    """

    model: Identity
    choices: tuple[Choice, ...]
    timed: Timed | None
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
    """The preset for a model and the command that runs it, with the speed-up where exactly this was measured.

    Args:
        model: a family's name, a shipped demo model, a folder of a diffusers pipeline, or an id on the hub.
        gpu: a name of :data:`CARDS`; None where there is none.
        steps: of the schedule; None = those that a distilled model's name tells, or the pipeline's default.
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
    steps = steps or identity.steps
    card = None if gpu is None else CARDS[gpu]
    size = (height, width, frames)
    kinds = [word for word, is_so in (("LoRA", lora), ("quantised", quantized), ("distilled", few)) if is_so]
    asked = (model.lower().rsplit("/", 1)[-1], gpus, gpu, steps)
    timed = None if kinds else next((run for run in TIMED if run.fits(*asked, size)), None)
    if timed:
        height, width, frames = timed.size
    choices = _choices(identity, size)
    way, on_sharing = _shared(identity, gpus, few=few)
    options, on_memory = _fitted(identity, card, quantized=quantized, is_shared=bool(way))
    notes = [
        timed.sentence if timed else _not_measured(identity, card, steps, size, gpus, kinds),
        *_notes_on_steps(steps, few=few),
        *on_sharing,
        *on_memory,
        *_notes_on_weights(lora=lora, quantized=quantized or "--quantize" in options),
        "What presets leave out and cost on small models: docs/guide/choosing.md; see your own with --compare.",
    ]
    if card is not None and card.capability < (8, 0):
        notes.append("Fused kernels need compute capability 8.0, so computed steps run without them.")
    if identity.family == "any":
        notes.append(
            "These presets run on any transformer that takes a timestep (docs/reference/transformers.md says which ran "
            "in tests); pipelines with a UNet, such as Stable Diffusion XL's, can't be accelerated."
        )
    if len(choices) > 3:
        notes.append(f"{choices[-1].preset} keeps an attention output for each block and branch in the GPU's memory.")
    if not identity.is_loadable:
        notes.append("Put the model's id on the hub, or its folder, in the place of MODEL.")
    counts = {"--steps": steps, "--height": height, "--width": width, "--num-frames": frames}
    options = [*(word for option, count in counts.items() if count for word in (option, str(count))), *options]
    start = ["dit-accel", "generate"]
    names, calls = "accelerate_pipeline", ""
    if way:
        start = ["torchrun", "--nproc-per-node", str(gpus), "-m", "dit_accel", "generate", "--parallel", way]
        names, calls = f"{names}, parallelize_pipeline", f"\nparallelize_pipeline(pipe, {way.replace(',', ', ')})"
    name = model if identity.is_loadable else "MODEL"
    shell = [*start, "--model", name, "--prompt", "a fox", "--preset", choices[0].preset, *options]
    return Recommendation(
        model=identity,
        choices=choices,
        timed=timed,
        notes=tuple(notes),
        python=f'from dit_accel import {names}\naccelerate_pipeline(pipe, "{choices[0].preset}"){calls}',
        shell=shlex.join([*shell, *([] if way else ["--compare"])]),
    )


def _not_measured(
    model: Identity,
    card: Card | None,
    steps: int | None,
    size: tuple[int | None, ...],
    gpus: int,
    kinds: list[str],
) -> str:
    where = "your card" if card is None else f"the {card.title}"
    where = where if gpus == 1 else f"{gpus} GPUs ({where})"
    length = "" if steps is None else f" at {steps} steps"
    asked = " and this size" if any(size) else ""
    kind = f" ({', '.join(kinds)})" if kinds else ""
    return f"Speed was not measured{length} for {model.name}{kind} on {where}{asked}."


def _choices(model: Identity, size: tuple[int | None, ...]) -> tuple[Choice, ...]:
    """Presets in the order in which to try them."""
    choices = (
        Choice("balanced", "first choice"),
        Choice("quality", "closer to the plain result"),
        Choice("turbo", "faster; small details may move"),
    )
    height, width, frames = (side or 0 for side in size)
    if not model.is_video or ((frames - 1) // 4 + 1) * (height // 16) * (width // 16) < LONG_CLIP:
        return choices
    presets = map(load_preset, preset_names())
    own = [preset for preset in presets if preset.model == model.family and preset.schedule.control == "adaptive"]
    sparge = [preset.name for preset in own if preset.skip.policy == "sparge"]
    return (*choices, *(Choice(name, "for long clips, where turbo is too slow") for name in sparge[:1]))


def _notes_on_steps(steps: int | None, *, few: bool) -> list[str]:
    if steps is None:
        which = "add --steps with the number that the model's page names" if few else "the pipeline's default is run"
        return [f"No number of steps was given: {which}."]
    if steps <= NOTHING_TO_SKIP:
        return [f"Of {steps} steps balanced computes all or nearly all: nothing is gained."]
    if steps <= FEW_STEPS:
        return [f"Of {steps} steps most or all are computed: expect little or no gain."]
    return []


def _fitted(model: Identity, card: Card | None, *, quantized: bool, is_shared: bool) -> tuple[list[str], list[str]]:
    """Options by which a pipeline fits its card, and the notes on them."""
    if card is None or quantized:
        return [], []
    name = model.name.lower()
    peak = next((peak for peak in PEAKS if peak.family == model.family and peak.part in name), None)
    if is_shared or peak is None:
        return [], ["Memory was not measured for this; where it does not fit, see --offload and --quantize."]
    if peak.transformers * peak.gib <= card.memory_gib / 2:
        return [], []
    options, parts = ["--offload", "model"], "Keep the pipeline's parts in host memory while others run"
    why = f"the {card.title} is small for this transformer (docs/results/{peak.source}.md)"
    if peak.gib <= card.memory_gib:
        return options, [f"{parts}: {why}."]
    if QUANTIZED * peak.gib <= card.memory_gib:
        kind = "float8" if card.capability >= FLOAT8_SINCE else "int8"
        return ["--quantize", kind, *options], [f"{parts}, and quantise it: {why}."]
    return ["--offload", "sequential"], [f"Keep its layers in host memory while others run, which is slow: {why}."]


def _notes_on_weights(*, lora: bool, quantized: bool) -> list[str]:
    page = "docs/reference/concepts.md, What works with it"
    notes = [f"A LoRA may be loaded, fused or swapped before or after ({page})."] if lora else []
    return (
        [*notes, f"Quantised layers run as they are ({page}); nothing was measured with them."] if quantized else notes
    )


def _shared(model: Identity, gpus: int, *, few: bool) -> tuple[str | None, list[str]]:
    """How GPUs share a picture or clip, and what to heed; models distilled to few steps have no second branch."""
    page = "docs/guide/scaling.md"
    if gpus == 1:
        return None, []
    sharing = () if model.facts is None else model.facts.sharing
    if "ulysses" not in sharing:
        return None, [f"No plan shares this model's tokens, so the command is for one GPU; see branches=2 in {page}."]
    branches = 2 if "branches" in sharing and gpus % 2 == 0 and not few else 1
    ways = {"ulysses": gpus // branches, "branches": branches}
    way = ",".join(f"{name}={count}" for name, count in ways.items() if count > 1)
    notes = [f"Each GPU holds the whole pipeline ({page})."]
    if ways["ulysses"] > 1:
        notes.append(f"The model's attention heads must divide by {ways['ulysses']}.")
    return way, notes
