"""Eight-bit queries, keys and values for option ``qk_dtype`` of ``attention``.

Scores are int8 products with one scale per query and one per key block (SageAttention; SpargeAttn, section 3.5). Two
changes reduce the rounding error and leave the softmax unchanged:

    q_i k_j = q'_i k'_j + q_i mu       k' = (k - mu) / f    q' = q f    mu = mean of the keys    f = sqrt(rms k / rms q)

``q_i mu`` only shifts the log-sum-exp, because it is the same for all keys. ``f`` balances the channels of q' and k'.
The channels with the largest ``rms q * rms k`` stay in float16. If four of 128 channels are 10 to 50 times as large in
q and k, the output's error is 15% with one scale per block, 11% with balanced channels, and 1% with these in float16.

With "int8+fp8", probabilities (times 256) and values are float8 e4m3. Values have one scale per channel, and their mean
is subtracted. Because probabilities sum to 1, the mean is added back at the end, with the mean of the rounding errors:

    sum_j p_j v_j = c + sum_j p_j w_j + small       w = e4m3(v - mean)       c = mean of (v - w)

If a row attends equally to 33K keys, its output is mostly c: without the rounding errors' mean its error is 4.8%. Means
and rms are computed from a quarter of the tokens (:func:`sampled_tokens`); the formulas are exact with any of them.
"""

from typing import NamedTuple

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import constants
from dit_accel.kernels.backends import float8_limit
from dit_accel.kernels.symbols import AttentionPlan

QK_DTYPES = ("int8", "int8+fp8")
SLOW_BF16 = ((8, 6), (8, 9), (12, 0))  # GeForce cards multiply bf16 at a quarter of int8's rate, others at half of it
HEAD_DIMS = (32, 64, 128)  # int8 matrix units multiply 32 channels at once


class Simulated(NamedTuple):
    """Quantised and dequantised tensors, float32: dense attention over them equals the kernels up to rounding."""

    q: torch.Tensor  # [B, S, H, D], in the units of k; rows that don't compute hold anything
    k: torch.Tensor  # [B, S, H_kv, D]; ignored keys hold 0, in v too
    v: torch.Tensor
    shift: torch.Tensor  # [B, H, S], q_i mu, missing in the unscaled scores of q and k


def chosen_qk_dtype(q: torch.Tensor, plan: AttentionPlan, qk_dtype: str | None) -> str | None:
    """Check the option; "auto" is "int8" if the GPU is slow in bf16 and the kernel takes the call, else None."""
    if qk_dtype not in (None, "auto", *QK_DTYPES):
        raise ShapeError(f"qk_dtype must be None or one of {('auto', *QK_DTYPES)}, got {qk_dtype!r}")
    if qk_dtype != "auto":
        return qk_dtype
    is_slow = q.is_cuda and torch.cuda.get_device_capability(q.device) in SLOW_BF16
    return "int8" if is_slow and q.dtype != torch.float32 and qk_dtype_limit(q, plan, "int8") is None else None


def qk_dtype_limit(q: torch.Tensor, plan: AttentionPlan, qk_dtype: str | None) -> str | None:
    """Return why backend "triton" does not support the option, or None."""
    if qk_dtype is None:
        return None
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS} with qk_dtype={qk_dtype!r}, got {q.shape[-1]}"
    if plan.masks is not None:
        return f"qk_dtype={qk_dtype!r} does not support masks inside tiles"
    return float8_limit(q) if qk_dtype == "int8+fp8" else None


def sampled_tokens(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Indices of the tokens in the statistics of q and k: one of four, at varying positions to avoid periodicity."""
    group = torch.arange(-(-tokens // constants.SAMPLING), device=device)
    token = group * constants.SAMPLING + ((group ^ group >> 2) & (constants.SAMPLING - 1))
    return token[token < tokens]


def simulate(q, k, v, plan, kv_len, qk_dtype) -> Simulated:
    """Quantise and dequantise to float32. Takes ``attention``'s arguments, already checked."""
    batch, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    token = torch.arange(tokens, device=q.device)
    key_end = torch.full((batch,), tokens, device=q.device) if kv_len is None else kv_len
    has_key = (token < key_end[:, None])[:, :, None, None]  # [B, S, 1, 1]
    computes = (plan.kv_count > 0).repeat_interleave(plan.block, 2)[:, :, :tokens].transpose(1, 2)[..., None]
    queries = torch.where(computes, q.float(), 0.0)  # not a product: queries that do not compute may hold NaN
    keys, values = (torch.where(has_key, x.float(), 0.0) for x in (k, v))

    # statistics over the sample, pooled over query heads that share a key head
    sample = sampled_tokens(tokens, q.device)
    q_count = computes[:, sample].unflatten(2, (-1, group)).sum((1, 3)).clamp(min=1)
    q_square = queries[:, sample].square().unflatten(2, (-1, group)).sum((1, 3)) / q_count  # [B, H_kv, D]
    k_count = has_key[:, sample].sum(1).clamp(min=1)
    mean = (keys[:, sample].sum(1) / k_count)[:, None]  # [B, 1, H_kv, D]
    keys = torch.where(has_key, keys - mean, 0.0)
    k_square = keys[:, sample].square().sum(1) / k_count
    level = (k_square / q_square).sqrt().sqrt().clamp(1 / constants.LARGEST_FACTOR, constants.LARGEST_FACTOR)
    factor = torch.where((q_square > 0) & (k_square > 0), level, 1.0)
    exact = torch.zeros_like(factor, dtype=torch.bool)
    exact.scatter_(-1, (q_square * k_square).topk(min(constants.EXACT_CHANNELS, q.shape[-1])).indices, True)

    by_query_head = [x.repeat_interleave(group, 1)[:, None] for x in (factor, exact, mean[:, 0])]  # [B, 1, H, D]
    shift = (queries * by_query_head[2]).sum(-1).transpose(1, 2)
    return Simulated(
        _round_channels(queries * by_query_head[0], by_query_head[1], 1),
        _round_channels(keys * (1 / factor)[:, None], exact[:, None], plan.block),
        _round_values(values, has_key) if qk_dtype == "int8+fp8" else values,
        shift,
    )


def _round_channels(x: torch.Tensor, exact: torch.Tensor, block: int) -> torch.Tensor:
    """Round to int8 with one scale per block of tokens, and exact channels to float16: ``[B, S, H, D]``."""
    tokens = x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -tokens % block)).unflatten(1, (-1, block))
    exact = exact[:, None]
    largest_int8 = blocks.masked_fill(exact, 0.0).abs().amax((2, 4), keepdim=True)  # [B, T, 1, H, 1]
    largest_exact = blocks.masked_fill(~exact, 0.0).abs().amax((2, 4), keepdim=True)
    scale = torch.maximum(largest_int8 / constants.INT8_MAX, largest_exact / constants.FP16_SAFE)
    scale = scale.clamp(min=constants.SMALLEST_SCALE)
    units = blocks * (1 / scale)
    return (torch.where(exact, units.half().float(), units.round()) * scale).flatten(1, 2)[:, :tokens]


def _round_values(values: torch.Tensor, has_key: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale per channel, around the mean over valid keys; that mean stays exact."""
    mean = values.sum(1, keepdim=True) / has_key.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(has_key, values - mean, 0.0)
    scale = (centred.abs().amax(1, keepdim=True) / constants.FP8_MAX).clamp(min=constants.SMALLEST_SCALE)
    rounded = (centred * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
    lost = (centred - rounded).sum(1, keepdim=True) / has_key.sum(1, keepdim=True).clamp(min=1)
    return torch.where(has_key, rounded + mean + lost, 0.0)
