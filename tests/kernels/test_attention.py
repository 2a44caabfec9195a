"""Sparse attention equals dense masked attention in float64, and touches only the rows that compute."""

import importlib
from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import attention, backend_status, lower
from dit_accel.kernels._cuda.attention import limit
from dit_accel.kernels.symbols import TileMasks
from tests.kernels.conftest import BACKENDS, IMPLEMENTED, is_refused, needs_hopper
from tests.kernels.naive_attention import LAYOUTS, check, laid_out
from tests.pairs import every_pair

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "forty-heads": {"batch": 1, "heads": 40, "tokens": 70},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "empty-rows": {"batch": 1, "heads": 3, "tokens": 200, "tiles": 0.15},
    "everything": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "tiles": 1.1},
    "no-tiles": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 0.0},
    "no-rows": {"batch": 1, "heads": 2, "tokens": 130, "rows": 0.0},
    "masks": {"batch": 2, "heads": 3, "tokens": 200, "masked": 0.5},
    "all-masked": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "masked": 1.1},
    "none-masked": {"batch": 1, "heads": 2, "tokens": 200, "masked": 0.0},
    "masks-128": {"batch": 1, "heads": 2, "tokens": 300, "block": 128, "tiles": 1.1, "masked": 0.5},
    "masked-block": {"batch": 1, "heads": 5, "tokens": 40, "tiles": 1.1, "masked": 1.1},
    "keys": {"batch": 2, "heads": 2, "tokens": 130, "keys": 0.3},
    "keys-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128, "keys": 0.3},
    "keys-of-ten-heads": {"batch": 1, "heads": 10, "tokens": 70, "keys": 0.3},
    "keys-alone": {"batch": 1, "heads": 2, "tokens": 192, "rows": 1.1, "tiles": 0.0, "keys": 0.3},
    "no-key-left": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 1.1, "keys": 0.3},
    "keys-and-masks": {"batch": 1, "heads": 2, "tokens": 200, "masked": 0.6, "keys": 0.3},
}
LARGE = {  # with fewer than four rows per multiprocessor the Hopper kernel splits rows; with more it fetches whole rows
    "one-block": {"batch": 1, "heads": 1, "tokens": 100, "rows": 1.1, "tiles": 1.1},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 256, "rows": 1.1, "tiles": 1.1},
    "ragged": {"batch": 2, "heads": 5, "tokens": 1000},
    "empty-rows": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1},
    "all-skipped": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 0.0},
    "no-rows": {"batch": 1, "heads": 3, "tokens": 700, "rows": 0.0},
    "long-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1},
    "rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3},
    "masks": {"batch": 2, "heads": 5, "tokens": 1000, "masked": 0.5},
    "all-masked": {"batch": 1, "heads": 3, "tokens": 700, "rows": 1.1, "tiles": 1.1, "masked": 1.1},
    "few-masked-tiles": {"batch": 1, "heads": 40, "tokens": 700, "rows": 0.7, "tiles": 0.1, "masked": 0.8},
    "long-masked-rows-in-parts": {"batch": 1, "heads": 3, "tokens": 9000, "rows": 0.2, "tiles": 1.1, "masked": 0.3},
    "masked-rows-by-ticket": {"batch": 2, "heads": 24, "tokens": 2500, "rows": 1.1, "tiles": 0.3, "masked": 0.5},
    "keys": {"batch": 2, "heads": 5, "tokens": 1000, "keys": 0.3},
    "keys-alone": {"batch": 1, "heads": 3, "tokens": 900, "tiles": 0.0, "keys": 0.05},
    "few-keys": {"batch": 1, "heads": 40, "tokens": 700, "keys": 0.005},
    "every-key": {"batch": 1, "heads": 3, "tokens": 900, "tiles": 0.2, "keys": 1.1},
    "no-key": {"batch": 1, "heads": 3, "tokens": 900, "keys": 0.0},
    "more-rows-with-keys-than-programs": {"batch": 2, "heads": 24, "tokens": 2500, "keys": 0.1},
}
KINDS = {"tiles": {}, "masks": {"masked": 0.5}, "keys": {"keys": 0.3}}
WAYS = {f"{kind}-{backend}": (options, backend) for kind, options in KINDS.items() for backend in BACKENDS}


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_dense_masked_attention(case, backend, dtype, make_tensor, make_sparsity):
    shape = (case["batch"], case["tokens"], case["heads"], 16)
    q, k, v = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    check(q, k, v, make_sparsity(**case), backend)


