"""Transformers that predict a video and its sound in one call."""

from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import torch

from dit_accel import accelerated
from dit_accel.loop.outputs import FIRST
from dit_accel.models import denoisers
from dit_accel.models.families import require_family
from tests.models.tiny import built, videos
from tests.rounding import distance
from tests.tiny import redraw

STEPS = 20


def minimax_h3(name):
    """A tiny MiniMax-H3 and a function that returns the latents of a run, video and audio."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, arguments = videos.minimax_h3(name)
        redraw(getattr(pipe, name).eval())
    pipe.set_progress_bar_config(disable=True)

    def run(steps=STEPS, **inputs):
        random = torch.Generator().manual_seed(0)
        latents = {
            "latents": torch.randn(*videos.H3_VIDEO, generator=random),
            "audio_latents": torch.randn(*videos.H3_AUDIO, generator=random),
        }
        # Its scheduler counts the end of the run as a step.
        return list(pipe(**arguments, **latents, **inputs, num_inference_steps=steps + 1, output=[*latents]).values())

    return pipe, run


def check(pipe, run, share, **sections):
    """Exact and restored runs have the plain one's bits, and forecasts of this share of the steps or more are near it.

    Returns the report of the forecasts.
    """
    plain = run()
    with accelerated(pipe, "exact"):
        assert all(map(torch.equal, run(), plain))
    with accelerated(pipe, "balanced", **sections):
        latents, report = run(), pipe.dit_accel.report()
    assert report.notes == [] and report.steps_by_mode["dispatch"] > share * STEPS
    assert all(0 < distance(*pair) < 0.05 for pair in zip(latents, plain, strict=True))
    assert all(map(torch.equal, run(), plain))
    return report


@pytest.mark.parametrize("name", ["transformer", "transformer_ref"])
def test_denoisers_are_found_under_any_name(name):
    pipe, run = minimax_h3(name)
    assert denoisers(pipe) == {name: getattr(pipe, name)}
    report = check(pipe, run, 1 / 3)
    assert report.layers == [f"{name}.transformer_blocks.{i}" for i in range(2)]
    assert {step.decided_by for step in report.steps} - {None} <= {FIRST, "audio"}


def test_given_frames_have_a_timestep_of_their_own():
    """MiniMax-H3's key frames precede the audio; level layer forecasts them too, and errors there are not counted."""
    pipe, run = minimax_h3("transformer")
    calls = []
    handle = pipe.transformer.register_forward_hook(lambda *call: calls.append(call[2:]), with_kwargs=True)
    run(num_condition_video_rows=8)
    handle.remove()
    (arguments, (video, audio)), family = calls[5], require_family(pipe.transformer)
    assert family.used(pipe.transformer, video, arguments).ne(0).all(dim=(0, 2)).tolist() == [False] * 8 + [True] * 16
    assert torch.equal(family.used(pipe.transformer, audio, arguments), audio)
    check(pipe, partial(run, num_condition_video_rows=8), 1 / 4, model=family.name, forecast={"level": "layer"})


def test_what_denoises_no_latents_is_no_denoiser():
    """A prior denoises the embedding of a picture, by a scheduler of its own, and a ControlNet predicts residuals."""
    prior = diffusers.PriorTransformer(num_attention_heads=1, attention_head_dim=8, num_layers=1, embedding_dim=8)
    net = diffusers.QwenImageControlNetModel(
        in_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=1, axes_dims_rope=(4, 6, 6)
    )
    assert denoisers(SimpleNamespace(prior=prior, controlnet=net, vae=torch.nn.Identity(), scheduler=None)) == {}


def test_timesteps_of_parts_tell_steps():
    """Cosmos 3 has timesteps for each token of the video and of the sound."""
    pipe, arguments = built("cosmos3")

    def run():
        random = torch.Generator().manual_seed(0)
        return pipe(**arguments, num_inference_steps=STEPS, output_type="latent", generator=random, return_dict=False)

    check(pipe, run, 1 / 4)
