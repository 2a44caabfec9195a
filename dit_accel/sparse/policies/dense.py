"""The policy that leaves nothing out."""

from typing import Any

import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.policies.policy import Policy, every_row


class Dense(Policy):
    """Compute every tile of every row."""

    leaves_out = False

    def draw(self, q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, config: Any, **options: Any) -> SparseSymbols:
        return SparseSymbols(every_row(q, layout), None, q.shape[2], layout.tokens, layout.block)

    def row_bytes(self, layout: TokenLayout) -> int:
        return 0
