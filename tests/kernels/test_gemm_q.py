"""GEMM-Q equals the dense projection, norm and rotation in float64 on the tiles that compute, and writes no others."""

import math

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import gemm_q
from tests.kernels import test_gemm_o
from tests.kernels.conftest import IMPLEMENTED, assert_no_worse, is_refused
from tests.pairs import every_pair

CASES = {
    **test_gemm_o.CASES,
    "one-head": {"batch": 2, "heads": 1, "tokens": 200},
    "40-heads": {"batch": 1, "heads": 40, "tokens": 70},
}
FUSIONS = {"plain": (False, False), "norm": (True, False), "rope": (False, True), "norm-and-rope": (True, True)}
HEAD_DIM, CHANNELS = 16, 40


def dense(x, weight, bias, heads, norm_weight, rope):
    """Compute in x's dtype; the norm's statistics and the rotation in float32 at least."""
    q = F.linear(x, weight, bias).unflatten(-1, (heads, -1))
    wide = q.double() if q.dtype == torch.float64 else q.float()
    if norm_weight is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight
    if rope is not None:
        cos, sin = (table[:, None] for table in rope)
        even, odd = wide[..., ::2], wide[..., 1::2]
        wide = wide * cos + torch.stack((-odd, even), -1).flatten(-2) * sin
    return wide.to(q.dtype)


def make_rope(tokens, device, head_dim=HEAD_DIM):
    angle = torch.arange(tokens, device=device)[:, None] / torch.arange(1, head_dim // 2 + 1, device=device)
    return tuple(f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))


def check(x, weight, bias, sparsity, backend, *, offset=0, norm_weight=None, rope=None):
    """Check a NaN-poisoned output over the whole sequence, and one of x's own length."""
    plan, heads = sparsity.plan, sparsity.plan.heads
    stream, computed = slice(offset, offset + x.shape[1]), sparsity.tokens_computed()
    written = torch.zeros_like(computed)
    written[:, stream] = computed[:, stream]
    poisoned = x.new_full((x.shape[0], plan.tokens, heads, weight.shape[0] // heads), math.nan)
    options = {"offset": offset, "norm_weight": norm_weight, "rope": rope, "backend": backend}
    out = gemm_q(x, weight, bias, plan, out=poisoned, **options)
    assert out is poisoned and torch.equal(out.isnan().any(-1), ~written)
    assert torch.equal(out.isnan().all(-1), ~written)

    stream_rope = None if rope is None else tuple(table[stream] for table in rope)
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    wide_norm = None if norm_weight is None else norm_weight.double()
    wide_rope = None if rope is None else tuple(table.double() for table in stream_rope)
    exact = dense(*wide, heads, wide_norm, wide_rope)
    low = dense(x, weight, bias, heads, norm_weight, stream_rope)
    chosen = computed[:, stream]
    assert_no_worse(out[:, stream][chosen], exact[chosen], low[chosen])

    alone = gemm_q(x, weight, bias, plan, **options)
    assert alone.shape == (*x.shape[:2], *out.shape[2:]) and torch.equal(alone[chosen], out[:, stream][chosen])


@every_pair(is_refused, case=CASES, fusion=FUSIONS, channels=(40, 64), **IMPLEMENTED)
def test_equals_dense_projection(case, fusion, channels, backend, dtype, device, make_tensor, make_sparsity):
    width = case["heads"] * HEAD_DIM
    x = make_tensor(case["batch"], case["tokens"], channels, dtype=dtype)
    weight, bias = make_tensor(width, channels, dtype=dtype), make_tensor(width, dtype=dtype)
    norm_weight = make_tensor(HEAD_DIM, dtype=dtype) if fusion[0] else None
    rope = make_rope(case["tokens"], device) if fusion[1] else None
    check(x, weight, bias, make_sparsity(**case), backend, norm_weight=norm_weight, rope=rope)


@every_pair(is_refused, head_dim=(64, 128), **IMPLEMENTED)
def test_whole_heads_of_full_size(head_dim, backend, dtype, device, make_tensor, make_sparsity):
    x, weight = make_tensor(1, 130, CHANNELS, dtype=dtype), make_tensor(2 * head_dim, CHANNELS, dtype=dtype)
    options = {"norm_weight": make_tensor(head_dim, dtype=dtype), "rope": make_rope(130, device, head_dim)}
    check(x, weight, None, make_sparsity(1, 2, 130, block=128), backend, **options)


@pytest.mark.parametrize("seam", [0, 30, 64, 100, 399])
def test_two_streams_share_the_block_at_the_seam(seam, backend, device, make_tensor, make_sparsity):
    """Text and vision have their own weights, parts of fused ones as x is; the seam may cut a block anywhere."""
    sparsity = make_sparsity(2, 2, 400)
    rope, norm_weight = make_rope(400, device), make_tensor(HEAD_DIM)
    for offset, length in ((0, seam), (seam, 400 - seam)):
        if length:
            x = make_tensor(2, length, 2 * CHANNELS)[..., CHANNELS:]
            weight = make_tensor(4 * HEAD_DIM, 2 * CHANNELS)[2 * HEAD_DIM :, :CHANNELS]
            check(x, weight, None, sparsity, backend, offset=offset, norm_weight=norm_weight, rope=rope)


def test_density_one_is_bit_identical_to_linear_on_a_cpu(make_tensor, make_sparsity):
    plan = make_sparsity(1, 2, 130, rows=1.1).plan
    if plan.mask64.is_cuda:
        pytest.skip("a CPU property")
    x, weight, bias = make_tensor(1, 130, CHANNELS), make_tensor(2 * HEAD_DIM, CHANNELS), make_tensor(2 * HEAD_DIM)
    assert torch.equal(gemm_q(x, weight, bias, plan, backend="reference").flatten(2), F.linear(x, weight, bias))
