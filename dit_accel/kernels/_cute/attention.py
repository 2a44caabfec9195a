"""Block-sparse attention by flash-attn-4: a plan's lists in its words, and the contract's corners that it leaves out.

flash-attn-4 takes two lists of key blocks a row: *full* tiles, and *masked* ones, whose scores go one by one through a
function of (query, key). It walks both from the last entry to the first and cuts only the entry it visits first at the
end of the keys, so a list may reach beyond the last valid key by nothing but the ragged part of its last block.

Every row of the grid is launched and written: a reused row costs it a start and a store of zeros. So where reused rows
must survive, it writes to a tensor of its own, and the rows that compute are copied (4% of the time at 17K tokens and
80% sparsity, not measurable at 33K).
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from dit_accel.kernels.forecast import weighted_sum
from dit_accel.kernels.symbols import FIRST_PARTIAL_TILE, AttentionPlan, TileMasks

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
BLOCKS = (64, 128)  # its tile is the block: 64 takes 1.5 times as long as 128 (everything computed, 17K tokens)


def limit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    kv_len: torch.Tensor | None,
    pv_threshold: float | None,
    qk_dtype: str | None,
    return_lse: bool,
) -> str | None:
    """What keeps flash-attn-4 from these arguments of :func:`~dit_accel.kernels.attention.attention`, or None."""
    if q.dtype not in DTYPES:
        return f"q must have dtype {' or '.join(map(str, DTYPES))}, got {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}"
    if plan.block not in BLOCKS:
        return f"plan.block must be one of {BLOCKS}, got {plan.block}"
    if plan.blocks == 1 and plan.masks is not None and plan.masks.pool.shape[0] > 0:
        return "PARTIAL tiles need 2 blocks or more, got 1"  # it tells a tensor's layout by its one axis of stride 1
    if pv_threshold is not None:
        return f"pv_threshold must be None, got {pv_threshold}"
    if qk_dtype is not None:
        return f"qk_dtype must be None, got {qk_dtype!r}"
    return None


def attention_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_len: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    keep_reused: bool = True,
) -> None:
    """Attention of the rows that compute, into ``out``.

    Arguments are those of :func:`~dit_accel.kernels.attention.attention`, checked, and without a :func:`limit`. With
    ``keep_reused`` False reused rows of ``out`` become 0: for an ``out`` that nobody has written yet.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    lengths = None if kv_len is None else kv_len.clamp(0, plan.tokens)
    lists = BlockSparseTensorsTorch(*tile_lists(plan, lengths), block_size=(plan.block, plan.block))
    masks = {} if plan.masks is None else _masks(plan.masks, plan)
    values = v if lengths is None else _without_tail(v, lengths)
    computed = torch.empty_like(q, memory_format=torch.contiguous_format) if keep_reused else out
    with torch.cuda.device(q.device):
        _flash_attn_fwd(
            q.detach(), k.detach(), values.detach(),
            seqused_k=lengths, softmax_scale=scale, pack_gqa=False, block_sparse_tensors=lists, out=computed, lse=lse,
            **masks,
        )  # fmt: skip
    if keep_reused:  # copy the rows whose bit is set: those that the opposite plan reuses
        weighted_sum((computed,), (1.0,), plan=dataclasses.replace(plan, mask64=~plan.mask64), out=out)


def tile_lists(plan: AttentionPlan, lengths: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """``(masked count, masked index, full count, full index)``, without the tiles behind each sample's last key.

    ``lengths`` are the samples' valid keys, int32 ``[B]``, at most the plan's tokens. Counts are int32 ``[B, H, Tq]``
    (the masked one of a plan without masks ``[1, 1, Tq]``, all 0) and indices int32 ``[B, H, Tq, Tk]``, ascending up to
    their count.
    """
    full_count, full_index = plan.kv_count if plan.full_count is None else plan.full_count, plan.kv_index
    if plan.full_count is None:
        masked_count, masked_index = _zeros(plan.blocks, full_count.device), full_index
    else:
        slot = torch.arange(plan.blocks, device=full_count.device)
        masked_count = plan.kv_count - full_count
        masked_index = full_index.gather(-1, (full_count[..., None] + slot).clamp_(max=plan.blocks - 1))
    if lengths is not None:
        end = (lengths + plan.block - 1)[:, None, None, None] // plan.block
        full_count = _count_before(end, full_index, full_count)
        if plan.full_count is not None:
            masked_count = _count_before(end, masked_index, masked_count)
    return masked_count, masked_index, full_count, full_index


def _count_before(end: torch.Tensor, index: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """How many of a row's first ``count`` indices are below ``end``."""
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    return (listed & (index < end)).sum(-1, dtype=torch.int32)


@functools.cache  # filling it anew would take 1% of a short sequence's attention
def _zeros(blocks: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, 1, blocks, dtype=torch.int32, device=device)


def _without_tail(v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """v with zeros behind each sample's last key: there a probability is 0, and 0 times NaN would be NaN.

    With the trimmed lists it costs 5% at 17K tokens and 80% sparsity, 2% at 33K.
    """
    valid = torch.arange(v.shape[1], device=v.device) < lengths[:, None]
    return torch.where(valid[:, :, None, None], v, 0.0)


def _masks(masks: TileMasks, plan: AttentionPlan) -> dict[str, object]:
    """The keyword arguments that make flash-attn-4 read the tiles' masks."""
    if masks.pool.shape[0] == 0:  # a tile that is not FULL is CAUSAL
        return {"mask_mod": _mask_function(plan.block, partial=False)}
    codes = masks.codes.expand(plan.batch, plan.heads, -1, -1)
    words = masks.pool.contiguous().view(torch.int32).flatten()
    return {"mask_mod": _mask_function(plan.block, partial=True), "aux_tensors": [codes, words]}


@functools.cache
def _mask_function(block: int, partial: bool):
    """Whether a (query, key) pair of a masked tile attends, as a function in CuTe DSL.

    It runs for each pair by itself. At 17K tokens a CAUSAL tile costs 1.0 times a FULL one, a PARTIAL one 2.4 times.
    """
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    log_block = block.bit_length() - 1  # shifts: the compiler can't tell that a position is not negative

    @cute.jit
    def causal(batch, head, query, key, lengths, tensors):
        return key <= query

    @cute.jit
    def by_code(batch, head, query, key, lengths, tensors):
        codes, words = tensors  # int32 [B, H, Tq, Tk], and the pool as int32 [P * block * block / 32]
        row, column = query[0], key[0]
        code = codes[batch[0], head[0], row >> log_block, column >> log_block]
        entry = cutlass.max(code - FIRST_PARTIAL_TILE, 0)
        line = (entry << log_block) + (row & (block - 1))
        word = words[(line << (log_block - 5)) + ((column & (block - 1)) >> 5)]
        attends = (word >> (column & 31)) & 1
        if code < FIRST_PARTIAL_TILE:  # CAUSAL: the list has no FULL tile
            attends = cutlass.Int32(column <= row)
        return scalar_to_ssa(attends != 0, cutlass.Boolean)

    return by_code if partial else causal
