"""FlashOmni's row policy: vision blocks that hardly matter to text, and to which text hardly matters, are reused."""

from __future__ import annotations

import torch

from dit_accel.layout import TokenLayout


def row_mask(probabilities: torch.Tensor, layout: TokenLayout, tau: float) -> torch.Tensor:
    """Rows that compute (FlashOmni, section 3.3, equation 1).

    Vision block i is scored by its contribution to text, ``C_i = Σ_{text j} P̃[j, i]``, and by the guidance it takes
    from text, ``G_i = Σ_{text j} softmax_vision(P̃[vision, j])_i``. With each score sorted ascending, a block is
    reused iff its running sum stays within ``tau`` of the total in both. Rows that hold text always compute.

    Args:
        probabilities: pooled attention map P̃, float ``[B, H, T, T]``.
        layout: which blocks hold text.
        tau: share of the score that is reused, 0..1, after its ramp.

    Returns:
        bool ``[B, H, T]``, True = compute. All True where the sequence has no text block to score against.
    """
    rows = torch.ones(probabilities.shape[:-1], dtype=torch.bool, device=probabilities.device)
    text, vision = layout.text_blocks, layout.vision_blocks
    if layout.text == 0:
        return rows
    contribution = probabilities[:, :, text, vision].sum(dim=2)
    guidance = probabilities[:, :, vision, text].softmax(dim=2).sum(dim=3)
    rows[:, :, vision] = ~(_lowest_mass(contribution, tau) & _lowest_mass(guidance, tau))
    return rows


def ramped(tau: float, progress: float, power: float) -> float:
    """A threshold that grows from 0 at the first step: ``tau · progress ** power`` (FlashOmni, appendix A.1.1)."""
    return tau * progress**power


def _lowest_mass(scores: torch.Tensor, tau: float) -> torch.Tensor:
    """Entries whose running sum in ascending order stays within ``tau`` of the total, along the last dimension."""
    ascending, order = scores.sort(dim=-1)
    running = ascending.cumsum(dim=-1)
    chosen = running <= tau * running[..., -1:]
    return torch.zeros_like(chosen).scatter(-1, order, chosen)
