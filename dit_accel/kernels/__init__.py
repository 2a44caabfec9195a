"""Sparse kernels: one page per op with its contract, validation, torch reference and dispatch.

The torch reference is the specification and the CPU backend. Triton kernels live in ``_triton`` and are imported by
the first call that needs them, so importing this package compiles nothing and touches no GPU.
"""

from dit_accel.kernels.attention import attention
from dit_accel.kernels.backends import backend_status
from dit_accel.kernels.forecast import weighted_sum
from dit_accel.kernels.gemm_o import gemm_o_dispatch, gemm_o_update
from dit_accel.kernels.gemm_q import gemm_q
from dit_accel.kernels.lowering import lower
from dit_accel.kernels.packing import pack_bits, unpack_bits
from dit_accel.kernels.pooling import PooledMap, pooled_map
from dit_accel.kernels.selection import select_rows, select_tiles

__all__ = [
    "PooledMap",
    "attention",
    "backend_status",
    "gemm_o_dispatch",
    "gemm_o_update",
    "gemm_q",
    "lower",
    "pack_bits",
    "pooled_map",
    "select_rows",
    "select_tiles",
    "unpack_bits",
    "weighted_sum",
]
