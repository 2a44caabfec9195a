"""Pipelines with ambiguous steps and branches: they are accelerated, or run plainly and say why."""

import diffusers
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler

from dit_accel import accelerate_pipeline, accelerated, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.loop.controller import STUCK
from dit_accel.models.drive import ONLY_KNOWN
from dit_accel.models.session import NO_TIMESTEP
from tests.models.tiny import STEPS, built, call
from tests.models.tiny.parts import flow
from tests.rounding import distance
from tests.tiny import tiny_output, tiny_pipeline

INTERVAL = {"schedule": {"control": "interval", "warmup": 3, "interval": 2}}


@pytest.mark.parametrize("name", ["z-image", "hidream", "prx", "ideogram4"])
def test_steps_are_told_apart(name):
    """Every transformer is accelerated step by step; exact and restored runs have the bits of the plain one."""
    pipe, _ = built(name)
    plain = call(name)
    with accelerated(pipe, "exact"):
        assert torch.equal(call(name), plain)
    accelerate_pipeline(pipe, "balanced", **INTERVAL)
    assert not torch.equal(call(name), plain)
    report = pipe.dit_accel.report()
    assert [step.index for step in report.steps] == list(range(STEPS))
    assert report.steps_by_mode["dispatch"] >= 5 and report.computed_fraction < 0.8
    assert all(None not in layer for layer in report.density)
    assert not [note for note in report.notes if "caches" in note or "computed" in note]
    assert torch.equal(call(name), call(name))
    restore_pipeline(pipe)
    assert torch.equal(call(name), plain)


def test_prompts_that_cannot_be_divided_go_together():
    """Latents in a list have no rows to take; the report says so."""
    pipe, _ = built("z-image")
    with accelerated(pipe, "balanced", per_prompt=True):
        call("z-image")
        assert any("prompts of a batch computed together" in note for note in pipe.dit_accel.report().notes)


@pytest.mark.parametrize("changes", [{}, INTERVAL], ids=["adaptive", "interval"])
def test_noise_levels_that_rise_are_the_mirror_of_those_that_fall(changes):
    """Mochi's levels rise from 0 to 1 and its outputs have the opposite sign: so do forecasts and corrections."""
    results = []
    for is_mirrored in (False, True):
        pipe = tiny_pipeline("sd3")
        pipe.scheduler = flow(shift=3.0, invert_sigmas=is_mirrored)
        if is_mirrored:
            mirrored = lambda _, args, call: (args, {**call, "timestep": 1000 - call["timestep"]})  # noqa: E731
            pipe.transformer.register_forward_pre_hook(mirrored, with_kwargs=True)
            for parameter in pipe.transformer.proj_out.parameters():
                parameter.data.neg_()
        with accelerated(pipe, "balanced", **changes):
            latents = tiny_output(pipe, "sd3", steps=STEPS)
            results.append((latents, [step.mode for step in pipe.dit_accel.report().steps]))
    (falling, modes), (rising, mirrored_modes) = results
    assert modes == mirrored_modes and "dispatch" in modes
    assert float((rising - falling).norm() / falling.norm()) < 1e-5


def test_both_transformers_of_guidance_compute_in_the_same_steps():
    """Guidance multiplies the difference of the two, so errors common to both cancel."""
    pipe, _ = built("ideogram4")
    with accelerated(pipe, "balanced", target_error=1.0):
        call("ideogram4")
        conditional, unconditional = pipe.dit_accel.report().density
        assert conditional == unconditional and 0.0 in conditional


def test_one_transformer_under_two_names():
    """It is accelerated once, and its two calls in a step are its branches."""
    pipe, _ = built("ideogram4")
    other = pipe.unconditional_transformer
    pipe.unconditional_transformer = pipe.transformer
    try:
        plain = call("ideogram4")
        with accelerated(pipe, "balanced", **INTERVAL):
            assert not torch.equal(call("ideogram4"), plain)
            report = pipe.dit_accel.report()
            assert report.layers == ["transformer"] and report.computed_fraction < 0.8 and not report.notes
        assert torch.equal(call("ideogram4"), plain)
    finally:
        pipe.unconditional_transformer = other


