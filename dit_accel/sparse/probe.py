"""The probe: measure the error of sparse attention on a few rows of queries, and adjust how much it leaves out.

The error of a site is ``e = ‖O' − O‖ / ‖O‖`` over the measured rows, all heads together, of the worst sample. A
*growth* g in (0, 1] scales how much a policy may leave out. Near the current growth the error behaves like ``e ∝ g^p``.
If tiles are chosen by mass, p is about 1. If a share of the tiles is left out, smallest first, p is 2 to 3, because
each further tile has more weight than the last. The next growth is

    g' = min(1, g · (target / e)^½),   the factor between ½ and 5/4,   g = 1 at first

With ``x = log g − log g*``, where g* meets the target, this is ``x' = (1 − p/2) x``: it converges for every p below 4,
and in one step for p = 2. The undamped rule ``g · target / e`` gives ``(1 − p) x`` and oscillates for p ≥ 2. The bounds
of the factor keep one outlier or NaN from emptying or filling the masks. The growth rises more slowly than it falls,
because masks are whole tiles: if no tile is left out, the error is 0 and does not predict the cost of the next tile.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout

FACTORS = (0.5, 1.25)  # bounds on the change of the growth per measurement


def probed_rows(layout: TokenLayout, count: int, turn: int) -> list[slice]:
    """Return the tokens of ``count`` row-blocks, spread evenly over the blocks without text.

    Each ``turn`` shifts them by one block, so every block is measured within ``ceil(blocks / count)`` turns. Blocks
    with text compute whole and are left out. If there are fewer than ``count`` blocks, all are returned.
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
    """Return ``‖O' − O‖ / ‖O‖`` of the worst sample, float32 ``[1]`` on the device; O is dense attention in q's dtype.

    O' (``o``) is sparse attention of q, k and v ``[B, S, H, D]``. Without rows the error is 0.
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
    """Return the next growth from the current one and the error measured under it."""
    lowest, highest = FACTORS
    factor = math.sqrt(target / error) if error != 0 else highest
    return min(1.0, growth * min(highest, max(lowest, factor)))  # max gives `lowest` if the factor is NaN