@needs_hopper
@every_pair(case=LARGE, head_dim=(64, 128), dtype=(torch.float16, torch.bfloat16))
def test_on_hopper(case, head_dim, dtype, make_tensor, make_sparsity):
    """And the result does not depend on who finishes last."""
    sparsity = make_sparsity(**case, block=128)
    q, k, v = (make_tensor(case["batch"], case["tokens"], case["heads"], head_dim, dtype=dtype) for _ in range(3))
    out = check(q, k, v, sparsity, "cuda")
    computed = sparsity.tokens_computed()
    assert torch.equal(attention(q, k, v, sparsity.plan, backend="cuda")[computed], out[computed])


@every_pair(layout=LAYOUTS, head_dim=(16, 32, 64, 128), way=WAYS)
def test_layouts_and_head_dimensions(layout, head_dim, way, make_tensor, make_sparsity):
    kind, backend = way
    check(*laid_out(layout, make_tensor, head_dim=head_dim), make_sparsity(2, 4, 130, **kind), backend, scale=0.3)


@needs_hopper
@pytest.mark.parametrize("layout", [layout for name, layout in LAYOUTS.items() if name != "odd-strides"])
def test_layouts_on_hopper(layout, make_tensor, make_sparsity):
    """Large scores among them: the maximum jumps by far more than the accumulators may lag behind."""
    qkv = laid_out(layout, make_tensor, tokens=700, head_dim=128, dtype=torch.bfloat16)
    check(*qkv, make_sparsity(2, 4, 700, block=128), "cuda")


@every_pair(lengths=[(200, 1), (130, 0), (500, 64)], way=WAYS | {"long-masks": (KINDS["masks"], "triton-long")})
def test_keys_beyond_kv_len_take_no_part(lengths, way, monkeypatch, device, make_tensor, make_sparsity):
    """Rows left without a key are empty. Lengths may be a view; long calls load masked tiles through descriptors."""
    kind, backend = way
    if backend.endswith("-long"):
        monkeypatch.setattr("dit_accel.kernels.symbols.SHORT_PAIRS", 0)
    kv_len = torch.tensor([lengths, (7, 7)], dtype=torch.int32, device=device).T.contiguous()[:, 0]  # of stride 2
    q, k, v = (make_tensor(2, 200, 2, 16, dtype=torch.float16) for _ in range(3))
    check(q, k, v, make_sparsity(2, 2, 200, **kind), backend.removesuffix("-long"), kv_len=kv_len)


@needs_hopper
@pytest.mark.parametrize("kind", [KINDS["tiles"], KINDS["keys"]], ids=["tiles", "keys"])
@pytest.mark.parametrize("lengths", [(900, 3), (1000, 0), (128, 896)], ids=str)
def test_keys_beyond_kv_len_on_hopper(lengths, kind, make_tensor, make_sparsity):
    q, k, v = (make_tensor(2, 1000, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    check(q, k, v, make_sparsity(2, 4, 1000, block=128, rows=0.8, tiles=0.6, **kind), "cuda", kv_len=kv_len)


@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 3)], ids=["shared", "by-sample", "by-head"])
def test_masks_shared_by_samples_and_heads(axes, backend, make_tensor, make_sparsity):
    sparsity = make_sparsity(2, 3, 130, masked=0.5)
    masks = sparsity.symbols.masks
    symbols = replace(sparsity.symbols, masks=TileMasks(masks.codes[: axes[0], : axes[1]], masks.pool))
    sparsity = sparsity._replace(symbols=symbols, plan=lower(symbols, backend="reference"))
    q, k, v = (make_tensor(2, 130, 3, 16) for _ in range(3))
    check(q, k, v, sparsity, backend)


