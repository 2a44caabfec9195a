"""The policy that leaves nothing out, and the rows that all policies start from: every one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.symbols import SparseSymbols

if TYPE_CHECKING:
    from dit_accel.presets import Skip


def every_row(q: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """``cache_bits`` under which all rows of ``q`` ``[B, S, H, D]`` compute: uint8 ``[B, T, ceil(H / 8)]``."""
    return pack_bits(torch.ones(q.shape[0], layout.blocks, q.shape[2], dtype=torch.bool, device=q.device))


def symbols(
    q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, config: Skip, *, kv_len: Any = None, pooled: Any = None
) -> SparseSymbols:
    """Every tile of every row; arguments as for :func:`dit_accel.sparse.policies.draw`."""
    return SparseSymbols(every_row(q, layout), None, q.shape[2], layout.tokens, layout.block)
