"""Options that several commands share, with their help texts, and checks that raise an :class:`OptionError`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dit_accel.errors import DitAccelError
from dit_accel.tools.demo import DEFAULT_MODEL as DEFAULT_MODEL
from dit_accel.tools.demo import model_preset
from dit_accel.tools.repeats import REPEATS as REPEATS

if TYPE_CHECKING:
    from dit_accel.presets import Preset

Dtype = Literal["bfloat16", "float16", "float32"]
Offload = Literal["none", "model", "sequential"]

PromptOption = Annotated[str, typer.Option("--prompt", "-p", help="What the picture or clip shows.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Folder of a diffusers pipeline, model id on the Hugging Face hub, or name of a shipped demo model.",
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
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Denoising steps.", show_default="the pipeline's")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the starting noise.")]
HeightOption = Annotated[int | None, typer.Option("--height", min=1, help="Pixels.", show_default="the pipeline's")]
WidthOption = Annotated[int | None, typer.Option("--width", min=1, help="Pixels.", show_default="the pipeline's")]
ImageOption = Annotated[
    Path | None,
    typer.Option(
        "--image",
        help="Input picture, for pipelines that take one: Kontext, img2img, the first frame of image-to-video.",
    ),
]
FramesOption = Annotated[
    int | None,
    typer.Option("--num-frames", min=1, help="Frames of the clip; video only.", show_default="the pipeline's"),
]
FpsOption = Annotated[
    float | None,
    typer.Option("--fps", min=1, max=100, help="Frames a second of the written clip.", show_default="the model's"),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of weights and activations.", show_default="bfloat16 on CUDA, else float32"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cuda, cuda:1, mps or cpu.", show_default="cuda if there is one, else cpu"),
]
OffloadOption = Annotated[
    Offload,
    typer.Option("--offload", help="Keep weights in host memory: whole models at a time, or layer by layer (slow)."),
]
RepeatsOption = Annotated[
    int,
    typer.Option("--repeats", min=1, help="Speed-ups are medians of at least so many, plain and accelerated in turn."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


class OptionError(DitAccelError, ValueError):
    """A command line option can't be used as it was given."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")


def parse_overrides(settings: list[str] | None) -> dict[str, Any]:
    """``["target_error=0.1", …]`` as keyword arguments of ``load_preset``; values are YAML."""
    import yaml

    overrides = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise OptionError("--set", f"must be KEY=VALUE, e.g. target_error=0.1, got {setting!r}")
        try:
            overrides[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise OptionError("--set", f"the value in {setting!r} is not YAML") from None
    return overrides


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
    if name not in (None, "none"):
        choose_preset(name, overrides)
    return name, overrides


def choose_preset(name: str | None, overrides: dict[str, Any], pipe: Any = None) -> Preset:
    """The preset of that name or path, with the overrides applied, as the pipeline gets it; without a name `balanced`.

    Without a pipeline, the preset as such: for checking name, keys and values before one is loaded.

    Raises:
        PresetError: unknown preset, key or value.
    """
    from dit_accel.presets import default_preset, load_preset

    if pipe is None:
        return load_preset(default_preset(name, is_video=False), **overrides)
    from dit_accel.pipeline import preset_for

    return preset_for(pipe, name, **overrides)


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that say something."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--prompts", f"{path} can't be read: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def require_writable(path: Path, option: str) -> None:
    """Checks, before anything is computed, that the file ``path`` can be written."""
    folder = path.resolve().parent
    if path.is_dir():
        raise OptionError(option, f"{path} is a folder; give the name of a file")
    if not folder.is_dir():
        raise OptionError(option, f"folder {folder} does not exist; create it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OptionError(option, f"{path} can't be written: no permission")
