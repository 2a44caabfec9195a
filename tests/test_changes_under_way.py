"""Runs that change one thing midway, compared with plain runs that change the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from dit_accel import accelerated
from tests.rounding import distance
from tests.tiny import PROMPT, tiny_output, tiny_pipeline

STEPS = 16
# Arguments that turn classifier-free guidance on, and off.
GUIDANCE = {
    "flux": ({"negative_prompt": "blurred", "true_cfg_scale": 2.0}, {}),
    "flux-controlnet": ({}, {}),
    "flux-ip-adapter": ({}, {}),
    "sd3": ({"negative_prompt": "blurred"}, {"guidance_scale": 1.0}),
    "qwen-image": ({}, {"true_cfg_scale": 1.0}),
    "wan": ({}, {"guidance_scale": 1.0}),
    "ltx": ({}, {"guidance_scale": 1.0}),
    "hunyuan": ({"negative_prompt": "blurred", "true_cfg_scale": 3.0}, {}),
}
SLACK = 0.02  # relative error of a changed run beyond three times that of an unchanged one


def noise_like(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


@dataclass(frozen=True)
class Change:
    """Something that a callback may change between two steps, by a strength from 0 to 1, with its ``tensors``.

    ``prepare`` makes a pipeline ready once, and ``begin`` puts it back to where each run begins.
    """

    apply: Callable
    tensors: tuple[str, ...] = ()
    prepare: Callable = lambda pipe: None
    begin: Callable = lambda pipe: None


def replaces(name):
    def apply(pipe, tensors, strength):
        tensors[name] = tensors[name] + strength * noise_like(tensors[name], seed=1)

    return apply


def writes_to(name):
    def apply(pipe, tensors, strength):
        tensors[name].add_(noise_like(tensors[name], seed=1), alpha=strength)

    return apply


def ends_guidance(pipe, tensors, strength):
    """End guidance as in diffusers' guide: the scale becomes 0, and only the prompt's half continues."""
    if pipe._guidance_scale > 1:
        pipe._guidance_scale = 0.0
        for name in ("prompt_embeds", "pooled_prompt_embeds"):
            tensors[name] = tensors[name].chunk(2)[-1]


def add_adapters(pipe):
    config = pytest.importorskip("peft").LoraConfig
    settings = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q", "to_v", "to_out.0"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name in ("one", "two"):
            pipe.transformer.add_adapter(config(**settings), adapter_name=name)


def first_adapter(pipe):
    pipe.transformer.enable_adapters()
    pipe.transformer.set_adapters("one", 1.0)


def mutes_adapters(pipe, tensors, strength):
    layer = next(item for item in pipe.transformer.modules() if hasattr(item, "_disable_adapters"))
    (pipe.transformer.enable_adapters if layer._disable_adapters else pipe.transformer.disable_adapters)()


def unmerged(pipe):
    """Subtracting merged weights leaves rounding errors, so the weights are restored too."""
    weights = {name: item for name, item in pipe.transformer.named_modules() if hasattr(item, "base_layer")}
    for layer in weights.values():
        if not hasattr(layer, "kept"):
            layer.kept = layer.base_layer.weight.detach().clone()
    if any(layer.merged_adapters for layer in weights.values()):
        pipe.transformer.unfuse_lora()
    with torch.no_grad():
        for layer in weights.values():
            layer.base_layer.weight.copy_(layer.kept)
    first_adapter(pipe)


def scales_by_arguments(pipe, tensors, strength):
    """Scales in pipelines' attention arguments; some pipelines read them once, before their loop."""
    for name in ("_joint_attention_kwargs", "_attention_kwargs"):
        if hasattr(pipe, name):
            setattr(pipe, name, {"scale": strength})


def keep_weight(pipe):
    pipe.transformer.proj_out.kept = pipe.transformer.proj_out.weight.detach().clone()


