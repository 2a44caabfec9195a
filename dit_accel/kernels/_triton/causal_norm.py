"""RMS normalisation and SiLU of pixels in channels-last layout: one program for some pixels, read and written once.

Programs are for pixels of the output, so frames of the past are copied and borders filled on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2, on_device

VALUES = 4096  # of a tile of pixels and channels
NUMBERS = ("parts", "pixels", "time", "height", "width", "kept", "frames", "channels")


@triton.jit(do_not_specialize=NUMBERS[:-1])
def _norm(
    x, weight, input_bias, past, out, parts, pixels, time, height, width, kept, frames, channels, root,
    HAS_BIAS: tl.constexpr, HAS_PAST: tl.constexpr, BORDER: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // parts).to(tl.int64)
    pixel = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)  # of the sample's output
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    out_height, out_width = height + 2 * BORDER, width + 2 * BORDER
    frame = pixel // (out_height * out_width) - frames
    row, column = pixel // out_width % out_height - BORDER, pixel % out_width - BORDER
    within = (pixel < pixels) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = row * width + column
    inside = (within & (frame >= 0))[:, None] & has_channel[None, :]  # [rows, channels]
    at = ((sample * time + frame) * height * width + place)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(input_bias + channel, has_channel, other=0.0).to(tl.float32)
        value = tl.where(inside, value + bias[None, :], 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(value * value, 1)), 1e-12)
    y = value * (root / norm)[:, None] * tl.load(weight + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    if HAS_PAST:
        known = (within & (frame < 0) & (frame >= -kept))[:, None] & has_channel[None, :]
        at = ((sample * kept + kept + frame) * height * width + place)[:, None] * channels + channel[None, :]
        y += tl.load(past + at, known, other=0.0).to(tl.float32)  # y is 0 there
    to = (sample * pixels + pixel)[:, None] * channels + channel[None, :]
    tl.store(out + to, y.to(out.dtype.element_ty), (pixel < pixels)[:, None] & has_channel[None, :])


def norm_into(x, weight, silu, input_bias, past, out, frames, border) -> None:
    """Fill ``out`` ``[B, frames + T, H + 2 border, W + 2 border, C]``; x and past are dense in channels-last layout."""
    batch, channels, time, height, width = x.shape
    pixels, padded = out[0, ..., 0].numel(), next_power_of_2(channels)
    rows = max(1, VALUES // padded)
    parts, kept = triton.cdiv(pixels, rows), 0 if past is None else past.shape[2]
    with on_device(x):
        launch(
            _norm, batch * parts, (x, weight, input_bias, past, out),
            (parts, pixels, time, height, width, kept, frames, channels, float(channels**0.5)),
            HAS_BIAS=input_bias is not None, HAS_PAST=past is not None, BORDER=border, SILU=silu, ROWS=rows,
            CHANNELS=padded, num_warps=4,
        )  # fmt: skip
