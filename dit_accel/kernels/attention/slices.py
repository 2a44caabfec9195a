"""Slices: single keys of a row-block, which join the softmax over its tiles (FG-Attn, section 4).

A slice holds the scores of a row-block's queries with one key. Attention over the row's tiles returned the output O and
the log-sum-exp L of the scaled scores; the softmax then continues over the row's single keys J:

    L' = log(e^L + sum_j e^(s_j))     O' = e^(L - L') O + sum_j e^(s_j - L') v_j     j in J

So any backend can compute the tiles, with its masks and number formats, and a row without single keys costs nothing
here. The bits are the only list of the keys, in 1/32 of the memory of FG-Attn's int32 lists.
"""

import torch

from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.packing import unpack_bits


def add_slices(q, k, v, plan, scale, kv_len, out, lse, backend) -> None:
    """Continue the softmax over a plan's tiles with its single keys, in place.

    Takes ``attention``'s arguments, already checked, its results for the tiles, and their backend. After "reference"
    and "triton" the same backend runs the single keys; after "cuda" it does too, or "triton" if "cuda" can't.
    """
    if backend == "reference":
        _add_slices_reference(q, k, v, plan, scale, kv_len, out, lse)
        return
    from dit_accel.kernels._cuda.attention import add_slices_into, slices_limit

    if backend == "triton" or hopper_limit(q) or slices_limit(q, k, v, plan, out):
        from dit_accel.kernels._triton.slices import add_slices_into
    add_slices_into(q, k, v, plan, scale, kv_len, out, lse)


def _add_slices_reference(q, k, v, plan, scale, kv_len, out, lse) -> None:
    lengths = [plan.tokens] * plan.batch if kv_len is None else kv_len.clamp(0, plan.tokens).tolist()
    group = q.shape[2] // k.shape[2]
    for b, h, row in plan.slices.count.nonzero().tolist():
        is_key = unpack_bits(plan.slices.bits[b, h, row], plan.blocks * plan.block, backend="reference")
        keys = is_key[: lengths[b]].nonzero().flatten()
        if len(keys) == 0:
            continue
        queries = slice(row * plan.block, min((row + 1) * plan.block, plan.tokens))
        scores = q[b, queries, h].float() @ k[b, keys, h // group].float().T * scale
        before = lse[b, h, queries]
        total = torch.logaddexp(before, scores.logsumexp(-1))
        result = (scores - total[:, None]).exp() @ v[b, keys, h // group].float()
        out[b, queries, h] = ((before - total).exp()[:, None] * out[b, queries, h] + result).to(out.dtype)
        lse[b, h, queries] = total
