"""Invariants of GEMM-O: UPDATE equals the dense linear layer, and DISPATCH on UPDATE's inputs equals UPDATE."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dit_accel.kernels import gemm_o_dispatch, gemm_o_update, lower, pack_bits
from tests.kernels.conftest import IMPLEMENTED, assert_no_worse, is_refused
from tests.pairs import every_pair

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "block-128": {"batch": 1, "heads": 2, "tokens": 260, "block": 128},
    "everything": {"batch": 1, "heads": 3, "tokens": 200, "rows": 1.1},
    "all-reused": {"batch": 1, "heads": 3, "tokens": 200, "rows": 0.0},
    "64-heads": {"batch": 1, "heads": 64, "tokens": 70},
}
HEAD_DIM, COLUMNS = 16, 40


def dense(o, weight, bias):
    return F.linear(o.flatten(2), weight, bias)


def only(o, keep):
    """o with the (token, head) rows outside ``keep`` set to zero."""
    return torch.where(keep[..., None], o, 0.0)


@every_pair(is_refused, case=CASES, **IMPLEMENTED)
def test_both_stages_equal_the_dense_linear(case, backend, dtype, make_tensor, make_sparsity):
    """UPDATE, DISPATCH on its stack, and UPDATE that rebases the stack onto other symbols."""
    sparsity, later = make_sparsity(**case), make_sparsity(**case)
    shape = (case["batch"], case["tokens"], case["heads"], HEAD_DIM)
    o, *history = (make_tensor(*shape, dtype=dtype) for _ in range(3))
    weight, bias = make_tensor(COLUMNS, shape[2] * HEAD_DIM, dtype=dtype), make_tensor(COLUMNS, dtype=dtype)
    check_both_stages(o, weight, bias, sparsity, backend, history=history)
    check_rebase(o, history, weight, bias, sparsity, later, backend)


@every_pair(is_refused, head_dim=(64, 128), **IMPLEMENTED)
def test_whole_heads_of_full_size(head_dim, backend, dtype, make_tensor, make_sparsity):
    sparsity = make_sparsity(1, 2, 130, block=128)
    o, weight = make_tensor(1, 130, 2, head_dim, dtype=dtype), make_tensor(COLUMNS, 2 * head_dim, dtype=dtype)
    check_both_stages(o, weight, None, sparsity, backend, history=[torch.flip(o, [1])])


@pytest.mark.parametrize("seam", [64, 100])
def test_streams_are_views_of_the_joint_tensor(seam, backend, make_tensor, make_sparsity):
    """Text and vision have their own weights, columns of fused ones, and share the block at the seam."""
    sparsity, later = make_sparsity(2, 2, 400), make_sparsity(2, 2, 400)
    joint = make_tensor(3, 2, 400, 4, HEAD_DIM)[:, :, :, ::2]
    for stream in (slice(0, seam), slice(seam, 400)):
        weight, bias = make_tensor(COLUMNS, 100 + 2 * HEAD_DIM)[:, 100:], make_tensor(COLUMNS)
        o, *history = joint[:, :, stream]
        check_both_stages(o, weight, bias, sparsity, backend, history=history, offset=stream.start)
        check_rebase(o, history, weight, bias, sparsity, later, backend, offset=stream.start)


def check_rebase(o, history, weight, bias, before, now, backend, *, offset=0):
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


def test_unchanged_symbols_leave_the_stack_before_as_it_is(backend, make_tensor, make_sparsity):
    """Bit for bit: nothing is multiplied, so features may contain NaN."""
    plan = make_sparsity(2, 5, 200).plan
    o, weight = make_tensor(2, 200, 5, HEAD_DIM), make_tensor(COLUMNS, 5 * HEAD_DIM)
    before, history = make_tensor(3, 2, 200, COLUMNS), [torch.full_like(o, math.nan)] * 2
    previous = before, plan.mask64.clone()
    _, stack = gemm_o_update(o, weight, None, plan, history=history, previous=previous, backend=backend)
    assert torch.equal(stack[1:], before[:2])


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
    assert (gemm_o_dispatch(o, weight, reused, stack, [1.0, 1.0, -1.0], backend=backend) == large).all()

    first, second = (torch.tensor([[[head == 0, head == 1]] * 2]) for head in (0, 1))
    packed = (pack_bits(rows.to(device), backend="reference") for rows in (first, second))
    before, now = (lower(replace(half.symbols, cache_bits=bits)) for bits in packed)
    weight[:, 0] = weight[:, HEAD_DIM] = 1.0  # either head adds 1
    previous = stack[:1], before.mask64
    _, rebased = gemm_o_update(o, weight, None, now, history=[o], previous=previous, backend=backend)
    assert (rebased[1] == large).all()


def check_both_stages(o, weight, bias, sparsity, backend, *, history=(), offset=0):
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
