"""A plan lists exactly what its symbols mark, in the documented order."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.symbols import SparseSymbols, TileMasks
from tests.kernels.conftest import BACKENDS
from tests.pairs import every_pair

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
every_order = pytest.mark.parametrize("order", ["head", "length"])

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
MASKED = [  # every layout of the codes with one case, and every case
    ("ragged", "batch-and-heads"),
    ("ragged", "heads"),
    ("ragged", "broadcast"),
    ("ragged", "strided"),
    ("40-heads", "heads"),
    ("more-blocks-than-a-chunk", "strided"),
    ("all-empty", "broadcast"),
]


def naive_lists(rows, tiles, order, masked=None):
    """The lists of a plan, by looping over every bit. ``masked``: tiles that stand behind a row's full ones."""
    batch, heads, blocks = rows.shape
    masked = torch.zeros_like(tiles) if masked is None else masked
    rows, tiles, masked = rows.tolist(), tiles.tolist(), masked.tolist()
    lists = {"mask64": [], "kv": [], "full": [], "rows": [], "work": []}
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
            lists["rows"].append([i for i in range(blocks) if rows[b][h][i]])
    work = [[head_row * blocks + i for i in computed] for head_row, computed in enumerate(lists["rows"])]
    for group in work if order == "head" else [itertools.chain(*work)]:
        lists["work"] += sorted(group, key=lambda row: -len(lists["kv"][row]))
    return lists


def plan_lists(plan):
    """Lists of a plan, each up to its count."""

    def heads_of(index, count):
        return [row[:n] for row, n in zip(index.flatten(0, -2).tolist(), count.flatten().tolist(), strict=True)]

    return {
        "mask64": plan.mask64.flatten().tolist(),
        "kv": heads_of(plan.kv_index, plan.kv_count),
        "full": (plan.kv_count if plan.full_count is None else plan.full_count).flatten().tolist(),
        "rows": heads_of(plan.row_index, plan.row_count),
        "work": plan.work[: plan.work_count.item()].tolist(),
    }


