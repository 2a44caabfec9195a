"""GLM-Image: a block's MLP runs twice, and given images are read from keys and values that are kept before a run."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dit_accel import accelerated
from dit_accel.models.families.family import Load, Tokens
from dit_accel.models.families.glm_image import FAMILY
from dit_accel.models.interceptor import OTHER_KEYS
from tests.models import tiny
from tests.tiny import flux, redraw

STEPS = 9
LAYER = {"schedule": {"control": "interval", "warmup": 2, "interval": 2}, "forecast": {"level": "layer", "order": 1}}
TILES = {"policy": "sparge", "steps": "all", "tau_kv": 0.3}
SIDE = 8  # of the given image in tokens


@pytest.fixture(scope="module")
def glm():
    """A tiny pipeline, and a function that runs it for some prompts, on given images or not."""
    pipe, arguments = tiny.built.__wrapped__("glm-image")
    redraw(pipe.transformer)
    vae = flux.image_vae()
    channels = vae.config.latent_channels
    vae.register_to_config(latents_mean=[0.0] * channels, latents_std=[1.0] * channels)
    pipe.register_modules(vae=vae)
    image = Image.new("RGB", (64, 64), "teal")

    def run(prompts=(0, 1), edits=False):
        batch, inputs = len(prompts), {**arguments, "guidance_scale": 1.5}
        for name in ("prompt_embeds", "negative_prompt_embeds", "prior_token_ids"):
            inputs[name] = torch.cat([arguments[name], arguments[name].flip(1)])[list(prompts)]
        if edits:
            inputs["image"] = [[image]] * batch
            inputs["prior_token_image_ids"] = [torch.arange(SIDE**2) % 16] * batch
            inputs["source_image_grid_thw"] = [torch.tensor([[1, SIDE, SIDE]])] * batch
        seeds = [torch.Generator().manual_seed(prompt) for prompt in prompts]
        return pipe(**inputs, num_inference_steps=STEPS, generator=seeds, output_type="latent", return_dict=False)[0]

    return pipe, run


@pytest.mark.parametrize("edits", [False, True], ids=["text", "edits"])
def test_layers_are_forecast_in_every_branch(glm, edits):
    """Exact is equal bit for bit, and each prompt of a batch gets what it gets alone, with level layer too."""
    pipe, run = glm
    plain = run(edits=edits)
    with accelerated(pipe, "exact"):
        assert torch.equal(run(edits=edits), plain)
    with accelerated(pipe, "exact", **LAYER):
        result, report = run(edits=edits), pipe.dit_accel.report()
        alone = torch.cat([run([prompt], edits) for prompt in (0, 1)])
    assert report.notes == [] and report.steps_by_mode["dispatch"] == 3
    assert 0 < (result - plain).norm() / plain.norm() < 0.05
    torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(edits=edits), plain)


def test_attention_to_given_images_is_left_whole(glm):
    """Tiles are skipped in the branch without a prompt alone."""
    pipe, run = glm
    plain = run(edits=True)
    with accelerated(pipe, "exact", model="glm_image", skip=TILES, blocks={"size": 64}):
        assert not torch.equal(run(edits=True), plain)
        report = pipe.dit_accel.report()
    assert {item["reason"] for item in report.fallbacks} == {OTHER_KEYS} and report.left_out > 0


def test_keys_of_given_images_count():
    """Only calls that read them have more work."""
    config = SimpleNamespace(num_attention_heads=2, attention_head_dim=8)
    transformer, tokens = SimpleNamespace(config=config), Tokens(4, 12)
    arguments = {"hidden_states": torch.zeros(3, 4, 8, 6)}
    original = FAMILY.work(Load(transformer, arguments, tokens), None)
    for mode, keys in (("write", 16), ("skip", 16), ("read", 16 + 20)):
        cache = SimpleNamespace(mode=mode, k_caches=[torch.zeros(1, 20, 2, 8)])
        work = FAMILY.work(Load(transformer, arguments | {"kv_caches": [cache]}, tokens), None)
        assert work.tiles == {"attn1": 4 * 3 * 16 * keys * 16} and work.rest == original.rest
