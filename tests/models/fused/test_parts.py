"""Fused kernels stand in for modules that they equal, and for nothing else."""

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_accel.models.fused import parts as fused


@pytest.mark.parametrize("eps", [1e-6, 1e-2], ids=["alike", "other-eps"])
@pytest.mark.parametrize("width", [16, 32], ids=["per-head", "across-heads"])
@pytest.mark.parametrize("norm_class", [RMSNorm, nn.RMSNorm, nn.LayerNorm], ids=lambda item: item.__module__)
@torch.no_grad()
def test_norm_and_rope_in_one_equal_the_two(norm_class, width, eps):
    """For any kind of norm, of queries and of keys; kinds without a kernel are called."""
    norms, pair = [norm_class(width, eps=value) for value in (1e-6, eps)], torch.randn(2, 2, 5, 2, 16)
    rotary, out = (torch.randn(5, 16), torch.randn(5, 16)), tuple(torch.empty_like(pair))
    expected = []
    for norm, x in zip(norms, pair, strict=True):
        nn.init.normal_(norm.weight)
        normed = norm(x) if width == 16 else norm(x.flatten(2)).view(x.shape)
        expected.append(apply_rotary_emb(normed, rotary, sequence_dim=1))
    torch.testing.assert_close(fused.normalise_heads(norms[0], pair[0], rotary), expected[0])
    torch.testing.assert_close(fused.normalise_pair(norms, *pair, rotary), tuple(expected))
    fused.normalise_pair(norms, *pair, rotary, out=out)
    torch.testing.assert_close(out, tuple(expected))


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


@pytest.mark.parametrize("width", [4, 6], ids=["in-words", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_two_streams_are_joined(dtype, width):
    """Parts of joint projections, which are no dense tensors; gradients flow."""
    x, context = (torch.randn(2, count, 3 * 2 * width, dtype=dtype, requires_grad=True) for count in (5, 3))
    with torch.enable_grad():
        parts = [item.chunk(3, dim=-1)[2].unflatten(2, (2, width)) for item in (context, x)]
        fused.cat_tokens(*parts).sum().backward()
    with torch.no_grad():
        assert torch.equal(fused.cat_tokens(*parts), torch.cat(parts, dim=1))
    assert x.grad.sum() == x.grad[..., -2 * width :].numel()
