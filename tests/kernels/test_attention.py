"""Sparse attention equals dense masked attention in float64, and touches only the rows that compute."""

import importlib
import math

import pytest
import torch

from dit_accel.errors import BackendError, ShapeError, UnsupportedError
from dit_accel.kernels import attention
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.kernels.naive_attention import check
from tests.pairs import every_pair

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy on the log of an empty sum

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "one-head": {"batch": 1, "heads": 1, "tokens": 200},
    "forty-heads": {"batch": 1, "heads": 40, "tokens": 70},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "empty-rows": {"batch": 1, "heads": 3, "tokens": 200, "tiles": 0.15},
    "everything": {"batch": 1, "heads": 2, "tokens": 200, "rows": 1.1, "tiles": 1.1},
    "whole-rows-reused": {"batch": 1, "heads": 3, "tokens": 200, "rows": 0.4, "tiles": 1.1},
}


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_dense_masked_attention(case, backend, dtype, make_tensor, make_sparsity, assert_no_worse):
    sparsity = make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], 16)
    q, k, v = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    check(q, k, v, sparsity, backend, assert_no_worse)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_head_dimensions(head_dim, backend, make_tensor, make_sparsity, assert_no_worse):
    q, k, v = (make_tensor(1, 130, 2, head_dim) for _ in range(3))
    check(q, k, v, make_sparsity(1, 2, 130), backend, assert_no_worse)


