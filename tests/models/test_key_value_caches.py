"""Transformers that keep keys and values: an output may contain them, or be longer in the step that fills them."""

import pytest
import torch
from torch.utils import _pytree as pytree

from dit_accel import accelerated, load_preset
from dit_accel.models.session import BESIDE
from tests.models.tiny import images, videos
from tests.rounding import distance
from tests.tiny import redraw

STEPS = 20
INTERVAL = {"schedule": {"control": "interval", "warmup": 3, "interval": 2}, "forecast": {"level": "output"}}


def built(build):
    """A tiny pipeline whose outputs change slowly from step to step, and a function that runs it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, arguments = build()
        for module in (pipe.transformer, pipe.vae):
            redraw(module.eval())
    pipe.set_progress_bar_config(disable=True)

    def run(**changes):
        passed = {"num_inference_steps": STEPS, "output_type": "latent", **arguments, **changes}
        return pipe(**passed, generator=torch.Generator().manual_seed(0), return_dict=False)[0]

    return pipe, run


def outputs(pipe, run, **changes):
    """Shapes of the tensors in the output of each transformer call, and the latents of the run."""
    shapes = []

    def note(module, inputs, output):
        shapes.append([leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)])

    handle = pipe.transformer.register_forward_hook(note)
    latents = run(**changes)
    handle.remove()
    return shapes, latents


@pytest.mark.parametrize("preset, keys", [("balanced", {}), ("exact", INTERVAL)])
def test_a_cache_beside_the_prediction_is_neither_judged_nor_recorded(preset, keys):
    """AnyFlow-FAR's cache has zeros, whose relative error is no number, and is far larger than its prediction."""
    pipe, run = built(videos.anyflow_far)
    shapes, plain = outputs(pipe, run)
    assert sum(shape.numel() for shape in shapes[-1][1:]) > 5 * shapes[-1][0].numel()
    with accelerated(pipe, preset, **keys):
        latents, report = run(), pipe.dit_accel.report()
    assert 0 < distance(latents, plain) < 0.03 and report.steps_by_mode["dispatch"] > STEPS / 3
    errors = [step.error for step in report.steps if step.mode == "update" and step.error is not None]
    assert all(0 < error < 1 for error in errors) and (errors or preset == "exact")
    assert 0 < report.cache_bytes == report.estimated_bytes and report.notes == [BESIDE]
    assert torch.equal(run(), plain)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "anew"])
def test_the_first_output_may_be_longer(keeps):
    """Qwen-Image 2.1 returns the prompt's tokens too in the steps that run them, with kept keys the first alone."""
    pipe, run = built(images.qwen_image_21)
    shapes, plain = outputs(pipe, run, use_kv_cache=keeps)
    assert (shapes[0] != shapes[1]) is keeps
    with accelerated(pipe, "exact"):
        assert torch.equal(run(use_kv_cache=keeps), plain)
    for preset, bound in (("balanced", 0.02), ("turbo", 0.05)):
        with accelerated(pipe, preset):
            assert 0 < distance(run(use_kv_cache=keeps), plain) < bound
            report = pipe.dit_accel.report()
        assert report.steps_by_mode["dispatch"] > STEPS / 3 and report.notes == []
        assert all(step.error < 1 for step in report.steps if step.error is not None)
    assert torch.equal(run(use_kv_cache=keeps), plain)


@pytest.mark.parametrize("level", ["output", "layer"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "anew"])
def test_no_forecast_has_another_shape(keeps, level):
    """The second step computes, although the interval forecasts it, if the first output has another shape."""
    pipe, run = built(images.qwen_image_21)
    shapes, plain = outputs(pipe, run, use_kv_cache=keeps)
    preset = load_preset("exact" if level == "layer" else "balanced", model="qwen_image_21", forecast={"level": level})
    with accelerated(pipe, preset, schedule={"control": "interval", "warmup": 0, "interval": 3}):
        accelerated_shapes, latents = outputs(pipe, run, use_kv_cache=keeps)
        report = pipe.dit_accel.report()
        modes = [step.mode for step in report.steps]
    assert any(note.startswith("steps computed when") for note in report.notes) is keeps
    assert accelerated_shapes == shapes
    assert modes[1] == ("update" if keeps else "dispatch") and modes.count("dispatch") > STEPS / 3
    assert 0 < distance(latents, plain) < 0.05
