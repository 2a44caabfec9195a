"""Quantisation of rows, each by one program that rotates it in registers, and their product with quantised weights.

The product is tiled: on Hopper the copy engine loads tiles of both sides several stages ahead. Sums are in registers;
scales and bias are applied when they are stored.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dit_accel.kernels._triton.configs import config
from dit_accel.kernels._triton.launch import launch, multiprocessors, next_power_of_2, unit_stride
from dit_accel.kernels._triton.rounding import store_units, turn
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.constants import LARGEST, SMALLEST_SCALE

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
GROUP = 8  # row tiles that share weight tiles in L2


@triton.jit
def _quantize_rows(
    x, hidden, value, values, scales, x_row, hidden_row, value_row, width, hidden_width, largest, smallest,
    HAS_HIDDEN: tl.constexpr, GATED: tl.constexpr, FEATURES: tl.constexpr, HIDDEN_FEATURES: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values += row * (width + hidden_width)
    feature = tl.arange(0, FEATURES)
    inside = feature < width
    turned = turn(tl.load(x + row * x_row + feature, inside, other=0.0), FEATURES, TURNED)
    maximum = tl.max(tl.abs(turned), 0)
    if HAS_HIDDEN:
        hidden_feature = tl.arange(0, HIDDEN_FEATURES)
        hidden_inside = hidden_feature < hidden_width
        loaded = tl.load(hidden + row * hidden_row + hidden_feature, hidden_inside, other=0.0)
        active = loaded.to(tl.float32)
        if GATED:
            factor = tl.load(value + row * value_row + hidden_feature, hidden_inside, other=0.0).to(tl.float32)
            active = active * tl.sigmoid(active) * factor
        else:  # GELU's tanh approximation, with tanh(y) = 2 sigmoid(2 y) - 1
            active *= tl.sigmoid(2.0 * SQRT_2_OVER_PI * (active + 0.044715 * active * active * active))
        active = turn(active.to(loaded.dtype), HIDDEN_FEATURES, TURNED)
        maximum = tl.maximum(maximum, tl.max(tl.abs(active), 0))
    scale = tl.maximum(maximum / largest, smallest)
    store_units(values + feature, turned, scale, inside)
    if HAS_HIDDEN:
        store_units(values + width + hidden_feature, active, scale, hidden_inside)
    tl.store(scales + row, scale)


def rows_into(x, hidden, value, values, scales, turned) -> None:
    """Fill ``values`` and ``scales`` of contiguous rows: ``x``, then an activation of ``hidden``, as in the op."""
    x, hidden, value = (item if item is None else unit_stride(item).flatten(0, -2) for item in (x, hidden, value))
    width, hidden_width = x.shape[1], 0 if hidden is None else hidden.shape[1]
    features, hidden_features = (next_power_of_2(max(count, 8)) for count in (width, hidden_width))
    strides = (0 if part is None else part.stride(0) for part in (x, hidden, value))
    launch(
        _quantize_rows, len(x), (x, hidden, value, values, scales),
        (*strides, width, hidden_width, LARGEST[values.dtype], SMALLEST_SCALE),
        HAS_HIDDEN=hidden is not None, GATED=value is not None, FEATURES=features, HIDDEN_FEATURES=hidden_features,
        TURNED=turned, num_warps=min(max(features // 1024, hidden_features // 1024, 1), 8),
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


def product_into(values, scales, weight, weight_scales, bias, out) -> None:
    """Compute ``out``, which has a row for each row of ``values`` and a column for each row of ``weight``."""
    columns, channels = weight.shape
    values = values.reshape(-1, channels)
    rows = len(values)
    sizes = config("linear layers", values)
    tile = sizes["ROWS"], sizes["COLUMNS"], sizes["CHANNELS"]
    by_descriptor = hopper_limit(values) is None  # the interpreter, without a GPU, takes Hopper's path
    value_tiles = weight_tiles = None
    if by_descriptor:
        value_tiles = TensorDescriptor(values, [rows, channels], [channels, 1], [tile[0], tile[2]])
        weight_tiles = TensorDescriptor(weight, [columns, channels], [channels, 1], [tile[1], tile[2]])
    programs = min(triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]), multiprocessors(values))
    launch(
        _product, programs,
        (values, weight, scales, weight_scales, bias, out, value_tiles, weight_tiles), (rows, columns, channels),
        GROUPED=GROUP, PROGRAMS=programs, HAS_BIAS=bias is not None, BY_DESCRIPTOR=by_descriptor, **sizes,
    )  # fmt: skip
