"""Tiles of ``[B, S, H, D]``: the tokens of one head, through the copy engine (TMA) or by pointers."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load_tile(
    tiles, base, batch, head, start, token_stride, valid_tokens,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Load ``[TOKENS, HEAD_DIM]`` of a head from token ``start`` on; IS_CUT: tokens from ``valid_tokens`` on read 0.

    A descriptor reads 0 only beyond the end of the sequence, regardless of ``valid_tokens``.
    """
    if BY_DESCRIPTOR:
        return tiles.load([batch, start, head, 0]).reshape([TOKENS, HEAD_DIM])
    token = tl.arange(0, TOKENS)[:, None]
    pointers = base + tl.cast(start, tl.int64) * token_stride + token * token_stride + tl.arange(0, HEAD_DIM)[None, :]
    if IS_CUT:
        return tl.load(pointers, token < valid_tokens, other=0.0)
    return tl.load(pointers)


def fits_descriptor(x: torch.Tensor) -> bool:
    """Return True if address and strides are multiples of 16 bytes, as the copy engine (TMA) requires."""
    strides = [
        stride * x.element_size() for stride, length in zip(x.stride()[:3], x.shape[:3], strict=True) if length > 1
    ]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


def tile_descriptor(x: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Return a descriptor of tiles ``[1, tokens, 1, D]`` of ``[B, S, H, D]``."""
    head_dim = x.shape[-1]  # also replaces the stride of an axis of length 1, which may be any number
    strides = [stride if length > 1 else head_dim for stride, length in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, tokens, 1, head_dim])
