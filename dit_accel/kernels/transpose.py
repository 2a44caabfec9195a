"""Transposition: from the tiles of each query block to the tiles of each key block, for the gradients of keys."""

from __future__ import annotations

import torch

from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.lowering import lower
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols


@torch.no_grad()
def transpose_lists(plan: AttentionPlan, *, order: str = "auto", backend: str = "auto") -> AttentionPlan:
    """The same tiles listed by key block: a plan whose rows are the key blocks, and whose keys are the query blocks.

    Its ``kv_count`` and ``kv_index`` say for each key block how many and which query blocks attend to it, ascending.
    Every key block is in the work list, those that nobody attends to last. Nothing waits for the device, and equal
    plans give equal lists. Masks inside tiles are not transposed: the lists hold all tiles, ``masks`` is None.

    Between the two stand one byte and then one bit a tile: 38 MB for 24 heads of 81K tokens in blocks of 64.

    Args:
        plan: B, H, T as in :class:`~dit_accel.kernels.symbols.AttentionPlan`.
        order: of the work list, as in :func:`~dit_accel.kernels.lowering.lower`.
        backend: "auto", "reference" or "triton".
    """
    chosen = resolve_backend(backend, plan.kv_index)
    if chosen == "triton":
        from dit_accel.kernels._triton.transpose import attending_blocks
    else:
        attending_blocks = _attending_blocks_reference
    every_row = plan.kv_count.new_full((plan.batch, plan.blocks, block_count(plan.heads, 8)), 255, dtype=torch.uint8)
    skip_bits = pack_bits(attending_blocks(plan), backend=backend)
    symbols = SparseSymbols(every_row, skip_bits, plan.heads, plan.tokens, plan.block)
    return lower(symbols, order=order, backend=backend)


def _attending_blocks_reference(plan: AttentionPlan) -> torch.Tensor:
    """Which query blocks (last axis) attend to each key block, bool ``[B, H, Tk, Tq]``."""
    batch, heads, blocks = plan.kv_count.shape
    listed = torch.arange(blocks, device=plan.kv_count.device) < plan.kv_count[..., None]
    tile = torch.where(listed, plan.kv_index.long(), blocks)  # beyond its count a list holds anything
    attends = plan.kv_count.new_zeros(batch, heads, blocks, blocks + 1, dtype=torch.bool).scatter_(-1, tile, True)
    return attends[..., :blocks].transpose(2, 3)
