"""Gradients of sparse attention equal autograd through dense masked attention in float64."""

import importlib
import math

import pytest
import torch

from dit_accel.kernels import attention, attention_backward, differentiable_attention
from tests.kernels.conftest import BACKENDS, IMPLEMENTED, assert_no_worse, captured, is_refused, needs_gpu
from tests.kernels.naive_attention import attending
from tests.pairs import every_pair

CASES = {
    "ragged": {"batch": 2, "heads": 2, "tokens": 130},
    "single-block": {"batch": 1, "heads": 2, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 200, "block": 128},
    "whole-blocks": {"batch": 1, "heads": 2, "tokens": 192},
    "long-key-blocks-first": {"batch": 1, "heads": 2, "tokens": 64 * 17 - 3, "rows": 0.9, "tiles": 0.03},
    "few-tiles": {"batch": 1, "heads": 3, "tokens": 200, "rows": 0.8, "tiles": 0.2},  # rows with one, rows with none
    "everything": {"batch": 1, "heads": 1, "tokens": 130, "rows": 1.1, "tiles": 1.1},
    "no-tiles": {"batch": 1, "heads": 1, "tokens": 130, "rows": 1.1, "tiles": 0.0},
    "all-reused": {"batch": 1, "heads": 2, "tokens": 130, "rows": 0.0},
    "masks": {"batch": 1, "heads": 2, "tokens": 200, "rows": 0.9, "masked": 0.6},
    "masks-128": {"batch": 1, "heads": 1, "tokens": 200, "block": 128, "tiles": 1.1, "masked": 1.1},
}


def expected_gradients(q, k, v, do, sparsity, scale=None, kv_len=None):
    """Compute gradients by autograd through dense attention in q's dtype."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    pairs = attending(sparsity)
    if kv_len is not None:
        pairs = pairs & (torch.arange(q.shape[1], device=q.device) < kv_len[:, None, None, None])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~pairs & pairs.any(-1, keepdim=True), -math.inf)  # no row of nothing but -inf
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1) * pairs, v)
    counted = torch.where(sparsity.tokens_computed()[..., None], do, 0)
    return torch.autograd.grad((out * counted).sum(), leaves)


def poisoned(x, sparsity):
    """NaN in rows that do not compute."""
    return torch.where(sparsity.tokens_computed()[..., None], x, math.nan)


def check(q, k, v, do, sparsity, backend, **options):
    """Compares all three gradients, with NaN wherever nothing may be read, and returns them."""
    expected = expected_gradients(*(x.double() for x in (q, k, v, do)), sparsity, **options)
    low = expected_gradients(q, k, v, do, sparsity, **options)
    if "kv_len" in options:
        k, v = k.clone(), v.clone()
        for b, length in enumerate(options["kv_len"].tolist()):
            k[b, length:] = v[b, length:] = math.nan
    o, lse = attention(q, k, v, sparsity.plan, return_lse=True, backend="reference", **options)
    o, do = poisoned(o, sparsity), poisoned(do, sparsity)
    actual = attention_backward(q, k, v, o, lse, do, sparsity.plan, backend=backend, **options)
    for gradient, exact, dense in zip(actual, expected, low, strict=True):
        assert gradient.is_contiguous()
        assert_no_worse(gradient, exact, dense)
    return actual


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_autograd_through_dense_attention(case, backend, dtype, make_tensor, make_sparsity):
    shape = (case["batch"], case["tokens"], case["heads"], 16)
    tensors = [make_tensor(*shape, dtype=dtype) for _ in range(4)]
    check(*tensors, make_sparsity(**case), backend)


@every_pair(views=("fused", "narrow", "expanded"), head_dim=(32, 64, 128), backend=BACKENDS)
def test_strides_and_head_dimensions(views, head_dim, backend, make_tensor, make_sparsity):
    """Views of a fused projection; rows of odd lengths, which no descriptor takes; equal gradients."""
    if views == "fused":
        tensors = make_tensor(1, 130, 4, 2, head_dim, dtype=torch.float16).unbind(2)
    else:
        wide = [make_tensor(1, 130, 2, head_dim + 1, dtype=torch.float16) for _ in range(4)]
        tensors = [x[..., :head_dim] if views == "narrow" else x[..., :head_dim].contiguous() for x in wide]
    if views == "expanded":
        tensors[3] = tensors[3][:1, :1, :1].expand(1, 130, 2, head_dim)
    check(*tensors, make_sparsity(1, 2, 130, rows=1.1), backend, scale=0.7)


@pytest.mark.parametrize("masked", [None, 0.5], ids=["plain", "masks"])
@pytest.mark.parametrize("lengths", [(130, 0), (128, 1)], ids=str)
def test_keys_beyond_kv_len_take_no_part(lengths, masked, backend, device, make_tensor, make_sparsity):
    """Their NaN has no effect; their own gradients are 0."""
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    tensors = [make_tensor(2, 200, 1, 16, dtype=torch.float16) for _ in range(4)]
    _, dk, dv = check(*tensors, make_sparsity(2, 1, 200, rows=0.9, masked=masked), backend, kv_len=kv_len)
    for b, length in enumerate(lengths):
        assert not dk[b, length:].any()
        assert not dv[b, length:].any()


def test_very_negative_scores_in_a_ragged_tail(backend, make_tensor, make_sparsity):
    """Keys beyond the sequence read as 0, so their weight would be e^100 times the others' or infinite."""
    q = make_tensor(1, 70, 1, 16, dtype=torch.float16).abs() + 5
    sparsity = make_sparsity(1, 1, 70, rows=1.1, tiles=1.1)
    v, do = (make_tensor(1, 70, 1, 16, dtype=torch.float16) for _ in range(2))
    check(q, -q, v, do, sparsity, backend)


