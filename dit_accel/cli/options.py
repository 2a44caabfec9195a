"""Options that several commands share, with their help texts, and checks that raise an :class:`OptionError`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dit_accel.errors import DitAccelError, PresetError, shortened, shown
from dit_accel.tools.demo import DEFAULT_MODEL as DEFAULT_MODEL
from dit_accel.tools.demo import model_preset
from dit_accel.tools.repeats import REPEATS as REPEATS

if TYPE_CHECKING:
    from dit_accel.presets import Preset

Dtype = Literal["bfloat16", "float16", "float32"]
Offload = Literal["none", "model", "sequential"]
Quantize = Literal["float8", "int8"]

# Bounds beyond all reason, so that a slip of the finger is told before any work.
MOST_STEPS = 10_000
FEWEST_PIXELS, MOST_PIXELS = 16, 16_384  # of a side; 16 are one token of most models
MOST_FRAMES = 10_000
MOST_IMAGES = 1_000
MOST_REPEATS = 1_000
LONGEST_PROMPTS = 2**20  # bytes of a file


class OptionError(DitAccelError, ValueError):
    """A command line option can't be used as it was given."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(option, message)

    def __str__(self) -> str:
        return ": ".join(self.args)


def require_finite(option: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise OptionError(option.opts[0], f"must be a finite number, got {value}")
    return value


PromptOption = Annotated[str, typer.Option("--prompt", "-p", help="What the picture or clip shows.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Folder of a diffusers pipeline, model id on the Hugging Face hub, or name of a demo model.",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Name of a preset (see `dit-accel presets list`) or path of a YAML file; `none` runs the plain pipeline.",
        show_default="balanced, which for a pipeline that makes videos is video-balanced",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the preset, e.g. --set target_error=0.1 or skip.policy=none. Repeatable.",
    ),
]
CallOption = Annotated[
    list[str] | None,
    typer.Option(
        "--call",
        metavar="NAME=VALUE",
        help="Any other argument of the pipeline's own call, its value in YAML, e.g. --call max_sequence_length=256. "
        "Repeatable.",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", min=1, max=MOST_STEPS, help="Denoising steps.", show_default="the pipeline's"),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=-(2**63), max=2**63 - 1, help="Seed of the starting noise, of 64 bits.")
]
HeightOption = Annotated[
    int | None,
    typer.Option("--height", min=FEWEST_PIXELS, max=MOST_PIXELS, help="In pixels.", show_default="the pipeline's"),
]
WidthOption = Annotated[
    int | None,
    typer.Option("--width", min=FEWEST_PIXELS, max=MOST_PIXELS, help="In pixels.", show_default="the pipeline's"),
]
ImageOption = Annotated[
    Path | None,
    typer.Option(
        "--image",
        help="Input picture, for pipelines that take one: Kontext, img2img, the first frame of image-to-video.",
    ),
]
FramesOption = Annotated[
    int | None,
    typer.Option(
        "--num-frames",
        min=1,
        max=MOST_FRAMES,
        help="Frames of the clip; video only.",
        show_default="the pipeline's",
    ),
]
FpsOption = Annotated[
    float | None,
    typer.Option(
        "--fps",
        min=1,
        max=100,
        callback=require_finite,
        help="Frames a second of the written clip.",
        show_default="the model's",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype", help="Data type of weights and activations.", show_default="bfloat16 on CUDA, else float32"
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cuda, cuda:1, mps or cpu.", show_default="cuda if there is one, else cpu"),
]
OffloadOption = Annotated[
    Offload,
    typer.Option("--offload", help="Keep weights in host memory: whole models at a time, or layer by layer (slow)."),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize",
        help="Quantise the layers of the transformer's blocks by torchao: int8 halves their memory; float8 is faster "
        "too, on an RTX 4090, H100 or later. Pictures differ a little.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="LORA[:WEIGHT]",
        help="A LoRA to load, its weight 1 unless given: a folder, a file, or an id on the hub (OWNER/NAME or "
        "OWNER/NAME/FILE). Repeatable. What SLA's fine-tuning wrote beside one is used where the preset runs SLA.",
    ),
]
RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=1,
        max=MOST_REPEATS,
        help="Speed-ups are medians of at least so many, plain and accelerated in turn.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def parse_overrides(settings: list[str] | None) -> dict[str, Any]:
    """``["target_error=0.1", …]`` as keyword arguments of ``load_preset``; values are YAML."""
    return _parse_pairs("--set", "KEY=VALUE, e.g. target_error=0.1", settings)


def parse_call(arguments: list[str] | None) -> dict[str, Any]:
    """``["max_sequence_length=256", …]`` as arguments of a pipeline's call; values are YAML."""
    return _parse_pairs("--call", "NAME=VALUE, e.g. max_sequence_length=256", arguments)


def _parse_pairs(option: str, form: str, given: list[str] | None) -> dict[str, Any]:
    from dit_accel.presets.reading import read_yaml

    pairs = {}
    for each in given or []:
        key, equals, value = each.partition("=")
        if not equals or not key.strip():
            raise OptionError(option, f"must be {form}, got {shown(each)}")
        try:
            pairs[key.strip()] = read_yaml(value)
        except PresetError as error:
            raise OptionError(option, f"the value in {shown(each)} is {error}") from None
    return pairs


def named_preset(
    name: str | None, model: str, settings: list[str] | None, refusal: str = ""
) -> tuple[str | None, dict[str, Any]]:
    """Name of the preset asked for, else the one that the model is meant to run with, if any; and its overrides.

    Both are checked: a misspelt preset should not wait for the model to load.

    Args:
        refusal: why the command can't run plain, with ``none``; empty = it can.
    """
    name, overrides = name or model_preset(model), parse_overrides(settings)
    if name == "none" and refusal:
        raise OptionError("--preset", refusal)
    if name != "none":
        choose_preset(name, overrides)
    return name, overrides


def choose_preset(name: str | None, overrides: dict[str, Any], pipe: Any = None) -> Preset:
    """The preset of that name or path, with the overrides applied, as the pipeline gets it; without a name `balanced`.

    Without a pipeline, the preset as such: for checking name, keys and values before one is loaded.

    Raises:
        PresetError: unknown preset, key or value.
    """
    from dit_accel.presets import default_preset

    if pipe is None:
        from dit_accel.models.presets import load_preset

        return load_preset(default_preset(name, is_video=False), **overrides)
    from dit_accel.pipeline import preset_for

    return preset_for(pipe, name, **overrides)


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that say something."""
    from dit_accel.presets.reading import read_text

    name = shortened(str(path))
    try:
        text = read_text(path, LONGEST_PROMPTS)
    except (OSError, ValueError) as error:
        raise OptionError("--prompts", f"{name} can't be read: {getattr(error, 'strerror', None) or error}") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise OptionError("--prompts", f"{name} holds no prompts; write one a line")
    return prompts
