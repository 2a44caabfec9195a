"""Fused kernels stand in for modules that they equal, and for nothing else."""

import copy
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families import ltx2
from dit_accel.models.fused import parts as fused
from dit_accel.models.fused.flux import FluxDoubleBlockHook
from dit_accel.models.fused.ltx2 import LTX2BlockHook
from tests.models import tiny
from tests.tiny import tiny_flux_lora, tiny_output, tiny_pipeline

FAMILIES = [
    *("flux", "flux-ip-adapter", "wan", "wan-i2v-clip", "wan22-5b-i2v", "hunyuan", "hunyuan-i2v"),
    *("qwen-image", "qwen-image-edit", "flux2"),
]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Blocks run through the fused ops, whose references run on the CPU, and HunyuanVideo's without padding."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    monkeypatch.setattr(FamilyDriver, "cuts_padding", lambda reader, *_: reader.family.cut is not None)


def distance(result, expected):
    return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_is_what_it_was(name, as_on_a_gpu):
    """Results are equal up to rounding, and bit for bit after restoring."""
    pipe, plain = tiny.pipeline(name), tiny.output(name, steps=2)
    accelerate_pipeline(pipe, "exact")
    assert distance(tiny.output(name, steps=2), plain) < 1e-5
    report = pipe.dit_accel.report()
    assert report.computed_fraction == 1.0 and report.fallbacks == []
    restore_pipeline(pipe)
    assert torch.equal(tiny.output(name, steps=2), plain)


def test_lora_keeps_its_effect(as_on_a_gpu):
    """Layers that carry an adapter are called, not read."""
    pipe = tiny_pipeline("flux")
    plain = tiny_output(pipe, "flux", steps=2)
    pipe.load_lora_weights(tiny_flux_lora(pipe))
    adapted = tiny_output(pipe, "flux", steps=2)
    assert distance(adapted, plain) > 1e-3
    accelerate_pipeline(pipe, "exact")
    assert distance(tiny_output(pipe, "flux", steps=2), adapted) < 1e-5


@pytest.mark.parametrize("part, reasons", [("norm1", ["its norm1 carries hooks"]), ("attn", [])], ids=["norm", "attn"])
def test_parts_that_carry_hooks_are_called(part, reasons, as_on_a_gpu):
    """A block without its norms has nothing to fuse; a block without its attention has."""
    pipe, calls = tiny_pipeline("flux"), []
    plain = tiny_output(pipe, "flux", steps=2)
    block = pipe.transformer.transformer_blocks[0]
    block.get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    accelerate_pipeline(pipe, "exact")
    assert distance(tiny_output(pipe, "flux", steps=2), plain) < 1e-5
    assert calls == [1, 1]
    assert [fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks] == reasons


def own_class(block):
    block.__class__ = type("Own", (type(block),), {"__module__": __name__})


def own_forward(block):
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("change", [own_class, own_forward], ids=["class", "forward"])
@pytest.mark.parametrize("name", ["flux", "flux2", "qwen-image", "wan", "z-image", "krea2", "ltx2", "minimax-h3"])
def test_blocks_that_are_not_diffusers_own_run_themselves(name, change, as_on_a_gpu, monkeypatch):
    """A class derived from diffusers', or a forward that was put in its place, may do anything."""
    pipe, plain = copy.deepcopy(tiny.pipeline(name)), tiny.output(name, steps=2)
    monkeypatch.setattr(tiny, "pipeline", lambda _: pipe)
    if name in tiny.PIPELINES:
        arguments = tiny.built(name)[1]
        monkeypatch.setattr(tiny, "built", lambda _: (pipe, arguments))
    blocks = {"wan": "blocks", "z-image": "layers"}.get(name, "transformer_blocks")
    change(getattr(pipe.transformer, blocks)[0])
    accelerate_pipeline(pipe, "exact")
    assert distance(tiny.output(name, steps=2), plain) < 1e-5
    (fallback,) = pipe.dit_accel.report().fallbacks
    assert fallback["reason"] == "its forward is not diffusers' own"


def test_where_devices_share_layers_nothing_is_fused(as_on_a_gpu, monkeypatch):
    """Under diffusers' tensor parallelism a device has some heads of each layer, and part of each product."""
    pipe = tiny_pipeline("flux")
    shared = SimpleNamespace(tensor_parallel_config=object(), context_parallel_config=None)
    monkeypatch.setattr(pipe.transformer, "_parallel_config", shared, raising=False)
    accelerate_pipeline(pipe, "exact")
    fused = []
    monkeypatch.setattr(FluxDoubleBlockHook, "compute", lambda *_: fused.append(1))
    tiny_output(pipe, "flux", steps=2)
    assert not fused


