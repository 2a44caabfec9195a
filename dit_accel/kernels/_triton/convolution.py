"""Implicit GEMM: tiles of pixels times weights, tap by tap, with bias and residual added as tiles are stored.

Pixels with their border are the rows of one matrix, so the pixels that a tap reads lie a fixed number of rows further,
and the copy engine of Hopper loads them as one tile. The taps of a row lie side by side in memory: a row of the matrix
is as long as all of them, and rows overlap. Sums for border pixels are computed and not stored: 0.7% at 480 x 832.
Output channels that are no power of two are two products of each tile (96 = 64 + 32). With phases, each program makes
the pixels of one phase and stores them two apart.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels._triton.launch import launch


@triton.jit
def _store(
    out, bias, residual, acc, at, first, channel, inside,
    OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    at = at[:, None] + channel[None, :]  # [pixels, channels]
    has_channel = first + channel < OUTPUTS
    inside = inside[:, None] & has_channel[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + first + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


NUMBERS = (  # any value runs the same compiled kernel
    *("tiles", "sample_rows", "frames", "padded_height", "padded_width"),
    *("height", "width", "out_frames"),
)


@triton.jit(do_not_specialize=NUMBERS)
def _convolve(
    out, bias, residual, pixel_tiles, weight_tiles, second_tiles,
    tiles, sample_rows, frames, padded_height, padded_width, height, width, out_frames,
    OUTPUTS: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, PARTS: tl.constexpr,
    PHASES: tl.constexpr, PIXELS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    CHANNEL_TILES: tl.constexpr = (OUTPUTS + FIRST + SECOND - 1) // (FIRST + SECOND)
    tile = tl.program_id(0)
    first_channel = tile % CHANNEL_TILES * (FIRST + SECOND)
    tile //= CHANNEL_TILES
    phase = tile % PHASES  # programs that share pixels run at the same time
    tile //= PHASES
    sample, first_pixel = tile // tiles, tile % tiles * PIXELS
    down, right = phase // 2 % 2, phase % 2

    first_row = sample * sample_rows + first_pixel + down * padded_width + right
    weight_row = phase * OUTPUTS + first_channel
    acc = tl.zeros([PIXELS, FIRST], tl.float32)
    second = tl.zeros([PIXELS, SECOND if SECOND else 16], tl.float32)
    for step in tl.range(0, KT * KH * PARTS, num_stages=STAGES):
        line = step // PARTS  # of taps
        apart = (line // KH * padded_height + line % KH) * padded_width
        pixels = pixel_tiles.load([first_row + apart, step % PARTS * DEPTH])
        weights = weight_tiles.load([weight_row, step * DEPTH])
        acc = tl.dot(pixels, weights.T, acc, input_precision="tf32")
        if SECOND:
            weights = second_tiles.load([weight_row + FIRST, step * DEPTH])
            second = tl.dot(pixels, weights.T, second, input_precision="tf32")

    pixel = first_pixel + tl.arange(0, PIXELS)
    line, column = pixel // padded_width, pixel % padded_width
    frame, row = line // padded_height, line % padded_height
    inside = (frame < frames) & (row < height) & (column < width)
    first_line = first_pixel // padded_width
    first_frame, first_row = first_line // padded_height, first_line % padded_height
    if PHASES > 1:
        row, column, height, width = 2 * row + down, 2 * column + right, 2 * height, 2 * width
        first_row = 2 * first_row + down
    if PHASES == 8:
        frame, first_frame = 2 * frame - 1 + phase // 4, 2 * first_frame - 1 + phase // 4
        inside &= frame >= 0  # the first frame is not repeated
        frame = frame.to(tl.int64)  # a tile may cover two frames, which are four of the output
    apart = (frame - first_frame) * height + row - first_row  # lines, so few that offsets have 32 bits
    at = (apart * width + column) * OUTPUTS + first_channel
    start = ((sample * out_frames + first_frame).to(tl.int64) * height + first_row) * width * OUTPUTS
    out += start
    if HAS_RESIDUAL:
        residual += start
    channel = tl.arange(0, FIRST)
    _store(out, bias, residual, acc, at, first_channel, channel, inside, OUTPUTS, HAS_BIAS, HAS_RESIDUAL)
    if SECOND:
        channel = FIRST + tl.arange(0, SECOND)
        _store(out, bias, residual, second, at, first_channel, channel, inside, OUTPUTS, HAS_BIAS, HAS_RESIDUAL)


def _config(x: torch.Tensor, outputs: int) -> dict[str, int]:
    is_half = x.element_size() == 2
    depth = 64 if is_half else 32
    pairs = ((128, 0), (128, 64), (64, 32), (64, 0))  # 384 channels on one H200: 0.63 ms by (128, 0), 0.83 by (128, 64)
    first, second = next((pair for pair in pairs if outputs % sum(pair) == 0), (32, 0))
    pixels = 128 if is_half and second == 32 else 256
    stages = 4 if is_half and not second else 3
    return {
        "PIXELS": pixels, "FIRST": first, "SECOND": second, "DEPTH": depth, "STAGES": stages,
        "num_warps": pixels // 32,
    }  # fmt: skip


def _tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def convolve_into(x, weight, bias, residual, out) -> None:
    """Fill ``out`` ``[B, O, T', H', W']``; x (with its border), residual and out are dense in channels-last layout.

    ``weight`` is ``[phases, O, C, kt, kh, kw]``.
    """
    phases, outputs, channels, *kernel = weight.shape
    config = _config(x, outputs)
    depth, first, second = config["DEPTH"], config["FIRST"], config["SECOND"]
    batch, _, time, padded_height, padded_width = x.shape
    out_frames, height, width = out.shape[2:]
    if phases > 1:
        height, width = height // 2, width // 2
    frames, width_of_taps = time - kernel[0] + 1, kernel[2] * channels
    parts = triton.cdiv(width_of_taps, depth)
    lines = weight.permute(0, 1, 3, 4, 5, 2).reshape(phases * outputs, -1, width_of_taps)
    missing = parts * depth - width_of_taps
    matrix = (F.pad(lines, (0, missing)) if missing else lines).flatten(1)
    pixels = x.as_strided((x.numel() // channels - kernel[2] + 1, width_of_taps), (channels, 1))
    tiles = triton.cdiv(frames * padded_height * padded_width, config["PIXELS"])
    second_tiles = _tiles(matrix, second, depth) if second else None
    launch(
        _convolve, batch * tiles * phases * triton.cdiv(outputs, first + second),
        (out, bias, residual, _tiles(pixels, config["PIXELS"], depth), _tiles(matrix, first, depth), second_tiles),
        (tiles, x[0, 0].numel(), frames, padded_height, padded_width, height, width, out_frames),
        OUTPUTS=outputs, KT=kernel[0], KH=kernel[1], PARTS=parts, PHASES=phases,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, **config,
    )  # fmt: skip
