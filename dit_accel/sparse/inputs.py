"""Inputs of one attention, for sites and policies."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.pooling import PooledMap, pooled_map


class Inputs(NamedTuple):
    """Inputs of one attention."""

    q: torch.Tensor  # [B, S, H, D], as k and v
    k: torch.Tensor
    v: torch.Tensor
    layout: TokenLayout
    dense: Callable[[], torch.Tensor]  # the model's own attention, for calls that leave no tile out
    kv_len: torch.Tensor | None = None  # int32 [B], valid keys of each sample; None = all
    gate: torch.Tensor | None = None  # [B, S, H, D], multiplies the output before its projection; None = 1
    x: torch.Tensor | None = None  # [B, S, C], features that q, k and v project, for a policy with a learned gate
    pooled: PooledMap | None = None  # of q and k; None = not computed yet

    def scored(self, backend: str = "auto") -> PooledMap:
        """Return the pooled map."""
        block, kv_len = self.layout.block, self.kv_len
        return self.pooled or pooled_map(self.q, self.k, block, kv_len=kv_len, backend=backend)


class Projection(NamedTuple):
    """A linear map that training added to an attention: of SLA's linear attention, or VSA's gate."""

    weight: torch.Tensor  # [N, C]
    bias: torch.Tensor | None = None  # [N]

    def to(self, like: torch.Tensor) -> Self:
        """Return the projection on the device and in the dtype of ``like``."""
        return type(self)(*(None if part is None else part.to(like) for part in self))
