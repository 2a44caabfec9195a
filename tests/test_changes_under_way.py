"""Runs that randomly change one thing midway, compared with plain runs that change the same way.

The long run: ``CHANGED_RUNS=300 pytest tests/test_changes_under_way.py``. ``CHANGED_RUNS=300-500`` uses other cases.
"""

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from dit_accel import accelerate_pipeline, restore_pipeline
from tests.tiny import PROMPT, tiny_output, tiny_pipeline

first, _, last = os.environ.get("CHANGED_RUNS", "4").rpartition("-")
SEEDS = range(int(first or 0), int(last))

# Arguments that turn classifier-free guidance on, and off.
GUIDANCE = {
    "flux": ({"negative_prompt": "blurred", "true_cfg_scale": 2.0}, {}),
    "flux-controlnet": ({}, {}),
    "flux-ip-adapter": ({}, {}),
    "sd3": ({}, {"guidance_scale": 1.0}),
    "qwen-image": ({}, {"true_cfg_scale": 1.0}),
    "wan": ({}, {"guidance_scale": 1.0}),
    "ltx": ({}, {"guidance_scale": 1.0}),
    "mochi": ({}, {"guidance_scale": 1.0}),
    "hunyuan": ({"negative_prompt": "blurred", "true_cfg_scale": 3.0}, {}),
}
MOST = tuple(name for name in GUIDANCE if "-control" not in name and "-ip-" not in name)
PRESETS = {
    "exact": {"preset": "exact"},
    "balanced": {"preset": "balanced"},
    "turbo": {"preset": "turbo"},
    "layer": {"preset": "turbo", "level": "layer"},
    "interval": {"preset": "exact", "schedule": {"control": "interval", "warmup": 2, "interval": 2}},
    "per-prompt": {"preset": "turbo", "per_prompt": True},
}
SLACK = 0.02  # relative error of a changed run, for each change, beyond three times that of an unchanged one