@pytest.mark.parametrize("lengths", [(200, 1), (130, 0), (128, 64), (500, 63)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, backend, device, make_tensor, make_sparsity, assert_no_worse):
    """Their NaN has no effect; rows left without a key are empty."""
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    q, k, v = (make_tensor(2, 200, 3, 16, dtype=torch.float16) for _ in range(3))
    sparsity = make_sparsity(2, 3, 200)
    clean = check(q, k, v, sparsity, backend, assert_no_worse, kv_len=kv_len)
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = math.nan
    poisoned = attention(q, k, v, sparsity.plan, kv_len=kv_len, backend=backend)
    computed = sparsity.tokens_computed()
    assert torch.equal(poisoned[computed], clean[computed])


@pytest.mark.parametrize("options", [{}, {"qk_dtype": "int8"}], ids=["plain", "int8"])
def test_kv_len_may_be_a_view(options, backend, device, make_tensor, make_sparsity):
    q, k, v = (make_tensor(2, 130, 2, 32) for _ in range(3))
    plan = make_sparsity(2, 2, 130, rows=1.1).plan
    lengths = torch.tensor([[70, 1], [129, 2]], dtype=torch.int32, device=device)
    views = lengths[:, 0], lengths[0, :1].expand(2)
    for view in views:
        expected = attention(q, k, v, plan, kv_len=view.clone(), backend=backend, **options)
        assert torch.equal(attention(q, k, v, plan, kv_len=view, backend=backend, **options), expected)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_share_keys(kv_heads, backend, make_tensor, make_sparsity, assert_no_worse):
    q, k, v = make_tensor(1, 130, 4, 16), make_tensor(1, 130, kv_heads, 16), make_tensor(1, 130, kv_heads, 16)
    check(q, k, v, make_sparsity(1, 4, 130), backend, assert_no_worse)
    check(q, k, v, make_sparsity(1, 4, 130, rows=1.1, tiles=1.1), backend, assert_no_worse)


def test_views_of_a_fused_projection(backend, make_tensor, make_sparsity, assert_no_worse):
    q, k, v = make_tensor(2, 130, 3, 3, 16).unbind(2)
    check(q, k, v, make_sparsity(2, 3, 130), backend, assert_no_worse)


def test_scale(backend, make_tensor, make_sparsity, assert_no_worse):
    q, k, v = (make_tensor(1, 130, 2, 16) for _ in range(3))
    check(q, k, v, make_sparsity(1, 2, 130), backend, assert_no_worse, scale=0.7)


def test_large_scores_do_not_overflow(backend, make_tensor, make_sparsity, assert_no_worse):
    q, k, v = make_tensor(1, 130, 2, 16) * 10, make_tensor(1, 130, 2, 16) * 10, make_tensor(1, 130, 2, 16)
    check(q, k, v, make_sparsity(1, 2, 130), backend, assert_no_worse)


def test_rows_without_a_tile_are_zero(backend, make_tensor, make_sparsity):
    q, k, v = (make_tensor(1, 130, 2, 16) for _ in range(3))
    plan = make_sparsity(1, 2, 130, rows=1.1, tiles=0.0).plan
    out, lse = attention(q, k, v, plan, return_lse=True, out=torch.full_like(q, math.nan), backend=backend)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_all_rows_reused_leave_the_output_alone(backend, make_tensor, make_sparsity):
    q, k, v = (make_tensor(1, 130, 2, 16) for _ in range(3))
    out = attention(q, k, v, make_sparsity(1, 2, 130, rows=0.0).plan, out=v.clone(), backend=backend)
    assert torch.equal(out, v)


def test_all_ones_is_bit_identical_to_dense_on_a_cpu(make_tensor, make_sparsity):
    """The reference must not cost quality, or an extra pass, where nothing is skipped."""
    q, k, v = (make_tensor(2, 200, 3, 16).cpu() for _ in range(3))
    plan = make_sparsity(2, 3, 200, rows=1.1, tiles=1.1).plan
    if plan.mask64.is_cuda:
        pytest.skip("a CPU property")
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(attention(q, k, v, plan, backend="reference"), expected.transpose(1, 2))


GPU_WAYS = {
    "plain": {},
    "everything": {"masked": 0.5, "kv_len": (150, 300), "pv_threshold": -1.0},
}


@pytest.mark.parametrize("options", GPU_WAYS.values(), ids=GPU_WAYS.keys())
@pytest.mark.parametrize("block", [64, 128])
def test_gpus_without_tensor_descriptors(block, options, monkeypatch, device, make_tensor, make_sparsity):
    """Other GPUs than Hopper read tiles by pointers, in other sizes."""
    implementation = importlib.import_module("dit_accel.kernels._triton.attention")
    options = dict(options)
    plan = make_sparsity(2, 2, 300, block=block, masked=options.pop("masked", None), rows=1.1).plan
    if "kv_len" in options:
        options["kv_len"] = torch.tensor(options["kv_len"], dtype=torch.int32, device=device)
    q, k, v = (make_tensor(2, 300, 2, 16, dtype=torch.float16) for _ in range(3))
    expected = attention(q, k, v, plan, backend="triton", **options)
    monkeypatch.setattr(implementation, "hopper_limit", lambda tensor: "it is not a Hopper GPU")
    torch.testing.assert_close(attention(q, k, v, plan, backend="triton", **options), expected, rtol=2e-3, atol=2e-3)


def test_strides_that_no_descriptor_takes(device, make_tensor, make_sparsity, assert_no_worse):
    """For example 17 half-precision numbers are 34 bytes, and the copy engine needs a multiple of 16."""
    q, k, v = (make_tensor(2, 130, 3, 17, dtype=torch.float16)[..., :16] for _ in range(3))
    check(q, k, v, make_sparsity(2, 3, 130), "triton", assert_no_worse)


def test_one_key_head_of_a_wide_tensor(device, make_tensor, make_sparsity, assert_no_worse):
    """An axis of length 1 may have any stride, also one that no descriptor takes."""
    q, k, v = make_tensor(1, 130, 2, 16, dtype=torch.float16), *(make_tensor(2, 130, 16, dtype=torch.float16))
    k, v = (x.as_strided((1, 130, 1, 16), (3, 16, 5, 1)) for x in (k, v))
    check(q, k, v, make_sparsity(1, 2, 130), "triton", assert_no_worse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 130, 32)}, r"q must have shape \[B, S, H, D\], got \[1, 130, 32\]"),
        ({"q": [[0.0]]}, r"q must be a tensor \[B, S, H, D\], got list"),
        ({"plan": "sparge"}, "plan must be an AttentionPlan from lower or plan, got str"),
        ({"q": torch.zeros(1, 130, 2, 16).double()}, "q must have dtype .*float32, got torch.float64"),
        ({"k": torch.zeros(1, 129, 2, 16)}, r"k must have shape \[1, 130, H_kv, 16\], got \[1, 129, 2, 16\]"),
        ({"v": torch.zeros(1, 130, 2, 16).half()}, "v must have q's dtype and device"),
        ({"k": torch.zeros(1, 130, 1, 16)}, "k and v must have one number of heads that divides q's 2, got 1 and 2"),
        ({"q": torch.zeros(1, 130, 16, 2).transpose(2, 3)}, "q must have stride 1 along its last axis"),
        ({"out": torch.zeros(1, 130, 2, 8)}, r"out must have shape \[1, 130, 2, 16\]"),
        ({"scale": -1.0}, "scale must be positive, got -1.0"),
        ({"pv_threshold": 0.0}, "pv_threshold must be negative .*, got 0.0; use None"),
        ({"pv_threshold": math.nan}, "pv_threshold must be negative .*, got nan"),
        ({"kv_len": torch.zeros(2, dtype=torch.int32)}, r"kv_len must have shape \[1\], got \[2\]"),
        ({"kv_len": torch.zeros(1)}, "kv_len must have dtype torch.int32, got torch.float32"),
    ],
    ids=[
        "q-axes", "q", "plan", "q-dtype", "k-length", "v-dtype", "kv-heads", "q-stride", "out", "scale", "threshold-0",
        "threshold-nan", "kv_len", "kv_len-dtype",
    ],
)  # fmt: skip
def test_bad_arguments(change, message, device, make_tensor, make_sparsity):
    arguments = {name: make_tensor(1, 130, 2, 16) for name in "qkv"} | {"plan": make_sparsity(1, 2, 130).plan}
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(ShapeError, match=message):
        attention(**(arguments | change))