@every_pair(case=CASES, order=("head", "length"), backend=BACKENDS)
def test_lowering_equals_a_naive_loop(case, backend, order, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(**case)
    plan = lower(symbols, order=order, backend=backend)
    assert plan_lists(plan) == naive_lists(rows, tiles, order)
    assert (plan.tokens, plan.block) == (case["tokens"], 64)


@pytest.mark.parametrize(("case", "axes"), MASKED)
def test_masked_tiles_stand_behind_full_ones(case, axes, backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(**CASES[case])
    batch, heads, blocks, _ = tiles.shape
    shape = {"heads": (1, heads), "broadcast": (1, 1)}.get(axes, (batch, heads))
    codes = torch.randint(0, 4, (*shape, blocks, blocks), dtype=torch.int32).to(tiles.device)
    codes = codes.transpose(2, 3) if axes == "strided" else codes
    pool = torch.zeros(2, 64, 8, dtype=torch.uint8, device=tiles.device)
    masks = TileMasks(codes, pool)
    plan = lower(replace(symbols, masks=masks), order="head", backend=backend)
    assert plan.masks is masks
    assert plan_lists(plan) == naive_lists(rows, tiles, "head", masked=(codes != 0).expand_as(tiles))


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


@every_order
def test_scratch_is_overwritten_and_returned(backend, order, make_sparsity):
    """Buffers with lists of other symbols give the same plan as fresh ones, without new memory."""
    *_, scratch = make_sparsity(2, 3, 600, rows=1.1, tiles=1.1)
    rows, tiles, symbols, _ = make_sparsity(2, 3, 600)
    plan = lower(symbols, order=order, scratch=scratch, backend=backend)
    assert plan_lists(plan) == naive_lists(rows, tiles, order)
    assert plan.kv_index.data_ptr() == scratch.kv_index.data_ptr()
    assert plan.work.data_ptr() == scratch.work.data_ptr()


def test_scratch_of_a_masked_plan(backend, make_sparsity):
    """It can be reused for symbols with other masks, and without masks."""
    rows, tiles, symbols, _ = make_sparsity(2, 3, 200)
    pool = torch.zeros(0, 64, 8, dtype=torch.uint8, device=tiles.device)
    first, second = (
        TileMasks(torch.full((1, 1, 4, 4), code, dtype=torch.int32).to(tiles.device), pool) for code in (0, 1)
    )
    scratch = lower(replace(symbols, masks=first), backend=backend)
    plan = lower(replace(symbols, masks=second), order="head", scratch=scratch, backend=backend)
    assert plan.full_count.data_ptr() == scratch.full_count.data_ptr()
    assert plan_lists(plan) == naive_lists(rows, tiles, "head", masked=torch.ones_like(tiles))
    plain = lower(symbols, order="head", scratch=scratch, backend=backend)
    assert plain.full_count is None
    assert plan_lists(plain) == naive_lists(rows, tiles, "head")


@every_order
def test_a_scratch_leaves_nothing_of_its_own_in_a_plan(backend, order, make_sparsity):
    """A scratch of any symbols gives a plan with the same lists, masks and bits as a fresh one."""
    kinds = {}
    for kind, held in {
        "tiles": (),
        "linear": ("linear_bits",),
        "keys": ("slice_bits",),
        "masks": ("masks",),
        "all": ("linear_bits", "slice_bits", "masks"),
    }.items():
        sparsity = make_sparsity(2, 3, 200, masked=0.5)
        skipped = pack_bits(~sparsity.tiles & sparsity.rows[..., None])
        keys = pack_bits((~sparsity.tiles & sparsity.rows[..., None]).repeat_interleave(64, -1))
        given = {"linear_bits": skipped, "slice_bits": keys, "masks": sparsity.symbols.masks}
        kinds[kind] = replace(sparsity.symbols, **{"masks": None, **{name: given[name] for name in held}})
    options = {"order": order, "backend": backend}
    alone = {kind: lower(symbols, **options) for kind, symbols in kinds.items()}
    for before, (kind, symbols) in itertools.product(kinds, kinds.items()):
        if symbols.masks is not None and kinds[before].masks is None:
            continue  # refused, as below
        plan, fresh = lower(symbols, scratch=copy.deepcopy(alone[before]), **options), alone[kind]
        assert plan_lists(plan) == plan_lists(fresh)
        for name in ("tokens", "block", "masks", "linear_bits"):
            assert getattr(plan, name) is getattr(fresh, name)
        assert (plan.full_count is None) == (symbols.masks is None)
        assert (plan.slices is None) == (symbols.slice_bits is None)
        if plan.slices is not None:
            count = int(fresh.slices.work_count)
            assert plan.slices.bits is symbols.slice_bits and int(plan.slices.work_count) == count > 0
            assert torch.equal(plan.slices.count, fresh.slices.count)
            assert torch.equal(plan.slices.work[:count], fresh.slices.work[:count])


def test_bits_beyond_the_last_head_and_block_are_ignored(backend, make_sparsity):
    rows, tiles, symbols, _ = make_sparsity(1, 3, 300)
    stray = SparseSymbols(symbols.cache_bits | 0b11111000, symbols.skip_bits | 0b11100000, 3, 300, 64)
    assert plan_lists(lower(stray, order="head", backend=backend)) == naive_lists(rows, tiles, "head")


@needs_gpu
def test_ten_thousand_rows_are_ranked_together(make_sparsity):
    *_, symbols, _ = make_sparsity(1, 64, 64 * 180)
    assert plan_lists(lower(symbols, order="length")) == plan_lists(lower(symbols, order="length", backend="reference"))


@needs_gpu
def test_lowering_never_waits_for_the_gpu(backend, make_sparsity):
    """It can be captured in a CUDA graph, which a synchronisation would break."""
    if backend == "reference":
        pytest.skip("the reference may wait")
    rows, tiles, symbols, scratch = make_sparsity(2, 3, 600)
    lower(symbols, order="head", scratch=scratch, backend=backend)
    for tensor in scratch.tensors():
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lower(symbols, order="head", scratch=scratch, backend=backend)
    graph.replay()
    assert plan_lists(scratch) == naive_lists(rows, tiles, "head")


def test_scratch_of_another_shape_is_an_error(make_sparsity):
    *_, scratch = make_sparsity(1, 3, 300)
    *_, symbols, _ = make_sparsity(1, 2, 300)
    with pytest.raises(ShapeError, match=r"scratch must have the symbols' batch, heads and blocks \[1, 2, 5\]"):
        lower(symbols, scratch=scratch)


def test_scratch_without_masks_is_an_error_for_symbols_with_masks(make_sparsity):
    *_, symbols, scratch = make_sparsity(1, 3, 100)
    pool = torch.zeros(0, 64, 8, dtype=torch.uint8, device=scratch.kv_count.device)
    masks = TileMasks(torch.zeros_like(scratch.kv_index), pool)
    with pytest.raises(ShapeError, match="scratch must come from symbols with masks"):
        lower(replace(symbols, masks=masks), scratch=scratch)


def test_an_unknown_order_is_an_error(make_sparsity):
    *_, symbols, _ = make_sparsity(1, 3, 100)
    with pytest.raises(ShapeError, match=r"order must be one of .*, got 'row'"):
        lower(symbols, order="row")


def test_symbols_of_the_wrong_shape_are_an_error(device):
    with pytest.raises(ShapeError, match=r"cache_bits must be uint8 \[1, 2, 1\]"):
        SparseSymbols(pack_bits(torch.ones(1, 3, 3, dtype=torch.bool, device=device)), None, 3, 128, 64)
