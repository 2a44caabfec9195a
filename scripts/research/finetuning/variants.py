"""Variants to compare with SLA: attention with one part missing or replaced, mostly by SLA's settings."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dit_accel.sla.swap import swap_attention, swapped_attention

NEGLIGIBLE = 0.10  # share of tiles, SLA's default


@dataclass(frozen=True)
class Variant:
    """One variant of attention; `critical` and `negligible` are shares of tiles.

    `projection`, of linear attention: learned = SLA; identity = added unchanged; zero = left out, so only critical
    tiles count.
    """

    name: str
    critical: float
    projection: Literal["learned", "identity", "zero"]
    negligible: float = NEGLIGIBLE
    feature_map: str = "softmax"

    def swap_in(self, pipe: Any) -> None:
        """Use this variant in the pipeline or transformer."""
        shares = {"critical": self.critical, "negligible": self.negligible}
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
        Variant("sla-80", 0.20, "learned"),
        Variant("sparse-87", 0.125, "zero"),
        Variant("sum-87", 0.125, "identity"),
        Variant("sla-87", 0.125, "learned"),
    )
}
