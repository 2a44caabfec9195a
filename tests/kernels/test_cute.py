"""The `cute` backend: what it refuses, the lists it hands over, and the contract around what flash-attn-4 does."""

import contextlib
import dataclasses
import math
import re
import sys
import tomllib
import types
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dit_accel.kernels import _cute, attention, lower, pack_bits, unpack_bits
from dit_accel.kernels._cute import attention as launcher
from dit_accel.kernels._cute.attention import attention_into, limit, tile_lists
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols, TileMasks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NAN = math.nan

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or _cute.why_not(GPU) is not None, reason="needs an H100 or H200 and flash-attn-4"
)


class Sparsity(NamedTuple):
    """Random rows and tiles, masks in them, and the plan that they lower to."""

    rows: torch.Tensor  # bool [B, H, T]
    tiles: torch.Tensor  # bool [B, H, T, T]; False in reused rows
    masks: TileMasks | None
    plan: AttentionPlan

    def computed(self) -> torch.Tensor:
        """bool ``[B, S, H]``."""
        by_token = self.rows.repeat_interleave(self.plan.block, 2)[:, :, : self.plan.tokens]
        return by_token.transpose(1, 2)

    def attended(self, kv_len: torch.Tensor | None) -> torch.Tensor:
        """bool ``[B, H, S, S]``: the pairs that attend."""
        block, tokens = self.plan.block, self.plan.tokens
        keep = self.tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)
        if self.masks is not None:
            position = torch.arange(keep.shape[-1])
            codes = self.masks.codes.expand(*self.tiles.shape)
            causal = (codes == 1).repeat_interleave(block, 2).repeat_interleave(block, 3)
            keep &= ~causal | (position <= position[:, None])
            bits = unpack_bits(self.masks.pool, block)  # [P, block, block]
            for b, h, i, j in (codes >= 2).nonzero().tolist():
                tile = (b, h, slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                keep[tile] &= bits[codes[b, h, i, j] - 2]
        keep = keep[:, :, :tokens, :tokens]
        return keep if kv_len is None else keep & (torch.arange(tokens) < kv_len[:, None, None, None])


def make_sparsity(batch, heads, tokens, block=128, rows=0.6, tiles=0.5, entries=None) -> Sparsity:
    """With ``entries`` a third of the tiles is FULL, the others are CAUSAL or, if more than 0, PARTIAL at random.

    What stands behind a row's count in its list is far out of range.
    """
    generator = torch.Generator().manual_seed(1)
    blocks = -(-tokens // block)
    row_mask = torch.rand(batch, heads, blocks, generator=generator) < rows
    tile_mask = (torch.rand(batch, heads, blocks, blocks, generator=generator) < tiles) & row_mask[..., None]
    masks = None
    if entries is not None:
        codes = torch.randint(0, 3, (1, heads, blocks, blocks), generator=generator, dtype=torch.int32)
        if entries:
            entry = torch.randint(2, 2 + entries, codes.shape, generator=generator, dtype=torch.int32)
            codes = torch.where(codes == 2, entry, codes)
        pool = torch.randint(0, 256, (entries, block, block // 8), generator=generator, dtype=torch.uint8)
        masks = TileMasks(codes if entries else codes.clamp(max=1), pool)
    symbols = SparseSymbols(pack_bits(row_mask.transpose(1, 2)), pack_bits(tile_mask), heads, tokens, block, masks)
    plan = lower(symbols, backend="reference")
    plan.kv_index.masked_fill_(torch.arange(blocks) >= plan.kv_count[..., None], 1 << 20)
    return Sparsity(row_mask, tile_mask, masks, plan)


def dense(q, k, v, keep, scale):
    """Masked dense attention in q's dtype: out ``[B, S, H, D]`` and lse ``[B, H, S]``; 0 and -inf without a key."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).masked_fill(~keep, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v), scores.double().logsumexp(-1)


@pytest.fixture
def installation(monkeypatch):
    """``install(version, module)`` makes flash-attn-4 look installed; what ``why_not`` remembers is forgotten."""

    def install(version: str | None, module: types.ModuleType | None = None) -> None:
        def version_of(name: str) -> str:
            assert name == "flash-attn-4"
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", version_of)
        for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
            monkeypatch.setitem(sys.modules, name, module)

    _cute.why_not.cache_clear()
    yield install
    _cute.why_not.cache_clear()


@pytest.mark.parametrize(
    ("version", "device", "capability", "message"),
    [
        (None, GPU, (9, 0), r"flash-attn-4 is not installed; pip install 'dit-accel\[hopper\]'"),
        ("4.0.0b35", GPU, (9, 0), r"flash-attn-4 is 4.0.0b35, and 4.0.0b36 is required; pip install"),
        ("4.0.0b36", CPU, (9, 0), "the tensors are on 'cpu', and flash-attn-4 needs a CUDA device"),
        ("4.0.0b36", GPU, (8, 0), r"it needs a GPU of compute capability \(9, 0\) \(H100, H200\), got \(8, 0\)"),
        ("4.0.0b36", GPU, (10, 0), r"got \(10, 0\)"),
        ("4.0.0b36", GPU, (9, 0), r"flash-attn-4 can't be imported \(ModuleNotFoundError: .*\); pip install"),
    ],
    ids=["absent", "another-version", "cpu", "ampere", "blackwell", "broken"],
)
def test_says_why_it_cannot_run(installation, monkeypatch, version, device, capability, message):
    installation(version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert re.search(message, _cute.why_not(device))


def test_nothing_keeps_it_from_hopper(installation, monkeypatch):
    installation("4.0.0b36", types.ModuleType("flash_attn"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _cute.why_not(GPU) is None


def test_the_extra_installs_the_version_that_the_launcher_is_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"flash-attn-4=={_cute.VERSION}; sys_platform == 'linux'" in project["optional-dependencies"]["hopper"]


def small_plan(tokens: int = 256, **options) -> AttentionPlan:
    return make_sparsity(1, 2, tokens, **options).plan


LIMITS = {
    "plain": ({}, None),
    "lse-kv_len": ({"return_lse": True, "kv_len": torch.tensor([100], dtype=torch.int32)}, None),
    "masks": ({"plan": small_plan(entries=3)}, None),
    "block-64": ({"plan": small_plan(block=64)}, None),
    "one-causal-block": ({"plan": small_plan(tokens=100, entries=0)}, None),
    "float32": ({"q": torch.zeros(1, 256, 2, 64)}, "q must have dtype .*float16 or .*bfloat16, got torch.float32"),
    "head_dim": ({"q": torch.zeros(1, 256, 2, 96).half()}, r"head_dim must be one of \(64, 128\), got 96"),
    "block": ({"plan": small_plan(block=32)}, r"plan.block must be one of \(64, 128\), got 32"),
    "one-partial-block": ({"plan": small_plan(tokens=100, entries=3)}, "PARTIAL tiles need 2 blocks or more, got 1"),
    "pv_threshold": ({"pv_threshold": -5.0}, "pv_threshold must be None, got -5.0"),
    "qk_dtype": ({"qk_dtype": "int8"}, "qk_dtype must be None, got 'int8'"),
}


@pytest.mark.parametrize(("change", "message"), LIMITS.values(), ids=LIMITS.keys())
def test_limits(change, message):
    """Each names the argument, what is required and what came."""
    half = torch.zeros(1, 256, 2, 64, dtype=torch.float16)
    arguments = {"q": half, "k": half, "v": half, "plan": small_plan(), "kv_len": None}
    found = limit(**(arguments | {"pv_threshold": None, "qk_dtype": None, "return_lse": False} | change))
    assert found is None if message is None else re.search(message, found)


@pytest.mark.parametrize("lengths", [None, (1000, 0), (128, 129), (999, 1)], ids=str)
@pytest.mark.parametrize("entries", [None, 0, 3], ids=["full", "causal", "partial"])
def test_lists_hold_the_tiles_that_compute_and_end_at_the_last_key(entries, lengths):
    sparsity = make_sparsity(2, 3, 1000, entries=entries)
    kv_len = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    lists = tile_lists(sparsity.plan, kv_len)
    assert all(x.dtype == torch.int32 for x in lists)
    masked_count, masked_index, full_count, full_index = lists
    masked_count = masked_count.expand_as(full_count)
    end = [8, 8] if lengths is None else [-(-length // 128) for length in lengths]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, sparsity.rows.shape)).tolist():
        computes = [j for j in sparsity.tiles[b, h, i].nonzero().flatten().tolist() if j < end[b]]
        masked = [j for j in computes if sparsity.masks is not None and sparsity.masks.codes[0, h, i, j]]
        assert masked_index[b, h, i, : masked_count[b, h, i]].tolist() == masked
        assert full_index[b, h, i, : full_count[b, h, i]].tolist() == [j for j in computes if j not in masked]


def test_lists_without_masks_and_lengths_are_the_plans_own():
    plan = small_plan()
    masked_count, _, full_count, full_index = tile_lists(plan, None)
    assert not masked_count.any()
    assert full_count is plan.kv_count
    assert full_index is plan.kv_index


def stand_in(q, k, v, *, seqused_k, softmax_scale, pack_gqa, block_sparse_tensors, out, lse, mask_mod=None,
             aux_tensors=None):  # fmt: skip
    """What flash-attn-4 does, with its corners: it writes every row, cuts only the entries that it visits first at the
    end of the keys, and multiplies all values of a tile, NaN too, whatever their probability.
    """
    masked_count, masked_index, full_count, full_index, (block, block_k) = block_sparse_tensors
    assert block_k == block and pack_gqa is False
    _, tokens, heads, _ = q.shape
    masked_count = masked_count.expand_as(full_count)
    position = torch.arange(tokens)
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, full_count.shape)).tolist():
        end = tokens if seqused_k is None else seqused_k[b]
        keys, keep = [], []
        rows = position[i * block : (i + 1) * block]
        for count, index, masked in ((masked_count, masked_index, True), (full_count, full_index, False)):
            for visit, j in enumerate(index[b, h, i, : count[b, h, i]].flip(0).tolist()):
                tile = position[j * block : (j + 1) * block]
                assert len(tile), f"tile {j} lies behind the last token"
                attend = (tile < end if visit == 0 else tile >= 0).expand(len(rows), -1)
                if masked and mask_mod == "causal":
                    attend = attend & (tile <= rows[:, None])
                elif masked:
                    codes, words = aux_tensors
                    attend = attend & attended_of(codes[b, h, i, j], words.view(-1, block, block // 32), rows, tile)
                keys.append(tile)
                keep.append(attend)
        if keys:
            tile, attend, kv_head = torch.cat(keys), torch.cat(keep, 1), h // (heads // k.shape[2])
            scores = q[b, rows, h].float() @ k[b, tile, kv_head].float().T * softmax_scale
            scores = scores.masked_fill(~attend, -math.inf)
            out[b, rows, h] = (scores.softmax(-1).nan_to_num(0.0) @ v[b, tile, kv_head].float()).to(out.dtype)
            if lse is not None:
                lse[b, h, rows] = scores.logsumexp(-1)


def attended_of(code: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    if code < 2:
        return tile <= rows[:, None]
    bits = (words[code - 2][..., None] >> torch.arange(32) & 1).bool().flatten(-2)
    return bits[: len(rows), : len(tile)]


@pytest.fixture
def flash_attention(monkeypatch):
    """The stand-in in place of flash-attn-4, for tensors on a CPU."""
    interface, sparsity = types.ModuleType("interface"), types.ModuleType("block_sparsity")
    interface._flash_attn_fwd = stand_in
    sparsity.BlockSparseTensorsTorch = lambda *lists, block_size: (*lists, block_size)
    for name, module in {"interface": interface, "block_sparsity": sparsity}.items():
        monkeypatch.setitem(sys.modules, f"flash_attn.cute.{name}", module)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "_mask_function", lambda block, partial: "by code" if partial else "causal")


CASES = {
    "ragged": {},
    "one-block": {"tokens": 100},
    "whole-blocks": {"tokens": 384},
    "grouped-heads": {"heads": 4, "kv_heads": 2},
    "empty-rows": {"tiles": 0.1},
    "all-skipped": {"rows": 1.1, "tiles": 0.0},
    "all-reused": {"rows": 0.0},
    "everything": {"rows": 1.1, "tiles": 1.1},
    "kv_len": {"kv_len": (290, 129)},
    "kv_len-0": {"kv_len": (128, 0)},
    "kv_len-beyond": {"kv_len": (10**6, 1)},
    "causal": {"entries": 0},
    "causal-kv_len": {"entries": 0, "kv_len": (290, 129), "rows": 1.1, "tiles": 1.1},
    "partial": {"entries": 3},
    "partial-kv_len": {"entries": 3, "kv_len": (290, 129), "rows": 1.1, "tiles": 1.1},
    "block-64": {"block": 64},
    "block-64-kv_len": {"block": 64, "kv_len": (290, 65)},
    "block-64-partial": {"block": 64, "entries": 3},
}


def check_contract(device, dtype, check, *, tokens=300, heads=3, kv_heads=None, head_dim=64, kv_len=None, **options):
    """Rows that compute are close to float64, others keep the poison, and nothing behind the last key takes part.

    q, k and v are views of one fused projection that is poisoned behind the sequence, and out is a view too.
    """
    sparsity = make_sparsity(2, heads, tokens, **options)
    lengths = None if kv_len is None else torch.tensor(kv_len, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, tokens, 3, heads, head_dim, generator=generator).to(dtype).unbind(2)
    k, v = (x[:, :, : kv_heads or heads] for x in (k, v))
    keep = sparsity.attended(lengths)
    exact, exact_lse = dense(*(x.double() for x in (q, k, v)), keep, head_dim**-0.5)
    low, _ = dense(q, k, v, keep, head_dim**-0.5)

    fused = torch.full((2, tokens + 7, 3, heads, head_dim), NAN, dtype=dtype)
    fused[:, :tokens, 0] = q
    for part, x in ((1, k), (2, v)):
        for b in range(2):
            length = tokens if kv_len is None else kv_len[b]
            fused[b, : min(length, tokens), part, : x.shape[2]] = x[b, :length]
    q, k, v = fused.to(device)[:, :tokens].unbind(2)
    k, v = (x[:, :, : kv_heads or heads] for x in (k, v))
    out = torch.full((2, tokens, heads, 2 * head_dim), NAN, dtype=dtype, device=device)[..., :head_dim]
    lse = torch.full((2, heads, tokens), NAN, device=device)
    lengths = None if lengths is None else lengths.to(device)
    attention_into(q, k, v, to_device(sparsity.plan, device), head_dim**-0.5, lengths, out, lse)

    computed, out, lse = sparsity.computed(), out.cpu(), lse.cpu()
    assert torch.equal(out.isnan().any(-1), ~computed)
    assert torch.equal(out.isnan().all(-1), ~computed)
    if computed.any():
        check(out[computed], exact[computed], low[computed])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-5)  # -inf in reused and in empty rows


def to_device(plan: AttentionPlan, device) -> AttentionPlan:
    moved = {name: x.to(device) for name, x in vars(plan).items() if isinstance(x, torch.Tensor)}
    if plan.masks is not None:
        moved["masks"] = TileMasks(plan.masks.codes.to(device), plan.masks.pool.to(device))
    return dataclasses.replace(plan, **moved)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_launcher_keeps_the_contract(case, flash_attention, assert_no_worse):
    check_contract(CPU, torch.float16, assert_no_worse, **case)


def test_an_output_of_the_ops_own_is_written_without_a_copy(flash_attention, monkeypatch):
    """Its reused rows may hold anything, so they cost nothing: flash-attn-4 leaves zeros there."""
    monkeypatch.setattr(launcher, "weighted_sum", None)
    sparsity = make_sparsity(1, 2, 300)
    q, k, v = torch.randn(3, 1, 300, 2, 64).half()
    out = torch.full_like(q, NAN)
    attention_into(q, k, v, sparsity.plan, 0.125, None, out, None, keep_reused=False)
    assert not out.isnan().any()
    assert not out[~sparsity.computed()].any()


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_dense_masked_attention(case, head_dim, dtype, assert_no_worse):
    check_contract(GPU, dtype, assert_no_worse, head_dim=head_dim, **case)


@on_hopper
def test_the_op_runs_it_and_never_makes_the_host_wait():
    sparsity = make_sparsity(1, 2, 300, entries=3)
    plan, computed = to_device(sparsity.plan, GPU), sparsity.computed().to(GPU)
    q, k, v = torch.randn(3, 1, 300, 2, 64, device=GPU).half()
    kv_len = torch.tensor([200], dtype=torch.int32, device=GPU)
    expected = torch.empty_like(q)
    attention_into(q, k, v, plan, 0.125, kv_len, expected, None, keep_reused=False)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention(q, k, v, plan, kv_len=kv_len, backend="cute")
        kept = attention(q, k, v, plan, kv_len=kv_len, out=v.clone(), backend="cute")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[computed], expected[computed])
    assert torch.equal(kept, torch.where(computed[..., None], expected, v))