@pytest.mark.parametrize("case", ["block-128", "masks"])
def test_gpus_without_tensor_descriptors(case, monkeypatch, make_tensor, make_sparsity):
    """Other GPUs than Hopper read tiles by pointers, in other sizes."""
    implementation = importlib.import_module("dit_accel.kernels._triton.attention_backward")
    monkeypatch.setattr(implementation, "hopper_limit", lambda tensor: "it is not a Hopper GPU")
    case = CASES[case]
    tensors = [make_tensor(1, case["tokens"], case["heads"], 16, dtype=torch.float16) for _ in range(4)]
    check(*tensors, make_sparsity(**case), "triton")


@every_pair(is_refused, **IMPLEMENTED)
def test_gradients_flow_through_differentiable_attention(backend, dtype, make_tensor, make_sparsity):
    """Its output is attention's, and 0 where rows do not compute; the gradient of a sum is a view of one number."""
    sparsity = make_sparsity(1, 2, 130)
    q, k, v = (make_tensor(1, 130, 2, 16, dtype=dtype).requires_grad_() for _ in range(3))
    out = differentiable_attention(q, k, v, sparsity.plan, scale=0.3, backend=backend)
    assert torch.equal(out, attention(q, k, v, sparsity.plan, scale=0.3, out=torch.zeros_like(q), backend=backend))
    out.sum().backward()
    ones = torch.ones_like(q)
    expected = expected_gradients(*(x.double() for x in (q, k, v, ones)), sparsity, scale=0.3)
    low = expected_gradients(q, k, v, ones, sparsity, scale=0.3)
    for leaf, exact, dense in zip((q, k, v), expected, low, strict=True):
        assert_no_worse(leaf.grad, exact, dense)


def test_only_what_wants_a_gradient_gets_one(make_tensor, make_sparsity):
    q, k, v = (make_tensor(1, 130, 2, 16) for _ in range(3))
    plan = make_sparsity(1, 2, 130).plan
    assert not differentiable_attention(q, k, v, plan).requires_grad
    differentiable_attention(q, k.requires_grad_(), v, plan).sum().backward()
    assert k.grad.any() and q.grad is v.grad is None


@needs_gpu
def test_equal_in_every_run_and_without_waiting_for_the_gpu(make_tensor, make_sparsity):
    q, k, v, do = (make_tensor(2, 1000, 3, 64, dtype=torch.float16) for _ in range(4))
    plan = make_sparsity(2, 3, 1000).plan
    o, lse = attention(q, k, v, plan, return_lse=True, backend="triton")
    expected = attention_backward(q, k, v, o, lse, do, plan, backend="triton")
    for _ in range(3):
        actual = captured(lambda: attention_backward(q, k, v, o, lse, do, plan, backend="triton"))
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
