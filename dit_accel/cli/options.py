"""Options that several commands share: each is one field of a dataclass here, and no command lists it again.

A command has a dataclass ``Options``, derived from one of these, and is a function of it; :func:`takes_options` makes
the function with an option for each field, which typer needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from dit_accel.errors import OptionError, PresetError, shown
from dit_accel.serving.loading import Loading
from dit_accel.serving.loras import parse_loras, with_projections
from dit_accel.tools.demo import DEFAULT_MODEL, model_preset
from dit_accel.tools.repeats import REPEATS as REPEATS

# Bounds beyond all reason, so that a typing mistake is refused before any work.
MOST_STEPS = 10_000
FEWEST_PIXELS, MOST_PIXELS = 16, 16_384  # of a side; 16 are one token of most models
MOST_FRAMES = 10_000
MOST_IMAGES = 1_000
MOST_REPEATS = 1_000


def require_finite(option: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise OptionError(option.opts[0], f"must be a finite number, got {value}")
    return value


def _side(name: str) -> Any:
    return typer.Option(name, min=FEWEST_PIXELS, max=MOST_PIXELS, help="In pixels.", show_default="the pipeline's")


def option(help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass of options; ``more`` goes to ``typer.Option``, and so do names other than the field's."""
    return field(default=default, metadata={"option": typer.Option(*names, help=help, **more)})


def takes_options(*, without: Collection[str] = ()) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a command for typer of a function whose one parameter is a dataclass of options: its fields, own ones first.

    Args:
        without: fields of base classes that are no options of this command and keep their defaults.
    """

    def expand(command: Callable[[Any], None]) -> Callable[..., None]:
        (kind,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
        types = get_type_hints(kind, include_extras=True)
        own = {name: place for place, cls in enumerate(kind.__mro__) for name in vars(cls).get("__annotations__", ())}
        parameters = []
        for each in sorted(fields(kind), key=lambda field: own[field.name]):
            if each.name in without:
                continue
            default = Parameter.empty if each.default is MISSING else each.default
            given = each.metadata.get("option")
            annotation = Annotated[types[each.name], given] if given else types[each.name]
            parameters.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(kind(**given))

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return expand


StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, max=MOST_STEPS, help="Denoising steps.", show_default="the pipeline's")
]
HeightOption = Annotated[int | None, _side("--height")]
WidthOption = Annotated[int | None, _side("--width")]
RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=1,
        max=MOST_REPEATS,
        help="Speed-ups are medians of at least so many runs, plain and accelerated in turn.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """The pipeline, its device and its weights."""

    model: str = option(
        "Folder of a diffusers pipeline, model id on the Hugging Face hub, or name of a demo model.",
        "--model",
        "-m",
        default=DEFAULT_MODEL,
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        "Data type of weights and activations.", show_default="bfloat16 on CUDA, else float32"
    )
    device: str | None = option("cuda, cuda:1, mps or cpu.", show_default="cuda if there is one, else cpu")
    offload: Literal["none", "model", "sequential"] = option(
        "Keep weights in host memory: whole models at a time, or layer by layer (slow).", default="none"
    )
    lora: list[str] | None = option(
        "A LoRA to load, with weight 1 by default: a folder, a file, or an id on the hub (OWNER/NAME or "
        "OWNER/NAME/FILE). Repeatable. A preset that runs SLA uses the projections that SLA's fine-tuning wrote "
        "with the LoRA.",
        metavar="LORA[:WEIGHT]",
    )
    quantize: Literal["float8", "int8"] | None = option(
        "Quantise the layers of the transformer's blocks by torchao: int8 halves their memory; float8 is "
        "faster too, on an RTX 4090, H100 or later. Images differ a little."
    )

    def loading(self) -> Loading:
        return Loading(self.device, self.dtype, self.offload, parse_loras(self.lora), self.quantize)


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoadingOptions):
    """A pipeline, its preset and the arguments of its call."""

    preset: str | None = option(
        "Name of a preset (see `dit-accel presets list`) or path of a YAML file; `none` runs the plain pipeline.",
        show_default="balanced, which for a pipeline that makes videos is video-balanced",
    )
    overrides: list[str] | None = option(
        "Change one key of the preset, e.g. --set target_error=0.1 or skip.policy=none. Repeatable.",
        "--set",
        metavar="KEY=VALUE",
    )
    call: list[str] | None = option(
        "Any other argument of the pipeline's own call, its value in YAML, e.g. --call "
        "max_sequence_length=256. Repeatable.",
        metavar="NAME=VALUE",
    )
    steps: StepsOption = None
    seed: int = option("Seed of the starting noise, of 64 bits.", default=0, min=-(2**63), max=2**63 - 1)
    height: HeightOption = None
    width: WidthOption = None
    num_frames: int | None = option("Frames of a video.", min=1, max=MOST_FRAMES, show_default="the pipeline's")
    image: Path | None = option(
        "Input image, for pipelines that take one: Kontext, img2img, the first frame of image-to-video."
    )
    force: ForceOption = False
    quiet: bool = option("Print nothing but errors.", "--quiet", "-q", default=False)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Options of the pipeline's call that are numbers, by name; None = not given."""
        return {"steps": self.steps, "height": self.height, "width": self.width, "num-frames": self.num_frames}

    def preset_and_loading(self, refusal: str = "") -> tuple[str | None, dict[str, Any], Loading]:
        """The preset's name and overrides as :func:`named_preset` gives them, and how to load the pipeline."""
        name, overrides = named_preset(self.preset, self.model, self.overrides, refusal)
        loading = self.loading()
        return name, with_projections(name, overrides, loading.loras), loading


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
    from dit_accel.models.presets import load_preset
    from dit_accel.presets import default_preset

    name, overrides = name or model_preset(model), parse_overrides(settings)
    if name == "none" and refusal:
        raise OptionError("--preset", refusal)
    if name != "none":
        load_preset(default_preset(name, is_video=False), **overrides)
    return name, overrides
