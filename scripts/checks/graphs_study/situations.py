"""Changes between runs of a pipeline whose steps are replayed: a table for the CPU's tests and for a GPU.

Each situation is a list of runs. A run begins with a change to the pipeline and has its own arguments. Outputs, symbols
and decisions must equal, bit for bit, those of a pipeline that never captures.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from peft import BOFTConfig, HRAConfig, IA3Config, LoraConfig, OFTConfig
from torch import nn
from torch.utils._pytree import tree_map_only

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.models.beside import linear_trial
from dit_accel.presets import Preset
from tests.tiny import redraw, tiny_output, tiny_pipeline

BUILDING = threading.Lock()  # building uses the process's only random generator
STEPS = 5
LONG = "a dog that runs across a field of yellow flowers"
COMPARED = ("output", "symbols", "steps", "fallbacks")
TILES = {"policy": "sparge", "steps": "all", "tau_kv": 0.3}
Change = Callable[[Any], object]
Run = tuple[Change, Mapping[str, Any]]


@dataclass(frozen=True)
class Situation:
    """Runs one after the other with one tiny pipeline: the change before each, and its arguments.

    `config`: of the transformer, for kernels that need other heads. `replays`: the last run must have replayed steps.
    """

    family: str
    runs: tuple[Run, ...]
    preset: Preset = field(default_factory=lambda: load_preset("exact"))
    config: Mapping[str, Any] = field(default_factory=dict)
    replays: bool = True


def nothing(pipe: Any) -> None:
    """Leave the pipeline as it is."""


def changed(family: str, *changes: Change, **more: Any) -> Situation:
    """Run before each change and after the last one, always with the same arguments."""
    return Situation(family, tuple((change, {}) for change in (nothing, *changes)), **more)


def called(family: str, *arguments: Mapping[str, Any], **more: Any) -> Situation:
    """Run an unchanged pipeline with other arguments each time."""
    return Situation(family, tuple((nothing, values) for values in arguments), **more)


def adapter(config: Any) -> Change:
    """Add a peft adapter with random weights."""

    def add(pipe: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            pipe.transformer.add_adapter(config, "style")

    return add


def without_adapters(pipe: Any) -> None:
    pipe.transformer.disable_adapters()


def with_adapters(pipe: Any) -> None:
    pipe.transformer.enable_adapters()


def set_value(path: str, value: Any) -> Change:
    """Set an attribute of the transformer by its dotted path."""
    owner, _, name = path.rpartition(".")

    def change(pipe: Any) -> None:
        setattr(pipe.transformer.get_submodule(owner), name, value)

    return change


def scale_buffer(pipe: Any) -> None:
    """Replace a buffer with another tensor."""
    owner = next(module for module in pipe.transformer.modules() if module._buffers)
    name, buffer = next((name, item) for name, item in owner._buffers.items() if item is not None)
    owner._buffers[name] = buffer * 0.5


def scale_weight(pipe: Any) -> None:
    """Replace the data of a weight."""
    weight = pipe.transformer.proj_out.weight
    weight.data = weight.data * 1.5


def scale_weight_in_place(pipe: Any) -> None:
    pipe.transformer.proj_out.weight.data.mul_(1.5)


class Scaled(nn.Module):
    """Layer whose output is multiplied by numbers in a nested attribute."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.settings = {"factors": [1.0, 2.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.settings["factors"]
        return self.layer(x) * (first * second)


def scaled_layer(pipe: Any) -> None:
    pipe.transformer.proj_out = Scaled(pipe.transformer.proj_out)


def other_factor(pipe: Any) -> None:
    pipe.transformer.proj_out.settings["factors"][0] = 0.3


def new_processors(pipe: Any) -> None:
    processors = {name: type(item)() for name, item in pipe.transformer.attn_processors.items()}
    pipe.transformer.set_attn_processor(processors)


def deterministic(wanted: bool) -> None:
    torch.use_deterministic_algorithms(wanted, warn_only=True)


def cast(dtype: torch.dtype) -> Change:
    return lambda pipe: pipe.to(dtype)