def first_weight(pipe):
    with torch.no_grad():
        pipe.transformer.proj_out.weight.copy_(pipe.transformer.proj_out.kept)


def replaces_weight(pipe, tensors, strength):
    layer = pipe.transformer.proj_out
    layer.weight = torch.nn.Parameter(layer.kept * (1 + strength))


ADAPTER = {"prepare": add_adapters, "begin": first_adapter}
CHANGES = {
    "prompt": Change(replaces("prompt_embeds"), ("prompt_embeds",)),
    "prompt-in-place": Change(writes_to("prompt_embeds"), ("prompt_embeds",)),
    "negative-prompt": Change(replaces("negative_prompt_embeds"), ("negative_prompt_embeds",)),
    "pooled-prompt": Change(replaces("pooled_prompt_embeds"), ("pooled_prompt_embeds",)),
    "guidance": Change(lambda pipe, _, strength: setattr(pipe, "_guidance_scale", 1.5 + 5 * strength)),
    "guidance-on-and-off": Change(
        lambda pipe, *_: setattr(pipe, "_guidance_scale", 1.0 if pipe._guidance_scale > 1 else 4.0)
    ),
    "guidance-ends": Change(ends_guidance, ("prompt_embeds", "pooled_prompt_embeds")),
    "adapter-scale": Change(lambda pipe, _, strength: pipe.transformer.set_adapters("one", 1 - strength), **ADAPTER),
    "adapter-switched": Change(
        lambda pipe, *_: pipe.transformer.set_adapters(
            {"one": "two", "two": "one"}[pipe.transformer.active_adapters()[0]], 1.0
        ),
        **ADAPTER,
    ),
    "adapters-off-and-on": Change(mutes_adapters, **ADAPTER),
    "adapter-merged": Change(
        lambda pipe, _, strength: pipe.transformer.fuse_lora(lora_scale=strength, adapter_names=["one"]),
        prepare=add_adapters,
        begin=unmerged,
    ),
    "adapter-scale-by-arguments": Change(scales_by_arguments, **ADAPTER),
    "picture-scale": Change(
        lambda pipe, _, strength: pipe.set_ip_adapter_scale(strength), begin=lambda pipe: pipe.set_ip_adapter_scale(0.4)
    ),
    "weight-replaced": Change(replaces_weight, prepare=keep_weight, begin=first_weight),
    "control-picture": Change(replaces("control_image"), ("control_image",)),
    "control-picture-in-place": Change(writes_to("control_image"), ("control_image",)),
}
MADE_TWICE = [  # pipeline, kind of the change, and the condition that the report names
    ("flux", "prompt", "encoder_hidden_states"),
    ("flux", "prompt-in-place", "encoder_hidden_states"),
    ("flux", "adapter-scale", "adapters"),
    ("flux", "adapter-switched", "adapters"),
    ("flux", "adapters-off-and-on", "adapters"),
    ("flux", "adapter-scale-by-arguments", "joint_attention_kwargs[0]"),
    ("flux", "weight-replaced", "weights"),
    ("flux-controlnet", "control-picture", "controlnet_cond of the ControlNet"),
    ("flux-controlnet", "control-picture-in-place", "controlnet_cond of the ControlNet"),
    ("flux-ip-adapter", "picture-scale", "adapters"),
    ("hunyuan", "guidance", "guidance_scale of HunyuanVideoPipeline"),
    ("qwen-image", "prompt", "encoder_hidden_states"),
    ("sd3", "pooled-prompt", "pooled_projections"),
    ("sd3", "guidance-ends", "shapes or return_dict"),
    ("sd3", "adapter-merged", "adapters"),
    ("wan", "negative-prompt", "encoder_hidden_states"),
    ("wan", "guidance-on-and-off", "guidance_scale of WanPipeline"),
]


def run(pipe, name, guided, callback, tensors=(), **arguments):
    """Latents of a run."""
    asked = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", *tensors]}
    return tiny_output(pipe, name, **{"steps": STEPS} | GUIDANCE[name][not guided] | asked | arguments)


