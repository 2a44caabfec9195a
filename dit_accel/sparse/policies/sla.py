"""SLA's tile policy: in each row, tiles of high probability attend, tiles of low probability are left out.

Linear attention approximates the tiles in between.
"""

from typing import Any

import torch

from dit_accel.kernels.attention.linear_attention import linear_attention
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.classification import classify_tiles
from dit_accel.kernels.plans.pooling import PooledMap, pooled_map
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.presets.skip import SlaSkip
from dit_accel.sparse.policies.policy import Policy, every_row


class Sla(Policy):
    """Put critical tiles into ``skip_bits`` and marginal tiles into ``linear_bits``; every row computes."""

    def draw(
        self, q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, config: SlaSkip, **options: Any
    ) -> SparseSymbols:
        return classified(q, k, layout, config.critical, config.negligible, **options)

    def row_bytes(self, layout: TokenLayout) -> int:
        return 2 * super().row_bytes(layout)

    def projection(self, config: SlaSkip) -> str | None:
        return config.projection

    def add(
        self,
        o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        config: SlaSkip,
        *,
        projection: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Add linear attention over the marginal tiles, through the learned projection."""
        if projection is not None:
            options |= {"feature_map": config.feature_map, "projection": projection}
            linear_attention(q, k, v, plan, out=o, accumulate=True, **options)
        return o

    def thresholds(self, config: SlaSkip) -> dict[str, tuple[float, ...]]:
        return {"critical": (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03)}

    def fitted(self, config: SlaSkip, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes with a smaller negligible share if both shares would exceed 1."""
        critical = changes["critical"]
        return changes if critical + config.negligible <= 1 else {**changes, "negligible": round(1 - critical, 4)}


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
    """Classify tiles by shares of each row (SLA, section 4.1, equations 2 and 3).

    Rows and columns with text are critical as a whole, in addition to the row's share of other tiles, because text
    guides vision and vision guides text (FlashOmni, observation 1). At least one tile is critical, unless that share
    is 0.
    """
    pooled = pooled_map(q, k, layout.block, kv_len=kv_len, backend=backend) if pooled is None else pooled
    valid_blocks = None if kv_len is None else (kv_len.clamp(0, layout.tokens) + layout.block - 1) // layout.block
    options = {"always": layout.text_blocks, "valid_blocks": valid_blocks, "backend": backend}
    skip_bits, linear_bits = classify_tiles(pooled.probabilities, critical, negligible, **options)
    return SparseSymbols(
        every_row(q, layout), skip_bits, q.shape[2], layout.tokens, layout.block, linear_bits=linear_bits
    )
