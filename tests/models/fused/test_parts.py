"""Fused kernels stand in for modules that they equal, and for nothing else."""

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_accel.models.fused import parts as fused


def test_a_hooked_norm_is_called():
    norm, x, calls = RMSNorm(16, eps=1e-6), torch.randn(1, 5, 2, 16), []
    expected = norm(x)
    torch.testing.assert_close(fused.normalise_heads(norm, x), expected)
    norm.register_forward_hook(lambda *_: calls.append(1))
    out = torch.empty(1, 5, 2, 16)
    assert fused.normalise_heads(norm, x, out=out) is out
    assert calls == [1] and torch.equal(out, expected)


@pytest.mark.parametrize("width", [16, 32], ids=["per-head", "across-heads"])
@pytest.mark.parametrize("norm_class", [RMSNorm, nn.RMSNorm, nn.LayerNorm], ids=lambda item: item.__module__)
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
