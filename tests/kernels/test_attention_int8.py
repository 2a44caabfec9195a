"""Attention in 8 bits: error within the contract, equal to its simulation, and independent of unused values."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dit_accel.kernels import attention, constants
from dit_accel.kernels.attention.quantize import QK_DTYPES, chosen_qk_dtype
from tests.kernels.conftest import BACKENDS
from tests.kernels.naive_attention import LAYOUTS, laid_out
from tests.pairs import every_pair

BOUNDS = {"int8": 0.02, "int8+fp8": 0.05}  # of the norm of the output
# Triton's interpreter loses the carry of a float8 rounding: 1 in 32 numbers comes out half as large
CARRY_LOST = 0.0 if torch.cuda.is_available() else 0.1
# the simulation has no probabilities in half precision or float8
ROUNDING_OF_PROBABILITIES = {"int8": 4e-3, "int8+fp8": 0.035 + CARRY_LOST}
every_dtype = pytest.mark.parametrize("qk_dtype", QK_DTYPES)
CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 256, "block": 128, "rows": 1.1, "tiles": 1.1},
    "empty-rows": {"batch": 1, "heads": 3, "tokens": 200, "tiles": 0.15},
}
LARGE = [10.0, 20.0, 30.0, 50.0]
OUTLIERS = {
    "none": {},
    "k-offset": {"k_offset": [3, 40, 77, 100]},
    "k-and-q-offset": {"k_offset": [3, 40, 77, 100], "q_offset": [10, 50, 90, 120]},
    "k": {"k": [3, 40, 77, 100]},
    "q": {"q": [3, 40, 77, 100]},
    "v": {"v": [3, 40, 77, 100]},
    "other-channels": {"k": [3, 40, 77, 100], "q": [10, 50, 90, 120], "v": [3, 40, 77, 100]},
    "same-channels": {"k": [3, 40, 77, 100], "q": [3, 40, 77, 100]},
    "balanced": {"k": [3, 40, 77, 100], "q_inverse": [3, 40, 77, 100]},
}


def with_outliers(q, k, v, outliers):
    """Make channels 10 to 50 times as large as the others, or move them by 10 to 50 from 0."""
    tensors = {"q": q, "k": k, "v": v}
    for where, channels in outliers.items():
        name, _, how = where.partition("_")
        size = torch.tensor(LARGE, dtype=q.dtype, device=q.device)
        part = tensors[name][..., channels]
        tensors[name][..., channels] = part + size if how == "offset" else part * (1 / size if how else size)
    return q, k, v


def error_of(outliers, qk_dtype, backend, make_tensor, make_sparsity):
    """Error of dense attention, relative to the norm of the output."""
    q, k, v = with_outliers(*(make_tensor(1, 256, 1, 128, dtype=torch.float16) for _ in range(3)), OUTLIERS[outliers])
    plan = make_sparsity(1, 1, 256, block=128, rows=1.1, tiles=1.1).plan
    out = attention(q, k, v, plan, qk_dtype=qk_dtype, backend=backend)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    return ((out.double() - expected).norm() / expected.norm()).item()


@every_pair(outliers=list(OUTLIERS), qk_dtype=QK_DTYPES, backend=BACKENDS)
def test_the_error_stays_within_its_bound(outliers, qk_dtype, backend, make_tensor, make_sparsity):
    lost = CARRY_LOST if (qk_dtype, backend) == ("int8+fp8", "triton") else 0.0
    assert error_of(outliers, qk_dtype, backend, make_tensor, make_sparsity) <= BOUNDS[qk_dtype] + lost


def test_exact_channels_are_needed(make_tensor, make_sparsity, monkeypatch):
    """Without exact channels, channels that are large in q and in k exceed the bound, even after levelling."""
    monkeypatch.setattr(constants, "EXACT_CHANNELS", 0)
    assert error_of("same-channels", "int8", "reference", make_tensor, make_sparsity) > 2 * BOUNDS["int8"]


@every_pair(case=CASES, qk_dtype=QK_DTYPES, dtype=(torch.float16, torch.float32))
def test_the_kernel_equals_the_simulation(case, qk_dtype, dtype, make_tensor, make_sparsity):
    sparsity = make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], 64)
    q, k, v = make_tensor(*shape, dtype=dtype), make_tensor(*shape, dtype=dtype) + 2, make_tensor(*shape, dtype=dtype)
    check(q, k, v, sparsity.plan, sparsity.tokens_computed(), qk_dtype)


@every_pair(
    lambda case: case["layout"] == LAYOUTS["large-scores"], layout=LAYOUTS, head_dim=(32, 128), qk_dtype=QK_DTYPES
)
def test_layouts_and_head_dimensions(layout, head_dim, qk_dtype, make_tensor, make_sparsity):
    sparsity = make_sparsity(1, 4, 130)
    qkv = laid_out(layout, make_tensor, head_dim=head_dim, batch=1)
    check(*qkv, sparsity.plan, sparsity.tokens_computed(), qk_dtype, scale=0.3)


def check(q, k, v, plan, computed, qk_dtype, **options):
    """Compare output and lse with the reference; reused rows keep the poison, no other has any. Returns both."""
    results = {}
    for backend in BACKENDS:
        poisoned = torch.full_like(q, math.nan)
        results[backend] = attention(
            q, k, v, plan, qk_dtype=qk_dtype, out=poisoned, return_lse=True, backend=backend, **options
        )
        assert results[backend][0] is poisoned and torch.equal(poisoned.isnan().any(-1), ~computed)
        assert torch.equal(poisoned.isnan().all(-1), ~computed)
    (expected, expected_lse), (actual, lse) = results["reference"], results["triton"]
    distance = (actual[computed].double() - expected[computed].double()).norm()
    assert distance <= ROUNDING_OF_PROBABILITIES[qk_dtype] * expected[computed].double().norm()
    # -inf in reused and in empty rows; a sum in another order can turn a tie when an element is rounded to 8 bits
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=5e-3)
    return results


@pytest.mark.parametrize(("lengths", "qk_dtype"), [((130, 0), "int8"), ((500, 63), "int8+fp8")])
def test_what_takes_no_part_leaves_no_trace(lengths, qk_dtype, device, make_tensor, make_sparsity):
    """NaN in keys beyond ``kv_len`` and in queries of reused rows has no effect."""
    sparsity = make_sparsity(2, 2, 200)
    computed = sparsity.tokens_computed()
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    q, k, v = (make_tensor(2, 200, 2, 32, dtype=torch.float16) for _ in range(3))
    clean = check(q, k, v, sparsity.plan, computed, qk_dtype, kv_len=kv_len)
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = math.nan
    q[~computed] = math.nan
    for backend, (expected, _) in clean.items():
        out = attention(q, k, v, sparsity.plan, kv_len=kv_len, qk_dtype=qk_dtype, backend=backend)
        assert torch.equal(out[computed], expected[computed])


@every_dtype
def test_keys_all_alike_and_zeros(qk_dtype, backend, make_tensor, make_sparsity):
    """Channels without any size have no scale of their own; the output is then the mean of the values.

    In float8 too, although each value is rounded: the mean of what rounding takes away comes back.
    """
    plan = make_sparsity(1, 2, 128, rows=1.1, tiles=1.1).plan
    q, v = (make_tensor(1, 128, 2, 32, dtype=torch.float16) for _ in range(2))
    mean = v.double().mean(1, keepdim=True).expand_as(v)
    for k in (torch.zeros_like(v), torch.full_like(v, 3.0)):
        for query in (q, torch.zeros_like(q)):
            out = attention(query, k, v, plan, qk_dtype=qk_dtype, backend=backend)
            torch.testing.assert_close(out.double(), mean, rtol=0, atol=1e-3)


def test_a_mean_of_the_values_costs_nothing(backend, make_tensor, make_sparsity):
    """float8 rounds only the deviation of the values from their mean."""
    plan = make_sparsity(1, 2, 192, rows=1.1, tiles=1.1).plan
    q, k, v = (make_tensor(1, 192, 2, 32, dtype=torch.float16) for _ in range(3))
    near, far = (attention(q, k, v + x, plan, qk_dtype="int8+fp8", backend=backend).float() for x in (0, 16))
    torch.testing.assert_close(far - 16, near, rtol=0, atol=0.05)


@pytest.mark.parametrize(("kv_len", "qk_dtype"), [(None, "int8+fp8"), ((330, 100), "int8")], ids=["all-keys", "kv_len"])
def test_negligible_tiles_are_left_out(kv_len, qk_dtype, device, make_tensor, make_sparsity):
    """Under pv_threshold rows leave out tiles far below their best so far, as the reference does, and no last tile.

    Scores of the six key blocks lie about these heights, none of them near the threshold.
    """
    tokens, block = 380, 64
    heights = torch.tensor([2.0, -1.5, 1.0, -20.0, 1.5, -1.5], device=device)
    direction = torch.nn.functional.normalize(make_tensor(1, 1, 1, 32), dim=-1)
    by_token = heights.repeat_interleave(block)[None, :tokens, None, None]
    q = (2 * direction + 0.1 * make_tensor(2, tokens, 1, 32)).half()
    k = (direction * by_token * 32**0.5 / 2 + 0.1 * make_tensor(2, tokens, 1, 32)).half()
    v = make_tensor(2, tokens, 1, 32, dtype=torch.float16)
    plan = make_sparsity(2, 1, tokens, rows=1.1, tiles=1.1).plan
    lengths = None if kv_len is None else torch.tensor(kv_len, dtype=torch.int32, device=device)
    computed = torch.ones(q.shape[:3], dtype=torch.bool, device=device)
    _, lse = check(q, k, v, plan, computed, qk_dtype, kv_len=lengths, pv_threshold=-3.0)["triton"]
    _, whole = attention(q, k, v, plan, kv_len=lengths, qk_dtype=qk_dtype, return_lse=True, backend="triton")
    lost = whole - lse
    assert (lost[0] > 0.005).all()  # e^-1.5 of the 15 that all weights sum to is about 0.015
    if kv_len is not None:
        assert (lost[1].abs() < 1e-4).all()  # the second tile is the last with a key


def test_auto_is_int8_where_bf16_is_slow(monkeypatch):
    """Where the kernel can: for whole tiles, in half precision."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability: capability)
    half = partial(SimpleNamespace, is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 1, 64))
    calls = [(half(device=(major, 0)), None) for major in (8, 9, 12)]
    calls += [(half(device=(8, 9)), "masks"), (half(device=(8, 9), dtype=torch.float32), None)]
    chosen = [chosen_qk_dtype(q, SimpleNamespace(masks=masks), "auto") for q, masks in calls]
    assert chosen == [None, None, "int8", None, None]


@every_dtype
def test_loading_by_descriptor_equals_loading_by_pointer(qk_dtype, make_tensor, make_sparsity):
    """The kernel loads tiles by descriptor from Hopper on."""
    from dit_accel.kernels._triton.attention_int8 import attend, values_as_matrix
    from dit_accel.kernels._triton.quantize import quantize

    q, k, v = (make_tensor(1, 130, 2, 32, dtype=torch.float16) for _ in range(3))
    plan = make_sparsity(1, 2, 130, rows=1.1, tiles=1.1).plan
    quantized, results = quantize(q, k, v, plan, 0.2, None, qk_dtype, has_lse=False), []
    for by_descriptor in (False, True):
        matrix = values_as_matrix(v, plan, None, quantized, zero_fills=by_descriptor)
        results.append(torch.full_like(q, math.nan))
        attend(plan, quantized, matrix, {"KEY_TILE": 64, "STAGES": 1, "num_warps": 4}, by_descriptor, results[-1], None)
    assert torch.equal(*results)
