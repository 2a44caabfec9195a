"""Write the lines of Python and of shell that run a recommended preset."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dit_accel.tools.advise.identify import Identity
from dit_accel.tools.demo import demo_arguments, demo_path, tuning_prompts
from dit_accel.tools.files import repository_and_file

INPUTS = {  # required inputs of a pipeline, by a part of the model's name; the first part that fits decides
    "animate": ("image", "pose_video", "face_video"),
    "flf2v": ("image", "last_image"),
    "fill": ("image", "mask_image"),
    "canny": ("control_image",),
    "depth": ("control_image",),
    "ti2v": (),
    **dict.fromkeys(("i2v", "i2i", "edit", "kontext", "layered", "refiner"), ("image",)),
}
IMAGE = "image.png"
OPTIONS = {"num_inference_steps": "--steps", "guidance_scale": "--guidance"}  # other options have the argument's name


def inputs_of(model: Identity) -> tuple[str, ...]:
    """Return the inputs, besides a prompt, without which the model's pipeline does not run."""
    name = model.name.lower().rstrip("/").rsplit("/", 1)[-1]
    return () if model.facts is None else next((INPUTS[part] for part in INPUTS if part in name), ())


def call_of(
    model: Identity, *, steps: int | None, size: tuple[int | None, int | None, int | None], few: bool
) -> dict[str, Any]:
    """Return the arguments of the pipeline's call, without prompt and inputs.

    ``size`` is height, width and number of frames; a model distilled for few steps runs without guidance.
    """
    height, width, frames = size
    if "pose_video" in inputs_of(model):
        frames = None  # as many as the pose video has
    counts = {"num_inference_steps": steps, "height": height, "width": width, "num_frames": frames}
    call: dict[str, Any] = {name: count for name, count in counts.items() if count is not None}
    if (facts := model.facts) is None:
        return call
    if not few:
        return call | dict(facts.guided)
    return call if facts.unguided is None else call | {"guidance_scale": facts.unguided}


def python_lines(
    model: Identity, preset: str, call: Mapping[str, Any], way: str | None, loras: Mapping[str, float]
) -> str:
    """Return lines that accelerate a loaded pipeline ``pipe`` and call it."""
    names = ["accelerate_pipeline", *(["parallelize_pipeline"] if way else [])]
    lines = [f"from dit_accel import {', '.join(names)}"]
    adapters = [f"lora-{index}" for index in range(len(loras))]
    for adapter, source in zip(adapters, loras, strict=True):
        place, file = repository_and_file(source)
        rest = "" if file is None else f", weight_name={_literal(file)}"
        lines.append(f"pipe.load_lora_weights({_literal(place)}, adapter_name={_literal(adapter)}{rest})")
    if loras:
        lines.append(f"pipe.set_adapters({json.dumps(adapters)}, {list(loras.values())})")
    lines.append(f'accelerate_pipeline(pipe, "{preset}")')
    if way:
        lines.append(f"parallelize_pipeline(pipe, {way.replace(',', ', ')})")
    folder = demo_path(model.name)
    values = {"prompt": _prompt(model), **(demo_arguments(folder) if folder else {}), **call}
    arguments = [f"{name}={name}" for name in inputs_of(model)]
    arguments += [f"{name}={_literal(value)}" for name, value in values.items()]
    return "\n".join([*lines, f"result = pipe({', '.join(arguments)})"])


def shell_line(
    model: Identity,
    preset: str,
    call: Mapping[str, Any],
    way: str | None,
    loras: Mapping[str, float],
    *,
    gpus: int,
    options: Sequence[str],
) -> str:
    """Return the command that loads the pipeline and calls it; empty if no command can."""
    inputs = inputs_of(model)
    if set(inputs) - {"image"} or model.is_modular:
        return ""
    words = ["dit-accel", "generate", "--compare"]
    if way:
        words = ["torchrun", "--nproc-per-node", str(gpus), "-m", "dit_accel", "generate", "--parallel", way]
    words += ["--model", model.name if model.is_loadable else "MODEL", "--prompt", _prompt(model), "--preset", preset]
    words += [word for name in inputs for word in (f"--{name}", IMAGE)]
    for name, value in call.items():
        words.append(OPTIONS.get(name, f"--{name.replace('_', '-')}"))
        words.append(f"{value:g}" if isinstance(value, float) else str(value))
    for source, weight in loras.items():
        words += ["--lora", source if weight == 1 else f"{source}:{weight:g}"]
    return shlex.join([*words, *options])


def _prompt(model: Identity) -> str:
    return tuning_prompts(model.name)[0] if demo_path(model.name) else "a fox"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