@pytest.mark.parametrize(("name", "kind", "noted"), MADE_TWICE)
def test_a_change_costs_no_more_than_the_step_it_falls_in(name, kind, noted):
    """It is made twice, right before steps that are forecast otherwise: they are computed, and the report names it.

    The run is about as near to the plain one as without the change.
    """
    pipe, change = tiny_pipeline(name), CHANGES[kind]
    change.prepare(pipe)

    def output(at):
        def callback(pipe, step, timestep, tensors):
            if step in at:
                change.apply(pipe, tensors, 0.7 if step == at[0] else 0.2)
            return tensors

        change.begin(pipe)
        return run(pipe, name, True, callback, change.tensors)

    plain = output(())
    with accelerated(pipe, "turbo"):
        unchanged, usual = distance(output(()), plain), pipe.dit_accel.report()
        modes = [step.mode for step in usual.steps]
        first = modes.index("dispatch", 4)
        forecast = first, modes.index("dispatch", first + 4)
        before = tuple(step - 1 for step in forecast)
        changed, report = output(before), pipe.dit_accel.report()
    plain_changed = output(before)
    assert not [note for note in usual.notes if "dropped" in note]
    assert "dispatch" not in [report.steps[step].mode for step in forecast] and report.steps_by_mode["dispatch"]
    assert f"{noted} changed at step {first}: caches dropped" in report.notes
    assert distance(plain_changed, plain) > 0.001 or kind == "guidance"  # which HunyuanVideo reads before its loop
    assert distance(changed, plain_changed) <= 3 * unchanged + 2 * SLACK


REPLACING: dict[str, Any] = {  # pipeline, guidance, preset, arguments, and the share of the latents that is replaced
    "flux": ("flux", False, {}, {}, 0.1),
    "flux-layer": ("flux", False, {"level": "layer"}, {}, 1.0),
    "sd3-guided-batch": ("sd3", True, {}, {"prompt": [PROMPT, "an owl"], "negative_prompt": ["blurred"] * 2}, 1.0),
    "wan-guided": ("wan", True, {}, {}, 0.1),
    "ltx": ("ltx", False, {}, {}, 1.0),
    "qwen-image-prompts": ("qwen-image", False, {"per_prompt": True}, {"prompt": [PROMPT, "an owl"]}, 0.1),
}


@pytest.mark.parametrize(("name", "guided", "keys", "arguments", "share"), REPLACING.values(), ids=REPLACING)
def test_replaced_latents_have_the_effect_of_a_reset(name, guided, keys, arguments, share):
    """A callback that replaces a share of the latents once gets the run that it would get with a reset there."""
    pipe = tiny_pipeline(name)
    # UniPC, Wan's own scheduler, goes back to its earlier latents one step after a replacement.
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()

    def result(resets):
        def callback(pipe, step, timestep, tensors):
            if step == 7:
                latents, sigma = tensors["latents"], float(pipe.scheduler.sigmas[step + 1])
                other = sigma * noise_like(latents, 1) + (1 - sigma) * noise_like(latents, 2).abs()
                end = round(latents.shape[1 if latents.ndim == 3 else -1] * share)
                part = (slice(None), slice(end)) if latents.ndim == 3 else (..., slice(end))
                tensors["latents"] = latents.clone()
                tensors["latents"][part] = other[part]
                if resets:
                    pipe.dit_accel.reset()
            return tensors

        latents, report = run(pipe, name, guided, callback, **arguments), pipe.dit_accel.report()
        return latents, [step.mode for step in report.steps][-8:], report.notes

    with accelerated(pipe, "turbo", **keys):
        (found, modes, notes), (right, right_modes, _) = result(resets=False), result(resets=True)
    assert "latents changed at step 8: caches dropped" in notes and modes == right_modes
    torch.testing.assert_close(found, right)
