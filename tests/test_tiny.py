"""The tiny pipelines run, repeat exactly, stay finite, and hide no parameter behind a zero."""

import functools

import pytest
import torch

from tests.models import tiny
from tests.rounding import distance, equal_up_to_rounding
from tests.tiny import TINY_PIPELINES, tiny_inputs, tiny_output, tiny_pipeline

every_pipeline = pytest.mark.parametrize("name", TINY_PIPELINES)
# Their last block forms a text output that nothing reads.
TEXT_ENDS_UNREAD = ("sd3", "sd35", "mochi", "qwen-image", "hunyuan15", "hunyuan15-i2v")
UNREAD = {"add_q_proj", "norm_added_q", "to_add_out", "txt_mlp", "ff_context"}
# Softmax does not see a shift common to all keys; these keys are neither normalised nor rotated.
SHIFTS_OF_KEYS = ("to_k_ip.0.bias", "refiner_blocks.0.attn.to_k.bias")
# Without an image its embedding is masked; two sections leave the oldest history empty.
IDLE = {"hunyuan15": "image_embedder.", "framepack": "clean_x_embedder.proj_4x.weight"}
STEPS = 3

pipeline = functools.cache(tiny_pipeline)


@every_pipeline
def test_a_pipeline_repeats_and_reacts(name):
    """Equal seeds give equal latents; other weights, noise, prompts and steps move them by more than rounding, 2%."""
    pipe = pipeline(name)
    latents, longer = (tiny_output(pipe, name, steps=steps) for steps in (STEPS, 8))
    assert equal_up_to_rounding(tiny_output(tiny_pipeline(name), name, steps=STEPS), latents)
    others = tiny_output(tiny_pipeline(name, seed=1), name, steps=STEPS), tiny_output(pipe, name, steps=STEPS, seed=1)
    assert min(distance(other, latents) for other in others) > 0.1
    assert longer.isfinite().all() and 0.5 < longer.std() < 10
    others = tiny_output(pipe, name, steps=STEPS, prompt="two blue whales asleep"), longer
    assert min(distance(other, latents) for other in others) > 0.02


@every_pipeline
def test_every_parameter_reaches_the_output(name):
    """No gate or modulation is zero: the output has a gradient for each parameter that the model reads at all."""
    pipe = pipeline(name)
    quoted = {"negative_prompt": 'a sign that says "no"'} if name.startswith("hunyuan15") else {}
    calls = {pipe.components[part]: {} for part in ("transformer", "transformer_2") if pipe.components.get(part)}
    hooks = [
        module.register_forward_pre_hook(lambda module, _, inputs: calls[module].update(inputs), with_kwargs=True)
        for module in calls
    ]
    tiny_output(pipe, name, steps=STEPS, **quoted)
    for hook, (module, latest) in zip(hooks, calls.items(), strict=True):
        hook.remove()
        with torch.enable_grad():
            module(**latest)[0].square().mean().backward()
        unreached = [
            parameter_name
            for parameter_name, parameter in module.named_parameters()
            if (parameter.grad is None or parameter.grad.norm() < 1e-6 * parameter.norm())
            and not (
                name in TEXT_ENDS_UNREAD
                and parameter_name.startswith("transformer_blocks.1.")
                and UNREAD & set(parameter_name.split("."))
            )
            and not parameter_name.endswith(SHIFTS_OF_KEYS)
            and not (name in IDLE and parameter_name.startswith(IDLE[name]))
        ]
        module.zero_grad()
        assert not unreached


def test_building_leaves_the_global_random_state():
    """A test's random numbers are the same with or without a tiny pipeline in between."""
    before = torch.get_rng_state()
    tiny_pipeline("flux")
    tiny_inputs("flux")
    assert torch.equal(torch.get_rng_state(), before)


REFUSED = pytest.mark.xfail(reason="diffusers keeps history_key_scale in float32, and attention refuses such keys")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[REFUSED] if name == "helios" else []) for name in tiny.PIPELINES]
)
def test_pipelines_without_encoders_run_in_bfloat16(name):
    """On a GPU if there is one: stand-ins for encoders follow the device and the dtype of the model."""
    pipe, arguments = tiny.built.__wrapped__(name)
    arguments = tiny.moved(pipe, arguments, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    assert tiny.outputs(pipe, arguments, num_inference_steps=2)[0].isfinite().all()
