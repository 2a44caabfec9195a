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
    """Something that a callback may change between two steps.

    Args:
        apply: makes the change; it gets the pipeline, the callback's tensors, and a strength from 0 to 1.
        tensors: of the pipeline that the callback asks for.
        prepare: makes a pipeline ready for the change, once.
        begin: puts a pipeline back to where each run begins.
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


def turns_guidance(pipe, tensors, strength):
    """Set another guidance strength, whether or not the pipeline still reads it."""
    pipe._guidance_scale = 1.5 + 5 * strength


def toggles_guidance(pipe, tensors, strength):
    pipe._guidance_scale = 1.0 if pipe._guidance_scale > 1 else 4.0


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


def scales_adapter(pipe, tensors, strength):
    pipe.transformer.set_adapters("one", 1 - strength)


def switches_adapter(pipe, tensors, strength):
    pipe.transformer.set_adapters("two" if pipe.transformer.active_adapters() == ["one"] else "one", 1.0)


def mutes_adapters(pipe, tensors, strength):
    layer = next(item for item in pipe.transformer.modules() if hasattr(item, "_disable_adapters"))
    (pipe.transformer.enable_adapters if layer._disable_adapters else pipe.transformer.disable_adapters)()


def merges_adapter(pipe, tensors, strength):
    pipe.transformer.fuse_lora(lora_scale=strength, adapter_names=["one"])


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


def scales_pictures(pipe, tensors, strength):
    pipe.set_ip_adapter_scale(strength)


def picture_scale_of_begin(pipe):
    pipe.set_ip_adapter_scale(0.7)


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
    "guidance": Change(turns_guidance),
    "guidance-on-and-off": Change(toggles_guidance),
    "guidance-ends": Change(ends_guidance, ("prompt_embeds", "pooled_prompt_embeds")),
    "adapter-scale": Change(scales_adapter, **ADAPTER),
    "adapter-switched": Change(switches_adapter, **ADAPTER),
    "adapters-off-and-on": Change(mutes_adapters, **ADAPTER),
    "adapter-merged": Change(merges_adapter, prepare=add_adapters, begin=unmerged),
    "adapter-scale-by-arguments": Change(scales_by_arguments, **ADAPTER),
    "picture-scale": Change(scales_pictures, begin=picture_scale_of_begin),
    "weight-replaced": Change(replaces_weight, prepare=keep_weight, begin=first_weight),
    "control-picture": Change(replaces("control_image"), ("control_image",)),
    "control-picture-in-place": Change(writes_to("control_image"), ("control_image",)),
}
MADE_TWICE = {  # pipeline and kind of the change, at steps 6 and 10
    "flux": ("prompt", "adapter-switched", "adapters-off-and-on", "adapter-scale-by-arguments"),
    "wan": ("guidance-on-and-off",),
    "sd3": ("guidance-ends", "adapter-merged"),
}


def run(pipe, name, guided, callback, tensors=(), **arguments):
    """Latents of a run."""
    asked = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", *tensors]}
    return tiny_output(pipe, name, **{"steps": STEPS} | GUIDANCE[name][not guided] | asked | arguments)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in MADE_TWICE.items() for kind in kinds])
def test_a_change_costs_no_more_than_the_step_it_falls_in(name, kind):
    """The step after it is computed, and the run is about as near to the plain one as without the change."""
    pipe, change = tiny_pipeline(name), CHANGES[kind]
    change.prepare(pipe)

    def output(at):
        def callback(pipe, step, timestep, tensors):
            if step in at:
                change.apply(pipe, tensors, 0.7 if step == at[0] else 0.2)
            return tensors

        change.begin(pipe)
        return run(pipe, name, True, callback, change.tensors)

    plain, plain_changed = output(()), output((6, 10))
    with accelerated(pipe, "turbo"):
        unchanged = distance(output(()), plain)
        assert not [note for note in pipe.dit_accel.report().notes if "dropped" in note]
        changed = output((6, 10))
        report = pipe.dit_accel.report()
    assert "dispatch" not in (report.steps[7].mode, report.steps[11].mode) and report.steps_by_mode["dispatch"]
    assert any(note.endswith("changed at step 7: caches dropped") for note in report.notes)
    assert distance(plain_changed, plain) > 0.001
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
                latents = tensors["latents"]
                sigma = float(pipe.scheduler.sigmas[step + 1])
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
    assert "latents changed at step 8: caches dropped" in notes
    assert modes == right_modes
    torch.testing.assert_close(found, right)
