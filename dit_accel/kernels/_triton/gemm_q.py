"""GEMM-Q: one program per (row-block, head) tile; programs of reused tiles end at once.

A tile spans a whole head, so RMSNorm needs no second pass and RoPE's pairs are in one row:
``y = x * rsqrt(mean(x^2) + eps) * w``, then ``z0 = y0 cos0 - y1 sin0`` and ``z1 = y1 cos1 + y0 sin1``. Programs are
numbered by row-block, then head, so only the first program of a row-block does not read its tokens from L2.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import on_device, precision
from dit_accel.kernels.layout import block_count


@triton.jit
def _gemm_q(
    x, weight, bias, norm_weight, cos, sin, out, mask64,
    x_batch, x_token, weight_row, out_batch, out_token, out_head, cos_token, sin_token,
    heads, blocks, first_block, row_blocks, offset, length, channels, norm_eps,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, K_TILE: tl.constexpr, WHOLE_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # (b * row_blocks + row_block) * H + h
    head = program % heads
    row_block = first_block + program // heads % row_blocks
    batch = program // heads // row_blocks
    if (tl.load(mask64 + batch * blocks + row_block) >> head & 1) == 0:
        return

    token = row_block * BLOCK + tl.arange(0, BLOCK)  # in the plan's sequence
    stream_token = token - offset  # in x and out
    token_valid = ((stream_token >= 0) & (stream_token < length))[:, None]
    dim = tl.arange(0, HEAD_DIM)
    channel = tl.arange(0, K_TILE)
    x_tile = x + batch * x_batch + (row_block * BLOCK - offset) * x_token
    x_offsets = tl.arange(0, BLOCK)[:, None] * x_token + channel[None, :]  # [block, k_tile]
    weight_tile = weight + head * HEAD_DIM * weight_row
    weight_offsets = dim[None, :] * weight_row + channel[:, None]  # [k_tile, head_dim]
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for start in tl.range(0, channels, K_TILE, num_stages=STAGES):
        if WHOLE_TILES:
            tokens = tl.load(x_tile + start + x_offsets, token_valid, other=0.0)
            rows = tl.load(weight_tile + start + weight_offsets)
        else:
            valid = start + channel < channels
            tokens = tl.load(x_tile + start + x_offsets, token_valid & valid[None, :], other=0.0)
            rows = tl.load(weight_tile + start + weight_offsets, valid[:, None], other=0.0)
        acc = tl.dot(tokens, rows, acc, input_precision=PRECISION)

    if HAS_BIAS:
        acc += tl.load(bias + head * HEAD_DIM + dim).to(tl.float32)[None, :]
    if HAS_NORM:
        mean_square = tl.sum(acc * acc, 1) / HEAD_DIM
        acc = acc * tl.rsqrt(mean_square + norm_eps)[:, None] * tl.load(norm_weight + dim).to(tl.float32)[None, :]
    if HAS_ROPE:
        cos_tile = tl.load(cos + token[:, None] * cos_token + dim[None, :], token_valid, other=0.0)
        sin_tile = tl.load(sin + token[:, None] * sin_token + dim[None, :], token_valid, other=0.0)
        even, odd = tl.split(tl.reshape(acc, (BLOCK, HEAD_DIM // 2, 2)))
        rotated = tl.reshape(tl.join(-odd, even), (BLOCK, HEAD_DIM))
        acc = acc * cos_tile + rotated * sin_tile
    out_pointers = out + batch * out_batch + stream_token[:, None] * out_token + head * out_head + dim[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), token_valid)


def gemm_q_into(x, weight, bias, plan, offset, norm_weight, norm_eps, rope, stream) -> None:
    """Write x's queries into ``stream`` ``[B, S, H, D]``, the output's tokens for x."""
    batch, length, channels = x.shape
    first_block = offset // plan.block
    row_blocks = block_count(offset + length, plan.block) - first_block
    cos, sin = (None, None) if rope is None else rope
    sizes = config("GEMM-Q" if norm_weight is None and rope is None else "GEMM-Q, norm and RoPE", x)
    with on_device(x):
        _gemm_q[(batch * row_blocks * plan.heads,)](
            x, weight, bias, norm_weight, cos, sin, stream, plan.mask64,
            *x.stride()[:2], weight.stride(0), *stream.stride()[:3],
            0 if rope is None else cos.stride(0), 0 if rope is None else sin.stride(0),
            plan.heads, plan.blocks, first_block, row_blocks, offset, length, channels, norm_eps,
            BLOCK=plan.block, HEAD_DIM=stream.shape[-1], WHOLE_TILES=channels % sizes["K_TILE"] == 0,
            HAS_BIAS=bias is not None, HAS_NORM=norm_weight is not None, HAS_ROPE=rope is not None,
            PRECISION=precision(x), **sizes,
        )  # fmt: skip
