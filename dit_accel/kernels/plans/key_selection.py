"""Selection of single keys: the bits of FG-Attn's slices, computed without storing the score matrix.

For a group of queries that share a row of bits, key j is selected if and only if for any of them

    e^(s_ij - L_i) > min(threshold / N, 0.999 max_j e^(s_ij - L_i))      L_i = log sum_j e^(s_ij)

with s the scaled scores and N the number of keys (FG-Attn, section 4.3, has the threshold 0.5 / N). The second term
only matters for a ``threshold`` of 0.999 or more, where all keys may lie below the first: every query keeps its best
key.
"""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.constants import BEST_SHARE
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.layout import BLOCK_SIZES, block_count
from dit_accel.kernels.packing import pack_bits


@eager_op
def select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    threshold: float,
    *,
    group: int,
    block: int,
    kv_len: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return bits of the keys that any query of a group needs.

    Args:
        q: ``[B, Q, H, D]``, float16, bfloat16 or float32; any strides, the last being 1.
        k: ``[B, S, H, D]`` like q.
        threshold: probability that a key must exceed for at least one query, in units of 1 / N; positive.
        group: queries that share a row of bits: 1, 64 or 128.
        block: tokens in a key block; a row of bits is padded with zeros to whole blocks.
        kv_len: int32 ``[B]``, valid keys of each sample, which is its N; no later key is selected. None = all S.

    Returns:
        uint8 ``[B, H, ceil(Q / group), ceil(S / block) * block / 8]``, packed along keys: ``slice_bits`` as in
        :class:`~dit_accel.kernels.symbols.SparseSymbols`, before full tiles are separated from single keys.
    """
    checks.require_floats("q", q, ("B", "Q", "H", "D"))
    batch, queries, heads, head_dim = q.shape
    checks.require_like("q", q, (batch, "S", heads, head_dim), k=k)
    if not threshold > 0:
        raise ShapeError(f"threshold must be positive, in units of 1 / N, got {threshold}")
    checks.require_block(block)
    if group not in (1, *BLOCK_SIZES):
        raise ShapeError(f"group must be one of {(1, *BLOCK_SIZES)}, got {group}")
    checks.require_typed("q", q, (batch,), torch.int32, kv_len=kv_len)
    backend = resolve_backend(backend, q, {"triton": checks.triton_limit(head_dim)})
    row_bytes = block_count(k.shape[1], block) * block // 8
    # zeros, because kernels write no byte that has no valid key
    bits = q.new_zeros(batch, heads, block_count(queries, group), row_bytes, dtype=torch.uint8)
    if backend == "triton":
        from dit_accel.kernels._triton.key_selection import select_keys_into

        select_keys_into(bits, q, k, threshold, group, None if kv_len is None else kv_len.contiguous())
    else:
        _select_keys_reference(bits, q, k, threshold, group, kv_len)
    return bits


def _select_keys_reference(bits, q, k, threshold, group, kv_len) -> None:
    batch, _, heads, head_dim = q.shape
    lengths = [k.shape[1]] * batch if kv_len is None else kv_len.clamp(0, k.shape[1]).tolist()
    for b, length in enumerate(lengths):
        for h in range(heads if length else 0):
            key = k[b, :length, h].float()
            for row, query in enumerate(q[b, :, h].float().split(group)):
                probability = (query @ key.T * head_dim**-0.5).softmax(-1)
                bound = (BEST_SHARE * probability.amax(-1, keepdim=True)).clamp(max=threshold / length)
                packed = pack_bits((probability > bound).any(0))
                bits[b, h, row, : len(packed)] = packed
