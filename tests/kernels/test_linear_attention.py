"""Linear attention over marginal tiles, and its gradients, against masks over all pairs of tokens in float64."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import (
    differentiable_linear_attention,
    linear_attention,
    linear_attention_backward,
    lower,
    pack_bits,
)
from tests.kernels.conftest import IMPLEMENTED, assert_no_worse, is_refused
from tests.pairs import every_pair

FEATURES = {"softmax": lambda x: x.softmax(-1), "elu": lambda x: F.elu(x) + 1, "relu": torch.relu}
CASES = {  # batch, heads, tokens, block, kv_len, feature map
    "whole-blocks": (1, 3, 192, 64, None, "softmax"),
    "ragged": (1, 2, 300, 128, None, "softmax"),
    "single-block": (1, 2, 40, 64, None, "softmax"),
    "padding": (2, 1, 140, 64, (130, 1), "softmax"),
    "no-valid-key": (2, 1, 70, 64, (0, 500), "softmax"),
    "elu": (1, 2, 140, 64, None, "elu"),
    "elu-padding": (2, 1, 140, 64, (130, 1), "elu"),
    "relu": (1, 2, 140, 64, None, "relu"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
def make_marginal(make_sparsity):
    """``make(batch, heads, tokens, block, rows=0.7)``: a sparsity whose plan has marginal tiles too, and these tiles.

    bool ``[B, H, T, T]``, half of those that are skipped; row 0 of head 0 computes and has none.
    """

    def make(batch, heads, tokens, block, rows=0.7):
        sparsity = make_sparsity(batch, heads, tokens, block, rows, tiles=0.3)
        marginal = ~sparsity.tiles & (torch.arange(sparsity.tiles.shape[-1], device=sparsity.tiles.device) % 2 == 0)
        marginal[:, 0, 0] = False
        symbols = replace(sparsity.symbols, linear_bits=pack_bits(marginal, backend="reference"))
        return sparsity._replace(plan=lower(symbols, backend="reference")), marginal & sparsity.rows[..., None]

    return make


def lengths_of(kv_len, device):
    return None if kv_len is None else torch.tensor(kv_len, dtype=torch.int32, device=device)


def with_nan_beyond(x, kv_len):
    if kv_len is None:
        return x
    return x.masked_fill((torch.arange(x.shape[1], device=x.device) >= kv_len[:, None])[..., None, None], math.nan)


def dense(q, k, v, marginal, block, feature_map, kv_len=None):
    """Weights of all pairs, masked and divided by their sums, times v; 0 where a query meets no feature."""
    tokens = q.shape[1]
    pairs = marginal.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :tokens, :tokens]
    if kv_len is not None:
        pairs = pairs & (torch.arange(tokens, device=q.device) < kv_len[:, None, None, None])
    features = FEATURES[feature_map]
    weights = torch.einsum("bihd,bjhd->bhij", features(q), features(k)) * pairs
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", weights / torch.where(total > 0, total, 1.0), v)


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_equals_the_definition(case, backend, dtype, device, make_tensor, make_marginal):
    """In computed rows, with and without marginal tiles; the others keep ``out``, and keys beyond kv_len are NaN."""
    batch, heads, tokens, block, kv_len, feature_map = case
    kv_len = lengths_of(kv_len, device)
    sparsity, marginal = make_marginal(batch, heads, tokens, block)
    q, k, v = (make_tensor(batch, tokens, heads, 16, dtype=dtype) for _ in range(3))
    out, options = torch.full_like(q, math.nan), {"feature_map": feature_map, "kv_len": kv_len}
    read_k, read_v = (with_nan_beyond(x, kv_len) for x in (k, v))
    assert linear_attention(q, read_k, read_v, sparsity.plan, out=out, backend=backend, **options) is out
    computed = sparsity.tokens_computed()
    assert torch.equal(out.isnan().all(-1), ~computed) and torch.equal(out.isnan().any(-1), ~computed)
    exact = dense(*(x.double() for x in (q, k, v)), marginal, block, feature_map, kv_len)
    assert_no_worse(out[computed], exact[computed], dense(q, k, v, marginal, block, feature_map, kv_len)[computed])


@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
def test_the_projection_comes_last(accumulate, backend, make_tensor, make_marginal):
    """``O^l projection^T`` replaces the content of ``out`` or is added to it."""
    sparsity, marginal = make_marginal(1, 2, 200, 64, rows=1.1)
    q, k, v, held = (make_tensor(1, 200, 2, 16) for _ in range(4))
    weight, out = make_tensor(16, 16, dtype=torch.float64), held.clone()
    linear_attention(q, k, v, sparsity.plan, projection=weight, out=out, accumulate=accumulate, backend=backend)
    expected = dense(*(x.double() for x in (q, k, v)), marginal, 64, "softmax") @ weight.T
    torch.testing.assert_close(out.double(), expected + held if accumulate else expected, rtol=1e-5, atol=1e-5)


@every_case
def test_gradients_are_those_of_autograd(case, backend, device, make_tensor, make_marginal):
    """Gradients equal the float64 definition's; queries and gradients in reused rows have no effect."""
    batch, heads, tokens, block, kv_len, feature_map = case
    kv_len = lengths_of(kv_len, device)
    sparsity, marginal = make_marginal(batch, heads, tokens, block)
    q, k, v, do = (make_tensor(batch, tokens, heads, 16) for _ in range(4))
    v = v + 1
    computed = sparsity.tokens_computed()[..., None]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = dense(*leaves, marginal, block, feature_map, kv_len)
    expected = torch.autograd.grad(out, leaves, do.double() * computed)
    q, do = (torch.where(computed, x, math.nan) for x in (q, do))
    options = {"feature_map": feature_map, "kv_len": kv_len, "backend": backend}
    k, v = (with_nan_beyond(x, kv_len) for x in (k, v))
    actual = linear_attention_backward(q, k, v, do, sparsity.plan, **options)
    for gradient, exact in zip(actual, expected, strict=True):
        assert gradient.dtype == torch.float32 and gradient.is_contiguous()
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-5)


