"""Lowering: symbols, which are bits, into the index lists that kernels eat, on the device and without a host sync."""

from __future__ import annotations

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.packing import unpack_bits
from dit_accel.symbols import AttentionPlan, SparseSymbols


def lower(symbols: SparseSymbols, *, scratch: AttentionPlan | None = None, backend: str = "auto") -> AttentionPlan:
    """The plan of a set of symbols; see :class:`~dit_accel.symbols.AttentionPlan` for its lists.

    A reused row has ``kv_count`` 0 and is in no list. A row that computes but has no tile is listed, with ``kv_count``
    0. ``work`` goes head by head, longest row first within a head and rows of equal length by index.

    Args:
        symbols: B, H, T as in :class:`~dit_accel.symbols.SparseSymbols`; ``skip_bits`` None = every tile computes.
        scratch: a plan of the same B, H, T and device, whose buffers are overwritten and returned in the new plan.
            Long video lowers into one scratch for all layers, just before use.
        backend: "auto", "reference" or "triton".

    Raises:
        ShapeError: ``scratch`` has another shape or device.
        BackendError: ``backend`` can't run here.
    """
    plan = _empty_plan(symbols) if scratch is None else _reused_plan(symbols, scratch)
    if resolve_backend(backend, symbols.cache_bits) == "triton":
        from dit_accel.kernels._triton.lowering import lower_into

        lower_into(symbols, plan)
    else:
        _lower_reference(symbols, plan)
    return plan


def _lower_reference(symbols: SparseSymbols, plan: AttentionPlan) -> None:
    heads, blocks = symbols.heads, symbols.blocks
    device = symbols.cache_bits.device
    by_row = unpack_bits(symbols.cache_bits, heads, backend="reference")  # [B, Tq, H]
    plan.mask64.copy_((by_row.long() << torch.arange(heads, device=device)).sum(-1))

    rows = by_row.transpose(1, 2)  # [B, H, Tq]
    tiles = rows[..., None].expand(-1, -1, -1, blocks)
    if symbols.skip_bits is not None:
        tiles = tiles & unpack_bits(symbols.skip_bits, blocks, backend="reference")
    plan.kv_count.copy_(tiles.sum(-1))
    plan.kv_index.copy_(_true_first(tiles))
    plan.row_count.copy_(rows.sum(-1))
    plan.row_index.copy_(_true_first(rows))

    length = torch.where(rows, plan.kv_count, -1).flatten(0, 1)  # [B * H, Tq]; reused rows sort behind empty ones
    order = torch.sort(length, dim=-1, descending=True, stable=True).indices
    count = plan.row_count.flatten().long()
    head = torch.arange(len(count), device=device)
    rank = torch.arange(blocks, device=device)
    capacity = plan.work.numel()
    slot = (count.cumsum(0) - count)[:, None] + rank
    slot = torch.where(rank < count[:, None], slot, capacity)  # the slot behind the end takes what does not compute
    work = plan.work.new_zeros(capacity + 1)
    work.scatter_(0, slot.flatten(), (head[:, None] * blocks + order).flatten().int())
    plan.work.copy_(work[:capacity])
    plan.work_count.copy_(count.sum()[None])


def _true_first(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the True entries, ascending, then those of the others: int64, shaped like ``mask``."""
    return torch.sort(mask.logical_not().to(torch.uint8), dim=-1, stable=True).indices


def _empty_plan(symbols: SparseSymbols) -> AttentionPlan:
    batch, heads, blocks = symbols.cache_bits.shape[0], symbols.heads, symbols.blocks

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=symbols.cache_bits.device)

    return AttentionPlan(
        mask64=empty(batch, blocks, dtype=torch.int64),
        kv_count=empty(batch, heads, blocks),
        kv_index=empty(batch, heads, blocks, blocks),
        row_count=empty(batch, heads),
        row_index=empty(batch, heads, blocks),
        work_count=empty(1),
        work=empty(batch * heads * blocks),
        tokens=symbols.tokens,
        block=symbols.block,
    )


def _reused_plan(symbols: SparseSymbols, scratch: AttentionPlan) -> AttentionPlan:
    required = (symbols.cache_bits.shape[0], symbols.heads, symbols.blocks)
    got = (scratch.batch, scratch.heads, scratch.blocks)
    if got != required or scratch.mask64.device != symbols.cache_bits.device:
        raise ShapeError(
            f"scratch must have the symbols' batch, heads and blocks {list(required)} on {symbols.cache_bits.device}, "
            f"got {list(got)} on {scratch.mask64.device}; pass scratch=None to allocate a plan"
        )
    buffers = {name: value for name, value in vars(scratch).items() if isinstance(value, torch.Tensor)}
    return AttentionPlan(**buffers, tokens=symbols.tokens, block=symbols.block)
