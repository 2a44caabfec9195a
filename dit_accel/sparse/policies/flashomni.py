"""FlashOmni's row policy: reuse vision blocks that exchange little attention with text.

Wan's self-attention has no text. There the score of a block is the attention that all blocks pay to it.
"""

import torch
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import pack_bits, unpack_bits
from dit_accel.kernels.plans.selection import select_rows, select_tiles


def row_bits(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> torch.Tensor:
    """Return the rows that compute, as ``cache_bits`` of symbols, from the pooled map P̃, float32 ``[B, H, T, T]``.

    With text they are those of :func:`select_rows`. Without it a block's score is ``M_i = Σ_j P̃[j, i]``: blocks whose
    scores, lowest first, sum to at most ``tau`` of the total are reused, but never the highest of a head.
    """
    if layout.text:
        return select_rows(probabilities, tau, text=layout.text_blocks, vision=layout.vision_blocks)
    batch, heads, blocks, _ = probabilities.shape
    received = probabilities.mean(2).flatten(0, 1)  # [B * H, T], each row sums to 1
    maps = functional.pad(received, (0, 0, 0, -len(received) % blocks)).view(1, -1, blocks, blocks)
    rows = unpack_bits(select_tiles(maps, tau).flatten(0, 2)[: len(received)], blocks).view(batch, heads, blocks)
    return pack_bits(rows.transpose(1, 2))
