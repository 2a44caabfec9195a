"""The closed loop around the model that ComfyUI's samplers call, held to a stand-in of ComfyUI's contract."""

import copy
import importlib.util
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.tools.comfyui import KEY, AccelerateNode, ReportNode, accelerate_model, output_presets

ROOT = Path(__file__).parents[2]
STEPS = 24
FLOW, NOISE = 1.0, 14.6  # largest noise level of a flow, and of a model that predicts noise
pytestmark = pytest.mark.filterwarnings("ignore:dit-accel")  # plain runs warn


class Model:
    """A smooth denoiser: a mixture of two images, weighted by the latents' distance from each."""

    def __init__(self, sigma_max: float) -> None:
        self.model_sampling = SimpleNamespace(sigma_max=torch.tensor(sigma_max))
        self.pictures = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
        self.calls: list[int] = []  # size of the batch of each
        self.current_patcher = SimpleNamespace(current_hooks=None)

    def apply_model(self, latents, sigma, prompt=0.0, control=None, transformer_options=None):
        self.calls.append(len(latents))
        if control is not None:
            prompt = prompt + control["output"][0].mean()
        if self.current_patcher.current_hooks is not None:
            prompt = prompt + sum(hook.strength for hook in self.current_patcher.current_hooks.hooks)
        noise = sigma.view(-1, 1, 1, 1)
        kept = 1 - noise if float(self.model_sampling.sigma_max) == FLOW else 1.0
        distances = [((latents - kept * picture) ** 2).mean((1, 2, 3)) for picture in self.pictures]
        share = torch.sigmoid((distances[1] - distances[0]) / (0.1 + sigma**2) + prompt).view(-1, 1, 1, 1)
        return share * self.pictures[0] + (1 - share) * self.pictures[1]


class Patcher:
    """Replaces ComfyUI's ModelPatcher for the nodes: copies share the model, and copy its options deeply."""

    def __init__(self, model):
        self.model, self.model_options, self.wrappers, self.attachments = model, {"transformer_options": {}}, {}, {}

    def clone(self):
        other = Patcher(self.model)
        other.model_options = copy.deepcopy(self.model_options)
        other.wrappers = {kind: {key: [*items] for key, items in keys.items()} for kind, keys in self.wrappers.items()}
        other.attachments = dict(self.attachments)
        return other

    def set_model_unet_function_wrapper(self, wrapper):
        self.model_options["model_function_wrapper"] = wrapper

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.get(kind, {}).pop(key, None)

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def get_attachment(self, key):
        return self.attachments.get(key)


class Executor:
    """Goes through the wrappers of a sampler, and then to itself."""

    def __init__(self, sampler, wrappers):
        self.class_obj, self.wrappers = sampler, wrappers

    def __call__(self, *args):
        if self.wrappers:
            return self.wrappers[0](Executor(self.class_obj, self.wrappers[1:]), *args)
        return self.class_obj.sample(*args)


class Guider:
    """Calls the model for a sampler: with guidance both branches, in one batch or apart.

    ``batched``, of the noise level, decides on it; ``change`` changes the model and the conditions of a call.
    """

    def __init__(self, patcher, guidance=1.0, batched=lambda sigma: True, change=lambda model, conditions, sigma: None):
        self.inner_model, self.options = patcher.model, patcher.model_options
        self.guidance, self.batched, self.change = guidance, batched, change

    def __call__(self, latents, sigma, model_options=None, seed=None):
        branches = [("wanted", 1.0)] if self.guidance == 1.0 else [("wanted", 1.0), ("unwanted", -1.0)]
        parts = [branches] if self.batched(float(sigma[0])) else [[branch] for branch in branches]
        denoised = torch.cat([part for group in parts for part in self._call(latents, sigma, group, model_options)])
        if self.guidance == 1.0:
            return denoised
        wanted, unwanted = denoised.chunk(2)
        return unwanted + (wanted - unwanted) * self.guidance

    def _call(self, latents, sigma, branches, model_options):
        count = len(branches)
        prompts = torch.cat([torch.full((len(latents),), prompt) for _, prompt in branches])
        options = {**model_options["transformer_options"], "uuids": [name for name, _ in branches]}
        conditions = {"prompt": prompts, "transformer_options": options}
        self.change(self.inner_model, conditions, float(sigma[0]))
        noisy, levels = torch.cat([latents] * count), torch.cat([sigma] * count)
        arguments = {"input": noisy, "timestep": levels, "c": conditions, "cond_or_uncond": list(range(count))}
        wrapper = self.options.get("model_function_wrapper")
        if wrapper is None:
            return [self.inner_model.apply_model(noisy, levels, **conditions)]
        return [wrapper(self.inner_model.apply_model, arguments)]


