"""RMSNorm and RoPE of queries and of keys in one launch; one program per token holds all of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2, on_device


@triton.jit
def _norm_rope_row(
    x, weight, cos, sin, out, width, eps,
    NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Compute all heads of the token to which ``x``, ``cos``, ``sin`` and ``out`` point."""
    dim = tl.arange(0, HEAD_DIM)[None, :]
    feature = tl.arange(0, HEADS)[:, None] * HEAD_DIM + dim
    inside = feature < width
    y = tl.load(x + feature, inside, other=0.0).to(tl.float32)  # [heads, head_dim]
    if NORM == "head":
        y *= tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)[:, None] * tl.load(weight + dim).to(tl.float32)
    if NORM == "token":
        mean_square = tl.sum(tl.sum(y * y, 1), 0) / width
        y *= tl.rsqrt(mean_square + eps) * tl.load(weight + feature, inside, other=0.0).to(tl.float32)
    if HAS_ROPE:
        even, odd = tl.split(y.reshape([HEADS, HEAD_DIM // 2, 2]))
        cos_even, cos_odd = tl.split(tl.load(cos + dim).reshape([1, HEAD_DIM // 2, 2]))
        sin_even, sin_odd = tl.split(tl.load(sin + dim).reshape([1, HEAD_DIM // 2, 2]))
        y = tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd).reshape([HEADS, HEAD_DIM])
    tl.store(out + feature, y.to(out.dtype.element_ty), inside)


@triton.jit
def _norm_rope(
    x, weight, out, second_x, second_weight, second_out, cos, sin,
    x_batch, x_token, out_batch, out_token, cos_token, sin_token, tokens, rows, width, eps,
    NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) % rows
    token, batch = (row % tokens).to(tl.int64), (row // tokens).to(tl.int64)
    read, written = batch * x_batch + token * x_token, batch * out_batch + token * out_token
    if HAS_ROPE:
        cos += token * cos_token
        sin += token * sin_token
    if tl.program_id(0) < rows:
        _norm_rope_row(x + read, weight, cos, sin, out + written, width, eps, NORM, HAS_ROPE, HEADS, HEAD_DIM)
    else:
        _norm_rope_row(
            second_x + read, second_weight, cos, sin, second_out + written, width, eps, NORM, HAS_ROPE, HEADS, HEAD_DIM
        )


def norm_rope_into(
    parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Fill ``out`` of one or two parts ``(x, weight, out)``; two parts of the same layout share a launch."""
    first, second = parts[0], parts[-1]
    if _layout(first) != _layout(second):
        for part in parts:
            norm_rope_into([part], rope, eps)
        return
    x, weight, out = first
    batch, tokens, heads, head_dim = x.shape
    norm = "none" if weight is None else "head" if weight.shape[0] == head_dim else "token"
    cos, sin = rope or (None, None)
    strides = (*x.stride()[:2], *out.stride()[:2], *(0 if table is None else table.stride(0) for table in (cos, sin)))
    padded = next_power_of_2(heads)
    with on_device(x):
        launch(
            _norm_rope, batch * tokens * len(parts), (*first, *second, cos, sin),
            (*strides, tokens, batch * tokens, heads * head_dim, float(eps)),
            NORM=norm, HAS_ROPE=rope is not None, HEADS=padded, HEAD_DIM=head_dim,
            num_warps=min(max(padded * head_dim // 512, 1), 8),
        )  # fmt: skip


def _layout(part: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> tuple:
    """Key of a part's layout; two parts with the same key, shape and dtype of ``x`` share a launch."""
    x, weight, out = part
    return x.stride(), None if weight is None else weight.shape, out.stride()
