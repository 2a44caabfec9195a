"""RMS normalisation of pixels into a padded video: one program for some pixels of the output, each read at its source.

Pixels of the padding are normalised again, which is cheaper than copying them in another pass: at 128 x 176 pixels
with a border of one they are 3% of the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2, on_device

VALUES = 4096  # of a tile of pixels and channels


@triton.jit
def _reflected(position, length):
    """The pixel that a position before the first or behind the last one reflects."""
    return length - 1 - tl.abs(length - 1 - tl.abs(position))


@triton.jit
def _vector(vector, channel, has_channel):
    return tl.load(vector + channel, has_channel, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _norm(
    x, shift, scale, input_bias, out, parts, time, height, width, pixels, out_height, out_width, before, border,
    channels, eps, IS_MODULATED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // parts).to(tl.int64)
    pixel = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)  # of the sample's output
    frame = tl.minimum(tl.maximum(pixel // (out_height * out_width) - before, 0), time - 1)
    row = _reflected(pixel // out_width % out_height - border, height)
    column = _reflected(pixel % out_width - border, width)
    source = sample * time * height * width + (frame * height + row) * width + column
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    inside = (pixel < pixels)[:, None] & has_channel[None, :]  # [rows, channels]
    value = tl.load(x + source[:, None] * channels + channel[None, :], inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value = tl.where(inside, value + _vector(input_bias, channel, has_channel), 0.0)
    y = value * tl.rsqrt(tl.sum(value * value, 1) / channels + eps)[:, None]
    if IS_MODULATED:
        at = sample * channels + channel
        y = y * (1.0 + _vector(scale, at, has_channel)) + _vector(shift, at, has_channel)
    if SILU:
        y *= tl.sigmoid(y)
    target = (sample * pixels + pixel)[:, None] * channels + channel[None, :]
    tl.store(out + target, y.to(out.dtype.element_ty), inside)


def pixel_norm_into(x, shift, scale, eps, before, border, silu, input_bias, out) -> None:
    """Fills ``out``; it and ``x`` are ``[B, C, T, H, W]`` in channels-last layout."""
    batch, channels, *size = x.shape
    _, _, out_time, out_height, out_width = out.shape
    pixels, padded = out_time * out_height * out_width, next_power_of_2(channels)
    rows = max(1, VALUES // padded)
    parts = triton.cdiv(pixels, rows)
    with on_device(x):
        launch(
            _norm, batch * parts, (x, shift, scale, input_bias, out),
            (parts, *size, pixels, out_height, out_width, before, border, channels, float(eps)),
            IS_MODULATED=shift is not None, HAS_BIAS=input_bias is not None, SILU=silu, ROWS=rows, CHANNELS=padded,
            num_warps=4,
        )  # fmt: skip
