"""RMSNorm and RoPE: one program a token, which holds all of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, on_device


@triton.jit
def _norm_rope(
    x, weight, cos, sin, out, x_batch, x_token, out_batch, out_token, cos_token, sin_token, tokens, heads, eps,
    NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) % tokens).to(tl.int64)
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    feature = tl.arange(0, HEADS)[:, None] * HEAD_DIM + dim
    inside = feature < heads * HEAD_DIM
    y = tl.load(x + batch * x_batch + token * x_token + feature, inside, other=0.0).to(tl.float32)  # [heads, head_dim]
    if NORM == "head":
        y *= tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)[:, None] * tl.load(weight + dim).to(tl.float32)
    if NORM == "token":
        mean_square = tl.sum(tl.sum(y * y, 1), 0) / (heads * HEAD_DIM)
        y *= tl.rsqrt(mean_square + eps) * tl.load(weight + feature, inside, other=0.0).to(tl.float32)
    if HAS_ROPE:
        even, odd = tl.split(y.reshape([HEADS, HEAD_DIM // 2, 2]))
        cos_even, cos_odd = tl.split(tl.load(cos + token * cos_token + dim).reshape([1, HEAD_DIM // 2, 2]))
        sin_even, sin_odd = tl.split(tl.load(sin + token * sin_token + dim).reshape([1, HEAD_DIM // 2, 2]))
        y = tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd).reshape([HEADS, HEAD_DIM])
    tl.store(out + batch * out_batch + token * out_token + feature, y.to(out.dtype.element_ty), inside)


def norm_rope_into(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    batch, tokens, heads, head_dim = x.shape
    norm = "none" if weight is None else "head" if weight.shape[0] == head_dim else "token"
    cos, sin = rope or (None, None)
    tile = triton.next_power_of_2(heads) * head_dim
    strides = (*x.stride()[:2], *out.stride()[:2], *(0 if table is None else table.stride(0) for table in (cos, sin)))
    with on_device(x):
        launch(
            _norm_rope, batch * tokens, (x, weight, cos, sin, out), (*strides, tokens, heads, float(eps)),
            NORM=norm, HAS_ROPE=rope is not None, HEADS=triton.next_power_of_2(heads), HEAD_DIM=head_dim,
            num_warps=min(max(tile // 512, 1), 8),
        )  # fmt: skip
