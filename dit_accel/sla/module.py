"""SLA as a trainable module: exact attention on critical tiles, linear attention on marginal tiles (section 4).

>>> from dit_accel.sla.module import SparseLinearAttention
>>> attend = SparseLinearAttention(head_dim=128)
>>> o = attend(q, k, v)  # doctest: +SKIP
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dit_accel.errors import ShapeError
from dit_accel.kernels.attention.attention import attention
from dit_accel.kernels.attention.attention_backward import differentiable_attention
from dit_accel.kernels.attention.linear_attention import FEATURE_MAPS, differentiable_linear_attention, linear_attention
from dit_accel.kernels.layout import BLOCK_SIZES, TokenLayout
from dit_accel.kernels.plans.classification import require_shares
from dit_accel.kernels.plans.lowering import lower
from dit_accel.kernels.symbols import AttentionPlan
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies.sla import classified

BACKENDS = ("auto", "reference", "triton")


@dataclass(frozen=True)
class Settings:
    """Arguments of a :class:`SparseLinearAttention`."""

    head_dim: int
    critical: float = 0.05
    negligible: float = 0.10
    feature_map: str = "softmax"
    block: int = 64
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ShapeError(f"head_dim must be at least 1, got {self.head_dim}")
        require_shares(self.critical, self.negligible)
        for name, values in (("feature_map", FEATURE_MAPS), ("block", BLOCK_SIZES), ("backend", BACKENDS)):
            if getattr(self, name) not in values:
                raise ShapeError(f"{name} must be one of {values}, got {getattr(self, name)!r}")


class SparseLinearAttention(nn.Module):
    """Self-attention ``O = O^s + Proj(O^l)`` (SLA, equation 6), for inference and training.

    Each call classifies its tiles by the pooled map. ``projection`` is the only parameter. It starts at zero, so a new
    module is sparse attention alone. Gradients flow to q, k, v and ``projection``, but not through the classification.
    Forward and backward never make the host wait.

    Args:
        head_dim: D of the inputs.
        critical: share of a row's tiles that attend (O^s), 0..1; at least one does, unless it is 0.
        negligible: share that is left out, 0..1; linear attention (O^l) approximates the tiles in between.
        feature_map: phi of linear attention: "softmax" over the head dimension, "elu" (elu + 1) or "relu".
        block: tokens in a block, 64 or 128; a tile is block × block.
        backend: backend of all kernels: "auto", "reference" or "triton".

    Raises:
        ShapeError: an argument is out of range.
    """

    def __init__(self, head_dim: int, critical: float = 0.05, negligible: float = 0.10, **others: Any) -> None:
        super().__init__()
        self.settings = Settings(head_dim, critical, negligible, **others)
        self.projection = nn.Linear(head_dim, head_dim, bias=False)
        nn.init.zeros_(self.projection.weight)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: TokenLayout | None = None,
        kv_len: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention ``[B, S, H, D]`` in q's dtype; under autocast q, k and v are cast to its dtype first.

        Args:
            q, k, v: ``[B, S, H, D]``, float16, bfloat16 or float32.
            layout: of S tokens, in blocks of the module's size: rows and columns of text are critical. None = no text.
            kv_len: int32 ``[B]``, valid keys of each sample. None = all.

        Raises:
            ShapeError: a tensor or the layout does not fit.
            UnsupportedError, BackendError: the backend can't take these tensors, or can't run here.
        """
        settings = self.settings
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
            with torch.autocast(device, enabled=False):  # autocast would round the classification's inputs
                return self.forward(q, k, v, layout=layout, kv_len=kv_len)
        plan = self.plan(q, k, layout, kv_len)
        linear = {"feature_map": settings.feature_map, "kv_len": kv_len, "backend": settings.backend}
        weight = self.projection.weight
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, weight))):
            o = attention(q, k, v, plan, kv_len=kv_len, backend=settings.backend)
            return linear_attention(q, k, v, plan, projection=weight, out=o, accumulate=True, **linear)
        sparse = differentiable_attention(q, k, v, plan, kv_len=kv_len, backend=settings.backend)
        marginal = differentiable_linear_attention(q, k, v, plan, **linear)
        return torch.addmm(sparse.flatten(0, 2), marginal.flatten(0, 2), weight.T.to(q.dtype)).view(q.shape)

    @torch.no_grad()
    def plan(
        self, q: torch.Tensor, k: torch.Tensor, layout: TokenLayout | None = None, kv_len: torch.Tensor | None = None
    ) -> AttentionPlan:
        """Return the classes of the tiles of q and k; see :meth:`forward` for arguments and errors."""
        settings = self.settings
        if q.dim() != 4 or q.shape[-1] != settings.head_dim:
            raise ShapeError(f"q must have shape [B, S, H, {settings.head_dim}], got {list(q.shape)}")
        layout = TokenLayout(0, q.shape[1], settings.block) if layout is None else layout
        if (layout.tokens, layout.block) != (q.shape[1], settings.block):
            required = f"q's {q.shape[1]} tokens in blocks of {settings.block}"
            raise ShapeError(f"layout must have {required}, got {layout.tokens} in blocks of {layout.block}")
        inputs = Inputs(q, k, k, layout, q.clone, kv_len)  # values and dense attention choose no tile
        symbols = classified(inputs, settings.critical, settings.negligible, settings.backend)
        return lower(symbols, backend=settings.backend)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in asdict(self.settings).items())
