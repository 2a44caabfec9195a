"""Open a pipeline, check the arguments of its call, and time the call."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, shortened, shown
from dit_accel.models import denoisers
from dit_accel.serving.estimates import require_memory
from dit_accel.serving.failures import explained_failures
from dit_accel.serving.input_images import read_input
from dit_accel.serving.loading import Loading, load_pipeline
from dit_accel.serving.media import Medium, medium_of, sampling_rate
from dit_accel.serving.processes import join
from dit_accel.serving.prompts import Job
from dit_accel.tools.demo import demo_arguments, demo_path, model_fps

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from dit_accel.presets import Preset
    from dit_accel.tools.measure.timing import Output


@dataclass(frozen=True)
class Setup:
    """A pipeline to load and how to run it; can be sent to other processes."""

    model: str  # a folder, an id on the Hub, or the name of a demo model
    preset: str | None = None  # a name or path; None = the default, "none" = plain
    overrides: dict[str, Any] = field(default_factory=dict)  # keys of the preset
    fps: float | None = None  # of videos; None = the model's
    loading: Loading = field(default_factory=Loading)
    degrees: dict[str, int] = field(default_factory=dict)  # keywords of `parallelize_pipeline`; empty = one device
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the pipeline's call
    batch_size: int = 1
    image: Image.Image | None = None  # the input of every job
    jobs: Sequence[Job] = ()  # checked once the pipeline is loaded, before the first one runs


# Arguments of a pipeline's call, and what sets them.
SET_BY_US = {"prompt": "the prompt", "image": "the input image", "generator": "the seed"}
SET_BY_US |= dict.fromkeys(("output_type", "return_dict"), "the command")
SET_BY_US |= dict.fromkeys(("callback_on_step_end", "callback_on_step_end_tensor_inputs"), "the command")


def open_pipeline(setup: Setup, console: Console) -> tuple[Any, Medium, Preset | None]:
    """Load a pipeline, plain but for weights that wait on the host; return it, its output form, and its preset."""
    from dit_accel import accelerate_pipeline, parallelize_pipeline
    from dit_accel.pipeline import preset_for

    def preset_of(pipe: Any) -> Preset | None:
        return None if setup.preset == "none" else preset_for(pipe, setup.preset, **setup.overrides)

    def keep_on_host(pipe: Any) -> None:
        if (preset := preset_of(pipe)) and preset.linear.dtype and preset.linear.weights != "device":
            accelerate_pipeline(pipe, preset)

    place = join(setup.degrees, setup.loading.device)
    pipe = load_pipeline(setup.model, replace(setup.loading, device=place), console, keep_on_host)
    if setup.degrees:
        parallelize_pipeline(pipe, **setup.degrees)
    return pipe, medium_of(pipe, model_fps(setup.model), setup.fps), preset_of(pipe)


def start_pipeline(pipe: Any, preset: Preset | None, quiet: bool) -> None:
    from dit_accel import accelerate_pipeline

    if preset is not None:
        accelerate_pipeline(pipe, preset)
    pipe.set_progress_bar_config(disable=quiet, desc="accelerated" if preset else "plain")


def call_arguments(
    pipe: Any, model: str, options: dict[str, Any], others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the arguments of ``pipe(...)``: a demo model's defaults, overridden by options and others.

    Options have names such as ``"num-images"``, others (of ``--call``) the pipeline's; None = unset. A list of images
    is for one output. ``fps`` is an argument only of pipelines with sound, which lasts as long as the video.
    """
    from dit_accel.models.families import pipeline_family
    from dit_accel.pipeline import makes_video

    parameters, folder = inspect.signature(pipe.__call__).parameters, demo_path(model)
    arguments = demo_arguments(folder) if folder else {}
    values, others = {name: value for name, value in options.items() if value is not None}, dict(others)
    if "image" in others and "image" not in values:  # of --call, which takes several
        values["image"] = read_input("image", others.pop("image"), pipe)
    true_guidance = "true_cfg_scale" in parameters and ("negative-prompt" in values or "true_cfg_scale" in arguments)
    scale = "true_cfg_scale" if true_guidance else "guidance_scale"
    keys = {"steps": "num_inference_steps", "num-images": "num_images_per_prompt", "mask": "mask_image"}
    keys["guidance"] = scale
    if makes_video(pipe) and values.pop("num-images", 1) > 1:  # few can make several, and some ignore the argument
        raise ArgumentError("num_images", f"{type(pipe).__name__} makes one video per run; run again with another seed")
    family = pipeline_family(pipe)
    takes_several = getattr(pipe, "takes_images", family is not None and type(pipe).__name__ in family.several_images)
    if isinstance(values.get("image"), list) and not takes_several:
        raise ArgumentError("image", f"{type(pipe).__name__} takes one image, got {len(values['image'])}")
    if (fps := values.pop("fps", None)) and sampling_rate(pipe):
        arguments |= {key: fps for key in ("frame_rate", "fps") if key in parameters}
        if parameters.keys().isdisjoint(("frame_rate", "fps")) and fps != medium_of(pipe).fps:
            raise ArgumentError("fps", f"{type(pipe).__name__} makes sound for its own frame rate; leave fps out")
    if "guidance" in values and hasattr(pipe, "guider"):  # a component with the scale, of HunyuanVideo 1.5
        pipe.guider = pipe.guider.new(guidance_scale=values.pop("guidance"))
    for name, value in values.items():
        key = keys.get(name, name.replace("-", "_"))
        if key not in parameters:
            alone = " without a negative prompt" if name == "guidance" and "true_cfg_scale" in parameters else ""
            raise ArgumentError(name.replace("-", "_"), f"{type(pipe).__name__} takes no {key}{alone}")
        arguments[key] = value
    _require_known(type(pipe).__name__, parameters, others, {keys.get(name, name.replace("-", "_")) for name in values})
    if isinstance(others.get("references"), str):
        others["references"] = [others["references"]]
    arguments |= {name: read_input(name, value, pipe) for name, value in others.items()}
    if "negative-prompt" in values and scale in parameters and arguments.get(scale, parameters[scale].default) <= 1.0:
        raise ArgumentError("negative_prompt", f"{type(pipe).__name__} uses it only with guidance above 1, such as 4")
    embeds = [getattr(module.config, "guidance_embeds", None) for module in denoisers(pipe).values()]
    if "guidance" in values and not true_guidance and False in embeds:  # of FLUX.1-schnell, which ignores the scale
        raise ArgumentError("guidance", f"{type(pipe).__name__} has no guidance embedding; add a negative prompt")
    _require_inputs(type(pipe).__name__, parameters, arguments)
    require_memory(pipe, arguments)
    return arguments