ADAPTERS = {
    "lora": LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], init_lora_weights=False),
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=["to_q"], init_weights=False),
    "boft": BOFTConfig(boft_block_size=4, target_modules=["to_q"], init_weights=False),
    "ia3": IA3Config(target_modules=["to_q"], feedforward_modules=[], init_ia3_weights=False),
    "hra": HRAConfig(r=2, target_modules=["to_q"], init_weights=False),
}
PICTURE = {
    key: [torch.linspace(-1, 1, 24).view(1, 1, 24)]
    for key in ("ip_adapter_image_embeds", "negative_ip_adapter_image_embeds")
}
HUNYUAN = {"attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}
QWEN = {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
GUIDED = {"prompt": "a cat", "negative_prompt": LONG}

SITUATIONS = {
    "strength of an IP-Adapter": Situation(
        "flux-ip-adapter",
        ((nothing, PICTURE), (lambda pipe: pipe.set_ip_adapter_scale(0.2), PICTURE), (nothing, PICTURE)),
    ),
    "strength of a LoRA": changed(
        "flux",
        adapter(ADAPTERS["lora"]),
        lambda pipe: pipe.transformer.set_adapters("style", 0.5),
        without_adapters,
        with_adapters,
    ),
    **{
        f"{name} taken off and put on": changed(
            # BOFT keeps a matrix on the CPU, so that a GPU's steps are not captured
            "flux",
            adapter(config),
            without_adapters,
            with_adapters,
            replays=name != "boft",
        )
        for name, config in ADAPTERS.items()
        if name != "lora"
    },
    "an argument's scale": called("flux", *({"joint_attention_kwargs": {"scale": scale}} for scale in (1.0, 0.5, 1.0))),
    "epsilon of a norm": changed("flux", set_value("norm_out.norm.eps", 0.5)),
    "numbers in a nested attribute": changed("flux", scaled_layer, other_factor),
    "processors": changed("flux", new_processors),
    "a buffer": changed("sd3", scale_buffer),
    "a weight": changed("flux", scale_weight, scale_weight_in_place),
    "training mode": changed("flux", lambda pipe: pipe.transformer.train(), lambda pipe: pipe.transformer.eval()),
    "dtypes": changed("flux", cast(torch.float64), cast(torch.float32)),
    "sizes": called("flux", *({"height": side, "width": 64} for side in (64, 96, 64))),
    "strengths of a ControlNet": called(
        "flux-controlnet", *({"controlnet_conditioning_scale": scale} for scale in (1.0, 0.3, 1.0))
    ),
    "a part of a ControlNet's run": called("flux-controlnet", {"control_guidance_end": 0.5}, {}),
    "guidance": called(
        "qwen-image", *({"true_cfg_scale": scale, "negative_prompt": "rain"} for scale in (4.0, 1.0, 2.0))
    ),
    "lengths of prompts": called(
        "qwen-image",
        *({"prompt": prompt} for prompt in ("a red fox", "a cat in snow", "a cat in snow")),
        preset=load_preset("exact", skip=TILES),
        config=QWEN,
    ),
    "guided, then not": called(
        "hunyuan",
        {**GUIDED, "true_cfg_scale": 3.0},
        {**GUIDED, "true_cfg_scale": 1.0},
        {"prompt": LONG},
        {"prompt": LONG},
        config=HUNYUAN,
    ),
    "batches": called("flux", {"prompt": ["a cat", "a dog"]}, {}, {"prompt": ["a cat", "a dog"]}),
    "layers in 8 bits": changed(
        "flux", scale_weight_in_place, scale_weight, preset=load_preset("exact", linear={"dtype": "int8"})
    ),
    "inference mode": changed(
        "flux", *(lambda pipe, wanted=wanted: setattr(pipe, "is_in_inference_mode", wanted) for wanted in (True, False))
    ),
    "deterministic algorithms": changed("flux", lambda _: deterministic(True), lambda _: deterministic(False)),
    "forecasts": called("wan", {}, {}, {}, preset=load_preset("video-turbo", model="wan", skip=TILES)),
}


def build(situation: Situation, device: str, dtype: torch.dtype) -> Any:
    """Build the tiny pipeline of a situation."""
    pipe = tiny_pipeline(situation.family)
    if situation.config:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            kind = type(pipe.transformer)
            pipe.transformer = kind.from_config({**pipe.transformer.config, **situation.config}).eval()
            redraw(pipe.transformer)
    return pipe.to(device, dtype)


def differences(situation: Situation, device: str, dtype: torch.dtype) -> list[str]:
    """List the runs in which captured steps differ from steps that were never captured, and the difference."""
    with patch.object(linear_trial, "TIMED", ()):  # layers in 8 bits stay, also where they are slower
        plain, replayed = (runs(situation, device, dtype, graphs) for graphs in ("never", "always"))
    wrong = []
    for number, rows in enumerate(zip(plain, replayed, strict=True), 1):
        wrong += [f"run {number}: {what}" for what in COMPARED if not _same(*(row[what] for row in rows))]
    if situation.replays and not replayed[-1]["replayed"]:
        wrong.append(f"nothing was replayed in the last run: {replayed[-1]['notes']}")
    return wrong


def runs(situation: Situation, device: str, dtype: torch.dtype, graphs: str) -> list[dict[str, Any]]:
    """Results of a situation's runs with `kernels.graphs` set to ``graphs``."""
    with BUILDING:
        pipe = accelerate_pipeline(build(situation, device, dtype), situation.preset, **{"kernels.graphs": graphs})
    rows = []
    for change, arguments in situation.runs:
        change(pipe)
        arguments = tree_map_only(torch.Tensor, lambda values: values.to(device, dtype), dict(arguments))
        with torch.inference_mode() if getattr(pipe, "is_in_inference_mode", False) else nullcontext():
            output = tiny_output(pipe, situation.family, steps=STEPS, **arguments)
        rows.append(_row(pipe, output))
    return rows


def threads(device: str, dtype: torch.dtype) -> list[str]:
    """Run pipelines in two threads that capture at the same time; on a GPU each has its own stream."""
    situation, found = SITUATIONS["sizes"], {}
    expected = runs(situation, device, dtype, "never")

    def work(place: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        with stream, torch.no_grad():
            found[place] = runs(situation, device, dtype, "always")

    started = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    wrong = [f"thread {place} raised" for place in range(2) if place not in found]
    for place, rows in found.items():
        equal = all(_same(a["output"], b["output"]) for a, b in zip(expected, rows, strict=True))
        wrong += [] if equal and rows[-1]["replayed"] else [f"thread {place}: equal {equal}, {rows[-1]['notes']}"]
    return wrong


def streams(device: str, dtype: torch.dtype) -> list[str]:
    """Start runs of one pipeline on another stream while the previous one still computes; a CPU has no streams."""
    side, steps = (512, 30) if device == "cuda" else (64, 6)
    pipe = accelerate_pipeline(tiny_pipeline("flux").to(device, dtype), "exact", **{"kernels.graphs": "always"})

    def run(seed: int) -> torch.Tensor:
        return tiny_output(pipe, "flux", steps=steps, seed=seed, height=side, width=side)

    run(0)
    alone, together = [run(0), run(1)], []
    for seed in (0, 1):
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            together.append(run(seed))
    if device == "cuda":
        torch.cuda.synchronize()
    return [f"seed {seed}" for seed in (0, 1) if not torch.equal(alone[seed], together[seed])]


def _row(pipe: Any, output: torch.Tensor) -> dict[str, Any]:
    report = pipe.dit_accel.report()
    return {
        "output": torch.as_tensor(output).cpu(),
        "symbols": {
            name: [item.cpu() for item in symbols.tensors()] for name, symbols in pipe.dit_accel.symbols().items()
        },
        "steps": [(step.mode, step.error) for step in report.steps],
        "fallbacks": report.fallbacks,
        "replayed": report.replayed,
        "notes": report.notes,
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
