"""Options that several commands share. Each is one field of a dataclass.

Each command derives a dataclass ``Options`` from one of these and takes it as its only argument;
:func:`takes_options` turns the fields into the parameters that typer needs.
"""

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from dit_accel.constants import MOST_STEPS
from dit_accel.errors import ArgumentError, PresetError, shortened, shown
from dit_accel.serving.loading import Loading
from dit_accel.tools.demo import DEFAULT_MODEL, demo_path, model_preset
from dit_accel.tools.extras import require_extra
from dit_accel.tools.measure.repeats import REPEATS

# Generous bounds, which catch typing mistakes before any work.
MOST_PIXELS = 16_384  # of a side
SIDE = {"min": 16, "max": MOST_PIXELS, "show_default": "the pipeline's"}  # 16 pixels are one token in most models
MOST_FRAMES = 10_000
MOST_IMAGES = 1_000
MOST_REPEATS = 1_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def option_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def require_finite(option: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ArgumentError(option.name, f"must be a finite number, got {value}")
    return value


def option(help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Field of a dataclass of options; ``names`` and ``more`` are passed to ``typer.Option``."""
    return field(default=default, metadata={"option": typer.Option(*names, help=help, **more)})


def takes_options(*, without: Collection[str] = ()) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Turn a function of one options dataclass into a typer command, ``without`` some inherited fields."""

    def expand(command: Callable[[Any], None]) -> Callable[..., None]:
        (kind,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
        types = get_type_hints(kind)
        order = {name: index for index, cls in enumerate(kind.__mro__) for name in vars(cls).get("__annotations__", ())}
        parameters = []
        for option in sorted(fields(kind), key=lambda field: order[field.name]):
            if option.name in without:
                continue
            default = Parameter.empty if option.default is MISSING else option.default
            annotation = Annotated[types[option.name], option.metadata["option"]]
            parameters.append(Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(kind(**values))

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return expand


def repeats_option() -> Any:
    return option(
        "Minimum number of timed runs per speed-up (a median), plain and accelerated alternately.",
        default=REPEATS,
        min=1,
        max=MOST_REPEATS,
    )


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    steps: int | None = option("Denoising steps.", min=1, max=MOST_STEPS, show_default="the pipeline's")
    height: int | None = option("In pixels.", **SIDE)
    width: int | None = option("In pixels.", **SIDE)
    num_frames: int | None = option("Frames of a video.", min=1, max=MOST_FRAMES, show_default="the pipeline's")

    @property
    def sizes(self) -> dict[str, int | None]:
        return {"steps": self.steps, "height": self.height, "width": self.width, "num-frames": self.num_frames}


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    model: str = option(
        "Folder of a diffusers pipeline, model id on the Hugging Face Hub, or name of a demo model.",
        "--model",
        "-m",
        default=DEFAULT_MODEL,
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        "Data type of weights and activations.", show_default="bfloat16 on CUDA, otherwise float32"
    )
    device: str | None = option("cuda, cuda:1, mps or cpu.", show_default="cuda if available, otherwise cpu")
    offload: Literal["none", "text", "model", "group", "sequential"] = option(
        "Keep weights in host memory; move layers of text encoders (text), whole models (model), blocks of the "
        "transformer (group), or single layers (sequential, slow), to the GPU when they run.",
        default="none",
    )
    lora: list[str] | None = option(
        "LoRA to load: a folder, a file, or an id on the Hub (OWNER/NAME or OWNER/NAME/FILE); weight 1 by default. "
        "Repeatable. Presets with SLA use the projections that SLA's fine-tuning saved with the LoRA.",
        metavar="LORA[:WEIGHT]",
    )
    quantize: Literal["float8", "int8"] | None = option(
        "Quantise the linear layers of the transformer's blocks with torchao. int8 halves their memory; float8 is "
        "also faster, on an RTX 4090, H100 or later. Outputs differ slightly."
    )

    def loading(self) -> Loading:
        return Loading(self.device, self.dtype, self.offload, parse_loras(self.lora), self.quantize)


def preset_option(more: str = "") -> Any:
    return option(
        f"Name of a preset (see `dit-accel presets list`) or path of a YAML file{more}.",
        show_default="balanced, or video-balanced for video pipelines",
    )


def engine_option(processes: str) -> Any:
    return option(f"Where {processes}, or on a Ray cluster (extra `ray`) at RAY_ADDRESS or started.", default="process")


def actors_option() -> Any:
    meaning = "With --engine ray: number of GPUs, or of CPUs without GPUs, each with a process."
    return option(meaning, min=1, show_default="all GPUs")


def require_engine(engine: Literal["process", "ray"], actors: int | None, device: str | None) -> None:
    if engine == "process" and actors is not None:
        raise ArgumentError("actors", "needs --engine ray")
    if engine == "ray":
        require_extra("ray", "--engine ray")
        if device not in (None, "cuda", "cpu"):
            raise ArgumentError("device", f"must be cuda or cpu with --engine ray, got {device}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(SizeOptions, LoadingOptions):
    preset: str | None = preset_option("; `none` runs the plain pipeline")
    overrides: list[str] | None = option(
        "Change one key of the preset, e.g. --set target_error=0.1 or skip.policy=none. Repeatable.",
        "--set",
        metavar="KEY=VALUE",
    )
    call: list[str] | None = option(
        "Any other argument of the pipeline's call, with its value in YAML, e.g. --call max_sequence_length=256; "
        "images, masks, videos and sound are files. Repeatable.",
        metavar="NAME=VALUE",
    )
    seed: int = option("Seed of the initial noise, a 64-bit integer.", default=0, min=-(2**63), max=2**63 - 1)
    image: Path | None = option("Input image, if the pipeline takes one: Kontext, img2img, the first frame of a video.")
    force: bool = option("Replace existing files.", "--force", "-f", default=False)
    quiet: bool = option("Print nothing but errors.", "--quiet", "-q", default=False)

    def loading(self) -> Loading:
        return replace(super().loading(), inputs=[*parse_call(self.call)])

    def preset_and_loading(self, refusal: str = "") -> tuple[str | None, dict[str, Any], Loading]:
        """Return the name of the preset, or else of the model's own, if any; its overrides; and how to load the model.

        All are checked here, before the model loads; ``refusal`` says why the command can't run with ``none``.
        """
        from dit_accel.models.presets import load_preset
        from dit_accel.presets import default_preset
        from dit_accel.sla.checkpoints import checkpoint_preset

        name = self.preset or model_preset(self.model) or checkpoint_preset(self.model)
        overrides = _parse_pairs("set", "KEY=VALUE, e.g. target_error=0.1", self.overrides)
        if name == "none" and refusal:
            raise ArgumentError("preset", refusal)
        if name != "none":
            load_preset(default_preset(name, is_video=False), **overrides)
        loading = self.loading()
        return name, with_projections(name, overrides, [*loading.loras, self.model]), loading


def parse_loras(texts: list[str] | None) -> dict[str, float]:
    """Parse ``["style.safetensors:0.8", …]`` into weights by LoRA: a folder, a file or an id on the Hub."""
    loras: dict[str, float] = {}
    for text in texts or []:
        source, colon, last = text.rpartition(":")
        try:
            source, weight = (source, float(last)) if colon else (text, 1.0)
        except ValueError:
            source, weight = text, 1.0
        if not math.isfinite(weight):
            raise ArgumentError("lora", f"a weight must be a finite number, got {last}")
        if (source := _resolved(source)) in loras:
            raise ArgumentError("lora", f"{shortened(source)} was given twice; give it once")
        loras[source] = weight
    if loras:
        require_extra("peft", "--lora")
    return loras


def with_projections(preset: str | None, overrides: dict[str, Any], sources: Iterable[str]) -> dict[str, Any]:
    """Add projections that LoRAs' folders or the model's hold to the overrides, if the preset has their policy."""
    from dit_accel.models.presets import load_preset
    from dit_accel.presets import default_preset
    from dit_accel.sla.checkpoints import checkpoint_preset, trained_overrides

    folders = [source for source in sources if os.path.isdir(source)]
    trained = {source: name for source in folders if (name := checkpoint_preset(source)) is not None}
    if not trained or preset == "none":
        return overrides
    skip = load_preset(default_preset(preset, is_video=False), **overrides).skip
    fitting = [source for source, name in trained.items() if load_preset(name).skip.policy == skip.policy]
    if not fitting or getattr(skip, "projection", None) is not None:
        return overrides
    return {**trained_overrides(fitting[0]), **overrides}


def _resolved(source: str, option: str = "lora") -> str:
    """Return the path of a local LoRA, with demo models and ``~`` resolved, or an id on the Hub unchanged."""
    model, _, rest = source.partition("/")
    folder = demo_path(model)
    path = folder / rest if folder else Path(source).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):  # not a valid file name
        there = False
    if there:
        return str(path)
    if folder or source.startswith((".", "/", "~")) or source.count("/") < 1:
        raise ArgumentError(option, f"{shown(source)} is not a folder, a file or a Hub id (OWNER/NAME)")
    return source


def named_loras(texts: list[str] | None) -> dict[str, str]:
    rule, loras = "NAME=LORA, or a folder of .safetensors files", dict[str, str]()
    for text in texts or []:
        files = sorted(Path(folder).glob("*.safetensors")) if os.path.isdir(folder := os.path.expanduser(text)) else []
        found = [(file.stem.replace(".", "-"), str(file)) for file in files] or [
            (name, _resolved(str(it), "loras")) for name, it in _parse_pairs("loras", rule, [text]).items()
        ]
        if len(found) > len(names := dict(found)) or names.keys() & loras:
            raise ArgumentError("loras", f"must have names that differ, got {shown(text)}; give NAME=LORA")
        loras |= names
    return loras


def parse_call(arguments: list[str] | None) -> dict[str, Any]:
    return _parse_pairs("call", "NAME=VALUE, e.g. max_sequence_length=256", arguments)


def _parse_pairs(field: str, form: str, texts: list[str] | None) -> dict[str, Any]:
    from dit_accel.presets.reading import read_yaml

    pairs = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ArgumentError(field, f"must be {form}, got {shown(text)}")
        try:
            pairs[key.strip()] = read_yaml(value)
        except PresetError as error:
            raise ArgumentError(field, f"the value in {shown(text)} is {error}") from None
    return pairs
