"""Activations of an MLP: a gate, and GELU in the epilogue of a matrix product.

    y = x_0 sigmoid(x_0) x_1          x = [x_0 | x_1], or x_0 = x and x_1 apart

The gate is SwiGLU (Shazeer 2020, arXiv 2002.05202, equation 5) without the matrix products before and after it.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op


@eager_op
def swiglu(
    x: torch.Tensor, value: torch.Tensor | None = None, *, out: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """``SiLU(x_0) * x_1``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, S, 2 * M]``, or ``[B, S, M]`` with a value; float16, bfloat16 or float32, the last stride being 1.
        value: x_1, ``[B, S, M]`` like x, of a projection of its own; None = the second half of x.
        out: ``[B, S, M]`` like x, for example some features of a wider tensor; None = allocated.
    """
    checks.require_floats("x", x, ("B", "S", "2 * M" if value is None else "M"))
    checks.require_like("x", x, tuple(x.shape), value=value)
    if value is None and x.shape[-1] % 2:
        raise ShapeError(f"x must have an even number of features, got {x.shape[-1]}")
    x, value = x.chunk(2, dim=-1) if value is None else (x, value)
    checks.require_like("x", x, tuple(x.shape), out=out)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.swiglu import swiglu_into

        swiglu_into(x, value, out)
    else:
        out.copy_(F.silu(x.float()) * value.float())
    return out


@eager_op
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``GELU(x W^T + b)`` with the tanh approximation. Forward only: no gradient flows.

    On a GPU cuBLASLt applies GELU to its float32 sums; elsewhere the sums are rounded first.

    ``x`` ``[..., C]``, ``weight`` ``[N, C]``, ``bias`` ``[N]`` and the result are float16, bfloat16 or float32.
    """
    checks.require_dtype("x", x, checks.FLOAT_DTYPES)
    checks.require_same("x", x, ("N", x.shape[-1]), weight=weight)
    checks.require_same("x", x, weight.shape[:1], bias=bias)
    if bias is None or not x.is_cuda:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).view(*x.shape[:-1], -1)
