"""SwiGLU: a program reads and writes some of the features of a token once."""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch

FEATURES = 2048  # features per program


@triton.jit
def _swiglu(
    x, value, out, x_batch, x_token, value_batch, value_token, out_batch, out_token, tokens, width, PART: tl.constexpr
):  # fmt: skip
    parts = tl.cdiv(width, PART)
    row = tl.program_id(0) // parts
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    feature = tl.program_id(0) % parts * PART + tl.arange(0, PART)
    inside = feature < width
    gates = tl.load(x + batch * x_batch + token * x_token + feature, inside, other=0.0).to(tl.float32)
    values = tl.load(value + batch * value_batch + token * value_token + feature, inside, other=0.0).to(tl.float32)
    y = gates * tl.sigmoid(gates) * values
    tl.store(out + batch * out_batch + token * out_token + feature, y.to(out.dtype.element_ty), inside)


def swiglu_into(x: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` from ``x`` and ``value``, each ``[B, S, M]``."""
    batch, tokens, width = out.shape
    launch(
        _swiglu, batch * tokens * triton.cdiv(width, FEATURES), (x, value, out),
        (*x.stride()[:2], *value.stride()[:2], *out.stride()[:2], tokens, width), PART=FEATURES, num_warps=4,
    )  # fmt: skip
