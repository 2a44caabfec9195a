"""RMSNorm and RoPE of queries and of keys in one launch; one program per token holds all of its heads."""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import broadcast_strides, launch, next_power_of_2


@triton.jit
def _norm_rope_row(
    x, weight, cos, sin, out, cos_head, sin_head, width, eps,
    NORM: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Compute all heads of the token to which ``x``, ``cos``, ``sin`` and ``out`` point."""
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    feature = head * HEAD_DIM + dim
    inside = feature < width
    y = tl.load(x + feature, inside, other=0.0).to(tl.float32)  # [heads, head_dim]
    if NORM == "head":
        unit = tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)[:, None]
        y *= unit * tl.load(weight + dim).to(tl.float32)
    if NORM == "token":
        unit = tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / width + eps)
        y *= unit * tl.load(weight + feature, inside, other=0.0).to(tl.float32)
    if ROPE == "adjacent":
        even, odd = tl.split(y.reshape([HEADS, HEAD_DIM // 2, 2]))
        cos_even, cos_odd = tl.split(tl.load(cos + dim).reshape([1, HEAD_DIM // 2, 2]))
        sin_even, sin_odd = tl.split(tl.load(sin + dim).reshape([1, HEAD_DIM // 2, 2]))
        y = tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd).reshape([HEADS, HEAD_DIM])
    if ROPE == "halves":  # the other feature of a pair is loaded again, from the cache, and normalised again
        is_first, turned = dim < HALF, dim < 2 * HALF
        apart, angle, inside_pair = tl.where(is_first, HALF, -HALF), dim % HALF, inside & turned
        other = tl.load(x + feature + apart, inside_pair, other=0.0).to(tl.float32)
        if NORM == "head":
            other *= unit * tl.load(weight + dim + apart, turned, other=0.0).to(tl.float32)
        if NORM == "token":
            other *= unit * tl.load(weight + feature + apart, inside_pair, other=0.0).to(tl.float32)
        cosine = tl.load(cos + head * cos_head + angle, inside_pair, other=1.0)
        sine = tl.load(sin + head * sin_head + angle, inside_pair, other=0.0)
        y = y * cosine + tl.where(is_first, -sine, sine) * other
    tl.store(out + feature, y.to(out.dtype.element_ty), inside)


@triton.jit
def _norm_rope(
    x, weight, out, second_x, second_weight, second_out, cos, sin,
    x_batch, x_token, out_batch, out_token, cos_batch, cos_token, cos_head, sin_batch, sin_token, sin_head,
    tokens, rows, width, eps,
    NORM: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) % rows
    token, batch = (row % tokens).to(tl.int64), (row // tokens).to(tl.int64)
    read, written = batch * x_batch + token * x_token, batch * out_batch + token * out_token
    if ROPE != "none":
        cos += batch * cos_batch + token * cos_token
        sin += batch * sin_batch + token * sin_token
    if tl.program_id(0) < rows:
        _norm_rope_row(
            x + read, weight, cos, sin, out + written, cos_head, sin_head, width, eps,
            NORM, ROPE, HALF, HEADS, HEAD_DIM,
        )  # fmt: skip
    else:
        _norm_rope_row(
            second_x + read, second_weight, cos, sin, second_out + written, cos_head, sin_head, width, eps,
            NORM, ROPE, HALF, HEADS, HEAD_DIM,
        )  # fmt: skip


def norm_rope_into(parts, rope, eps) -> None:
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
    kind = "none" if cos is None else "adjacent" if cos.dim() == 2 else "halves"
    tables = (table[None, :, None] if kind == "adjacent" else table for table in (cos, sin))
    strides = (*x.stride()[:2], *out.stride()[:2], *(item for table in tables for item in broadcast_strides(table, 3)))
    padded = next_power_of_2(heads)
    launch(
        _norm_rope, batch * tokens * len(parts), (*first, *second, cos, sin),
        (*strides, tokens, batch * tokens, heads * head_dim, float(eps)),
        NORM=norm, ROPE=kind, HALF=cos.shape[-1] if kind == "halves" else 0, HEADS=padded, HEAD_DIM=head_dim,
        num_warps=min(max(padded * head_dim // 512, 1), 8),
    )  # fmt: skip


def _layout(part: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]) -> tuple:
    """Key of a part's layout; two parts with the same key, shape and dtype of ``x`` share a launch."""
    x, weight, out = part
    return x.stride(), None if weight is None else weight.shape, out.stride()
