"""Implicit GEMM: tiles of pixels times weights, tap by tap, with bias and residual added as tiles are stored.

The copy engine of Hopper loads a tile of pixels at any offset and fills what lies outside with zeros, so a tap of the
kernel is one load, and borders cost nothing. Output channels that are no power of two are two products of each tile
(96 = 64 + 32). With phases, each program makes the pixels of one phase and stores them two apart.

On one H100, 4 frames of 480 x 832 with 96 channels in bfloat16: 1.9 ms (428 TF); cuDNN takes 3.2 ms. 4 frames of
240 x 416 with 192 channels: 1.06 ms (747 TF); cuDNN takes 1.3 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels._triton.launch import launch, on_device

COLUMNS = 16  # pixels in a row of a tile


@triton.jit
def _store(out, bias, residual, acc, at, first, channel, inside, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    at = at[:, None] + channel[None, :]  # [pixels, channels]
    if HAS_BIAS:
        acc += tl.load(bias + first + channel).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, inside[:, None], other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def _convolve(
    out, bias, residual, pixel_tiles, weight_tiles, second_tiles,
    frames, height, width, out_frames, row_tiles, column_tiles, outputs,
    CHANNELS: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PADDING: tl.constexpr,
    PHASES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    channel_tiles = outputs // (FIRST + SECOND)
    tile = tl.program_id(0)
    first_channel = tile % channel_tiles * (FIRST + SECOND)
    tile //= channel_tiles
    phase = tile % PHASES  # programs that share pixels run at the same time
    tile //= PHASES
    first_column = tile % column_tiles * COLUMNS
    tile //= column_tiles
    first_row = tile % row_tiles * ROWS
    tile //= row_tiles
    frame, sample = tile % frames, tile // frames

    down, right = phase // 2 % 2, phase % 2
    PARTS: tl.constexpr = CHANNELS // DEPTH
    acc = tl.zeros([ROWS * COLUMNS, FIRST], tl.float32)
    second = tl.zeros([ROWS * COLUMNS, SECOND if SECOND else 16], tl.float32)
    for step in tl.range(0, KT * KH * KW * PARTS, num_stages=STAGES):
        tap = step // PARTS
        row, column = first_row + tap // KW % KH - PADDING + down, first_column + tap % KW - PADDING + right
        pixels = pixel_tiles.load([sample, frame + tap // (KH * KW), row, column, step % PARTS * DEPTH])
        pixels = pixels.reshape(ROWS * COLUMNS, DEPTH)
        weight_row = phase * outputs + first_channel
        acc = tl.dot(pixels, weight_tiles.load([weight_row, step * DEPTH]).T, acc, input_precision="tf32")
        if SECOND:
            weights = second_tiles.load([weight_row + FIRST, step * DEPTH])
            second = tl.dot(pixels, weights.T, second, input_precision="tf32")

    pixel = tl.arange(0, ROWS * COLUMNS)
    row, column = first_row + pixel // COLUMNS, first_column + pixel % COLUMNS
    inside = (row < height) & (column < width)
    if PHASES > 1:
        row, column, height, width = 2 * row + down, 2 * column + right, 2 * height, 2 * width
    if PHASES == 8:
        frame = 2 * frame - 1 + phase // 4
        inside &= frame >= 0  # the first frame is not repeated
    at = (((sample * out_frames + frame).to(tl.int64) * height + row) * width + column) * outputs + first_channel
    channel = tl.arange(0, FIRST)
    _store(out, bias, residual, acc, at, first_channel, channel, inside, HAS_BIAS, HAS_RESIDUAL)
    if SECOND:
        channel = FIRST + tl.arange(0, SECOND)
        _store(out, bias, residual, second, at, first_channel, channel, inside, HAS_BIAS, HAS_RESIDUAL)


def _config(x: torch.Tensor, outputs: int) -> dict[str, int]:
    channels, is_half = x.shape[1], x.element_size() == 2
    depth = next(each for each in (64, 32, 16) if channels % each == 0 and (is_half or each < 64))
    pairs = ((128, 64), (64, 32), (128, 0), (64, 0), (32, 0))
    first, second = next(pair for pair in pairs if outputs % sum(pair) == 0)
    large = not is_half or not second  # 256 pixels fill the registers of eight warps
    rows = 16 if large else 8
    stages = 4 if is_half and not second else 3
    return {
        "ROWS": rows, "COLUMNS": COLUMNS, "FIRST": first, "SECOND": second, "DEPTH": depth, "STAGES": stages,
        "num_warps": rows // 2,
    }  # fmt: skip


def _dense(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a dense tensor by its sizes, because strides of single frames are arbitrary."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(tensor, list(tensor.shape), strides, block)


def convolve_into(x, weight, bias, residual, out, padding) -> None:
    """Fill ``out`` ``[B, O, T', H', W']``; x, residual and out are dense in channels-last layout.

    Args:
        weight: ``[phases, O, C, kt, kh, kw]``.
    """
    phases, outputs, channels, *kernel = weight.shape
    config = _config(x, outputs)
    rows, columns, depth = config["ROWS"], config["COLUMNS"], config["DEPTH"]
    batch, _, out_frames, height, width = out.shape
    if phases > 1:
        height, width = height // 2, width // 2
    frames = x.shape[2] - kernel[0] + 1
    matrix = weight.permute(0, 1, 3, 4, 5, 2).reshape(phases * outputs, -1)
    pixel_tiles = _dense(x.permute(0, 2, 3, 4, 1), [1, 1, rows, columns, depth])
    weight_tiles = _dense(matrix, [config["FIRST"], depth])
    second_tiles = _dense(matrix, [config["SECOND"], depth]) if config["SECOND"] else None
    row_tiles, column_tiles = triton.cdiv(height, rows), triton.cdiv(width, columns)
    tiles = batch * frames * row_tiles * column_tiles * phases * (outputs // (config["FIRST"] + config["SECOND"]))
    with on_device(x):
        launch(
            _convolve, tiles, (out, bias, residual, pixel_tiles, weight_tiles, second_tiles),
            (frames, height, width, out_frames, row_tiles, column_tiles, outputs), CHANNELS=channels,
            KT=kernel[0], KH=kernel[1], KW=kernel[2], PADDING=padding, PHASES=phases, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, **config,
        )  # fmt: skip
