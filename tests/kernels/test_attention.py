"""Sparse attention equals dense masked attention in float64, and touches only the rows that compute."""

import importlib
import math

import pytest
import torch

from dit_accel.kernels import attention
from tests.kernels.conftest import BACKENDS, IMPLEMENTED, is_refused
from tests.kernels.naive_attention import LAYOUTS, check, laid_out
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
    "no-tiles": {"batch": 1, "heads": 2, "tokens": 130, "rows": 1.1, "tiles": 0.0},
    "whole-rows-reused": {"batch": 1, "heads": 3, "tokens": 200, "rows": 0.4, "tiles": 1.1},
}


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_dense_masked_attention(case, backend, dtype, make_tensor, make_sparsity, assert_no_worse):
    sparsity = make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], 16)
    q, k, v = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    check(q, k, v, sparsity, backend, assert_no_worse)


@every_pair(layout=LAYOUTS, head_dim=(16, 32, 64, 128), backend=BACKENDS)
def test_layouts_and_head_dimensions(layout, head_dim, backend, make_tensor, make_sparsity, assert_no_worse):
    qkv = laid_out(layout, make_tensor, head_dim=head_dim)
    check(*qkv, make_sparsity(2, 4, 130), backend, assert_no_worse, scale=0.3)


@pytest.mark.parametrize("lengths", [(200, 1), (130, 0), (500, 64)], ids=str)
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


def test_kv_len_may_be_a_view(backend, device, make_tensor, make_sparsity):
    q, k, v = (make_tensor(2, 130, 2, 32) for _ in range(3))
    plan = make_sparsity(2, 2, 130, rows=1.1).plan
    lengths = torch.tensor([[70, 1], [129, 2]], dtype=torch.int32, device=device)
    views = lengths[:, 0], lengths[0, :1].expand(2)
    for view in views:
        expected = attention(q, k, v, plan, kv_len=view.clone(), backend=backend)
        assert torch.equal(attention(q, k, v, plan, kv_len=view, backend=backend), expected)


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


def test_one_key_head_of_a_wide_tensor(device, make_tensor, make_sparsity, assert_no_worse):
    """An axis of length 1 may have any stride, also one that no descriptor takes."""
    q, k, v = make_tensor(1, 130, 2, 16, dtype=torch.float16), *(make_tensor(2, 130, 16, dtype=torch.float16))
    k, v = (x.as_strided((1, 130, 1, 16), (3, 16, 5, 1)) for x in (k, v))
    check(q, k, v, make_sparsity(1, 2, 130), "triton", assert_no_worse)
