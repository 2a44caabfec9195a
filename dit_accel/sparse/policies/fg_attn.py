"""FG-Attn's policy: each row-block attends to the single keys with large weights, anywhere in the sequence.

Both masks keep keys whose probability among all N exceeds ``key_threshold / N`` (section 4.3): "exact" for any query of
the row-block, "average_query" for the mean of its queries. FG-Attn-cached is "exact", kept for 15 steps
(``skip.refresh``); the step that computes the mask attends to every key. If all keys of a tile stay, the whole tile
computes: the result is the same, and no keys are gathered.
"""

import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.plans.pooling import block_means
from dit_accel.kernels.plans.selection import select_keys
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.presets.skip import FgAttnSkip
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies.policy import Policy, every_row

# In units of 1 / N. The paper has 0.5 for both. The mean of queries has a flatter distribution than single queries: at
# 0.5 it leaves out 37.9% of demo-wan's keys, at 20.9 dB.
THRESHOLDS = {"exact": 0.5, "average_query": 0.1}


class FgAttn(Policy):
    """Select single keys in ``slice_bits``; every row computes, and rows and columns with text compute whole."""

    def draw(self, inputs: Inputs, config: FgAttnSkip) -> SparseSymbols:
        """Return the keys that compute (FG-Attn, section 4.3)."""
        q, layout, kv_len = inputs.q, inputs.layout, inputs.kv_len
        queries, group = (block_means(q, layout.block), 1) if config.mask == "average_query" else (q, layout.block)
        threshold = config.key_threshold or THRESHOLDS[config.mask]
        slice_bits = select_keys(queries, inputs.k, threshold, group=group, block=layout.block, kv_len=kv_len)
        return every_row(q, layout, promote_tiles(slice_bits, layout, kv_len), slice_bits=slice_bits)

    def row_bytes(self, layout: TokenLayout) -> int:
        return super().row_bytes(layout) + layout.blocks * layout.block // 8

    def plan_entries(self, rows: int) -> int:
        return 2 * rows + 1

    def keeps_scores(self, config: FgAttnSkip) -> bool:
        return config.mask == "exact"

    def thresholds(self, config: FgAttnSkip) -> dict[str, tuple[float, ...]]:
        return {"key_threshold": (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 8.0)}


def promote_tiles(slice_bits: torch.Tensor, layout: TokenLayout, kv_len: torch.Tensor | None) -> torch.Tensor:
    """Move tiles whose valid keys all stay, and tiles with text, from ``slice_bits`` to the returned ``skip_bits``.

    ``slice_bits`` is changed in place.
    """
    keys = torch.arange(layout.blocks * layout.block, device=slice_bits.device)[None]
    is_padding = keys >= (layout.tokens if kv_len is None else kv_len.clamp(max=layout.tokens)[:, None])
    packed, by_tile = pack_bits(is_padding)[:, None, None], (layout.blocks, layout.block // 64)
    padding, words = (bits.view(torch.int64).unflatten(-1, by_tile) for bits in (packed, slice_bits))  # views
    is_whole = (words | padding).eq(-1).all(-1) & words.ne(0).any(-1)  # [B, H, T, T]
    is_whole[:, :, layout.text_blocks] = True
    is_whole[..., layout.text_blocks] = True
    words.masked_fill_(is_whole[..., None], 0)
    return pack_bits(is_whole)
