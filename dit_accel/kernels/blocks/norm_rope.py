"""RMSNorm and rotary embedding of queries and keys in one pass, into their place in the joint sequence.

The norm is per head, as in FLUX and HunyuanVideo, or across all heads of a token, as in Wan:

    y = x / sqrt(mean(x^2) + eps) * weight          RoPE: (y0, y1) -> (y0 cos0 - y1 sin0, y1 cos1 + y0 sin1)

The pairs are adjacent features, or the same features of the two halves of a head (LTX-2, MiniMax-H3).
"""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op


@eager_op
def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise and rotate, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, S, H, D]``, float16, bfloat16 or float32; any strides of batch and token, heads and features in order.
        weight: floating ``[D]``: RMSNorm of each head; ``[H * D]``: across all heads of a token; None = no norm.
        rope: ``(cos, sin)``, float32, the last stride being 1; None = no rotation. ``[S, D]``: of adjacent features.
            ``[B or 1, S, H or 1, R]``: of features R apart, in the first 2 R of each head; the others stay.
        out: ``[B, S, H, D]`` like x, but not in its memory, e.g. the tokens of a joint sequence; None = allocated.
    """
    _require_rows(x, weight, out)
    _require_tables(x, rope)
    (out,) = _norm_rope([(x, weight, out)], rope, eps, backend)
    return out


@eager_op
def norm_rope_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    eps: float = 1e-6,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`norm_rope` of queries and of keys, in one launch if both have the same layout in memory.

    ``q`` and ``k`` have the same shape and dtype; ``weights`` and ``out`` hold those of queries, then those of keys.
    """
    out_q, out_k = out or (None, None)
    checks.require_same("q", q, tuple(q.shape), k=k)
    _require_rows(q, weights[0], out_q, "q")
    _require_rows(k, weights[1], out_k, "k")
    _require_tables(q, rope)
    return _norm_rope([(q, weights[0], out_q), (k, weights[1], out_k)], rope, eps, backend)


def _norm_rope(
    parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    """Run parts ``(x, weight, out)`` that share all other arguments; return their outputs."""
    parts = [
        (x, weight, torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out)
        for x, weight, out in parts
    ]
    x = parts[0][0]
    if resolve_backend(backend, x, {"triton": checks.triton_limit(x.shape[-1])}) == "triton":
        from dit_accel.kernels._triton.norm_rope import norm_rope_into

        norm_rope_into(parts, rope, eps)
    else:
        for x, weight, out in parts:
            out.copy_(norm_rope_reference(x, weight, rope, eps))
    return tuple(out for _, _, out in parts)


def norm_rope_reference(x, weight, rope, eps) -> torch.Tensor:
    y = x.float()
    if weight is not None:
        normed = y if weight.shape[0] == x.shape[-1] else y.flatten(2)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * weight.float()
        y = normed.view(x.shape)
    if rope is None:
        return y
    cos, sin = rope
    if cos.dim() == 2:
        even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
        return y * cos[:, None] + torch.stack([-odd, even], dim=-1).flatten(-2) * sin[:, None]
    half = cos.shape[-1]
    first, second, others = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, others], dim=-1)


def _require_rows(x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor | None, name: str = "x") -> None:
    checks.require_floats(name, x, ("B", "S", "H", "D"))
    checks.require_like(name, x, tuple(x.shape), out=out)
    for role, tensor in ((name, x), ("out", out)):
        if tensor is not None and tensor.shape[2] > 1 and tensor.stride(2) != tensor.shape[3]:
            rule = f"must hold a token's heads contiguously (stride {tensor.shape[3]})"
            raise ShapeError(f"{role} {rule}, got strides {list(tensor.stride())}; call .contiguous()")
    if weight is None:
        return
    heads, head_dim = x.shape[2:]
    checks.require_dtype("weight", weight, checks.FLOAT_DTYPES)
    checks.require_unit_stride("weight", weight)
    if weight.dim() != 1 or weight.shape[0] not in (head_dim, heads * head_dim):
        raise ShapeError(f"weight must have shape [{head_dim}] or [{heads * head_dim}], got {list(weight.shape)}")
    checks.require_device("weight", weight, name, x)


def _require_tables(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    if rope is None:
        return
    batch, tokens, heads, head_dim = x.shape
    shape = (tokens, head_dim)
    if rope[0].dim() == 4:
        shape, limits = tuple(rope[0].shape), ((1, batch), (tokens,), (1, heads), range(1, head_dim // 2 + 1))
        if any(length not in allowed for length, allowed in zip(shape, limits, strict=True)):
            required = f"[{batch} or 1, {tokens}, {heads} or 1, at most {head_dim // 2}]"
            raise ShapeError(f"rope[0] must have shape {required}, got {list(shape)}")
    for name, table in zip(("rope[0]", "rope[1]"), rope, strict=True):
        checks.require_typed("x", x, shape, torch.float32, **{name: table})
        checks.require_unit_stride(name, table)