def noise_like(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


@dataclass(frozen=True)
class Change:
    """Something that a callback may change between two steps.

    Args:
        apply: makes the change; it gets the pipeline, the callback's tensors, and a strength from 0 to 1.
        tensors: of the pipeline that the callback asks for.
        families: tiny pipelines that know the change.
        guided: whether it needs guidance.
        often: how often it may be made in a run. What is on and off by turns at every step is two things to forecast.
        prepare: makes a pipeline ready for the change, once.
        begin: puts a pipeline back to where each run begins.
    """

    apply: Callable
    tensors: tuple[str, ...] = ()
    families: tuple[str, ...] = MOST
    guided: bool | None = None
    often: tuple[str, ...] = ("once", "once", "several", "every step")
    prepare: Callable = field(default=lambda pipe: None)
    begin: Callable = field(default=lambda pipe: None)


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


def adds_adapter(pipe, tensors, strength):
    add_adapters(pipe)
    first_adapter(pipe)


def without_adapters(pipe):
    if getattr(pipe.transformer, "peft_config", None):
        pipe.transformer.delete_adapters(["one", "two"])


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


@torch.no_grad()
def writes_to_weight(pipe, tensors, strength):
    layer = pipe.transformer.proj_out
    layer.weight.copy_(layer.kept * (1 + strength))


def replaces_weight(pipe, tensors, strength):
    layer = pipe.transformer.proj_out
    layer.weight = torch.nn.Parameter(layer.kept * (1 + strength))


WEIGHT = {"prepare": keep_weight, "begin": first_weight}
ADAPTER = {"prepare": add_adapters, "begin": first_adapter}
CONTROL = {"tensors": ("control_image",), "families": ("flux-controlnet",)}
CHANGES = {
    "prompt": Change(replaces("prompt_embeds"), ("prompt_embeds",)),
    "prompt-in-place": Change(writes_to("prompt_embeds"), ("prompt_embeds",)),
    "negative-prompt": Change(replaces("negative_prompt_embeds"), ("negative_prompt_embeds",), ("wan",), guided=True),
    "pooled-prompt": Change(replaces("pooled_prompt_embeds"), ("pooled_prompt_embeds",), ("sd3",)),
    "guidance": Change(turns_guidance, guided=True),
    "guidance-on-and-off": Change(toggles_guidance, families=("wan",), guided=True, often=("once", "several")),
    "guidance-ends": Change(
        ends_guidance, ("prompt_embeds", "pooled_prompt_embeds"), ("sd3",), guided=True, often=("once",)
    ),
    "adapter-scale": Change(scales_adapter, **ADAPTER),
    "adapter-switched": Change(switches_adapter, often=("once", "several"), **ADAPTER),
    "adapters-off-and-on": Change(mutes_adapters, often=("once", "several"), **ADAPTER),
    "adapter-added": Change(adds_adapter, often=("once",), begin=without_adapters),
    "adapter-merged": Change(merges_adapter, often=("once",), prepare=add_adapters, begin=unmerged),
    "adapter-scale-by-arguments": Change(scales_by_arguments, families=("flux", "sd3", "qwen-image"), **ADAPTER),
    "picture-scale": Change(scales_pictures, families=("flux-ip-adapter",), begin=picture_scale_of_begin),
    "weight-in-place": Change(writes_to_weight, **WEIGHT),
    "weight-replaced": Change(replaces_weight, **WEIGHT),
    "control-picture": Change(replaces("control_image"), **CONTROL),
    "control-picture-in-place": Change(writes_to("control_image"), **CONTROL),
}


class Case:
    """A random pipeline with its arguments and a preset."""

    def __init__(self, choose, names=MOST, guided=None):
        self.name = choose.choice(names)
        self.preset = choose.choice(list(PRESETS))
        self.batch = choose.choice([1, 1, 2])
        self.guided = choose.random() < 0.5 if guided is None else guided
        self.steps = choose.randint(12, 20)
        self.pipe = tiny_pipeline(self.name)

    def __str__(self):
        kind = "guided" if self.guided else "unguided"
        return f"{self.name} {kind} under {self.preset}, batch of {self.batch}, {self.steps} steps"

    def run(self, callback=None, tensors=(), **arguments):
        """Latents of a run."""
        prompts = [PROMPT, "an owl"][: self.batch]
        inputs = {"prompt": prompts, "steps": self.steps, **GUIDANCE[self.name][not self.guided], **arguments}
        if self.name == "qwen-image" or "negative_prompt" in inputs:
            inputs["negative_prompt"] = ["blurred"] * self.batch
        if callback is not None:
            asked = ["latents", *tensors]
            inputs |= {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": asked}
        return tiny_output(self.pipe, self.name, **inputs)

    def accelerate(self, **changes):
        accelerate_pipeline(self.pipe, **{**PRESETS[self.preset], **changes})


REPLACING = {  # pipeline, guidance, preset, batch, and the share of the latents that is replaced
    "flux": ("flux", False, "balanced", 1, 0.1),
    "flux-layer": ("flux", False, "layer", 1, 1.0),
    "flux-guided": ("flux", True, "turbo", 1, 0.1),
    "sd3-guided-batch": ("sd3", True, "turbo", 2, 1.0),
    "wan-guided": ("wan", True, "turbo", 1, 0.1),
    "ltx": ("ltx", False, "balanced", 1, 1.0),
    "qwen-image-prompts": ("qwen-image", False, "per-prompt", 2, 0.1),
    "flux-all": ("flux", False, "balanced", 1, 1.0),
}


@pytest.mark.parametrize("name, guided, preset, batch, share", REPLACING.values(), ids=REPLACING)
def test_replaced_latents_have_the_effect_of_a_reset(name, guided, preset, batch, share):
    """A callback that replaces a share of the latents once gets the run that it would get with a reset there."""
    case = Case(random.Random(0), (name,), guided)
    case.preset, case.batch, case.steps = preset, batch, 16
    # UniPC, Wan's own scheduler, goes back to its earlier latents one step after a replacement.
    case.pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    case.accelerate()

    def run(resets):
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

        latents, report = case.run(callback), case.pipe.dit_accel.report()
        return latents, [step.mode for step in report.steps][-8:], report.notes

    (found, modes, notes), (right, right_modes, _) = run(resets=False), run(resets=True)
    assert "latents changed at step 8: caches dropped" in notes
    assert modes == right_modes
    torch.testing.assert_close(found, right)


def relative_error(latents, plain):
    assert latents.isfinite().all()
    return float((latents - plain).norm() / plain.norm())


def check_numbers(report):
    """Every number that the loop has measured is one."""
    assert all(math.isfinite(step.error) for step in report.steps if step.error is not None)
    assert all(math.isfinite(share) for layer in report.density for share in layer if share is not None)
    assert math.isfinite(report.computed_fraction)


def check_error(case, changed, unchanged, changes=1):
    print(f"error {changed:.4f}, unchanged {unchanged:.4f}")
    assert changed <= 3 * unchanged + SLACK * changes, f"{case}: error {changed:.4f}, unchanged {unchanged:.4f}"


def check_change(choose):
    """One change by callbacks, once, several times, or at every step from one on."""
    kind = choose.choice(list(CHANGES))
    change = CHANGES[kind]
    case = Case(choose, change.families, change.guided)
    often = choose.choice(change.often)
    when = sorted(choose.sample(range(case.steps - 1), {"once": 1, "several": 3, "every step": 1}[often]))
    if often == "every step":
        when = list(range(when[0], case.steps))
    start, end = choose.uniform(0.1, 1), choose.uniform(0.1, 1)
    strengths = {step: start + (end - start) * place / len(when) for place, step in enumerate(when)}
    if often == "every step" and kind in ("prompt", "prompt-in-place", "negative-prompt", "pooled-prompt"):
        strengths = {step: strength / len(when) for step, strength in strengths.items()}
    print(f"{kind} at {when} in {case}")
    change.prepare(case.pipe)

    def callback(pipe, step, timestep, tensors):
        if step in strengths:
            change.apply(pipe, tensors, strengths[step])
        return tensors

    def run(callback=None):
        change.begin(case.pipe)
        return case.run(callback, change.tensors)

    check(case, run, callback, [step + 1 for step in when])


def check_control_window(choose):
    """A ControlNet that counts in a part of the steps."""
    case = Case(choose, ("flux-controlnet",))
    start, end = sorted(round(choose.random(), 2) for _ in range(2))
    arguments = {"controlnet_conditioning_scale": choose.choice([0.3, 1.0, 2.0])}
    window = {"control_guidance_start": start, "control_guidance_end": end}
    counts = [not (step / case.steps < start or (step + 1) / case.steps > end) for step in range(case.steps)]
    when = [step for step in range(1, case.steps) if counts[step] != counts[step - 1]]
    print(f"ControlNet from {start} to {end}, which is a change at {when} in {case}")
    check(case, lambda changed=None: case.run(**arguments, **(changed or {})), window, when)


def check(case, run, changed, when):
    """A run with a change is as good as one without, and computes the steps of the change."""
    pipe = case.pipe
    plain, plain_changed = run(), run(changed)
    case.accelerate()
    unchanged = relative_error(run(), plain)
    assert not [note for note in pipe.dit_accel.report().notes if "dropped" in note]
    latents = run(changed)
    report = pipe.dit_accel.report()
    check_numbers(report)
    print(report.steps_by_mode, report.notes)
    if case.preset == "exact":
        assert torch.equal(latents, plain_changed)
    else:
        # An item that differs twice in a row may differ at every step, and then belongs to the step.
        apart = [step for step in when if step < case.steps and step - 1 not in when]
        assert all(report.steps[step].mode != "dispatch" for step in apart)
        if when and 2 < when[0] < case.steps:
            assert any(note.endswith(f"changed at step {when[0]}: caches dropped") for note in report.notes)
        check_error(case, relative_error(latents, plain_changed), unchanged, max(1, len(apart)))
    restore_pipeline(pipe)
    assert torch.equal(run(changed), plain_changed)


def check_next_run(choose):
    """A run of another size, number of steps, dtype or preset equals that of a pipeline accelerated for it exactly."""
    case = Case(choose)
    pipe = case.pipe.to(torch.bfloat16).to(torch.float32)  # so that other dtypes lose nothing
    sizes = [{}, {"height": 64, "width": 96}, {"height": 128, "width": 96}]
    dtypes, presets = [torch.float32, torch.float64, torch.bfloat16], list(PRESETS)
    settings = []
    for _ in range(3):
        now = dict(settings[-1]) if settings else {"size": {}, "steps": case.steps, "dtype": dtypes[0]}
        now.setdefault("preset", case.preset)
        match choose.choice(list(now)):
            case "size":
                now["size"] = choose.choice(sizes)
            case "steps":
                now["steps"] = choose.randint(4, 20)
            case "dtype":
                now["dtype"] = choose.choice(dtypes)
            case "preset":
                now["preset"] = choose.choice(presets)
        settings.append(now)
    print(f"runs of {settings} in {case}")

    def run(now):
        pipe.to(now["dtype"])
        return case.run(steps=now["steps"], **now["size"])

    plain = [run(now) for now in settings]
    fresh = []
    for now in settings:
        case.preset = now["preset"]
        pipe.to(now["dtype"])
        case.accelerate()
        fresh.append(run(now))
        restore_pipeline(pipe)
    for place, now in enumerate(settings):
        if place == 0 or now["preset"] != settings[place - 1]["preset"]:
            case.preset = now["preset"]
            case.accelerate()
        latents = run(now)
        check_numbers(pipe.dit_accel.report())
        assert torch.equal(latents, fresh[place])
        assert now["preset"] != "exact" or torch.equal(latents, plain[place])
    restore_pipeline(pipe)
    assert torch.equal(run(settings[0]), plain[0])


KINDS = [*[check_change] * 5, check_control_window, check_next_run]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed-{seed}")
def test_a_change_costs_no_more_than_the_step_it_falls_in(seed):
    choose = random.Random(seed)
    choose.choice(KINDS)(choose)
