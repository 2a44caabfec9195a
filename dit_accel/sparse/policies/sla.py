"""SLA's tile policy: in each row, tiles of high probability attend, tiles of low probability are left out.

Linear attention approximates the tiles in between.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dit_accel.kernels.attention.linear_attention import linear_attention
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.classification import classify_tiles
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.presets.skip import SlaSkip
from dit_accel.sparse.inputs import Inputs, Projection
from dit_accel.sparse.policies.policy import Policy, every_row


class Sla(Policy):
    """Put critical tiles into ``skip_bits`` and marginal tiles into ``linear_bits``; every row computes."""

    def draw(self, inputs: Inputs, config: SlaSkip) -> SparseSymbols:
        symbols = classified(inputs, config.critical, config.negligible)
        if config.linear == "all":
            return replace(symbols, linear_bits=torch.full_like(symbols.linear_bits, 255))
        return symbols

    def row_bytes(self, layout: TokenLayout) -> int:
        return 2 * super().row_bytes(layout)

    def add(
        self,
        o: torch.Tensor,
        qkv: Sequence[torch.Tensor],
        plan: AttentionPlan,
        config: SlaSkip,
        projection: Projection | None,
        **options: Any,
    ) -> torch.Tensor:
        """Add linear attention over the marginal tiles, or over all, through the learned projection."""
        if projection is None:
            return o
        options |= {"feature_map": config.feature_map, "projection": projection.weight}
        linear_attention(*qkv, plan, out=o, accumulate=True, **options)
        return o if projection.bias is None else o.add_(projection.bias)

    def thresholds(self, config: SlaSkip) -> dict[str, tuple[float, ...]]:
        shares = (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03)
        return {"critical": tuple(share for share in shares if share + config.negligible <= 1)}


def classified(inputs: Inputs, critical: float, negligible: float, backend: str = "auto") -> SparseSymbols:
    """Classify tiles by shares of each row (SLA, section 4.1, equations 2 and 3).

    Rows and columns with text are critical as a whole: text and vision guide each other (FlashOmni, observation 1).
    """
    layout, kv_len, probabilities = inputs.layout, inputs.kv_len, inputs.scored(backend).probabilities
    valid_blocks = None if kv_len is None else (kv_len.clamp(0, layout.tokens) + layout.block - 1) // layout.block
    options = {"always": layout.text_blocks, "valid_blocks": valid_blocks, "backend": backend}
    skip_bits, linear_bits = classify_tiles(probabilities, critical, negligible, **options)
    return every_row(inputs.q, layout, skip_bits, linear_bits=linear_bits)