def test_unknown_denoisers_are_named(pipe):
    """A model that takes timesteps and is no transformer runs plainly; every report and a warning say so."""

    class Refiner(torch.nn.Module):
        def forward(self, sample, timestep):
            return sample

    pipe.refiner = Refiner()
    with pytest.warns(UserWarning, match=r"pipe\.refiner is not accelerated"):
        accelerate_pipeline(pipe, "turbo")
    for _ in range(2):
        tiny_output(pipe, "flux", steps=4)
        assert f"pipe.refiner is not accelerated: {ONLY_KNOWN}" in pipe.dit_accel.report().notes


class Unnamed(torch.nn.Module):
    """An expert of an unknown class, whose forward does not name its arguments, and in which nothing can be found."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.cache_context = lambda: inner, inner.config, inner.cache_context
        self.dtype, self.device = inner.dtype, inner.device

    def forward(self, *args, **kwargs):
        return self.inner()(*args, **kwargs)


class Unknown(Unnamed):
    """An expert of an unknown class that names its timestep."""

    def forward(self, hidden_states, timestep, **kwargs):
        return self.inner()(hidden_states, timestep, **kwargs)


TILES = {"skip": {"policy": "sparge", "steps": "all", "top_k": 0.5}, "blocks": {"size": 64}}


@pytest.mark.parametrize(
    "place, kind, preset, keys, reason",
    [
        ("transformer", Unnamed, "balanced", {}, "transformer Unnamed takes no 'timestep'"),
        ("transformer_2", Unknown, "exact", INTERVAL | {"forecast.level": "layer"}, "level 'layer' of preset"),
        ("transformer", Unknown, "balanced", TILES, "can't run on Unknown, whose blocks are not known"),
        ("transformer_2", Unknown, "wan21-sparge", {}, "preset 'wan21-sparge' is for wan models, and Unknown is not"),
    ],
    ids=["no-timestep", "level", "tiles", "family"],
)
def test_a_denoiser_of_an_unknown_class_is_left_plain(place, kind, preset, keys, reason):
    """The known one is accelerated; a warning and every report name the other's class and the reason."""
    pipe = tiny_pipeline("wan22")
    plain = tiny_output(pipe, "wan22", steps=STEPS)
    setattr(pipe, place, kind(getattr(pipe, place)))
    with pytest.warns(UserWarning, match=rf"pipe\.{place} is not accelerated: .*{kind.__name__}"):
        accelerate_pipeline(pipe, preset, **keys)
    for _ in range(2):
        assert not torch.equal(tiny_output(pipe, "wan22", steps=STEPS), plain) or place == "transformer_2"
        report = pipe.dit_accel.report()
        assert any(note.startswith(f"pipe.{place} is not accelerated") and reason in note for note in report.notes)
        assert not any("not in effect" in note for note in report.notes)
    assert report.family == "wan" and not any(layer.startswith(f"{place}.") for layer in report.layers)
    restore_pipeline(pipe)
    assert torch.equal(tiny_output(pipe, "wan22", steps=STEPS), plain)


def test_known_denoisers_are_needed():
    """Without one that can be accelerated the reason is an error, and nothing is changed."""
    pipe = tiny_pipeline("wan22")
    pipe.transformer, pipe.transformer_2 = Unnamed(pipe.transformer), Unnamed(pipe.transformer_2)
    with pytest.raises(UnsupportedError, match="Unnamed takes no 'timestep'"):
        accelerate_pipeline(pipe, "balanced")
    assert not hasattr(pipe, "dit_accel")


def test_calls_without_a_timestep_run_plainly():
    class Transformer(torch.nn.Module):
        def forward(self, x, t=None):
            return 2 * x

    pipe = Pipe()
    pipe.transformer, pipe.scheduler = Transformer(), flow()
    accelerate_pipeline(pipe, "turbo")
    assert pipe.dit_accel.report().computed_fraction is None
    with pytest.warns(UserWarning, match="without a timestep"):
        assert pipe.transformer(torch.ones(2)).tolist() == [2, 2]
    report = pipe.dit_accel.report()
    assert report.notes == [NO_TIMESTEP] and report.computed_fraction == 1.0


