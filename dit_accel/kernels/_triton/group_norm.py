"""Group normalisation in channels-last layout: moments of chunks of pixels, their sum by group, then one pass.

torch gives each group of each image one block, which is 32 blocks for an autoencoder's images, on 132 multiprocessors.
Here the pixels are cut into about a thousand chunks, each with sums for every channel. Sums are float32 and those of
differences from the channel's first pixel, so that a mean far from zero costs no digits.
"""

import torch
import triton
import triton.language as tl

from dit_accel.kernels._triton.launch import launch, load_floats, next_power_of_2

VALUES = 8192  # of a tile of pixels and channels
SUMMED = 4096  # of a tile whose sums stay in registers
CHUNKS = 1024  # of pixels, at most, for each image
PARTS = 64  # chunks that are summed at a time


@triton.jit
def _chunk_sums(x, sums, pixels, chunks, channels, ROWS: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr):
    image, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    x += image * pixels * channels
    pivot = load_floats(x + channel, has_channel)[None, :]
    total, squares = tl.zeros([ROWS, CHANNELS], tl.float32), tl.zeros([ROWS, CHANNELS], tl.float32)
    for step in range(STEPS):
        pixel = (chunk * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (pixel < pixels)[:, None] & has_channel[None, :]  # [rows, channels]
        at = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.where(inside, tl.load(x + at, inside, other=0.0).to(tl.float32) - pivot, 0.0)
        total += value
        squares += value * value
    sums += tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(sums, tl.sum(total, 0), has_channel)
    tl.store(sums + channels, tl.sum(squares, 0), has_channel)


@triton.jit
def _group_moments(
    x, input_bias, sums, moments, pixels, chunks, channels, groups,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    image, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    width = channels // groups
    channel = group * width + tl.arange(0, WIDTH)
    has_channel = tl.arange(0, WIDTH) < width
    total, squares = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for step in range(STEPS):
        chunk = step * PART + tl.arange(0, PART)
        inside = (chunk < chunks)[:, None] & has_channel[None, :]  # [part, width]
        at = (image * chunks + chunk)[:, None] * 2 * channels + channel[None, :]
        total += tl.sum(tl.load(sums + at, inside, other=0.0), 0)
        squares += tl.sum(tl.load(sums + at + channels, inside, other=0.0), 0)
    shift = total / pixels  # of the channel's mean from its pivot
    mean = load_floats(x + image * pixels * channels + channel, has_channel) + shift
    if HAS_BIAS:
        mean += load_floats(input_bias + channel, has_channel)
    mean_of_group = tl.sum(tl.where(has_channel, mean, 0.0), 0) / width
    apart = tl.where(has_channel, mean - mean_of_group, 0.0)
    within = tl.where(has_channel, squares / pixels - shift * shift, 0.0)
    variance = tl.maximum(tl.sum(within + apart * apart, 0) / width, 0.0)
    moments += tl.program_id(0) * 2
    tl.store(moments, mean_of_group)
    tl.store(moments + 1, variance)


@triton.jit
def _normalise(
    x, weight, bias, input_bias, moments, scale_map, shift_map, out, pixels, parts, channels, groups, out_pixels,
    height, width, start, eps, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PADDED: tl.constexpr, BORDER: tl.constexpr,
    TIMES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // parts).to(tl.int64)
    pixel = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)  # of out
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    inside = (pixel < out_pixels)[:, None] & has_channel[None, :]  # [rows, channels]
    to = (image * out_pixels + pixel.to(tl.int64))[:, None] * channels + channel[None, :]
    if PADDED:
        out_width, out_height = width + 2 * BORDER, height + 2 * BORDER
        frame = tl.maximum(pixel // (out_width * out_height) + start, 0)
        row = tl.minimum(tl.maximum(pixel // out_width % out_height - BORDER, 0), height - 1)
        column = tl.minimum(tl.maximum(pixel % out_width - BORDER, 0), width - 1)
        pixel = (frame * height + row) * width + column
    at = (image * pixels + pixel.to(tl.int64))[:, None] * channels + channel[None, :]
    moments += (image * groups + channel // (channels // groups)) * 2
    mean, variance = tl.load(moments, has_channel, other=0.0), tl.load(moments + 1, has_channel, other=0.0)
    if HAS_BIAS:
        mean -= load_floats(input_bias + channel, has_channel)
    scale = tl.rsqrt(variance + eps) * load_floats(weight + channel, has_channel)
    y = (tl.load(x + at, inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    y += load_floats(bias + channel, has_channel)[None, :]
    if TIMES:
        place = (frame * (height // TIMES) + row // TIMES) * (width // TIMES) + column // TIMES
        place = (image * (pixels // (TIMES * TIMES)) + place)[:, None] * channels + channel[None, :]
        y = y * load_floats(scale_map + place, inside) + load_floats(shift_map + place, inside)
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(out + to, y.to(out.dtype.element_ty), inside)


@triton.jit
def _add(x, update, bias, out, pixels, channels, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    has_channel = channel < channels
    inside = (pixel < pixels)[:, None] & has_channel[None, :]  # [rows, channels]
    at = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    y = tl.load(x + at, inside, other=0.0).to(tl.float32) + tl.load(update + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += load_floats(bias + channel, has_channel)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), inside)


def moments_into(x, groups, input_bias, moments) -> None:
    """Fill ``moments`` ``[B, groups, 2]`` with means and variances of ``x``, dense in channels-last layout."""
    images, channels = x.shape[:2]
    pixels, padded = x[0, 0].numel(), next_power_of_2(channels)
    rows = max(1, SUMMED // padded)
    steps = max(1, triton.cdiv(pixels, rows * CHUNKS))
    chunks = triton.cdiv(pixels, rows * steps)
    sums = x.new_empty(images, chunks, 2, channels, dtype=torch.float32)
    launch(
        _chunk_sums, images * chunks, (x, sums), (pixels, chunks, channels),
        ROWS=rows, STEPS=steps, CHANNELS=padded, num_warps=8,
    )  # fmt: skip
    launch(
        _group_moments, images * groups, (x, input_bias, sums, moments),
        (pixels, chunks, channels, groups), HAS_BIAS=input_bias is not None,
        WIDTH=next_power_of_2(channels // groups), PART=PARTS, STEPS=triton.cdiv(chunks, PARTS), num_warps=4,
    )  # fmt: skip


def group_norm_into(x, weight, bias, input_bias, moments, scale, shift, eps, silu, out, padding) -> None:
    """Fill ``out``; it and ``x`` are ``[B, C, H, W]`` or ``[B, C, T, H, W]`` in channels-last layout, as maps are.

    ``padding``: first frame of x in ``out``, which is negative where frames repeat the first one, and the border in
    pixels; None = ``out`` has the pixels of x, and there are no maps.
    """
    images, channels, *_, height, width = x.shape
    padded, groups = next_power_of_2(channels), moments.shape[1]
    out_pixels, (start, border) = out[0, 0].numel(), padding or (0, 0)
    rows = max(1, VALUES // padded)
    parts = triton.cdiv(out_pixels, rows)
    launch(
        _normalise, images * parts, (x, weight, bias, input_bias, moments, scale, shift, out),
        (x[0, 0].numel(), parts, channels, groups, out_pixels, height, width, start, float(eps)),
        HAS_BIAS=input_bias is not None, SILU=silu, PADDED=padding is not None, BORDER=border,
        TIMES=0 if scale is None else height // scale.shape[3], ROWS=rows, CHANNELS=padded, num_warps=8,
    )  # fmt: skip


def add_residual_into(x, update, bias, out) -> None:
    """Fills ``out``; all are ``[B, C, H, W]`` in channels-last layout."""
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    padded = next_power_of_2(channels)
    rows = max(1, VALUES // padded)
    launch(
        _add, triton.cdiv(pixels, rows), (x, update, bias, out), (pixels, channels),
        HAS_BIAS=bias is not None, ROWS=rows, CHANNELS=padded, num_warps=8,
    )  # fmt: skip
