"""A linear layer and GELU in the matrix product's epilogue: the MLP's inner features are written once."""

import torch
import torch.nn.functional as F

from dit_accel.kernels import checks
from dit_accel.kernels.custom_ops import eager_op


@eager_op
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``GELU(x W^T + b)`` with the tanh approximation. Forward only: no gradient flows.

    On a GPU cuBLASLt applies GELU to its float32 sums; elsewhere the sums are rounded first.

    ``x`` is ``[..., C]``, float16, bfloat16 or float32; ``weight`` ``[N, C]``, ``bias`` ``[N]`` and the result
    ``[..., N]`` are like it.
    """
    checks.require_dtype("x", x, checks.FLOAT_DTYPES)
    checks.require_same("x", x, ("N", x.shape[-1]), weight=weight)
    if bias is None or not x.is_cuda:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    checks.require_shape("bias", bias, (weight.shape[0],))
    product = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return product.view(*x.shape[:-1], -1)
