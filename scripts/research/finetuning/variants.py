"""Variants to compare with SLA: attention with one part missing or replaced, mostly by SLA's settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from dit_accel.kernels.attention_backward import differentiable_attention
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.linear_attention_backward import differentiable_linear_attention
from dit_accel.sla.module import SparseLinearAttention
from dit_accel.sla.swap import SlaProcessor, swap_attention, swapped_attention

NEGLIGIBLE = 0.10  # share of tiles, SLA's default
HEDGEHOG = "hedgehog"


class HedgehogAttention(SparseLinearAttention):
    """SLA with Hedgehog's features: ``phi(x) = softmax([2 W x, -2 W x])``, 2 D of them, with a learned W that starts as
    the identity (Zhang et al. 2024, *The Hedgehog & the Porcupine*, equation 6).

    Queries and keys of an attention layer share W. Features are computed before the kernels, whose "relu" does not
    change them, and values are padded to as many channels.

    Args:
        attention: SLA layer with "relu", which it replaces.
    """

    def __init__(self, attention: SparseLinearAttention) -> None:
        super().__init__(**asdict(attention.settings))
        self.features = nn.Linear(attention.settings.head_dim, attention.settings.head_dim, bias=False)
        nn.init.eye_(self.features.weight)
        self.to(attention.projection.weight)  # its device and dtype

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: TokenLayout | None = None,
        kv_len: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = self.plan(q, k, layout, kv_len)
        sparse = differentiable_attention(q, k, v, plan, kv_len=kv_len)
        wide = nn.functional.pad(v, (0, v.shape[-1]))
        marginal = differentiable_linear_attention(
            self._map(q), self._map(k), wide, plan, feature_map="relu", kv_len=kv_len
        )
        return sparse + self.projection(marginal[..., : v.shape[-1]])

    def _map(self, x: torch.Tensor) -> torch.Tensor:
        mapped = 2 * self.features(x)
        return torch.cat((mapped, -mapped), dim=-1).softmax(-1)


@dataclass(frozen=True)
class Variant:
    """One variant of attention.

    Args:
        name: name in tables.
        critical: share of critical tiles; the others are sparse.
        projection: projection of linear attention. learned: SLA. identity: added unchanged. zero: left out, so only
            critical tiles count.
        negligible: share of negligible tiles.
        feature_map: feature map of linear attention, or HEDGEHOG.
    """

    name: str
    critical: float
    projection: Literal["learned", "identity", "zero"]
    negligible: float = NEGLIGIBLE
    feature_map: str = "softmax"

    def swap_in(self, pipe: Any) -> None:
        """Use this variant in the pipeline or transformer."""
        shares = {"critical": self.critical, "negligible": self.negligible}
        if self.feature_map == HEDGEHOG:
            swap_attention(pipe, **shares, feature_map="relu")
            for processor in getattr(pipe, "transformer", pipe).modules():
                if isinstance(processor, SlaProcessor):
                    processor.attention = HedgehogAttention(processor.attention)
        else:
            swap_attention(pipe, **shares, feature_map=self.feature_map)
        for attention in swapped_attention(pipe).values():
            if self.projection == "identity":
                with torch.no_grad():
                    nn.init.eye_(attention.projection.weight)
            attention.projection.requires_grad_(self.projection == "learned")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("linear", 0.0, "identity", negligible=0.0),
        Variant("sparse-90", 0.10, "zero"),
        Variant("sum-90", 0.10, "identity"),
        Variant("sla-90", 0.10, "learned"),
        Variant("sparse-95", 0.05, "zero"),
        Variant("sum-95", 0.05, "identity"),
        Variant("sla-95", 0.05, "learned"),
        Variant("sla-95-elu", 0.05, "learned", feature_map="elu"),
        Variant("sla-95-hedgehog", 0.05, "learned", feature_map=HEDGEHOG),
        Variant("sla-80", 0.20, "learned"),
        Variant("sparse-87", 0.125, "zero"),
        Variant("sum-87", 0.125, "identity"),
        Variant("sla-87", 0.125, "learned"),
    )
}
