"""The Hopper attention kernel: refused arguments and, on such a GPU, results for both ways to share work.

With fewer than four rows per multiprocessor the kernel splits rows; with more it fetches whole rows.
"""

import dataclasses
import math

import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import attention
from dit_accel.kernels._cuda.attention import limit
from dit_accel.kernels.backends import backend_status, hopper_limit
from dit_accel.kernels.symbols import TileMasks
from tests.kernels.naive_attention import check as check_masked

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or hopper_limit(torch.zeros(1, device="cuda")) is not None, reason="needs Hopper"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])

CASES = {
    "one-block": {"batch": 1, "heads": 1, "tokens": 100, "rows": 1.1, "tiles": 1.1},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 256, "rows": 1.1, "tiles": 1.1},
    "ragged": {"batch": 2, "heads": 5, "tokens": 1000},
    "empty-rows": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1},
    "all-reused": {"batch": 1, "heads": 3, "tokens": 700, "rows": 0.0},
    "all-skipped": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 0.0},
    "long-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1},
    "rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3},
}


def exact_head(q, k, v, keep, scale):
    """One head in float64: out ``[S, D]`` and lse ``[S]``; 0 and -inf without a key."""
    scores = (q.double() @ k.double().T * scale).masked_fill(~keep, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v.double(), scores.logsumexp(-1)


def check(q, k, v, sparsity, kv_len=None):
    """Compares every head with float64 where rows compute, and requires the poison everywhere else."""
    plan, computed = sparsity.plan, sparsity.tokens_computed()
    out = torch.full((*q.shape,), math.nan, dtype=q.dtype, device=q.device)
    result, lse = attention(q, k, v, plan, kv_len=kv_len, return_lse=True, out=out, backend="cuda")
    assert result is out
    assert torch.equal(out.isnan().any(-1), ~computed) and torch.equal(out.isnan().all(-1), ~computed)
    again = attention(q, k, v, plan, kv_len=kv_len, backend="cuda")
    assert torch.equal(again[computed], out[computed]), "the result must not depend on who finishes last"
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    bound = 4 * torch.finfo(q.dtype).eps * v.float().nan_to_num(0.0).abs().max().item()
    for b in range(plan.batch):
        for h in range(plan.heads):
            keep = sparsity.tiles[b, h].repeat_interleave(plan.block, 0).repeat_interleave(plan.block, 1)
            keep = keep[: plan.tokens, : plan.tokens]
            if kv_len is not None:
                keep = keep & (torch.arange(plan.tokens, device=q.device) < kv_len[b])
            head_k, head_v = (x[b, :, h // group].nan_to_num(0.0) for x in (k, v))
            exact, exact_lse = exact_head(q[b, :, h], head_k, head_v, keep, scale)
            rows = computed[b, :, h]
            assert (out[b, rows, h].double() - exact[rows]).abs().max().item() <= bound if rows.any() else True
            expected_lse = exact_lse.masked_fill(~rows, -math.inf)
            torch.testing.assert_close(lse[b, h].double(), expected_lse, rtol=1e-5, atol=1e-5)


@on_hopper
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_dense_masked_attention(case, head_dim, dtype, make_tensor, make_sparsity):
    shape = (case["batch"], case["tokens"], case["heads"], head_dim)
    check(*(make_tensor(*shape, dtype=dtype) for _ in range(3)), make_sparsity(**case, block=128))


@on_hopper
@pytest.mark.parametrize("lengths", [(900, 3), (1000, 0), (128, 896)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, make_tensor, make_sparsity):
    """NaN in their keys and values has no effect."""
    q, k, v = (make_tensor(2, 1000, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = math.nan
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    check(q, k, v, make_sparsity(2, 4, 1000, block=128, rows=0.8, tiles=0.6), kv_len)


@on_hopper
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_share_keys(kv_heads, make_tensor, make_sparsity):
    q = make_tensor(1, 700, 4, 128, dtype=torch.bfloat16)
    k, v = (make_tensor(1, 700, kv_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    check(q, k, v, make_sparsity(1, 4, 700, block=128))


@on_hopper
def test_views_of_a_fused_projection(make_tensor, make_sparsity):
    q, k, v = make_tensor(2, 700, 3, 4, 64, dtype=torch.bfloat16).unbind(2)
    check(q, k, v, make_sparsity(2, 4, 700, block=128))


@on_hopper
def test_large_scores_do_not_overflow(make_tensor, make_sparsity):
    """The maximum jumps by far more than the accumulators may lag behind."""
    q, k = (make_tensor(1, 700, 2, 128, dtype=torch.bfloat16) * 10 for _ in range(2))
    check(q, k, make_tensor(1, 700, 2, 128, dtype=torch.bfloat16), make_sparsity(1, 2, 700, block=128))


MASKED = {
    "ragged": {"batch": 2, "heads": 5, "tokens": 1000, "masked": 0.5},
    "all-masked": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 1.1, "masked": 1.1},
    "few-tiles": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1, "masked": 0.8},
    "long-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1, "masked": 0.3},
    "rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3, "masked": 0.5},
}


@on_hopper
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED.keys())
def test_masks_inside_tiles(case, head_dim, dtype, make_tensor, make_sparsity, assert_no_worse):
    """Queries without a key in a tile, or in any, among them."""
    sparsity = make_sparsity(**case, block=128)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], head_dim, dtype=dtype) for _ in range(3))
    check_masked(q, k, v, sparsity, "cuda", assert_no_worse)


@on_hopper
def test_auto_takes_it_and_the_host_never_waits(make_tensor, make_sparsity):
    assert backend_status()["cuda"] == "ok"
    q = make_tensor(1, 700, 2, 128, dtype=torch.bfloat16)
    plan = make_sparsity(1, 2, 700, block=128).plan
    expected = attention(q, q, q, plan, out=torch.zeros_like(q), backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = attention(q, q, q, plan, out=torch.zeros_like(q))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)


def test_limits(make_sparsity, device):
    """Arguments are checked before any launch, on any device."""
    plan = make_sparsity(1, 2, 300, block=128).plan
    q = torch.zeros(1, 300, 2, 128, dtype=torch.float16, device=device)
    codes = torch.zeros(1, 1, plan.blocks, plan.blocks, dtype=torch.int32, device=device)
    masks = TileMasks(codes, torch.zeros(0, 128, 16, dtype=torch.uint8, device=device))
    masked = dataclasses.replace(plan, masks=masks, full_count=plan.kv_count)
    wide = torch.zeros(1, 300, 2, 132, dtype=torch.float16, device=device)[..., :128]  # rows of 264 bytes

    def judged(q=q, plan=plan, kv_len=None, pv_threshold=None, qk_dtype=None, k=q):
        return limit(q, k, q, plan, kv_len, pv_threshold, qk_dtype, None) or ""

    if not q.is_cuda or hopper_limit(q) is None:
        assert judged() == judged(plan=masked) == ""
    assert "float16 or bfloat16, got torch.float32" in judged(q.float())
    assert "head_dim must be one of (64, 128), got 32" in judged(q[..., :32])
    assert "block must be 128, got 64" in judged(plan=make_sparsity(1, 2, 300, block=64).plan)
    assert "kv_len must be None if the plan has masks" in judged(plan=masked, kv_len=torch.zeros(1))
    assert "pv_threshold and qk_dtype must be None, got -4.0 and None" in judged(pv_threshold=-4.0)
    assert "k must begin at and have strides in positive multiples of 16 bytes" in judged(k=wide)


@on_hopper
def test_an_explicit_choice_names_what_it_can_not_take(make_tensor, make_sparsity):
    q = make_tensor(1, 130, 2, 16, dtype=torch.float16)
    with pytest.raises(
        UnsupportedError, match=r"backend 'cuda' can't take this call: head_dim must be one of \(64, 128\)"
    ):
        attention(q, q, q, make_sparsity(1, 2, 130).plan, backend="cuda")