def test_float16_gradients_have_float32_sums(device, make_tensor, make_marginal):
    """Values of 300 make sums beyond float16's range."""
    sparsity, marginal = make_marginal(1, 1, 192, 64, rows=1.1)
    q, k, v, do = (make_tensor(1, 192, 1, 16, dtype=torch.float16) for _ in range(4))
    v = v + 300
    exact, low = [], []
    for dtype, results in ((torch.float64, exact), (torch.float32, low)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = dense(*leaves, marginal, 64, "softmax")
        results += [out.detach(), *torch.autograd.grad(out, leaves, do.to(dtype))]
    actual = [linear_attention(q, k, v, sparsity.plan, backend="triton")]
    actual += linear_attention_backward(q, k, v, do, sparsity.plan, backend="triton")
    for mine, double, single in zip(actual, exact, low, strict=True):
        assert_no_worse(mine, double, single.half())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a GPU")
def test_a_mean_of_the_values_does_not_blur_bfloat16_gradients(device, make_tensor, make_marginal):
    """A constant shared by all values changes neither dq nor dk, however large it is."""
    sparsity, marginal = make_marginal(1, 2, 1000, 64, rows=1.1)
    q, k, v, do = (make_tensor(1, 1000, 2, 64, dtype=torch.bfloat16) for _ in range(4))
    v = v + 8
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(dense(*leaves, marginal, 64, "softmax"), leaves, do.double())
    for gradient, expected in zip(linear_attention_backward(q, k, v, do, sparsity.plan), exact, strict=True):
        assert (gradient - expected).norm() < 0.01 * expected.norm()


def run(q, k, v, do, plan, backend, **options):
    """Output and gradients; rows that do not compute hold 0."""
    out = linear_attention(q, k, v, plan, out=torch.zeros_like(q), backend=backend, **options)
    return out, *linear_attention_backward(q, k, v, do, plan, backend=backend, **options)


def test_gradients_flow_through_the_differentiable_op(backend, make_tensor, make_marginal):
    """Its value is linear attention with 0 in rows that do not compute; its gradients are those of the backward op."""
    plan = make_marginal(1, 2, 70, 64)[0].plan
    leaves = [make_tensor(1, 70, 2, 16).requires_grad_() for _ in range(3)]
    out = differentiable_linear_attention(*leaves, plan, feature_map="elu", backend=backend)
    out.sum().backward()
    expected = run(*leaves, torch.ones_like(out), plan, backend, feature_map="elu")
    assert all(map(torch.equal, (out, *(leaf.grad for leaf in leaves)), expected))


def test_heads_go_in_groups(monkeypatch, make_tensor, make_marginal):
    """If the states of all heads are too large, groups of heads give the same result up to rounding of sums."""
    from dit_accel.kernels._triton import linear_attention as implementation

    plan = make_marginal(1, 2, 70, 64)[0].plan
    tensors = [make_tensor(1, 70, 2, 16) for _ in range(4)]
    together = run(*tensors, plan, "triton")
    monkeypatch.setattr(implementation, "GROUP_BYTES", 1)
    assert list(implementation.head_groups(tensors[0], plan)) == [slice(0, 1), slice(1, 2)]
    torch.testing.assert_close(run(*tensors, plan, "triton"), together)


def test_strided_views(backend, make_tensor, make_marginal):
    """Slices of one projection, and a gradient with other strides, give the same results as copies."""
    plan = make_marginal(1, 2, 70, 64, rows=1.1)[0].plan
    views = *make_tensor(1, 70, 3, 2, 16).unbind(2), make_tensor(1, 2, 70, 16).transpose(1, 2)
    copies = [x.contiguous() for x in views]
    torch.testing.assert_close(run(*views, plan, backend), run(*copies, plan, backend))
