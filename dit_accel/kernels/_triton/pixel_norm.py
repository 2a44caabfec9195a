"""RMS normalisation of pixels into a padded video: one program for some pixels of the output, each read at its source.

Pixels of the padding are normalised again, which is cheaper than copying them in another pass: at 128 x 176 pixels
with a border of one they are 3% of the output. The causal norm has one program for some pixels of a row, which copies
frames of the past, fills borders and keeps the last frames on the way.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, load_floats, next_power_of_2

VALUES = 4096  # of a tile of pixels and channels
NUMBERS = ("parts", "time", "height", "width", "known", "keeping")  # any value runs the same compiled kernel


@triton.jit
def _inside(position, length, REFLECT: tl.constexpr):
    """The pixel that a position before the first or behind the last one repeats or reflects."""
    if REFLECT:
        position = length - 1 - tl.abs(length - 1 - tl.abs(position))
    return tl.minimum(tl.maximum(position, 0), length - 1)


@triton.jit
def _norm(
    x, weight, shift, scale, input_bias, out, parts, time, height, width, pixels, out_sample, before, channels, eps,
    HAS_WEIGHT: tl.constexpr, IS_MODULATED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    PADDED: tl.constexpr, BORDER: tl.constexpr, REFLECT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // parts).to(tl.int64)
    pixel = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)  # of the sample's output
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    inside = (pixel < pixels)[:, None] & has_channel[None, :]  # [rows, channels]
    target = sample * out_sample + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    if PADDED:
        out_height, out_width = height + 2 * BORDER, width + 2 * BORDER
        frame = _inside(pixel // (out_height * out_width) - before, time, False)
        row = _inside(pixel // out_width % out_height - BORDER, height, REFLECT)
        column = _inside(pixel % out_width - BORDER, width, REFLECT)
        pixel = (frame * height + row) * width + column
    source = (sample * time * height * width + pixel)[:, None] * channels + channel[None, :]
    value = tl.load(x + source, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value = tl.where(inside, value + load_floats(input_bias + channel, has_channel)[None, :], 0.0)
    squares = tl.maximum(tl.sum(value * value, 1), 1e-24)  # SMALLEST of the op
    y = value * tl.rsqrt(squares / channels + eps)[:, None]
    if HAS_WEIGHT:
        y *= load_floats(weight + channel, has_channel)[None, :]
    if IS_MODULATED:
        at = sample * channels + channel
        y = y * (1.0 + load_floats(scale + at, has_channel)[None, :]) + load_floats(shift + at, has_channel)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(out + target, y.to(out.dtype.element_ty), inside)


def pixel_norm_into(x, vectors, eps, before, border, reflect, silu, out) -> None:
    """Fill ``out``; it and ``x`` are ``[B, C, T, H, W]`` in channels-last layout, each sample dense.

    ``vectors``: weight, shift, scale and bias of the input, or None.
    """
    batch, channels, *size = x.shape
    pixels, padded = out[0, 0].numel(), next_power_of_2(channels)
    rows = max(1, VALUES // padded)
    parts = triton.cdiv(pixels, rows)
    weight, shift, _, input_bias = vectors
    launch(
        _norm, batch * parts, (x, *vectors, out),
        (parts, *size, pixels, out.stride(0), before, channels, float(eps)), HAS_WEIGHT=weight is not None,
        IS_MODULATED=shift is not None, HAS_BIAS=input_bias is not None, SILU=silu,
        PADDED=out.shape[2:] != x.shape[2:], BORDER=border, REFLECT=reflect, ROWS=rows, CHANNELS=padded,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _causal_norm(
    x, weight, input_bias, past, out, kept, parts, time, height, width, known, keeping, root,
    FRAMES: tl.constexpr, BORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PAST: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) // parts  # of pixels, over all frames and samples
    out_height, out_width = height + 2 * BORDER, width + 2 * BORDER
    row, out_frame = line % out_height - BORDER, line // out_height % (FRAMES + time)
    sample = (line // (out_height * (FRAMES + time))).to(tl.int64)
    frame = out_frame - FRAMES
    out_column = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    column = out_column - BORDER
    feature = tl.arange(0, FEATURES)
    has_feature = feature < CHANNELS
    is_pixel = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = column[:, None] * CHANNELS + feature[None, :]  # [rows, features]
    inside = (is_pixel & (frame >= 0))[:, None] & has_feature[None, :]
    value = tl.load(x + ((sample * time + frame) * height + row) * width * CHANNELS + at, inside, other=0.0)
    value = value.to(tl.float32)
    if HAS_BIAS:
        value = tl.where(inside, value + load_floats(input_bias + feature, has_feature)[None, :], 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(value * value, 1)), 1e-12)
    y = value * (root / norm)[:, None] * load_floats(weight + feature, has_feature)[None, :]
    y *= tl.sigmoid(y)
    if HAS_PAST:
        is_known = (is_pixel & (frame < 0) & (frame >= -known))[:, None] & has_feature[None, :]
        start = ((sample * known + known + frame) * height + row) * width * CHANNELS
        y += tl.load(past + start + at, is_known, other=0.0).to(tl.float32)  # y is 0 there
    y = y.to(out.dtype.element_ty)
    to = out_column[:, None] * CHANNELS + feature[None, :]
    written = (out_column < out_width)[:, None] & has_feature[None, :]
    tl.store(out + line.to(tl.int64) * out_width * CHANNELS + to, y, written)
    place = frame - (time - keeping)  # among the kept frames
    is_kept = (is_pixel & (place >= 0))[:, None] & has_feature[None, :]
    tl.store(kept + ((sample * keeping + place) * height + row) * width * CHANNELS + at, y, is_kept)


def causal_norm_into(x, weight, input_bias, past, out, kept, border) -> None:
    """Fill ``out`` and its last frames ``kept``; all are ``[B, C, T, H, W]``, dense in channels-last layout."""
    channels, time, height, width = x.shape[1:]
    batch, _, out_frames, out_height, out_width = out.shape
    features = next_power_of_2(channels)
    rows = max(1, VALUES // features)
    parts, known = triton.cdiv(out_width, rows), 0 if past is None else past.shape[2]
    launch(
        _causal_norm, batch * out_frames * out_height * parts, (x, weight, input_bias, past, out, kept),
        (parts, time, height, width, known, kept.shape[2], float(channels**0.5)), FRAMES=out_frames - time,
        BORDER=border, HAS_BIAS=input_bias is not None, HAS_PAST=past is not None, ROWS=rows,
        CHANNELS=channels, FEATURES=features, num_warps=4,
    )  # fmt: skip
