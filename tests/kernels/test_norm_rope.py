"""RMSNorm per head or across heads, and RoPE, equal the same formulas in float64, rounded once."""

import math

import torch

from dit_accel.kernels import norm_rope, norm_rope_pair
from tests.kernels.conftest import BACKENDS, IMPLEMENTED, assert_rounded_once, is_refused
from tests.pairs import every_pair

WEIGHTS = {"per-head": lambda heads, dim: dim, "across-heads": lambda heads, dim: heads * dim, "no-norm": None}


def exact_norm_rope(x, weight, rope, eps):
    """One token and head at a time."""
    batch, tokens, heads, head_dim = x.shape
    y = x.double().clone()
    for b in range(batch):
        for token in range(tokens):
            if weight is not None and len(weight) == head_dim:
                for head in range(heads):
                    row = y[b, token, head]
                    y[b, token, head] = row / (row.square().mean() + eps).sqrt() * weight.double()
            elif weight is not None:
                row = y[b, token].flatten()
                y[b, token] = (row / (row.square().mean() + eps).sqrt() * weight.double()).view(heads, head_dim)
            if rope is not None:
                row = y[b, token].clone()
                if rope[0].dim() == 4:
                    cos, sin = (table[b % len(table), token].double() for table in rope)
                    half = cos.shape[-1]
                    first, second = slice(half), slice(half, 2 * half)
                    y[b, token, :, first] = row[:, first] * cos - row[:, second] * sin
                    y[b, token, :, second] = row[:, second] * cos + row[:, first] * sin
                    continue
                cos, sin = (table[token].double() for table in rope)
                y[b, token, :, 0::2] = row[:, 0::2] * cos[0::2] - row[:, 1::2] * sin[0::2]
                y[b, token, :, 1::2] = row[:, 1::2] * cos[1::2] + row[:, 0::2] * sin[1::2]
    return y


TABLES = {  # of adjacent features; or of halves, with heads before tokens in memory, as a part of wider ones
    "none": None,
    "adjacent": lambda make, heads, dim: make(5, dim),
    "halves-of-each-head": lambda make, heads, dim: make(2, heads, 5, dim).transpose(1, 2)[..., : dim // 2],
    "halves-of-all-heads": lambda make, heads, dim: make(1, 1, 5, dim).transpose(1, 2)[..., : dim // 2],
    "halves-of-some-features": lambda make, heads, dim: make(1, 5, 1, 6),
}


@every_pair(is_refused, size=((3, 16), (4, 64)), length=WEIGHTS, table=TABLES, **IMPLEMENTED)
def test_norm_and_rotation(size, length, table, backend, dtype, make_tensor):
    """Alone, and in a pair."""
    x = make_tensor(2, 5, *size, dtype=dtype) * 2
    weight = None if length is None else make_tensor(length(*size), dtype=dtype)
    rope = None if table is None else tuple(table(make_tensor, *size) for _ in range(2))
    expected = exact_norm_rope(x, weight, rope, 1e-5)
    pair = norm_rope_pair(x, x.clone(), (weight, weight), rope, eps=1e-5, backend=backend)
    for out in (norm_rope(x, weight, rope, eps=1e-5, backend=backend), *pair):
        assert out.dtype == dtype
        assert_rounded_once(out, expected, 2 * expected.abs().max())


def test_it_writes_its_tokens_of_a_joint_sequence_alone(backend, make_tensor):
    """The op reads a slice of a fused projection and writes a slice of the joint sequence."""
    x = make_tensor(2, 5, 3 * 48)[..., 48:96].unflatten(-1, (3, 16))
    joint = torch.full((2, 9, 3, 16), math.nan, device=x.device)
    weight, rope = make_tensor(16), (make_tensor(5, 16), make_tensor(5, 16))
    out = joint[:, 2:7]
    assert norm_rope(x, weight, rope, out=out, backend=backend) is out
    torch.testing.assert_close(out, norm_rope(x.contiguous(), weight, rope))
    assert joint[:, :2].isnan().all() and joint[:, 7:].isnan().all()


@every_pair(length=WEIGHTS, alike=(True, False), backend=BACKENDS)
def test_a_pair_is_each_by_itself(length, alike, backend, make_tensor):
    """A pair gives the results of two single calls, for any memory layout, into new tensors or joint sequences."""
    projected = make_tensor(2, 5, 3 * 48)
    q, k = (projected[..., start : start + 48].unflatten(-1, (3, 16)) for start in (0, 48))
    k = k if alike else k.contiguous()
    weights = (None, None) if length is None else (make_tensor(length(3, 16)), make_tensor(length(3, 16)))
    rope = make_tensor(5, 16), make_tensor(5, 16)
    expected = [norm_rope(x, weight, rope, eps=1e-5) for x, weight in zip((q, k), weights, strict=True)]
    torch.testing.assert_close(norm_rope_pair(q, k, weights, rope, eps=1e-5, backend=backend), tuple(expected))
    joint = torch.full((2, 2, 9, 3, 16), math.nan, device=q.device)
    norm_rope_pair(q, k, weights, rope, eps=1e-5, out=tuple(joint[:, :, 2:7]), backend=backend)
    torch.testing.assert_close(joint[:, :, 2:7], torch.stack(expected))
    assert joint[:, :, :2].isnan().all() and joint[:, :, 7:].isnan().all()
