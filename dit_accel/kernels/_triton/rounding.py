"""Rotation and quantisation of a row of features, which one program holds in registers."""

import triton
import triton.language as tl


@triton.jit
def turn(row, COUNT: tl.constexpr, TURNED: tl.constexpr):
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
def store_units(values, row, scale, inside):
    units = row * (1.0 / scale)
    if values.dtype.element_ty == tl.int8:
        tl.store(values, tl.floor(units + 0.5).to(tl.int8), inside)
    else:
        tl.store(values, units.to(values.dtype.element_ty), inside)