def test_tokens_are_shared_by_diffusers_where_that_is_not_tested_here():
    """Under context parallelism attention needs the tokens of all devices, in the places that the family knows."""
    shared = SimpleNamespace(tensor_parallel_config=None, context_parallel_config=object())
    driver = SimpleNamespace(transformer=SimpleNamespace(_parallel_config=shared), family=ltx2.FAMILY, preset=None)
    reason = LTX2BlockHook("transformer_blocks.0", driver)._why_not_shared()
    assert reason == "several devices share tokens, which is not tested with its blocks"


def test_hooked_attention_is_not_made_sparse():
    pipe, calls = tiny_pipeline("flux"), []
    pipe.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    preset = load_preset(
        "flux-flashomni-paper", schedule={"warmup": 1, "interval": 2, "cooldown": 1}, blocks={"size": 64}
    )
    accelerate_pipeline(pipe, preset)
    tiny_output(pipe, "flux", steps=4)
    assert calls == [1] * 4
    assert [each["reason"] for each in pipe.dit_accel.report().fallbacks] == ["its attn carries hooks"]


def test_a_hooked_norm_is_called():
    norm, x, calls = RMSNorm(16, eps=1e-6), torch.randn(1, 5, 2, 16), []
    expected = norm(x)
    torch.testing.assert_close(fused.normalise_heads(norm, x), expected)
    norm.register_forward_hook(lambda *_: calls.append(1))
    out = torch.empty(1, 5, 2, 16)
    assert fused.normalise_heads(norm, x, out=out) is out
    assert calls == [1] and torch.equal(out, expected)


@pytest.mark.parametrize("width", [16, 32], ids=["per-head", "across-heads"])
@pytest.mark.parametrize("norm_class", [RMSNorm, nn.RMSNorm, nn.LayerNorm], ids=lambda each: each.__module__)
def test_norm_and_rope_in_one_equal_the_two(width, norm_class):
    """For any kind of norm; kinds without a kernel are called."""
    norm, x = norm_class(width, eps=1e-6), torch.randn(2, 5, 2, 16)
    nn.init.normal_(norm.weight)
    rotary = torch.randn(5, 16), torch.randn(5, 16)
    normed = norm(x) if width == 16 else norm(x.flatten(2)).view(x.shape)
    expected = apply_rotary_emb(normed, rotary, sequence_dim=1)
    torch.testing.assert_close(fused.normalise_heads(norm, x, rotary), expected.detach())


@pytest.mark.parametrize("eps", [1e-6, 1e-2], ids=["alike", "other-eps"])
def test_a_pair_of_norms_equals_each(eps):
    q, k, rotary = torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16), (torch.randn(5, 16), torch.randn(5, 16))
    norms = RMSNorm(16, eps=1e-6), RMSNorm(16, eps=eps)
    expected = tuple(fused.normalise_heads(norm, x, rotary) for norm, x in zip(norms, (q, k), strict=True))
    torch.testing.assert_close(fused.normalise_pair(norms, q, k, rotary), expected)
    out = torch.empty(2, 5, 2, 16), torch.empty(2, 5, 2, 16)
    torch.testing.assert_close(fused.normalise_pair(norms, q, k, rotary, out=out), expected)
    torch.testing.assert_close(out, expected)


STREAMS = {
    "one-sequence": lambda joint: (joint[:, :3], joint[:, 3:]),
    "gap": lambda joint: (joint[:, :3], joint[:, 4:]),
    "swapped": lambda joint: (joint[:, 3:], joint[:, :3]),
    "apart": lambda joint: (joint[:, :3].clone(), joint[:, 3:].clone()),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_joined_without_a_copy_where_they_are_one_sequence(name, batch):
    joint = torch.randn(batch, 8, 4)
    first, second = STREAMS[name](joint)
    joined = fused.join_streams(first, second)
    assert torch.equal(joined, torch.cat([first, second], dim=1))
    assert (joined.data_ptr() == joint.data_ptr()) == (name == "one-sequence")


@pytest.mark.parametrize("activation", ["gelu-approximate", "gelu", "geglu", "swiglu"])
def test_every_mlp_gives_what_it_gave(activation):
    mlp, x = FeedForward(16, activation_fn=activation), torch.randn(2, 5, 16)
    torch.testing.assert_close(fused.feed_forward(mlp, x), mlp(x))


def test_recorded_features_go_on_from_fused_blocks(monkeypatch):
    """Level layer gives the same result as without fused kernels."""
    pipe = tiny_pipeline("flux")
    accelerate_pipeline(pipe, load_preset("flux-taylorseer", schedule={"warmup": 2, "interval": 3}))
    apart = tiny_output(pipe, "flux", steps=8)
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    assert distance(tiny_output(pipe, "flux", steps=8), apart) < 1e-5
