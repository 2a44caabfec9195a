"""Mark the query blocks that attend to each key block: one program per row marks its tiles."""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import on_device
from dit_accel.kernels.symbols import AttentionPlan


@triton.jit
def _mark_tiles(attends, kv_count, kv_index, blocks, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # (b * H + h) * Tq + i
    count = tl.load(kv_count + row)
    of_head = attends + row // blocks * blocks * blocks + row % blocks
    for start in range(0, count, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        key_block = tl.load(kv_index + row * blocks + slot, slot < count, other=0)
        tl.store(of_head + key_block.to(tl.int64) * blocks, tl.full([CHUNK], 1, tl.int8), slot < count)


def attending_blocks(plan: AttentionPlan) -> torch.Tensor:
    """Mark the query blocks that attend to each key block, bool ``[B, H, Tk, Tq]``."""
    batch, heads, blocks = plan.kv_count.shape
    attends = plan.kv_count.new_zeros(batch, heads, blocks, blocks, dtype=torch.uint8)
    chunk = min(triton.next_power_of_2(blocks), 128)
    with on_device(attends):
        _mark_tiles[(batch * heads * blocks,)](attends, plan.kv_count, plan.kv_index, blocks, CHUNK=chunk, num_warps=1)
    return attends.view(torch.bool)
