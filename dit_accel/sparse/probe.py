"""The probe: how far sparse attention lies from dense attention on a few rows of queries, and what follows from it.

The error of a site is ``e = ‖O' − O‖ / ‖O‖`` over the rows measured, all heads together, of the worst sample. What a
policy may leave out is scaled by a *growth* g in (0, 1]; near the growth in force the error behaves like ``e ∝ g^p``.
With tiles taken by mass p is about 1; with a share of tiles, the least first, it is 2 to 3 (each further tile weighs
more than the last). The next growth is

    g' = min(1, g · (target / e)^½),   the factor between ½ and 5/4,   g = 1 at first

In ``x = log g − log g*``, where g* meets the target, that is ``x' = (1 − p/2) x``: it converges for every p below 4,
and in one step for p = 2. The undamped rule, ``g · target / e``, gives ``(1 − p) x`` and swings for p ≥ 2. The bounds
of the factor keep one odd measurement, also one that is no number, from emptying or filling the masks. They let go more
slowly than they take hold, because masks are whole tiles: where none is left out the error is 0, and says nothing of
what the next tile would cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout

FACTORS = (0.5, 1.25)  # by which the growth changes at most from one measurement to the next


def probed_rows(layout: TokenLayout, count: int, turn: int) -> list[slice]:
    """Tokens of ``count`` row-blocks, spread evenly over those without text (which compute whole) and moved on by one
    each ``turn``, so that every row has its turn within ``ceil(blocks / count)``; all rows where there are no more.
    """
    blocks = layout.vision_blocks
    rows = len(range(blocks.start, blocks.stop))
    count = min(count, rows)
    chosen = sorted((index * rows // count + turn) % rows for index in range(count))
    starts = [(blocks.start + row) * layout.block for row in chosen]
    return [slice(start, min(start + layout.block, layout.tokens)) for start in starts]


def attention_error(
    o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Sequence[slice],
    *,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """``‖O' − O‖ / ‖O‖`` of the worst sample, float32 ``[1]`` on the device; O is dense attention in q's dtype.

    Args:
        o: O', sparse attention of q, k and v ``[B, S, H, D]``.
        rows: tokens of the queries that are measured; none gives 0.
        kv_len: int32 ``[B]``, valid keys of each sample; None = all.
    """
    if not rows:
        return o.new_zeros(1, dtype=torch.float32)
    sparse, query = (torch.cat([x[:, row] for row in rows], 1).transpose(1, 2) for x in (o, q))  # [B, H, R, D]
    valid = None
    if kv_len is not None:
        valid = (torch.arange(k.shape[1], device=k.device) < kv_len[:, None])[:, None, None]
    dense = functional.scaled_dot_product_attention(query, k.transpose(1, 2), v.transpose(1, 2), attn_mask=valid)
    difference, norm = ((x.float().flatten(1)).norm(dim=1) for x in (sparse.float() - dense.float(), dense))
    return (difference / norm.clamp(min=torch.finfo(torch.float32).tiny)).max()[None]


def adjusted(growth: float, error: float, target: float) -> float:
    """The growth that follows the one in force, by the error that was measured under it."""
    lowest, highest = FACTORS
    factor = math.sqrt(target / error) if error != 0 else highest
    return min(1.0, growth * min(highest, max(lowest, factor)))  # max gives `lowest` where the factor is no number
