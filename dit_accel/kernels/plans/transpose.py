"""Transposition: from the tiles of each query block to the tiles of each key block, for the gradients of keys."""

import torch

from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.plans.lowering import lower
from dit_accel.kernels.plans.regions import listed_tiles
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols


@torch.no_grad()
def transpose_lists(plan: AttentionPlan, *, order: str = "auto", backend: str = "auto") -> AttentionPlan:
    """List a plan's tiles by key block: return a plan whose rows are key blocks and whose keys are query blocks.

    Its ``kv_count`` and ``kv_index`` hold for each key block the number and the ascending list of query blocks that
    attend to it. Every key block is in the work list; blocks without queries come last. Nothing waits for the device,
    and equal plans give equal lists. Masks inside tiles are not transposed: the lists hold all tiles, without masks.

    Temporary memory is one byte and one bit per tile: 38 MB for 24 heads of 81K tokens in blocks of 64.

    Args:
        plan: B, H, T as in :class:`~dit_accel.kernels.symbols.AttentionPlan`.
        order: order of the work list, as in :func:`~dit_accel.kernels.lower`.
    """
    if resolve_backend(backend, plan.kv_index) == "triton":
        from dit_accel.kernels._triton.transpose import attending_blocks

        by_key = attending_blocks(plan)
    else:
        by_key = listed_tiles(plan).transpose(2, 3)
    every_row = plan.kv_count.new_full((plan.batch, plan.blocks, block_count(plan.heads, 8)), 255, dtype=torch.uint8)
    symbols = SparseSymbols(every_row, pack_bits(by_key, backend=backend), plan.heads, plan.tokens, plan.block)
    return lower(symbols, order=order, backend=backend)