def test_all_ones_is_bit_identical_to_dense_on_a_cpu(make_tensor, make_sparsity):
    """The reference must not cost quality, or an extra pass, where nothing is skipped."""
    q, k, v = (make_tensor(2, 200, 3, 16).cpu() for _ in range(3))
    plan = make_sparsity(2, 3, 200, rows=1.1, tiles=1.1).plan
    if plan.mask64.is_cuda:
        pytest.skip("a CPU property")
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(attention(q, k, v, plan, backend="reference"), expected.transpose(1, 2))


@pytest.mark.parametrize("threshold", [None, -1.0], ids=["plain", "threshold"])
@pytest.mark.parametrize("block", [64, 128])
def test_gpus_without_tensor_descriptors(block, threshold, monkeypatch, device, make_tensor, make_sparsity):
    """Other GPUs than Hopper read tiles by pointers, in other sizes."""
    options = {"pv_threshold": threshold, "backend": "triton"}
    if threshold is not None:
        options["kv_len"] = torch.tensor((150, 300), dtype=torch.int32, device=device)
    plan = make_sparsity(2, 2, 300, block=block, masked=threshold and 0.5, rows=1.1).plan
    q, k, v = (make_tensor(2, 300, 2, 16, dtype=torch.float16) for _ in range(3))
    expected = attention(q, k, v, plan, **options)
    implementation = importlib.import_module("dit_accel.kernels._triton.attention")
    monkeypatch.setattr(implementation, "hopper_limit", lambda tensor: "it is not a Hopper GPU")
    torch.testing.assert_close(attention(q, k, v, plan, **options), expected, rtol=2e-3, atol=2e-3)


def test_one_key_head_of_a_wide_tensor(make_tensor, make_sparsity):
    """An axis of length 1 may have any stride, also one that no descriptor takes."""
    q, k, v = make_tensor(1, 130, 2, 16, dtype=torch.float16), *(make_tensor(2, 130, 16, dtype=torch.float16))
    k, v = (x.as_strided((1, 130, 1, 16), (3, 16, 5, 1)) for x in (k, v))
    check(q, k, v, make_sparsity(1, 2, 130), "triton")


@needs_hopper
def test_auto_takes_the_hopper_kernel_and_the_host_never_waits(make_tensor, make_sparsity):
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


def test_limits_of_the_hopper_kernel(make_sparsity, device):
    """Arguments are checked before any launch, on any device."""
    plan, masked = (make_sparsity(1, 2, 300, block=128, masked=share).plan for share in (None, 0.5))
    q = torch.zeros(1, 300, 2, 128, dtype=torch.float16, device=device)
    wide = torch.zeros(1, 300, 2, 132, dtype=torch.float16, device=device)[..., :128]  # rows of 264 bytes

    def reason(q=q, plan=plan, kv_len=None, pv_threshold=None, qk_dtype=None, k=q):
        return limit(q, k, q, plan, kv_len, pv_threshold, qk_dtype, None) or ""

    assert reason() == reason(plan=masked) == "" and "float16 or bfloat16, got torch.float32" in reason(q.float())
    assert "head_dim must be one of (64, 128), got 32" in reason(q[..., :32])
    assert "block must be 128, got 64" in reason(plan=make_sparsity(1, 2, 300, block=64).plan)
    assert "kv_len must be None if the plan has masks" in reason(plan=masked, kv_len=torch.zeros(1))
    assert "pv_threshold and qk_dtype must be None, got -4.0 and None" in reason(pv_threshold=-4.0)
    assert "k must begin at and have strides in positive multiples of 16 bytes" in reason(k=wide)
