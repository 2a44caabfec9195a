"""What SLA is compared with: attention with one of its parts missing, each a setting of the same module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dit_accel.sla.swap import swap_attention

NEGLIGIBLE = 0.10  # of the tiles, SLA's default


@dataclass(frozen=True)
class Variant:
    """One way to attend.

    Args:
        name: in tables.
        critical: share of the tiles that attend; the others are sparse.
        projection: what linear attention goes through. learned: SLA. identity: it is added as it is. zero: it is left
            out, and only critical tiles count.
        negligible: share of the tiles that take no part.
    """

    name: str
    critical: float
    projection: Literal["learned", "identity", "zero"]
    negligible: float = NEGLIGIBLE

    def swap_in(self, pipe: Any) -> None:
        """Make the pipeline, or a transformer, attend so."""
        for attention in swap_attention(pipe, critical=self.critical, negligible=self.negligible).values():
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
    )
}