class Pipe:
    """Anything with a transformer and a scheduler."""


def test_diffusion_forcing_frame_by_frame_runs_plainly():
    kind = {"ar_step": 2, "causal_block_size": 1}
    pipe, plain = built("diffusion-forcing")[0], call("diffusion-forcing", **kind)
    with accelerated(pipe, "turbo"):
        with pytest.warns(UserWarning, match="its steps can't be told apart"):
            assert torch.equal(call("diffusion-forcing", **kind), plain)
        report = pipe.dit_accel.report()
        assert STUCK in report.notes and report.computed_fraction == 1.0 and len(report.notes) <= 3


@pytest.mark.parametrize("steps, forecast", [(2, 0), (5, 2)])
def test_steps_that_a_scheduler_takes_and_does_not_count_show_by_their_timesteps(steps, forecast):
    """Helios' DMD scheduler; its pipelines have two steps a stage, of which none can be forecast."""
    whole, arguments = built("helios")
    pipe = diffusers.HeliosPyramidPipeline(**whole.components, is_distilled=True)
    pipe.scheduler = diffusers.HeliosDMDScheduler(stages=1, stage_range=[0, 1])
    pipe.set_progress_bar_config(disable=True)
    with accelerated(pipe, "balanced"):
        pipe(**arguments, pyramid_num_inference_steps_list=[steps], output_type="latent")
        assert pipe.dit_accel.report().steps_by_mode.get("dispatch", 0) == forecast


@pytest.mark.parametrize("steps", [4, 6])
def test_the_step_before_one_without_effect_computes(steps):
    """Stages of a pyramid end with one; in UniPC the step before it counts most, and nothing corrects its forecast."""
    whole, arguments = built("helios")
    pipe = diffusers.HeliosPyramidPipeline(**whole.components)
    pipe.scheduler = diffusers.HeliosScheduler(stages=2, stage_range=[0, 0.5, 1], gamma=0.3)
    pipe.set_progress_bar_config(disable=True)
    arguments = {**arguments, "height": 64, "width": 64, "output_type": "latent"}
    arguments["pyramid_num_inference_steps_list"] = [steps] * 2
    plain = pipe(**arguments, generator=torch.Generator().manual_seed(0)).frames
    with accelerated(pipe, "balanced"):
        output = pipe(**arguments, generator=torch.Generator().manual_seed(0)).frames
        assert pipe.dit_accel.report().steps_by_mode["dispatch"] > 0 and distance(output, plain) < 0.05


NEW_NOISE = {
    "stochastic": lambda: flow(shift=3.0, stochastic_sampling=True),
    "consistency": lambda: FlowMatchLCMScheduler(shift=3.0),
}


@pytest.mark.parametrize("scheduler", NEW_NOISE.values(), ids=NEW_NOISE)
def test_noise_drawn_anew_runs_plainly(scheduler):
    """Outputs cannot be forecast if each step replaces the latents' whole noise."""
    pipe = tiny_pipeline("sd3")
    pipe.scheduler = scheduler()
    plain = seeded(pipe)
    with accelerated(pipe, "turbo"), pytest.warns(UserWarning, match="draws the noise of the latents anew"):
        assert torch.equal(seeded(pipe), plain)


@pytest.mark.parametrize("scheduler", [*NEW_NOISE.values(), FlowMatchHeunDiscreteScheduler], ids=[*NEW_NOISE, "heun"])
def test_tiles_are_left_out_under_any_scheduler(scheduler):
    """Obstacles to forecasts do not affect a preset that computes every step, and the report has no remark."""
    pipe = tiny_pipeline("sd3")
    pipe.scheduler = scheduler()
    plain = seeded(pipe)
    with accelerated(pipe, "exact", **TILES):
        assert not torch.equal(seeded(pipe), plain)
        report = pipe.dit_accel.report()
        assert report.left_out > 0.1 and report.notes == [] and report.steps_by_mode == {"full": len(report.steps)}


def seeded(pipe) -> torch.Tensor:
    """Pipeline without a generator for its scheduler, which uses torch's global one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny_output(pipe, "sd3", steps=STEPS)
