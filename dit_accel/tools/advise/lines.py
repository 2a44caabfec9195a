"""Write the lines of Python and of shell that run a recommended preset."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dit_accel.tools.advise.identify import Identity
from dit_accel.tools.advise.memory import WAYS, Placement, row_of
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.files import repository_and_file

OPTIONS = {"num_inference_steps": "--steps", "guidance_scale": "--guidance"}  # other options have the argument's name


@dataclass(frozen=True)
class Lines:
    """A call of a pipeline, as lines of Python and of shell."""

    model: Identity
    preset: str
    call: Mapping[str, Any]  # without inputs
    plan: Placement
    loras: Mapping[str, float]
    device: str
    dtype: str
    sharing: str | None  # of the call by `gpus`
    gpus: int

    def python(self) -> str:
        model, row = self.model, row_of(self.model)
        kind, dtype = ("Modular", "") if model.is_modular else ("Diffusion", f", dtype=torch.{self.dtype}")
        parts = "".join(f", {name}={name}" for name in row.get("parts", []))
        source = _literal(str(model.folder or self._source))
        lines = ["import torch", "import diffusers", "import dit_accel", *row.get("before", [])]
        lines.append(f"pipe = diffusers.{kind}Pipeline.from_pretrained({source}{parts}{dtype})")
        workflow = f'workflow="{row["workflow"]}", ' if "workflow" in row else ""
        lines += [f"pipe.load_components({workflow}dtype=torch.{self.dtype})"] if model.is_modular else []
        adapters = [f"lora-{index}" for index in range(len(self.loras))]
        for adapter, lora in zip(adapters, self.loras, strict=True):
            place, file = repository_and_file(lora)
            rest = "" if file is None else f", weight_name={_literal(file)}"
            lines.append(f"pipe.load_lora_weights({_literal(place)}, adapter_name={_literal(adapter)}{rest})")
        lines += [f"pipe.set_adapters({json.dumps(adapters)}, {list(self.loras.values())})"] if adapters else []
        way = "modular" if model.is_modular and self.plan.way == "model" else "python"
        weights = ', linear={"weights": "host"}' if self.plan.in_8_bits else ""
        whole = [*WAYS[self.plan.way].get("whole", []), *row.get("whole", [])]
        more = f", exclude_modules={json.dumps(whole)}" if whole else ""
        placed = [WAYS[self.plan.way][way].format(self.device, more)]
        placed += ["pipe.vae.enable_tiling()"] * self.plan.in_tiles
        accelerated = [f'dit_accel.accelerate_pipeline(pipe, "{self.preset}"{weights})']
        lines += accelerated + placed if weights else placed + accelerated  # first: in bf16 it does not fit
        lines += [f"dit_accel.parallelize_pipeline(pipe, {self.sharing})"] if self.sharing else []
        for name in model.inputs:
            loader = "load_video" if "video" in name else "load_image"
            lines.append(f'{name} = diffusers.utils.{loader}("{_file(name)}")')
        values = {**self.call, **(demo_arguments(model.folder) if model.folder else {}), **self.call}
        arguments = [f"{name}={name}" for name in model.inputs]
        arguments += [f"{name}={_literal(value)}" for name, value in values.items()]
        return "\n".join([*lines, f"result = pipe({', '.join(arguments)})"])

    def shell(self) -> str:
        if self.why_no_shell():
            return ""
        words = ["dit-accel", "generate", *([] if self.plan.in_8_bits else ["--compare"])]  # whose plain run is in bf16
        if self.sharing:
            words = ["torchrun", "--nproc-per-node", str(self.gpus), "-m", "dit_accel", "generate"]
            words += ["--parallel", self.sharing]
        words += ["--model", self._source, "--preset", self.preset]
        words += ["--set", "linear.weights=host"] if self.plan.in_8_bits else []
        for name in self.model.inputs:
            words += ["--image", _file(name)] if name == "image" else ["--call", f"{name}={_file(name)}"]
        for name, value in self.call.items():
            words.append(OPTIONS.get(name, f"--{name.replace('_', '-')}"))
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
        for lora, weight in self.loras.items():
            words += ["--lora", lora if weight == 1 else f"{lora}:{weight:g}"]
        words += ["--device", self.device] if self.device != "cuda" else []
        words += ["--dtype", self.dtype] if (self.device, self.dtype) != ("cuda", "bfloat16") else []
        return shlex.join([*words, *WAYS[self.plan.way]["options"]])

    def why_no_shell(self) -> str | None:
        for part in row_of(self.model).get("parts", []):
            return f"dit-accel generate takes no {part}"
        return "dit-accel generate does not decode in tiles" if self.plan.in_tiles else None

    @property
    def _source(self) -> str:
        return self.model.name if self.model.is_loadable else "MODEL"


def _file(name: str) -> str:
    return f"{name}.mp4" if "video" in name else f"{name}.png"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
