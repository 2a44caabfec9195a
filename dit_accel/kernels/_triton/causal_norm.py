"""RMS normalisation and SiLU of pixels in channels-last layout: one program for some pixels, read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2, on_device

VALUES = 4096  # of a tile of pixels and channels


@triton.jit
def _norm(
    x, weight, input_bias, out, pixels, of_sample, out_sample, channels, root,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # over all samples
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    inside = (pixel < pixels)[:, None] & has_channel[None, :]  # [rows, channels]
    value = tl.load(x + pixel[:, None] * channels + channel[None, :], inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(input_bias + channel, has_channel, other=0.0).to(tl.float32)
        value = tl.where(inside, value + bias[None, :], 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(value * value, 1)), 1e-12)
    y = value * (root / norm)[:, None] * tl.load(weight + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    at = pixel // of_sample * out_sample + pixel % of_sample * channels
    tl.store(out + at[:, None] + channel[None, :], y.to(out.dtype.element_ty), inside)


def norm_into(x, weight, silu, input_bias, out) -> None:
    """Fills ``out``; it and ``x`` are ``[B, C, T, H, W]`` in channels-last layout, each sample dense."""
    batch, channels, time, height, width = x.shape
    of_sample, padded = time * height * width, next_power_of_2(channels)
    rows = max(1, VALUES // padded)
    with on_device(x):
        launch(
            _norm, triton.cdiv(batch * of_sample, rows), (x, weight, input_bias, out),
            (batch * of_sample, of_sample, out.stride(0), channels, float(channels**0.5)),
            HAS_BIAS=input_bias is not None, SILU=silu, ROWS=rows, CHANNELS=padded, num_warps=4,
        )  # fmt: skip
