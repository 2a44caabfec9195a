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

from dit_accel.kernels.attention.attention import attention as attention
from dit_accel.kernels.attention.attention_backward import attention_backward as attention_backward
from dit_accel.kernels.attention.attention_backward import differentiable_attention as differentiable_attention
from dit_accel.kernels.attention.linear_attention import (
    differentiable_linear_attention as differentiable_linear_attention,
)
from dit_accel.kernels.attention.linear_attention import linear_attention as linear_attention
from dit_accel.kernels.attention.linear_attention import linear_attention_backward as linear_attention_backward
from dit_accel.kernels.backends import backend_status as backend_status
from dit_accel.kernels.blocks.forecast import weighted_sum as weighted_sum
from dit_accel.kernels.blocks.gemm_o import gemm_o_dispatch as gemm_o_dispatch
from dit_accel.kernels.blocks.gemm_o import gemm_o_update as gemm_o_update
from dit_accel.kernels.blocks.gemm_q import gemm_q as gemm_q
from dit_accel.kernels.blocks.mlp import linear_gelu as linear_gelu
from dit_accel.kernels.blocks.mlp import swiglu as swiglu
from dit_accel.kernels.blocks.norm_modulate import add_gated as add_gated
from dit_accel.kernels.blocks.norm_modulate import add_gated_norm_modulate as add_gated_norm_modulate
from dit_accel.kernels.blocks.norm_modulate import norm_modulate as norm_modulate
from dit_accel.kernels.blocks.norm_rope import norm_rope as norm_rope
from dit_accel.kernels.blocks.norm_rope import norm_rope_pair as norm_rope_pair
from dit_accel.kernels.blocks.quantized_linear import quantize_rows as quantize_rows
from dit_accel.kernels.blocks.quantized_linear import quantized_linear as quantized_linear
from dit_accel.kernels.decoder.convolution import convolution as convolution
from dit_accel.kernels.decoder.convolution import fold_upsampling as fold_upsampling
from dit_accel.kernels.decoder.convolution import operand_dtype as operand_dtype
from dit_accel.kernels.decoder.convolution import upsampled_convolution as upsampled_convolution
from dit_accel.kernels.decoder.group_norm import add_residual as add_residual
from dit_accel.kernels.decoder.group_norm import group_moments as group_moments
from dit_accel.kernels.decoder.group_norm import group_norm as group_norm
from dit_accel.kernels.decoder.pixel_norm import causal_norm as causal_norm
from dit_accel.kernels.decoder.pixel_norm import pad_video as pad_video
from dit_accel.kernels.decoder.pixel_norm import pixel_norm as pixel_norm
from dit_accel.kernels.decoder.single_head_attention import single_head_attention as single_head_attention
from dit_accel.kernels.packing import pack_bits as pack_bits
from dit_accel.kernels.packing import unpack_bits as unpack_bits
from dit_accel.kernels.plans.classification import classify_tiles as classify_tiles
from dit_accel.kernels.plans.lowering import lower as lower
from dit_accel.kernels.plans.pooling import PooledMap as PooledMap
from dit_accel.kernels.plans.pooling import pooled_map as pooled_map
from dit_accel.kernels.plans.selection import select_keys as select_keys
from dit_accel.kernels.plans.selection import select_rows as select_rows
from dit_accel.kernels.plans.selection import select_tiles as select_tiles
from dit_accel.kernels.plans.tile_masks import mask_from_plan as mask_from_plan
from dit_accel.kernels.plans.tile_masks import plan_from_mask as plan_from_mask
from dit_accel.kernels.plans.tile_masks import symbols_from_intervals as symbols_from_intervals
from dit_accel.kernels.plans.tile_masks import symbols_from_mask as symbols_from_mask
from dit_accel.kernels.plans.transpose import transpose_lists as transpose_lists
