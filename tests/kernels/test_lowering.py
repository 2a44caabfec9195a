"""A plan lists exactly what its symbols mark, in the documented order."""

import itertools
from dataclasses import replace

import pytest
import torch

from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.symbols import TileMasks
from tests.kernels.conftest import BACKENDS, captured, needs_gpu
from tests.pairs import every_pair

HAS_GPU = torch.cuda.is_available()

CASES = {
    "ragged": {"batch": 2, "heads": 3, "tokens": 200},
    "single-block": {"batch": 1, "heads": 5, "tokens": 40},
    "40-heads": {"batch": 2, "heads": 40, "tokens": 100},
    "64-heads": {"batch": 1, "heads": 64, "tokens": 100},
    "more-blocks-than-a-byte": {"batch": 1, "heads": 1, "tokens": 64 * 37},
    "more-blocks-than-a-chunk": {"batch": 1, "heads": 1, "tokens": 64 * (300 if HAS_GPU else 140) - 7},
    "everything": {"batch": 1, "heads": 3, "tokens": 200, "rows": 1.1, "tiles": 1.1},
    "all-reused": {"batch": 2, "heads": 2, "tokens": 130, "rows": 0.0},
    "all-empty": {"batch": 1, "heads": 2, "tokens": 130, "tiles": 0.0},
}
if HAS_GPU:  # the interpreter is slow
    CASES["370-blocks"] = {"batch": 1, "heads": 2, "tokens": 64 * 370}
CODES = {  # batch and heads of the codes of masks, and whether rows lie apart
    "no-masks": None,
    "batch-and-heads": lambda batch, heads: (batch, heads, False),
    "heads": lambda batch, heads: (1, heads, False),
    "broadcast": lambda batch, heads: (1, 1, False),
    "strided": lambda batch, heads: (batch, heads, True),
}


def naive_lists(rows, tiles, order, masked=None):
    """The lists of a plan, by looping over every bit. ``masked``: tiles that stand behind a row's full ones."""
    batch, heads, blocks = rows.shape
    masked = torch.zeros_like(tiles) if masked is None else masked
    rows, tiles, masked = rows.tolist(), tiles.tolist(), masked.tolist()
    lists, work = {"mask64": [], "kv": [], "full": []}, []
    for b in range(batch):
        for i in range(blocks):
            word = sum(1 << h for h in range(heads) if rows[b][h][i])
            lists["mask64"].append(word - (1 << 64) if word >> 63 else word)
        for h in range(heads):
            for i in range(blocks):
                computed = [j for j in range(blocks) if tiles[b][h][i][j]]
                full = [j for j in computed if not masked[b][h][i][j]]
                lists["kv"].append(full + [j for j in computed if masked[b][h][i][j]])
                lists["full"].append(len(full))
            work.append([(b * heads + h) * blocks + i for i in range(blocks) if rows[b][h][i]])
    groups = work if order == "head" else [itertools.chain(*work)]
    return lists | {"work": [row for group in groups for row in sorted(group, key=lambda row: -len(lists["kv"][row]))]}


def plan_lists(plan):
    """Lists of a plan, each up to its count."""
    rows = zip(plan.kv_index.flatten(0, 2).tolist(), plan.kv_count.flatten().tolist(), strict=True)
    return {
        "mask64": plan.mask64.flatten().tolist(),
        "kv": [index[:count] for index, count in rows],
        "full": (plan.kv_count if plan.full_count is None else plan.full_count).flatten().tolist(),
        "work": plan.work[: plan.work_count.item()].tolist(),
    }


@every_pair(case=CASES, order=("head", "length"), codes=CODES, backend=BACKENDS)
def test_lowering_equals_a_naive_loop(case, order, codes, backend, make_sparsity):
    """Masked tiles stand behind full ones; bits beyond the last head and block are ignored."""
    rows, tiles, symbols, _ = make_sparsity(**case)
    batch, heads, blocks, _ = tiles.shape
    beyond = [~pack_bits(torch.ones(size, dtype=torch.bool, device=rows.device)) for size in (heads, blocks)]
    symbols = replace(symbols, cache_bits=symbols.cache_bits | beyond[0], skip_bits=symbols.skip_bits | beyond[1])
    masked = None
    if codes is not None:
        *shape, is_strided = codes(batch, heads)
        kinds = torch.randint(0, 4, (*shape, blocks, blocks), dtype=torch.int32).to(rows.device)
        kinds = kinds.transpose(2, 3) if is_strided else kinds
        masks = TileMasks(kinds, torch.zeros(2, 64, 8, dtype=torch.uint8, device=rows.device))
        symbols, masked = replace(symbols, masks=masks), (kinds != 0).expand_as(tiles)
    plan = lower(symbols, order=order, backend=backend)
    assert plan_lists(plan) == naive_lists(rows, tiles, order, masked)
    assert (plan.tokens, plan.block, plan.masks) == (case["tokens"], 64, symbols.masks)


@pytest.mark.parametrize(("batch", "heads", "order"), [(1, 32, "length"), (3, 11, "head")], ids=["1024-rows", "1056"])
def test_the_order_follows_from_the_shape(batch, heads, order, make_sparsity):
    """Up to 1024 rows are ranked across heads, more than that head by head."""
    *_, symbols, _ = make_sparsity(batch, heads, 64 * 32)
    assert plan_lists(lower(symbols)) == plan_lists(lower(symbols, order=order))
    assert plan_lists(lower(symbols, order="head")) != plan_lists(lower(symbols, order="length"))


def test_no_skip_bits_means_every_tile(backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(1, 3, 600)
    plan = lower(replace(symbols, skip_bits=None), order="head", backend=backend)
    assert plan_lists(plan) == naive_lists(rows, torch.ones_like(tiles) & rows[..., None], "head")


@needs_gpu
def test_ten_thousand_rows_are_ranked_together(make_sparsity):
    *_, symbols, _ = make_sparsity(1, 64, 64 * 180)
    assert plan_lists(lower(symbols, order="length")) == plan_lists(lower(symbols, order="length", backend="reference"))


@needs_gpu
def test_lowering_never_waits_for_the_gpu(make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(2, 3, 600)
    plan = captured(lambda: lower(symbols, order="head", backend="triton"))
    assert plan_lists(plan) == naive_lists(rows, tiles, "head")
