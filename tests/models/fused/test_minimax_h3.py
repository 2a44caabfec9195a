"""MiniMax-H3's blocks: modulations by timestep and modality, RoPE of some features, and what runs as before."""

from functools import partial

import pytest
import torch

from dit_accel import accelerate_transformer
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.fused import minimax_h3
from tests.models.fused import test_videos_with_sound as shared
from tests.models.fused.test_flux_relatives import distance
from tests.models.tiny.parts import TOKENS, WIDTH

NOT_PLAIN = "a norm is no plain RMSNorm"
made, accelerated = partial(shared.made, "minimax-h3"), partial(shared.accelerated, "minimax-h3")


@pytest.fixture
def pipe():
    return shared.pipeline("minimax-h3")


def call(batch=1):
    """Arguments of the transformer: text, a given image at a timestep of its own, audio and video."""
    tags = torch.tensor([1] * TOKENS + [0] * 6 + [2] * 10 + [0] * 24)
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(batch, 30, 96),
        "audio_hidden_states": torch.randn(batch, 10, 32),
        "encoder_hidden_states": torch.randn(batch, TOKENS, WIDTH),
        "timestep": torch.tensor([0.3, 0.9, 0.5]),
        "timestep_indices": torch.tensor([0] * TOKENS + [1] * 6 + [2] * 10 + [0] * 24),
        "token_tags": tags,
        "position_ids": torch.arange(len(tags))[:, None].expand(-1, 3),
        **{f"{kind}_indices": (tags == tag).nonzero()[:, 0] for tag, kind in enumerate(("video", "text", "audio"))},
        "return_dict": False,
    }


@pytest.fixture
def attended(monkeypatch):
    """A list that gets an entry for each attention that the hooks run instead of the processor."""
    found, attend = [], minimax_h3.MiniMaxH3BlockHook.attend
    monkeypatch.setattr(minimax_h3.MiniMaxH3BlockHook, "attend", lambda *given: (found.append(1), attend(*given))[1])
    return found


def test_fused_blocks_compute_what_diffusers_does(pipe, as_on_a_gpu, attended):
    plain = made(pipe)
    fused, report = accelerated(pipe, "exact")
    assert report.fallbacks == [] and distance(fused, plain) < 1e-5
    assert len(attended) == 2 * shared.STEPS
    assert torch.equal(made(pipe), plain), "restored"


@pytest.mark.parametrize("batch", [1, 2])
def test_both_outputs_with_a_given_image(batch, pipe, as_on_a_gpu, attended):
    """Rows of five of the nine pairs of timestep and modality are in use, in every order of tokens."""
    given = call(batch)
    with torch.no_grad():
        plain = pipe.transformer(**given)
        accelerate_transformer(pipe.transformer, "exact", [0.9, 0.8])
        fused = pipe.transformer(**given)
    assert all(distance(*both) < 1e-5 for both in zip(fused, plain, strict=True)) and len(attended) == 2


def test_projections_may_be_fused(pipe, as_on_a_gpu):
    plain = made(pipe)
    pipe.transformer.fuse_qkv_projections()
    assert distance(accelerated(pipe, "exact")[0], plain) < 1e-5


def test_a_mask_is_left_to_the_processor(pipe, as_on_a_gpu, attended, by_hand):
    """The transformer passes none to its blocks; a hook on them may."""
    given, mask = call(), torch.rand(1, 1, 52, 52)
    without = pipe.transformer(**given)[0]
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
        )
    with torch.no_grad():
        plain = pipe.transformer(**given)[0]
        accelerate_transformer(pipe.transformer, "exact", [0.9, 0.8])
        fused = pipe.transformer(**given)[0]
    assert distance(plain, without) > 1e-4 and distance(fused, plain) < 1e-5 and by_hand and not attended


@pytest.mark.parametrize("name", ["norm1", "attn.norm_q"])
def test_a_norm_of_another_kind_is_called(name, pipe, as_on_a_gpu, attended):
    """The report names it, except in an attention that diffusers runs all the same."""
    owner, _, last = f"transformer_blocks.1.{name}".rpartition(".")
    owner = pipe.transformer.get_submodule(owner)
    setattr(owner, last, torch.nn.RMSNorm(getattr(owner, last).normalized_shape, elementwise_affine=False))
    plain = made(pipe, steps=2)
    fused, report = accelerated(pipe, "exact", steps=2)
    assert distance(fused, plain) < 1e-5 and len(attended) == 2
    assert [each["reason"] for each in report.fallbacks] == ([NOT_PLAIN] if name == "norm1" else [])


def test_the_text_decides_the_dtype_of_blocks(pipe, monkeypatch):
    """Latents are float32 before a model of another dtype; kernels run in half precision."""
    seen = []
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda _, x: seen.append(x.shape[1:]))
    accelerated(pipe, "exact", steps=1)
    assert seen == [(TOKENS, WIDTH)]
