"""RMS normalisation and SiLU of pixels in channels-last layout: one program for some pixels of a row of the output.

Frames of the past are copied, borders filled and the last frames kept on the way, so that features are read once.
"""

import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, next_power_of_2, on_device

VALUES = 4096  # of a tile of pixels and channels
NUMBERS = ("parts", "time", "height", "width", "known", "keeping")


@triton.jit(do_not_specialize=NUMBERS)
def _norm(
    x, weight, input_bias, past, out, kept, parts, time, height, width, known, keeping, root,
    FRAMES: tl.constexpr, BORDER: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PAST: tl.constexpr,
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
        bias = tl.load(input_bias + feature, has_feature, other=0.0).to(tl.float32)
        value = tl.where(inside, value + bias[None, :], 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(value * value, 1)), 1e-12)
    y = value * (root / norm)[:, None] * tl.load(weight + feature, has_feature, other=0.0).to(tl.float32)[None, :]
    if SILU:
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


def norm_into(x, weight, silu, input_bias, past, out, kept, border) -> None:
    """Fill ``out`` ``[B, frames + T, H + 2 border, W + 2 border, C]`` and its last frames ``kept`` ``[B, K, H, W, C]``.

    x and past are ``[B, C, T, H, W]``, dense in channels-last layout.
    """
    channels, time, height, width = x.shape[1:]
    batch, out_frames, out_height, out_width, _ = out.shape
    features = next_power_of_2(channels)
    rows = max(1, VALUES // features)
    parts, known = triton.cdiv(out_width, rows), 0 if past is None else past.shape[2]
    with on_device(x):
        launch(
            _norm, batch * out_frames * out_height * parts, (x, weight, input_bias, past, out, kept),
            (parts, time, height, width, known, kept.shape[1], float(channels**0.5)), FRAMES=out_frames - time,
            BORDER=border, SILU=silu, HAS_BIAS=input_bias is not None, HAS_PAST=past is not None, ROWS=rows,
            CHANNELS=channels, FEATURES=features, num_warps=4,
        )  # fmt: skip
