"""Z-Image's blocks: norms before and behind each part, prompts of a batch, and what is left to diffusers."""

import pytest
import torch

from dit_accel import load_preset
from dit_accel.models import drive
from tests.models import tiny
from tests.models.fused.test_flux_relatives import accelerated, at_heads, distance


def prompt(tokens, seed):
    return [torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))]


CASES = {
    "turbo": {"guidance_scale": 0.0},
    "guidance": {"prompt_embeds": prompt(6, 2), "negative_prompt_embeds": prompt(4, 3)},
    "unequal prompts": {"prompt_embeds": prompt(40, 2), "negative_prompt_embeds": prompt(4, 3)},
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_fused_blocks_compute_what_diffusers_does(given, as_on_a_gpu, by_hand):
    """With a mask for prompts of unequal length the attention runs by its own processor."""
    plain = tiny.output("z-image", 4, **given)
    with accelerated("z-image", "exact") as pipe:
        fused = tiny.output("z-image", 4, **given)
        assert pipe.dit_accel.report().fallbacks == []
    assert distance(fused, plain) < 1e-5 and by_hand
    assert torch.equal(tiny.output("z-image", 4, **given), plain), "restored"


@pytest.mark.parametrize("part", ["attention_norm1", "ffn_norm2", "feed_forward", "attention.norm_k"])
def test_parts_that_somebody_watches_are_called(part, as_on_a_gpu):
    """A norm's hook leaves the block to diffusers; a hook of the MLP, or in the attention, leaves that part to it."""
    plain, calls = tiny.output("z-image", 2, **CASES["turbo"]), []
    module = tiny.pipeline("z-image").transformer.layers[1].get_submodule(part)
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        with accelerated("z-image", "exact"):
            assert distance(tiny.output("z-image", 2, **CASES["turbo"]), plain) < 1e-5
    finally:
        handle.remove()
    assert len(calls) == 2


def omni():
    """Arguments of the Omni model: a given picture, and one to make, each after its part of the prompt."""
    generator = torch.Generator().manual_seed(4)
    pictures = [[torch.randn(4, 1, side, 8, generator=generator) for side in (8, 12)]]
    prompts = [[torch.randn(5, 32, generator=generator) for _ in range(2)]]
    given = {"x": pictures, "t": torch.tensor([0.5]), "cap_feats": prompts, "image_noise_mask": [[0, 1]]}
    return given | {"siglip_feats": [None]}


def test_given_pictures_have_modulations_of_their_own(as_on_a_gpu, by_hand):
    transformer = tiny.pipeline("z-image").transformer
    with torch.no_grad():
        (plain,) = transformer(**omni(), return_dict=False)[0]
        with accelerated("z-image", "exact"):
            (fused,) = transformer(**omni(), return_dict=False)[0]
    assert distance(fused, plain) < 1e-5 and by_hand


def test_a_mask_of_one_sample_hides_nothing(as_on_a_gpu, monkeypatch):
    """Older versions of diffusers always pass one."""
    transformer = tiny.pipeline("z-image").transformer
    build = type(transformer)._build_unified_sequence

    def masked(*args, **kwargs):
        unified, turns, _mask, noisy = build(transformer, *args, **kwargs)
        return unified, turns, torch.ones(unified.shape[:2], dtype=torch.bool), noisy

    plain = tiny.output("z-image", 4, **CASES["turbo"])
    monkeypatch.setattr(transformer, "_build_unified_sequence", masked)
    with accelerated("z-image", at_heads("z-image")) as pipe:
        tiny.output("z-image", 8, **CASES["turbo"])
        assert pipe.dit_accel.report().fallbacks == []
    with accelerated("z-image", "exact"):
        assert distance(tiny.output("z-image", 4, **CASES["turbo"]), plain) < 1e-5


@pytest.mark.parametrize("name", ["attention_norm2", "ffn_norm1"])
def test_a_norm_of_another_kind_is_called(name, as_on_a_gpu, monkeypatch):
    block = tiny.pipeline("z-image").transformer.layers[1]
    monkeypatch.setitem(block._modules, name, torch.nn.LayerNorm(64))
    plain = tiny.output("z-image", 2, **CASES["turbo"])
    with accelerated("z-image", "exact"):
        assert distance(tiny.output("z-image", 2, **CASES["turbo"]), plain) < 1e-5


def test_autocast_at_level_layer():
    """The attention's output has another dtype than the sequence, to which a float32 token was added."""
    preset = load_preset("exact", forecast={"level": "layer"})
    with accelerated("z-image", preset), torch.autocast("cpu", torch.bfloat16):
        made = tiny.output("z-image", 4, **CASES["turbo"])
    assert made.isfinite().all()


def test_whole_features_are_forecast(monkeypatch, by_hand):
    """Level layer gives what it gives where each part is remembered by itself."""
    schedule = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 1}
    preset = load_preset("exact", forecast={"level": "layer"}, schedule=schedule)
    with accelerated("z-image", preset) as pipe:
        made, report = tiny.output("z-image", 8), pipe.dit_accel.report()
    assert report.fallbacks == [] and report.steps_by_mode["dispatch"] > 1 and by_hand
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    with accelerated("z-image", preset):
        assert distance(made, tiny.output("z-image", 8)) < 1e-5


def test_a_batch_at_level_head_says_why_not():
    """Positions of tokens depend on the sample's prompt."""
    with accelerated("z-image", at_heads("z-image")) as pipe:
        tiny.output("z-image", 8, **CASES["guidance"])
        reasons = {fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks}
    assert reasons == {"tokens of each sample have positions of their own"}
