"""SLA's tile policy: per row, the tiles of most probability attend, those of least are left out, and linear attention
stands for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dit_accel.kernels.classification import classify_tiles
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.pooling import PooledMap, pooled_map
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.policies.dense import every_row

if TYPE_CHECKING:
    from dit_accel.presets import Skip


def symbols(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, config: Skip, **options: Any) -> SparseSymbols:
    """Critical tiles in ``skip_bits``, marginal ones in ``linear_bits``, every row computing."""
    return classified(q, k, layout, config.critical, config.negligible, **options)


def classified(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: TokenLayout,
    critical: float,
    negligible: float,
    *,
    kv_len: torch.Tensor | None = None,
    pooled: PooledMap | None = None,
    backend: str = "auto",
) -> SparseSymbols:
    """:func:`symbols` by numbers (SLA, section 4.1, equations 2 and 3).

    Rows and columns that hold text are critical as a whole, beside the row's share of other tiles: text guides vision
    and is guided by it (FlashOmni, observation 1).

    Args:
        critical: share of a row's tiles, those of most pooled probability, that attend; at least one, unless it is 0.
        negligible: share of a row's tiles, those of least, that take no part.
        backend: "auto", "reference" or "triton", of the pooled map and the classification.
    """
    pooled = pooled_map(q, k, layout.block, kv_len=kv_len, backend=backend) if pooled is None else pooled
    valid_blocks = None if kv_len is None else (kv_len.clamp(0, layout.tokens) + layout.block - 1) // layout.block
    options = {"always": layout.text_blocks, "valid_blocks": valid_blocks, "backend": backend}
    skip_bits, linear_bits = classify_tiles(pooled.probabilities, critical, negligible, **options)
    return SparseSymbols(
        every_row(q, layout), skip_bits, q.shape[2], layout.tokens, layout.block, linear_bits=linear_bits
    )
