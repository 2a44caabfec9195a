"""Modes of torch that hold for the whole process: settings that decide which kernels run, and watchers of all calls."""

from operator import attrgetter

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_PRECISIONS = attrgetter(
    *(f"{op}.fp32_precision" for op in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"))
)


def kernel_settings() -> tuple:
    """Return the settings that decide which kernels torch launches, and so the last bits of its outputs."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        nn.functional.scaled_dot_product_attention,  # SageAttention's readme has users replace it
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *_float32_precisions(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )


def _float32_precisions() -> tuple:
    """Return the precision of float32 products; torch's older getters raise after a newer setting (torch 2.9)."""
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    return _PRECISIONS(backends)


def watches_all_calls() -> bool:
    """Return True if a hook of all modules or a mode of all operations must see the work that is done."""
    return _has_any_global_hook() or torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing()
