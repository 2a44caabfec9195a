"""FlashOmni's row policy: vision blocks that hardly matter to text, and to which text hardly matters, are reused."""

from __future__ import annotations

import torch

from dit_accel.kernels.selection import select_rows
from dit_accel.layout import TokenLayout


def row_bits(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> torch.Tensor:
    """Rows that compute (FlashOmni, section 3.3, equation 1), packed.

    Vision block i is scored by its contribution to text, ``C_i = Σ_{text j} P̃[j, i]``, and by the guidance it takes
    from text, ``G_i = Σ_{text j} softmax_vision(P̃[vision, j])_i``. With each score sorted ascending, a block is
    reused iff its running sum stays within ``tau`` of the total in both. Rows that hold text always compute.

    Args:
        probabilities: pooled attention map P̃, float32 ``[B, H, T, T]``.
        layout: which blocks hold text.
        tau: share of the score that is reused, 0..1, after its ramp.

    Returns:
        ``cache_bits`` of :class:`~dit_accel.symbols.SparseSymbols`, uint8 ``[B, T, ceil(H / 8)]``, 1 = compute. All
        rows compute where the sequence has no text block to score against.
    """
    return select_rows(probabilities, tau, text=layout.text_blocks, vision=layout.vision_blocks)


def ramped(tau: float, progress: float, power: float) -> float:
    """A threshold that grows from 0 at the first step: ``tau · progress ** power`` (FlashOmni, appendix A.1.1)."""
    return tau * progress**power
