"""Kernels for sparse attention, projections, forecasts and 8-bit layers.

Each op has one page with its contract, checks, torch reference and choice of backend: ``plans/`` finds and lists the
tiles that compute, ``attention/`` runs over them, ``blocks/`` holds the other ops of transformers, ``decoder/`` those
of autoencoders. Read ``symbols.py`` first: it defines the packed bits that say what computes, and the plan of index
lists that kernels read. Then read ``attention/attention.py``.

The torch reference is the specification and the CPU backend. Triton kernels are in ``_triton``, CUDA C++ kernels in
``_cuda``. The first call that needs them imports them, so importing this package compiles nothing and uses no GPU.
``backend`` is "auto" (the fastest that supports the call), "reference" or "triton", unless an op names more. Triton's
kernels over heads have head dimensions 16, 32, 64 and 128, and those over rows at most 16384 features.

Every op raises a :class:`~dit_accel.errors.ShapeError` if a shape, dtype, stride, device or number violates its
docstring, an :class:`~dit_accel.errors.UnsupportedError` if the chosen backend does not support the arguments (the
message says why), and a :class:`~dit_accel.errors.BackendError` if the backend can't run on this machine.
"""

from dit_accel.kernels.attention.attention import attention
from dit_accel.kernels.attention.attention_backward import attention_backward, differentiable_attention
from dit_accel.kernels.attention.linear_attention import linear_attention
from dit_accel.kernels.attention.linear_attention_backward import (
    differentiable_linear_attention,
    linear_attention_backward,
)
from dit_accel.kernels.backends import backend_status
from dit_accel.kernels.blocks.forecast import weighted_sum
from dit_accel.kernels.blocks.gemm_o import gemm_o_dispatch, gemm_o_update
from dit_accel.kernels.blocks.gemm_q import gemm_q
from dit_accel.kernels.blocks.linear_gelu import linear_gelu
from dit_accel.kernels.blocks.norm_modulate import add_gated, add_gated_norm_modulate, norm_modulate
from dit_accel.kernels.blocks.norm_rope import norm_rope, norm_rope_pair
from dit_accel.kernels.blocks.quantized_linear import quantize_rows, quantized_linear
from dit_accel.kernels.blocks.swiglu import swiglu
from dit_accel.kernels.decoder.causal_norm import causal_norm
from dit_accel.kernels.decoder.convolution import convolution, fold_upsampling, upsampled_convolution
from dit_accel.kernels.decoder.group_norm import add_residual, group_moments, group_norm
from dit_accel.kernels.decoder.pixel_norm import pad_video, pixel_norm
from dit_accel.kernels.decoder.single_head_attention import single_head_attention
from dit_accel.kernels.plans.classification import classify_tiles
from dit_accel.kernels.plans.key_selection import select_keys
from dit_accel.kernels.plans.lowering import lower
from dit_accel.kernels.plans.packing import pack_bits, unpack_bits
from dit_accel.kernels.plans.pooling import PooledMap, pooled_map
from dit_accel.kernels.plans.selection import select_rows, select_tiles
from dit_accel.kernels.plans.tile_masks import mask_from_plan, plan_from_mask, symbols_from_intervals, symbols_from_mask
from dit_accel.kernels.plans.transpose import transpose_lists

__all__ = [
    "PooledMap",
    "add_gated",
    "add_gated_norm_modulate",
    "add_residual",
    "attention",
    "attention_backward",
    "backend_status",
    "causal_norm",
    "classify_tiles",
    "convolution",
    "differentiable_attention",
    "differentiable_linear_attention",
    "fold_upsampling",
    "gemm_o_dispatch",
    "gemm_o_update",
    "gemm_q",
    "group_moments",
    "group_norm",
    "linear_attention",
    "linear_attention_backward",
    "linear_gelu",
    "lower",
    "mask_from_plan",
    "norm_modulate",
    "norm_rope",
    "norm_rope_pair",
    "pack_bits",
    "pad_video",
    "pixel_norm",
    "plan_from_mask",
    "pooled_map",
    "quantize_rows",
    "quantized_linear",
    "select_keys",
    "select_rows",
    "select_tiles",
    "single_head_attention",
    "swiglu",
    "symbols_from_intervals",
    "symbols_from_mask",
    "transpose_lists",
    "unpack_bits",
    "upsampled_convolution",
    "weighted_sum",
]
