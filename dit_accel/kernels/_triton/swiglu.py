"""SwiGLU: a program reads and writes some of the features of a token once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, on_device

FEATURES = 2048  # features per program


@triton.jit
def _swiglu(x, out, x_batch, x_token, out_batch, out_token, tokens, width, PART: tl.constexpr):
    parts = tl.cdiv(width, PART)
    row = tl.program_id(0) // parts
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    feature = tl.program_id(0) % parts * PART + tl.arange(0, PART)
    inside = feature < width
    x += batch * x_batch + token * x_token + feature
    gate = tl.load(x, inside, other=0.0).to(tl.float32)
    value = tl.load(x + width, inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * value
    tl.store(out + batch * out_batch + token * out_token + feature, y.to(out.dtype.element_ty), inside)


def swiglu_into(x: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` ``[B, S, M]`` from ``x`` ``[B, S, 2 * M]``."""
    batch, tokens, width = out.shape
    with on_device(x):
        launch(
            _swiglu, batch * tokens * triton.cdiv(width, FEATURES), (x, out),
            (*x.stride()[:2], *out.stride()[:2], tokens, width), PART=FEATURES, num_warps=4,
        )  # fmt: skip
