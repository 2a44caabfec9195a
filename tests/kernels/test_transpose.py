"""Transposed lists have the same tiles by key block, in the documented order."""

import pytest
import torch

from dit_accel.kernels import transpose_lists
from tests.kernels.conftest import captured, needs_gpu
from tests.kernels.test_lowering import naive_lists, plan_lists

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 3, "tokens": 40},
    "more-tiles-in-a-row-than-a-chunk": {"batch": 1, "heads": 1, "tokens": 64 * 130, "rows": 0.05, "tiles": 1.1},
    "all-reused": {"batch": 1, "heads": 2, "tokens": 130, "rows": 0.0},
    "masks": {"batch": 1, "heads": 2, "tokens": 300, "masked": 0.5},
}


@pytest.mark.parametrize(("case", "order"), [*((case, "head") for case in CASES), ("ragged", "length")])
def test_transposition_equals_a_naive_loop(case, order, backend, make_sparsity):
    """Also with masked tiles after full ones, and with any content beyond the lists' counts."""
    rows, tiles, _, plan = make_sparsity(**CASES[case])
    beyond = torch.arange(plan.blocks, device=tiles.device) >= plan.kv_count[..., None]
    plan.kv_index[beyond] = torch.iinfo(torch.int32).max
    by_key = transpose_lists(plan, order=order, backend=backend)
    assert plan_lists(by_key) == naive_lists(torch.ones_like(rows), tiles.transpose(2, 3), order)
    assert (by_key.tokens, by_key.block, by_key.masks) == (plan.tokens, plan.block, None)


@needs_gpu
def test_transposition_never_waits_for_the_gpu(make_sparsity):
    rows, tiles, _, plan = make_sparsity(2, 3, 600)
    by_key = captured(lambda: transpose_lists(plan, order="head"))
    assert plan_lists(by_key) == naive_lists(torch.ones_like(rows), tiles.transpose(2, 3), "head")