class Windows(Guider):
    """Calls the model for one sample after the other, as for windows of a long video."""

    def __call__(self, latents, sigma, **others):
        windows = zip(latents.split(1), sigma.split(1), strict=True)
        return torch.cat([super(Windows, self).__call__(*window, **others) for window in windows])


class Sampler:
    def __init__(self, function):
        self.sampler_function, self.extra_options = function, {}

    def sample(self, guider, sigmas, extra_args, noise):
        return self.sampler_function(guider, noise * sigmas[0], sigmas, extra_args, None, True)


def euler(model, x, sigmas, extra_args, callback, disable):
    for sigma, following in pairwise(sigmas):
        denoised = model(x, sigma * x.new_ones(len(x)), **extra_args)
        x = x + (x - denoised) / sigma * (following - sigma)
    return x


def heun(model, x, sigmas, extra_args, callback, disable):
    for sigma, following in pairwise(sigmas):
        slope = (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma
        ahead = x + slope * (following - sigma)
        if following > 0:
            slope = (slope + (ahead - model(ahead, following * x.new_ones(len(x)), **extra_args)) / following) / 2
        x = x + slope * (following - sigma)
    return x


def ancestral(model, x, sigmas, extra_args, callback, disable):
    for sigma, following in pairwise(sigmas):
        denoised = model(x, sigma * x.new_ones(len(x)), **extra_args)
        x = denoised + following * torch.randn_like(x)
    return x


def halfway(model, x, sigmas, extra_args, callback, disable):
    """Needs images, which a trial does not have, and calls its model between the steps."""
    if x.ndim != 4:
        raise ValueError
    for sigma, following in pairwise(sigmas):
        middle = (sigma + following) / 2
        ahead = x + (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma * (middle - sigma)
        slope = (ahead - model(ahead, middle * x.new_ones(len(x)), **extra_args)) / middle
        x = x + slope * (following - sigma)
    return x


def schedule(sigma_max=FLOW, first=0, steps=STEPS):
    if sigma_max == FLOW:
        return torch.linspace(1, 0, steps + 1)[first:]
    return torch.cat([torch.logspace(math.log10(sigma_max), -1.5, steps), torch.zeros(1)])[first:]


def run(patcher, sampler=euler, sigmas=None, guider=None, seed=3, shape=(1, 4, 6, 6)):
    """Latents of one run, as ComfyUI's guider begins it."""
    sigmas = schedule(float(patcher.model.model_sampling.sigma_max)) if sigmas is None else sigmas
    guider = guider or Guider(patcher)
    options = copy.copy(patcher.model_options)
    options["transformer_options"] = {**options["transformer_options"], "sample_sigmas": sigmas}
    torch.manual_seed(seed)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    wrappers = [one for keys in patcher.wrappers.get("sampler_sample", {}).values() for one in keys]
    patcher.model.calls.clear()
    with torch.inference_mode():
        return Executor(Sampler(sampler), wrappers)(guider, sigmas, {"model_options": options, "seed": seed}, noise)


def report_of(patcher):
    return patcher.get_attachment(KEY).report()


def off(latents, reference):
    return float((latents - reference).norm() / reference.norm())


@pytest.fixture(params=[FLOW, NOISE], ids=["flow", "noise"])
def patcher(request):
    return Patcher(Model(request.param))


@pytest.fixture
def flow():
    return Patcher(Model(FLOW))


def test_exact_is_the_plain_run(patcher):
    """Preset exact changes no bit, and calls the model as often."""
    plain, calls = run(patcher), list(patcher.model.calls)
    accelerated = accelerate_model(patcher, "exact")
    assert torch.equal(run(accelerated), plain) and patcher.model.calls == calls
    assert report_of(accelerated).steps_by_mode == {"full": STEPS}


def test_steps_are_forecast(patcher):
    """The model is called in computed steps alone, and the result stays near the plain one.

    The moves of Euler's steps are known, and forecasts are corrected where the model predicts a flow.
    """
    plain, accelerated = run(patcher), accelerate_model(patcher, "quality")
    latents, report = run(accelerated), report_of(accelerated)
    assert len(patcher.model.calls) == STEPS - report.steps_by_mode["dispatch"]
    assert report.computed_fraction == len(patcher.model.calls) / STEPS < 0.8
    assert off(latents, plain) < 0.02
    assert run(patcher).equal(plain), "the model that came in stays as it is"
    corrects = not any("nothing corrected" in note for note in report.notes)
    assert corrects == (patcher.model.model_sampling.sigma_max == FLOW)


def test_the_nodes_inputs_decide_between_work_and_quality(flow):
    """A lower target computes more steps and comes nearer; 0 and -1 stand for the preset's values."""
    plain, errors, computed = run(flow), [], []
    for target, warmup in ((0.4, 3), (0.02, 3), (0.0, -1)):
        (accelerated,) = AccelerateNode().accelerate(flow, "balanced", target, warmup)
        errors.append(off(run(accelerated), plain))
        computed.append(len(flow.model.calls))
        assert warmup < 0 or [step.mode for step in report_of(accelerated).steps[:3]] == ["full"] * 3
    assert errors[0] > errors[1] and computed[0] < computed[1]
    run(accelerate_model(flow))
    assert computed[2] == len(flow.model.calls)


class VideoWithSound(Model):
    """Two streams in one tensor ``[B, 1, N]``: a video whose slope is constant, and a short sound whose slope bends."""

    SHAPES = ((1, 4, 6, 5), (1, 4, 6))  # of the streams

    def apply_model(self, latents, sigma, latent_shapes=None, **others):
        self.calls.append(len(latents))
        video, sound = latents.view(len(latents), 1, -1).split([120, 24], dim=-1)
        noise = sigma.view(-1, 1, 1)
        slopes = (self.pictures[:1].reshape(1, 1, -1)[..., :120], torch.sin(6 * noise) * torch.ones_like(sound))
        denoised = [stream - noise * slope for stream, slope in zip((video, sound), slopes, strict=True)]
        return torch.cat(denoised, dim=-1).view(latents.shape)


def test_streams_of_a_packed_tensor_are_compared_apart():
    """A long video that is easy to forecast hides no error of the short sound with it."""
    patcher, shape = Patcher(VideoWithSound(FLOW)), (1, 1, 144)

    def add_shapes(model, conditions, sigma):
        conditions["latent_shapes"] = VideoWithSound.SHAPES

    plain = run(patcher, shape=shape)
    for preset in ("exact", "balanced"):
        accelerated, whole = accelerate_model(patcher, preset), accelerate_model(patcher, preset)
        latents = run(accelerated, guider=Guider(accelerated, change=add_shapes), shape=shape)
        together = run(whole, guider=Guider(whole), shape=shape)
        assert preset != "exact" or torch.equal(latents, plain)
    assert report_of(accelerated).computed_fraction < 1
    assert off(latents[..., 120:], plain[..., 120:]) < 0.3 * off(together[..., 120:], plain[..., 120:])


GUIDERS = {  # calls of both branches in one batch, apart, and in turns; and a call for each of two samples
    "one-batch": (partial(Guider, guidance=3.0), 1),
    "apart": (partial(Guider, guidance=3.0, batched=lambda sigma: False), 1),
    "batch-falls-apart-in-the-run": (partial(Guider, guidance=3.0, batched=lambda sigma: sigma > 0.55), 1),
    "windows": (Windows, 2),
}


@pytest.mark.parametrize(("guider", "samples"), GUIDERS.values(), ids=GUIDERS)
def test_calls_of_one_step_are_forecast_from_their_own_records(flow, guider, samples):
    """Branches are told apart by their conditions, and windows, whose conditions are the same, by their order."""
    shape, accelerated = (samples, 4, 6, 6), accelerate_model(flow, "quality")
    plain = run(flow, guider=guider(flow), shape=shape)
    latents = run(accelerated, guider=guider(accelerated), shape=shape)
    assert off(latents, plain) < 0.02 and report_of(accelerated).computed_fraction < 0.9


@pytest.mark.parametrize("sampler, reason", [(heun, "more than once a step"), (ancestral, "draws noise")])
def test_other_samplers_run_plainly(patcher, sampler, reason):
    """A sampler with more than one call per step, or with noise, gives the plain result, and a note says so."""
    plain, calls = run(patcher, sampler), len(patcher.model.calls)
    accelerated = accelerate_model(patcher)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(run(accelerated, sampler), plain)
    assert len(patcher.model.calls) == calls
    assert any(f"sampler {sampler.__name__}" in note and reason in note for note in report_of(accelerated).notes)


def test_an_untried_sampler_is_known_by_its_calls(flow):
    plain, accelerated = run(flow, halfway), accelerate_model(flow)
    assert torch.equal(run(accelerated, halfway), plain)
    assert any("between steps" in note for note in report_of(accelerated).notes)


def test_runs_that_begin_in_the_middle(patcher):
    """An image-to-image run has a part of the noise levels, and is classified by its model."""
    sigmas = schedule(float(patcher.model.model_sampling.sigma_max), first=STEPS // 2)
    plain, accelerated = run(patcher, sigmas=sigmas), accelerate_model(patcher, "quality")
    assert off(run(accelerated, sigmas=sigmas), plain) < 0.02
    assert len(report_of(accelerated).steps) == STEPS - STEPS // 2


def test_a_run_after_an_interrupt_is_a_fresh_one(flow):
    def interrupted(model, x, sigmas, *others):
        euler(model, x, sigmas[: STEPS // 2], *others)
        raise KeyboardInterrupt

    fresh = run(accelerate_model(flow))
    accelerated = accelerate_model(flow)
    with pytest.raises(KeyboardInterrupt):
        run(accelerated, interrupted, seed=4)
    assert torch.equal(run(accelerated), fresh) and torch.equal(run(accelerated), fresh)


def test_copies_of_the_model_and_wrappers_that_it_had(flow):
    """ComfyUI copies a model for each node behind; a wrapper from before is called in computed steps."""
    seen = []

    def wrapper(apply_model, arguments):
        seen.append(len(arguments["input"]))
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    flow.set_model_unet_function_wrapper(wrapper)
    accelerated = accelerate_model(flow)
    again = accelerated.clone()
    run(again)
    assert seen == flow.model.calls
    assert len(seen) < STEPS and report_of(again) is report_of(accelerated)
    # A node that calls the model outside of a sampler gets the model's own output.
    latents, sigma = torch.randn(1, 4, 6, 6), torch.tensor([0.5])
    arguments = {"input": latents, "timestep": sigma, "c": {"prompt": 1.0}, "cond_or_uncond": [0]}
    outside = accelerated.model_options["model_function_wrapper"]
    assert torch.equal(outside(flow.model.apply_model, arguments), flow.model.apply_model(latents, sigma, 1.0))


def test_the_folder_for_custom_nodes(flow):
    """Objects that ComfyUI loads: classes with the attributes that it reads, from inputs to outputs."""
    spec = importlib.util.spec_from_file_location("nodes", ROOT / "integrations" / "comfyui" / "__init__.py")
    nodes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nodes)
    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(node, node.FUNCTION)) and node.INPUT_TYPES()["required"]["model"] == ("MODEL",)
    assert "balanced" in output_presets() and "flux-flashomni-paper" not in output_presets()
    accelerated = accelerate_model(flow)
    assert ReportNode().report(accelerated, "latents")["result"] == ("latents", "no run yet")
    run(accelerated)
    shown = ReportNode().report(accelerated, "latents")
    assert "computed fraction" in shown["result"][1] and shown["ui"]["text"] == [shown["result"][1]]


def another_prompt(model, conditions, sigma):
    if sigma < 0.7:
        conditions["prompt"] = conditions["prompt"] - 2


def control_that_ends(model, conditions, sigma):
    """Control in ComfyUI's form: other residuals at each step, and None outside of its range."""
    conditions["control"] = {"input": [], "output": [torch.full((4,), 1 + sigma / 10)]} if sigma > 0.7 else None


def hook_with_keyframes(model, conditions, sigma):
    model.current_patcher.current_hooks = SimpleNamespace(hooks=[HOOK])
    HOOK.strength = 1.0 if sigma > 0.7 else -1.0


HOOK = SimpleNamespace(strength=1.0)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("change", [another_prompt, control_that_ends, hook_with_keyframes])
def test_a_change_of_conditions_under_one_uuid_is_noticed(flow, change, guidance):
    """The step of the change is computed, forecasts start again, and the result stays near the plain one."""
    changed = partial(Guider, guidance=guidance, change=change)
    plain, accelerated = run(flow, guider=changed(flow)), accelerate_model(flow, "quality")
    latents, report = run(accelerated, guider=changed(accelerated)), report_of(accelerated)
    first = next(index for index, level in enumerate(schedule()) if level < 0.7)
    (noticed,) = [note for note in report.notes if "changed" in note]
    assert f"step {first}:" in noticed and report.steps[first].mode != "dispatch"
    assert report.computed_fraction < 0.7 and off(latents, plain) < 0.02


def test_errors(flow):
    for name in ("flux-flashomni-paper", "turbo-8bit"):
        with pytest.raises(UnsupportedError, match=rf"must forecast the output of any model.*'{name}'.*balanced"):
            accelerate_model(flow, name)
    with pytest.raises(PresetError, match="target_eror"):
        accelerate_model(flow, target_eror=0.1)
    with pytest.raises(UnsupportedError, match=r"ComfyUI 0\.3\.8 or later"):
        accelerate_model(SimpleNamespace(clone=lambda: None))
    with pytest.raises(UnsupportedError, match="got a plain model"):
        ReportNode().report(flow, "latents")
