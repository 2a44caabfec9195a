"""Quantisation of rows, each by one program that rotates it in registers, and their product with quantised weights.

The product is tiled: on Hopper the copy engine loads tiles of both sides several stages ahead. Sums are in registers;
scales and bias are applied when they are stored.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels._triton.launch import is_hopper_or_later, launch, multiprocessors, next_power_of_2
from dit_accel.kernels.backends import hopper_limit

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
GROUP = 8  # row tiles that share weight tiles in L2


@triton.jit
def _gelu(x):
    """GELU's tanh approximation, with tanh(y) = 2 sigmoid(2 y) - 1."""
    return x * tl.sigmoid(2.0 * SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))


@triton.jit
def _turn(row, COUNT: tl.constexpr, TURNED: tl.constexpr):
    """Multiply each 8 features of a row ``[COUNT]``, which one thread holds, by the Hadamard matrix of 8: sums and
    differences along each of three axes of 2, which are back in order at the end.
    """
    row = row.to(tl.float32)
    if TURNED:
        for _ in tl.static_range(3):
            first, second = tl.split(tl.reshape(row, (COUNT // 2, 2)))
            pairs = tl.reshape(tl.join(first + second, first - second), (COUNT // 8, 2, 2, 2))
            row = tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (COUNT,))
        row *= 0.3535533905932738  # 1 / sqrt(8)
    return row


@triton.jit
def _store(values, units, inside):
    if values.dtype.element_ty == tl.int8:
        tl.store(values, tl.floor(units + 0.5).to(tl.int8), inside)
    else:
        tl.store(values, units.to(values.dtype.element_ty), inside)


@triton.jit
def _quantize_rows(
    x, gelu, values, scales, x_row, gelu_row, width, gelu_width, largest, smallest,
    HAS_X: tl.constexpr, HAS_GELU: tl.constexpr, FEATURES: tl.constexpr, GELU_FEATURES: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values += row * (width + gelu_width)
    maximum = 0.0
    if HAS_X:
        feature = tl.arange(0, FEATURES)
        inside = feature < width
        turned = _turn(tl.load(x + row * x_row + feature, inside, other=0.0), FEATURES, TURNED)
        maximum = tl.max(tl.abs(turned), 0)
    if HAS_GELU:
        gelu_feature = tl.arange(0, GELU_FEATURES)
        gelu_inside = gelu_feature < gelu_width
        active = tl.load(gelu + row * gelu_row + gelu_feature, gelu_inside, other=0.0)
        active = _turn(_gelu(active.to(tl.float32)).to(active.dtype), GELU_FEATURES, TURNED)
        maximum = tl.maximum(maximum, tl.max(tl.abs(active), 0))
    scale = tl.maximum(maximum / largest, smallest)
    if HAS_X:
        _store(values + feature, turned * (1.0 / scale), inside)
    if HAS_GELU:
        _store(values + width + gelu_feature, active * (1.0 / scale), gelu_inside)
    tl.store(scales + row, scale)


def rows_into(x, gelu, values, scales, turned, largest, smallest_scale) -> None:
    """Rotate and quantise rows ``x`` ``[R, C]``, ``gelu`` ``[R, M]`` into ``values`` ``[R, C + M]`` and ``scales``."""
    rows, width = x.shape
    gelu_width = 0 if gelu is None else gelu.shape[1]
    x, gelu = (part if part is None or part.stride(-1) == 1 else part.contiguous() for part in (x, gelu))
    features, gelu_features = (next_power_of_2(max(count, 8)) for count in (width, gelu_width))
    launch(
        _quantize_rows, rows, (x, gelu, values, scales),
        (x.stride(0), 0 if gelu is None else gelu.stride(0), width, gelu_width, largest, smallest_scale),
        HAS_X=width > 0, HAS_GELU=gelu is not None, FEATURES=features, GELU_FEATURES=gelu_features,
        TURNED=turned, num_warps=min(max(features // 1024, gelu_features // 1024, 1), 8),
    )  # fmt: skip


@triton.jit
def _load(
    tiles, base, row, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr
):
    """Load ``[ROWS, COLUMNS]`` of a matrix, 0 beyond it."""
    if BY_DESCRIPTOR:
        return tiles.load([row, column])
    own_row, own_column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = base + row.to(tl.int64) * columns + column + (own_row[:, None] * columns + own_column[None, :])
    return tl.load(pointers, (own_row < rows - row)[:, None] & (own_column < columns - column)[None, :], other=0.0)


@triton.jit
def _product(
    values, weight, scales, weight_scales, bias, out, value_tiles, weight_tiles, rows, columns, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, GROUPED: tl.constexpr, PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        group = tile // (GROUPED * column_tiles)
        height = tl.minimum(row_tiles - group * GROUPED, GROUPED)
        place = tile - group * GROUPED * column_tiles
        first_row, first_column = (group * GROUPED + place % height) * ROWS, place // height * COLUMNS
        if values.dtype.element_ty == tl.int8:
            acc = tl.zeros([ROWS, COLUMNS], tl.int32)
        else:
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, channels, CHANNELS, num_stages=STAGES):
            tokens = _load(value_tiles, values, first_row, rows, start, channels, ROWS, CHANNELS, BY_DESCRIPTOR)
            features = _load(
                weight_tiles, weight, first_column, columns, start, channels, COLUMNS, CHANNELS, BY_DESCRIPTOR
            )
            acc = tl.dot(tokens, features.T, acc, out_dtype=acc.dtype)
        row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
        row_inside, column_inside = row < rows, column < columns
        by_row = tl.load(scales + row, row_inside, other=0.0)
        by_column = tl.load(weight_scales + column, column_inside, other=0.0)
        sums = acc.to(tl.float32) * by_row[:, None] * by_column[None, :]
        if HAS_BIAS:
            sums += tl.load(bias + column, column_inside, other=0.0).to(tl.float32)[None, :]
        pointers = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(pointers, sums.to(out.dtype.element_ty), row_inside[:, None] & column_inside[None, :])


def _config(values: torch.Tensor) -> dict[str, int]:
    if is_hopper_or_later(values):
        return {"ROWS": 128, "COLUMNS": 256, "CHANNELS": 128, "STAGES": 4, "num_warps": 8}
    return {"ROWS": 128, "COLUMNS": 128, "CHANNELS": 64, "STAGES": 3, "num_warps": 8}


def product_into(values, scales, weight, weight_scales, bias, out) -> None:
    """Compute ``out``, which has a row for each row of ``values`` and a column for each row of ``weight``."""
    columns, channels = weight.shape
    values = values.reshape(-1, channels)
    rows = len(values)
    config = _config(values)
    tile = config["ROWS"], config["COLUMNS"], config["CHANNELS"]
    by_descriptor = hopper_limit(values) is None  # the interpreter, without a GPU, takes Hopper's path
    value_tiles = weight_tiles = None
    if by_descriptor:
        value_tiles = TensorDescriptor(values, [rows, channels], [channels, 1], [tile[0], tile[2]])
        weight_tiles = TensorDescriptor(weight, [columns, channels], [channels, 1], [tile[1], tile[2]])
    tiles = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1])
    programs = min(tiles, multiprocessors(values))
    launch(
        _product, programs,
        (values, weight, scales, weight_scales, bias, out, value_tiles, weight_tiles), (rows, columns, channels),
        GROUPED=GROUP, PROGRAMS=programs, HAS_BIAS=bias is not None, BY_DESCRIPTOR=by_descriptor, **config,
    )  # fmt: skip