def _require_inputs(pipeline: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    """Check that no argument is missing but the prompt, which may follow."""
    for name, parameter in parameters.items():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is not parameter.empty or takes_any or name in arguments or name == "prompt":
            continue
        if name == "image":
            raise ArgumentError("image", f"{pipeline} needs an input image; give one")
        raise ArgumentError("call", f"{pipeline} needs {name}: --call {name}=VALUE, files for images, videos, sound")


def _require_known(
    pipeline: str, parameters: Mapping[str, inspect.Parameter], others: Mapping[str, Any], taken: Collection[str]
) -> None:
    """Check that names of ``--call`` are arguments of the call, set by no other option, with numbers where required."""
    from dit_accel.presets.complaints import did_you_mean

    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in others.items():
        if name in taken or name in SET_BY_US:
            raise ArgumentError("call", f"{name} is already set by {SET_BY_US.get(name, 'its own option')}")
        if name not in parameters and not takes_any:
            free = sorted(parameters.keys() - taken - SET_BY_US.keys() - {"self", "kwargs"})
            meant = did_you_mean(name, free)
            raise ArgumentError("call", f"{pipeline} takes no {shortened(name)}{meant}; it takes {', '.join(free)}")
        is_count = name.startswith("num_") or name in ("height", "width", "max_sequence_length")
        if is_count and isinstance(value, float):
            raise ArgumentError("call", f"{name} must be a whole number, got {shown(value)}")
        default = parameters[name].default if name in parameters else None
        if isinstance(default, int | float) and isinstance(value, str | dict):
            raise ArgumentError("call", f"{name} must be a number or a bool, such as {default}, got {shown(value)}")


def timed_call(pipe: Any, arguments: dict[str, Any], seed: int | Sequence[int]) -> Output:
    from dit_accel.tools.measure.timing import timed_output

    with explained_failures(type(pipe)):
        return timed_output(pipe, arguments, seed)