@pytest.mark.parametrize(
    ("plan_of", "message"),
    [
        ({"batch": 2, "heads": 2, "tokens": 130}, r"plan must have the batch and heads of q, \[1, 2\], got \[2, 2\]"),
        ({"batch": 1, "heads": 3, "tokens": 130}, r"plan must have the batch and heads of q, \[1, 2\], got \[1, 3\]"),
        ({"batch": 1, "heads": 2, "tokens": 131}, "plan must have q's 130 tokens, got 131"),
    ],
    ids=["batch", "heads", "tokens"],
)
def test_a_plan_of_another_shape_is_an_error(plan_of, message, make_tensor, make_sparsity):
    q = make_tensor(1, 130, 2, 16)
    with pytest.raises(ShapeError, match=message):
        attention(q, q, q, make_sparsity(**plan_of).plan)


@pytest.mark.parametrize(
    ("head_dim", "block", "options", "message"),
    [
        (24, 64, {}, r"head_dim must be one of \(16, 32, 64, 128\), got 24"),
        (16, 32, {}, r"plan.block must be one of \(64, 128\), got 32"),
        (16, 64, {"pv_threshold": -1.0}, "with pv_threshold, q must have dtype torch.float16 or .*got torch.float32"),
    ],
    ids=["head-dim", "block", "threshold-float32"],
)
def test_triton_says_what_it_cannot_take(head_dim, block, options, message, make_tensor, make_sparsity):
    q = make_tensor(1, 130, 2, head_dim)
    plan = make_sparsity(1, 2, 130, block=block).plan
    with pytest.raises(UnsupportedError, match=f"backend 'triton' can't take this call: {message}; use backend='auto'"):
        attention(q, q, q, plan, backend="triton", **options)
    attention(q, q, q, plan, **options)  # auto takes the reference


def test_an_unknown_backend_is_an_error(make_tensor, make_sparsity):
    q = make_tensor(1, 130, 2, 16)
    with pytest.raises(BackendError, match="backend must be"):
        attention(q, q, q, make_sparsity(1, 2, 130).plan, backend="flash")
