"""Invariants of GEMM-O: UPDATE equals the dense linear layer, and DISPATCH on UPDATE's inputs equals UPDATE."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import gemm_o_dispatch, gemm_o_update, lower, pack_bits
from tests.kernels.conftest import IMPLEMENTED, is_refused
from tests.pairs import every_pair

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "everything": {"batch": 1, "heads": 3, "tokens": 200, "rows": 1.1},
    "all-reused": {"batch": 1, "heads": 3, "tokens": 200, "rows": 0.0},
    "one-head": {"batch": 2, "heads": 1, "tokens": 200},
    "40-heads": {"batch": 1, "heads": 40, "tokens": 70},
    "64-heads": {"batch": 1, "heads": 64, "tokens": 70},
}
HEAD_DIM, COLUMNS = 16, 40


def dense(o, weight, bias):
    return F.linear(o.flatten(2), weight, bias)


def only(o, keep):
    """o with the (token, head) rows outside ``keep`` set to zero."""
    return torch.where(keep[..., None], o, 0.0)


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_update_is_the_dense_linear_and_the_bias_of_reused_heads(
    case, backend, dtype, make_tensor, make_sparsity, assert_no_worse
):
    sparsity = make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], HEAD_DIM)
    o, *history = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    weight, bias = make_tensor(COLUMNS, shape[2] * HEAD_DIM, dtype=dtype), make_tensor(COLUMNS, dtype=dtype)
    out, stack = gemm_o_update(o, weight, bias, sparsity.plan, history=history, backend=backend)

    wide = weight.double(), bias.double()
    assert_no_worse(out, dense(o.double(), *wide), dense(o, weight, bias))
    assert stack.shape == (3, *out.shape)
    for biases, features in zip(stack, (o, *history), strict=True):
        reused = only(features, ~sparsity.tokens_computed())
        assert_no_worse(biases, dense(reused.double(), *wide), dense(reused, weight, bias))


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_update_rebases_the_stack_before_onto_the_new_symbols(
    case, backend, dtype, make_tensor, make_sparsity, assert_no_worse
):
    """Cases include everything computed before and after, and everything reused before and after."""
    before, now = make_sparsity(**case), make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], HEAD_DIM)
    o, *history = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    weight, bias = make_tensor(COLUMNS, shape[2] * HEAD_DIM, dtype=dtype), make_tensor(COLUMNS, dtype=dtype)
    check_rebase(o, history, weight, bias, before, now, backend, assert_no_worse)


def check_rebase(o, history, weight, bias, before, now, backend, assert_no_worse, *, offset=0):
    """Compare rebased entries with the old ones plus the changed heads, and the output with the dense result."""
    stream = slice(offset, offset + o.shape[1])
    was, computes = (sparsity.tokens_computed()[:, stream] for sparsity in (before, now))
    options = {"offset": offset, "backend": backend}
    _, stack = gemm_o_update(history[0], weight, bias, before.plan, history=history[1:], **options)
    previous = stack.clone(), before.plan.mask64
    out, rebased = gemm_o_update(o, weight, bias, now.plan, history=history, previous=previous, **options)
    assert torch.equal(previous[0], stack)

    def expected(features, entry, weight):
        added, removed = only(features, was & ~computes), only(features, computes & ~was)
        return entry + dense(added, weight, None) - dense(removed, weight, None)

    for features, entry, actual in zip(history, stack, rebased[1:], strict=True):
        exact = expected(features.double(), entry.double(), weight.double())
        assert_no_worse(actual, exact, expected(features, entry, weight))
    wide_bias = None if bias is None else bias.double()
    for actual, features in ((out, o), (rebased[0], only(o, ~computes))):
        assert_no_worse(actual, dense(features.double(), weight.double(), wide_bias), dense(features, weight, bias))


def test_rebased_stack_equals_a_fresh_one(backend, make_tensor, make_sparsity):
    """Three updates run one after the other, each with other symbols."""
    o = [make_tensor(2, 200, 5, HEAD_DIM) for _ in range(3)]
    weight, bias = make_tensor(COLUMNS, 5 * HEAD_DIM), make_tensor(COLUMNS)
    plans = [make_sparsity(2, 5, 200).plan for _ in range(3)]
    previous = None
    for update, plan in enumerate(plans):
        options = {"history": o[:update][::-1], "backend": backend}
        _, stack = gemm_o_update(o[update], weight, bias, plan, previous=previous, **options)
        previous = stack, plan.mask64
    _, fresh = gemm_o_update(o[2], weight, bias, plans[2], **options)
    torch.testing.assert_close(stack, fresh, rtol=0, atol=1e-4)


def test_unchanged_symbols_leave_the_stack_before_as_it_is(backend, make_tensor, make_sparsity):
    """Bit for bit: nothing is multiplied, so features may contain NaN."""
    plan = make_sparsity(2, 5, 200).plan
    o, weight = make_tensor(2, 200, 5, HEAD_DIM), make_tensor(COLUMNS, 5 * HEAD_DIM)
    before, history = make_tensor(3, 2, 200, COLUMNS), [torch.full_like(o, math.nan)] * 2
    previous = before, plan.mask64.clone()
    _, stack = gemm_o_update(o, weight, None, plan, history=history, previous=previous, backend=backend)
    assert torch.equal(stack[1:], before[:2])


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_dispatch_adds_computed_heads_to_the_forecast_bias(
    case, backend, dtype, make_tensor, make_sparsity, assert_no_worse
):
    """Reused rows of o hold NaN, which must not reach the sum."""
    sparsity = make_sparsity(**case)
    computed = sparsity.tokens_computed()
    o = make_tensor(case["batch"], case["tokens"], case["heads"], HEAD_DIM, dtype=dtype)
    weight = make_tensor(COLUMNS, case["heads"] * HEAD_DIM, dtype=dtype)
    stack, weights = make_tensor(3, *o.shape[:2], COLUMNS, dtype=dtype), (1.75, -1.0, 0.25)
    poisoned_o = torch.where(computed[..., None], o, math.nan)
    poisoned_out = o.new_full(stack.shape[1:], math.nan)
    out = gemm_o_dispatch(poisoned_o, weight, sparsity.plan, stack, weights, out=poisoned_out, backend=backend)

    def expected(o, weight, stack):
        forecast = sum(factor * entry for factor, entry in zip(weights, stack, strict=True))
        return forecast + dense(only(o, computed), weight, None)

    assert out is poisoned_out
    assert_no_worse(out, expected(o.double(), weight.double(), stack.double()), expected(o, weight, stack))


def test_dispatch_with_unchanged_features_equals_update(backend, make_tensor, make_sparsity):
    """For reuse (one entry), and for any weights that sum to one where all remembered features are equal."""
    plan = make_sparsity(2, 5, 200).plan
    o, weight, bias = make_tensor(2, 200, 5, HEAD_DIM), make_tensor(COLUMNS, 5 * HEAD_DIM), make_tensor(COLUMNS)
    out, stack = gemm_o_update(o, weight, bias, plan, history=[o, o], backend=backend)
    for entries, weights in ((stack[:1], [1.0]), (stack, [3.0, -3.0, 1.0])):
        again = gemm_o_dispatch(o, weight, plan, entries, weights, backend=backend)
        torch.testing.assert_close(again, out, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_sums_run_in_float32_and_round_once(dtype, backend, device, make_sparsity):
    """Integers that the dtype can represent are exact, although partial sums need one bit more."""
    if (backend, dtype, device) == ("triton", torch.bfloat16, "cpu"):
        pytest.skip("the interpreter can't")
    large = 2 / torch.finfo(dtype).eps  # the dtype cannot represent its odd neighbour
    reused, half = make_sparsity(1, 2, 100, rows=0.0).plan, make_sparsity(1, 2, 100, rows=1.1)
    o = torch.ones(1, 100, 2, HEAD_DIM, dtype=dtype, device=device)
    stack = torch.stack([torch.full((1, 100, COLUMNS), value) for value in (large, 1.0, 1.0)]).to(device, dtype)
    weight = torch.zeros(COLUMNS, 2 * HEAD_DIM, dtype=dtype, device=device)
    out = gemm_o_dispatch(o, weight, reused, stack, [1.0, 1.0, -1.0], backend=backend)
    assert (out == large).all()

    first, second = (torch.tensor([[[head == 0, head == 1]] * 2]) for head in (0, 1))
    before, now = (
        lower(replace(half.symbols, cache_bits=pack_bits(rows.to(device), backend="reference")))
        for rows in (first, second)
    )
    weight[:, 0] = weight[:, HEAD_DIM] = 1.0  # either head adds 1
    previous = stack[:1], before.mask64
    _, rebased = gemm_o_update(o, weight, None, now, history=[o], previous=previous, backend=backend)
    assert (rebased[1] == large).all()


@every_pair(is_refused, head_dim=(64, 128), **IMPLEMENTED)
def test_whole_heads_of_full_size(head_dim, backend, dtype, make_tensor, make_sparsity, assert_no_worse):
    sparsity = make_sparsity(1, 2, 130, block=128)
    o, weight = make_tensor(1, 130, 2, head_dim, dtype=dtype), make_tensor(COLUMNS, 2 * head_dim, dtype=dtype)
    check_both_stages(o, weight, None, sparsity, backend, assert_no_worse, history=[torch.flip(o, [1])])


def check_both_stages(o, weight, bias, sparsity, backend, assert_no_worse, *, history=(), offset=0):
    """UPDATE against the dense linear and the reused heads alone; DISPATCH on its stack, with NaN in reused rows."""
    stream = slice(offset, offset + o.shape[1])
    computed = sparsity.tokens_computed()[:, stream]
    wide_bias = None if bias is None else bias.double()
    options = {"offset": offset, "backend": backend}
    out, stack = gemm_o_update(o, weight, bias, sparsity.plan, history=history, **options)
    assert_no_worse(out, dense(o.double(), weight.double(), wide_bias), dense(o, weight, bias))
    for biases, features in zip(stack, (o, *history), strict=True):
        reused = only(features, ~computed)
        assert_no_worse(biases, dense(reused.double(), weight.double(), wide_bias), dense(reused, weight, bias))

    weights = [1.75, -1.0, 0.5, -0.25][: len(stack)]
    poisoned_o = torch.where(computed[..., None], o, math.nan)
    poisoned_out = out.new_full(out.shape, math.nan)
    again = gemm_o_dispatch(poisoned_o, weight, sparsity.plan, stack, weights, out=poisoned_out, **options)

    def expected(o, weight, stack):
        forecast = sum(factor * entry for factor, entry in zip(weights, stack, strict=True))
        return forecast + dense(only(o, computed), weight, None)

    assert_no_worse(again, expected(o.double(), weight.double(), stack.double()), expected(o, weight, stack))


@pytest.mark.parametrize("seam", [30, 64, 100])
def test_streams_are_views_of_the_joint_tensor(seam, backend, make_tensor, make_sparsity, assert_no_worse):
    """Text and vision have their own weights and share the block at the seam."""
    sparsity = make_sparsity(2, 2, 400)
    joint, old = make_tensor(2, 400, 2, HEAD_DIM), make_tensor(2, 400, 2, HEAD_DIM)
    for stream in (slice(0, seam), slice(seam, 400)):
        weight, bias = make_tensor(COLUMNS, 2 * HEAD_DIM), make_tensor(COLUMNS)
        o, reused = joint[:, stream], ~sparsity.tokens_computed()[:, stream]
        options = {"offset": stream.start, "backend": backend}
        out, stack = gemm_o_update(o, weight, bias, sparsity.plan, history=[old[:, stream]], **options)
        wide = weight.double(), bias.double()
        assert_no_worse(out, dense(o.double(), *wide), dense(o, weight, bias))
        for biases, features in zip(stack, (o, old[:, stream]), strict=True):
            features = only(features, reused)
            assert_no_worse(biases, dense(features.double(), *wide), dense(features, weight, bias))
        again = gemm_o_dispatch(o, weight, sparsity.plan, stack[:1], [1.0], **options)
        torch.testing.assert_close(again, out, rtol=0, atol=1e-4)


def test_attention_columns_of_a_fused_projection(backend, make_tensor, make_sparsity, assert_no_worse):
    fused = make_tensor(COLUMNS, 100 + 2 * HEAD_DIM)
    weight = fused[:, 100:]
    sparsity = make_sparsity(1, 2, 130)
    o = make_tensor(1, 130, 4, HEAD_DIM)[:, :, ::2]
    out, stack = gemm_o_update(o, weight, None, sparsity.plan, backend=backend)
    assert_no_worse(out, dense(o.double(), weight.double(), None), dense(o, weight, None))
    again = gemm_o_dispatch(o, weight, sparsity.plan, stack, [1.0], backend=backend)
    torch.testing.assert_close(again, out, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.zeros(1, 130, 3, 16)}, r"o must have shape \[B, S, 2, D\], got \[1, 130, 3, 16\]"),
        ({"o": torch.zeros(1, 130, 2, 16).double()}, "o must have dtype .*, got torch.float64"),
        ({"weight": torch.zeros(40, 33)}, r"weight must have shape \[N, 32\], got \[40, 33\]"),
        ({"weight": torch.zeros(40, 32).half()}, "weight must have o's dtype and device"),
        ({"bias": torch.zeros(41)}, r"bias must have shape \[40\], got \[41\]"),
        ({"history": [torch.zeros(1, 129, 2, 16)]}, r"history\[0\] must have shape \[1, 130, 2, 16\]"),
        ({"offset": 1}, "o must lie inside the plan's 130 tokens, got tokens 1 to 131"),
        (
            {
                "history": [torch.zeros(1, 130, 2, 16)] * 2,
                "previous": (torch.zeros(1, 1, 130, 40), torch.zeros(1, 3).long()),
            },
            "previous stack must have an entry for each of 2 in history, got 1",
        ),
        (
            {"previous": (torch.zeros(1, 1, 130, 40), torch.zeros(1, 4).long())},
            r"previous mask64 must have shape \[1, 3\], got \[1, 4\]",
        ),
    ],
    ids=["heads", "o-dtype", "weight", "weight-dtype", "bias", "history", "offset", "previous", "previous-mask64"],
)
def test_bad_update_arguments(change, message, device, make_tensor, make_sparsity):
    arguments = {
        "o": make_tensor(1, 130, 2, 16),
        "weight": make_tensor(40, 32),
        "bias": None,
        "plan": make_sparsity(1, 2, 130).plan,
    }
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    change = {
        name: [x.to(device) for x in value] if isinstance(value, list | tuple) else value
        for name, value in change.items()
    }
    with pytest.raises(ShapeError, match=message):
        gemm_o_update(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": torch.zeros(1, 130, 40)}, r"stack must have shape \[M, 1, 130, 40\], got \[1, 130, 40\]"),
        ({"stack": torch.zeros(1, 1, 40, 130).transpose(2, 3)}, "stack must be contiguous"),
        ({"weights": [1.0, 2.0]}, "weights must hold 1 floats, one for each stack entry, got 2"),
        ({"out": torch.zeros(1, 130, 41)}, r"out must have shape \[1, 130, 40\], got \[1, 130, 41\]"),
    ],
    ids=["stack", "stack-strides", "weights", "out"],
)
def test_bad_dispatch_arguments(change, message, device, make_tensor, make_sparsity):
    arguments = {
        "o": make_tensor(1, 130, 2, 16), "weight": make_tensor(40, 32), "plan": make_sparsity(1, 2, 130).plan,
        "stack": make_tensor(1, 1, 130, 40), "weights": [1.0],
    }  # fmt: skip
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(ShapeError, match=message):
        gemm_o_dispatch(**(arguments | change))
