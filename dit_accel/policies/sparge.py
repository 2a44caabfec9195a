"""SpargeAttn's tile policy: per row, tiles that carry little probability in the pooled map are skipped."""

from __future__ import annotations

import torch

from dit_accel.layout import TokenLayout


def tile_mask(probabilities: torch.Tensor, layout: TokenLayout, tau_kv: float) -> torch.Tensor:
    """Tiles that compute (SpargeAttn, section 3.3, with τ = 1 − tau_kv).

    In each row, tiles are kept from the largest pooled probability down until their mass *reaches* ``1 − tau_kv``; so
    at least one tile is kept. Rows and columns that hold text are kept whole, for text guides vision and is guided by
    it (FlashOmni, observation 1).

    Args:
        probabilities: pooled attention map P̃, float ``[B, H, T, T]``.
        layout: which blocks hold text.
        tau_kv: probability mass that a row may lose, 0..1, after its ramp.

    Returns:
        bool ``[B, H, T, T]``, True = compute.
    """
    ascending, order = probabilities.sort(dim=-1)
    # Summed from the smallest up, where float32 loses nothing: a tile goes while it and all smaller fit into tau_kv.
    mass = ascending.cumsum(dim=-1)
    kept = mass > tau_kv * mass[..., -1:]
    kept[..., -1] = True
    tiles = torch.zeros_like(kept).scatter(-1, order, kept)
    tiles[..., layout.text_blocks] = True
    tiles[:, :, layout.text_blocks] = True
    return tiles
