"""SpargeAttn's tile policy: per row, tiles that carry little probability in the pooled map are skipped."""

from __future__ import annotations

import torch

from dit_accel.kernels.selection import select_tiles
from dit_accel.layout import TokenLayout


def tile_bits(probabilities: torch.Tensor, layout: TokenLayout, tau_kv: float) -> torch.Tensor:
    """Tiles that compute (SpargeAttn, section 3.3, with τ = 1 − tau_kv), packed.

    In each row, tiles are kept from the largest pooled probability down until their mass *reaches* ``1 − tau_kv``; so
    at least one tile is kept, and tiles of equal probability go or stay together. Rows and columns that hold text are
    kept whole, for text guides vision and is guided by it (FlashOmni, observation 1).

    Args:
        probabilities: pooled attention map P̃, float32 ``[B, H, T, T]``.
        layout: which blocks hold text.
        tau_kv: probability mass that a row may lose, 0..1, after its ramp.

    Returns:
        ``skip_bits`` of :class:`~dit_accel.symbols.SparseSymbols`, uint8 ``[B, H, T, ceil(T / 8)]``, 1 = compute.
    """
    return select_tiles(probabilities, tau_kv, always=layout.text_blocks)
