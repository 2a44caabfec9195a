"""FlashOmni's row policy: reuse vision blocks that exchange little attention with text.

Wan's self-attention has no text. There the score of a block is the attention that all blocks pay to it.
"""

import torch
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import pack_bits, unpack_bits
from dit_accel.kernels.plans.selection import select_rows, select_tiles


def row_bits(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> torch.Tensor:
    """Return the rows that compute (FlashOmni, section 3.3, equation 1), packed.

    Vision block i is scored by its contribution to text, ``C_i = Σ_{text j} P̃[j, i]``, and by the guidance it takes
    from text, ``G_i = Σ_{text j} softmax_vision(P̃[vision, j])_i``. With each score sorted ascending, a block is
    reused if and only if both running sums stay within ``tau`` of the total. Rows with text always compute.

    In a sequence without text the only score is the attention that the block receives, ``M_i = Σ_j P̃[j, i]``. In each
    head the block with the highest score always computes.

    P̃ (``probabilities``) is float32 ``[B, H, T, T]``, the result ``cache_bits`` of symbols, uint8
    ``[B, T, ceil(H / 8)]``, 1 = compute.
    """
    if layout.text:
        return select_rows(probabilities, tau, text=layout.text_blocks, vision=layout.vision_blocks)
    batch, heads, blocks, _ = probabilities.shape
    received = probabilities.mean(2).flatten(0, 1)  # [B * H, T], each row sums to 1
    maps = functional.pad(received, (0, 0, 0, -len(received) % blocks)).view(1, -1, blocks, blocks)
    rows = unpack_bits(select_tiles(maps, tau).flatten(0, 2)[: len(received)], blocks).view(batch, heads, blocks)
    return pack_bits(rows.transpose(1, 2))
