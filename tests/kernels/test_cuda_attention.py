"""The Hopper attention kernel: refused arguments and, on such a GPU, results for both ways to share work.

With fewer than four rows per multiprocessor the kernel splits rows; with more it fetches whole rows.
"""

import dataclasses
import math

import pytest
import torch

from dit_accel.kernels import attention
from dit_accel.kernels._cuda.attention import limit
from dit_accel.kernels.backends import backend_status, hopper_limit
from dit_accel.kernels.symbols import TileMasks
from tests.kernels.naive_attention import LAYOUTS, check, laid_out
from tests.pairs import every_pair

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or hopper_limit(torch.zeros(1, device="cuda")) is not None, reason="needs Hopper"
)
CASES = {
    "one-block": {"batch": 1, "heads": 1, "tokens": 100, "rows": 1.1, "tiles": 1.1},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 256, "rows": 1.1, "tiles": 1.1},
    "ragged": {"batch": 2, "heads": 5, "tokens": 1000},
    "empty-rows": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1},
    "all-skipped": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 0.0},
    "long-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1},
    "rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3},
    "masks": {"batch": 2, "heads": 5, "tokens": 1000, "masked": 0.5},
    "all-masked": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 1.1, "masked": 1.1},
    "few-masked-tiles": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1, "masked": 0.8},
    "long-masked-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1, "masked": 0.3},
    "masked-rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3, "masked": 0.5},
}


@on_hopper
@every_pair(case=CASES, head_dim=(64, 128), dtype=(torch.float16, torch.bfloat16))
def test_equals_dense_masked_attention(case, head_dim, dtype, make_tensor, make_sparsity, assert_no_worse):
    """And the result does not depend on who finishes last."""
    sparsity = make_sparsity(**case, block=128)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], head_dim, dtype=dtype) for _ in range(3))
    out = check(q, k, v, sparsity, "cuda", assert_no_worse)
    computed = sparsity.tokens_computed()
    assert torch.equal(attention(q, k, v, sparsity.plan, backend="cuda")[computed], out[computed])


@on_hopper
@pytest.mark.parametrize("lengths", [(900, 3), (1000, 0), (128, 896)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, make_tensor, make_sparsity, assert_no_worse):
    """NaN in their keys and values has no effect."""
    q, k, v = (make_tensor(2, 1000, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    sparsity = make_sparsity(2, 4, 1000, block=128, rows=0.8, tiles=0.6)
    clean = check(q, k, v, sparsity, "cuda", assert_no_worse, kv_len=kv_len)
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = math.nan
    computed = sparsity.tokens_computed()
    poisoned = attention(q, k, v, sparsity.plan, kv_len=kv_len, backend="cuda")
    assert torch.equal(poisoned[computed], clean[computed])


@on_hopper
@pytest.mark.parametrize("layout", [layout for name, layout in LAYOUTS.items() if name != "odd-strides"])
def test_layouts(layout, make_tensor, make_sparsity, assert_no_worse):
    """Large scores among them: the maximum jumps by far more than the accumulators may lag behind."""
    qkv = laid_out(layout, make_tensor, tokens=700, head_dim=128, dtype=torch.bfloat16)
    check(*qkv, make_sparsity(2, 4, 700, block=128), "cuda", assert_no_worse)


@on_hopper
def test_all_rows_reused_leave_the_output_alone(make_tensor, make_sparsity):
    q, k, v = (make_tensor(1, 700, 3, 128, dtype=torch.bfloat16) for _ in range(3))
    plan = make_sparsity(1, 3, 700, block=128, rows=0.0).plan
    assert torch.equal(attention(q, k, v, plan, out=v.clone(), backend="cuda"), v)


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

    def reason(q=q, plan=plan, kv_len=None, pv_threshold=None, qk_dtype=None, k=q):
        return limit(q, k, q, plan, kv_len, pv_threshold, qk_dtype, None) or ""

    assert reason() == reason(plan=masked) == ""
    assert "float16 or bfloat16, got torch.float32" in reason(q.float())
    assert "head_dim must be one of (64, 128), got 32" in reason(q[..., :32])
    assert "block must be 128, got 64" in reason(plan=make_sparsity(1, 2, 300, block=64).plan)
    assert "kv_len must be None if the plan has masks" in reason(plan=masked, kv_len=torch.zeros(1))
    assert "pv_threshold and qk_dtype must be None, got -4.0 and None" in reason(pv_threshold=-4.0)
    assert "k must begin at and have strides in positive multiples of 16 bytes" in reason(k=wide)
