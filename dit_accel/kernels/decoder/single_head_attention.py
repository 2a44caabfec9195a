"""Attention with one head of many features, as autoencoders have it in their middle block.

    out = softmax(Q K^T / sqrt(D)) V

No flash kernel takes heads of more than 256 features. Here scores go through memory, some rows of queries at a time:
a product with sums in float32, their exponentials by a kernel, and a product with the values. Above 256 features that
is faster than torch's own attention, whose kernel for such heads does not use the tensor cores of recent GPUs well.
"""

import torch
import torch.nn.functional as F

from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op

WIDEST_FLASH = 256  # features of a head
SCORES = 2**27  # in memory at a time, 6 bytes each


@eager_op
def single_head_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Attend to all keys. Forward only: no gradient flows.

    Args:
        query: ``[B, S, D]``, float16, bfloat16 or float32.
        key, value: ``[B, K, D]`` like query.
        backend: "auto", "reference" or "triton". float32, and D up to 256, are left to torch's own attention.

    Returns:
        ``[B, S, D]`` like query, contiguous.
    """
    checks.require_floats("query", query, ("B", "S", "D"))
    batch, _, features = query.shape
    checks.require_floats("key", key, ("B", "K", "D"))
    checks.require_like("query", query, (batch, key.shape[1], features), key=key, value=value)
    is_wide = features > WIDEST_FLASH and query.dtype != torch.float32
    if resolve_backend(backend, query) == "triton" and is_wide:
        return _by_products(query, key, value)
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0].contiguous()


def _by_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    from dit_accel.kernels._triton.softmax import exponentials_into

    batch, tokens, features = query.shape
    rows = max(1, SCORES // key.shape[1])
    out = query.new_empty(query.shape)
    for sample in range(batch):
        keys, values = key[sample].T, value[sample]
        for start in range(0, tokens, rows):
            scores = _product(query[sample, start : start + rows], keys)
            weights, sums = query.new_empty(scores.shape), scores.new_empty(len(scores))
            exponentials_into(scores, features**-0.5, weights, sums)
            out[sample, start : start + rows] = _product(weights, values).div_(sums[:, None])
    return out


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a matrix product in float32."""
    if a.device.type != "cuda":  # in Triton's interpreter
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)
