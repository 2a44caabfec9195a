"""A plan lists exactly what its symbols mark, in the documented order."""

from dataclasses import replace

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower, pack_bits
from dit_accel.symbols import SparseSymbols

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "64-heads": {"batch": 1, "heads": 64, "tokens": 130},
    "more-blocks-than-a-byte": {"batch": 1, "heads": 1, "tokens": 64 * 37},
    "everything": {"batch": 1, "heads": 3, "tokens": 200, "rows": 1.1, "tiles": 1.1},
    "all-reused": {"batch": 2, "heads": 2, "tokens": 130, "rows": 0.0},
    "all-empty": {"batch": 1, "heads": 2, "tokens": 130, "tiles": 0.0},
}


def naive_lists(rows, tiles):
    """The lists of a plan, by looping over every bit."""
    batch, heads, blocks = rows.shape
    lists = {"mask64": [], "kv": [], "rows": [], "work": []}
    for b in range(batch):
        for i in range(blocks):
            word = sum(1 << h for h in range(heads) if rows[b, h, i])
            lists["mask64"].append(word - (1 << 64) if word >> 63 else word)
        for h in range(heads):
            kv = [[j for j in range(blocks) if tiles[b, h, i, j]] for i in range(blocks)]
            computed = [i for i in range(blocks) if rows[b, h, i]]
            lists["kv"] += kv
            lists["rows"].append(computed)
            longest_first = sorted(computed, key=lambda i: -len(kv[i]))
            lists["work"] += [(b * heads + h) * blocks + i for i in longest_first]
    return lists


def plan_lists(plan):
    """The same lists, from a plan: each list up to its count."""

    def heads_of(index, count):
        return [row[:n] for row, n in zip(index.flatten(0, -2).tolist(), count.flatten().tolist(), strict=True)]

    return {
        "mask64": plan.mask64.flatten().tolist(),
        "kv": heads_of(plan.kv_index, plan.kv_count),
        "rows": heads_of(plan.row_index, plan.row_count),
        "work": plan.work[: plan.work_count.item()].tolist(),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_lowering_equals_a_naive_loop(case, backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(**case)
    plan = lower(symbols, backend=backend)
    assert plan_lists(plan) == naive_lists(rows, tiles)
    assert (plan.tokens, plan.block) == (case["tokens"], 64)


def test_no_skip_bits_means_every_tile(backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(1, 3, 600)
    plan = lower(replace(symbols, skip_bits=None), backend=backend)
    assert plan_lists(plan) == naive_lists(rows, torch.ones_like(tiles) & rows[..., None])


def test_scratch_is_overwritten_and_returned(backend, make_sparsity):
    """Buffers that hold the lists of other symbols give the same plan as fresh ones, and no new memory."""
    *_, scratch = make_sparsity(2, 3, 600, rows=1.1, tiles=1.1)
    rows, tiles, symbols, _ = make_sparsity(2, 3, 600)
    plan = lower(symbols, scratch=scratch, backend=backend)
    assert plan_lists(plan) == naive_lists(rows, tiles)
    assert plan.kv_index.data_ptr() == scratch.kv_index.data_ptr()
    assert plan.work.data_ptr() == scratch.work.data_ptr()


def test_bits_beyond_the_last_head_and_block_are_ignored(backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(1, 3, 300)
    stray = SparseSymbols(symbols.cache_bits | 0b11111000, symbols.skip_bits | 0b11100000, 3, 300, 64)
    assert plan_lists(lower(stray, backend=backend)) == naive_lists(rows, tiles)


def test_scratch_of_another_shape_is_an_error(make_sparsity):
    *_, scratch = make_sparsity(1, 3, 300)
    *_, symbols, _ = make_sparsity(1, 2, 300)
    with pytest.raises(ShapeError, match=r"scratch must have the symbols' batch, heads and blocks \[1, 2, 5\]"):
        lower(symbols, scratch=scratch)


def test_symbols_of_the_wrong_shape_are_an_error(device):
    with pytest.raises(ShapeError, match=r"cache_bits must be uint8 \[1, 2, 1\]"):
        SparseSymbols(pack_bits(torch.ones(1, 3, 3, dtype=torch.bool, device=device)), None, 3, 128, 64)
