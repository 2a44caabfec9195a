"""Lowering of symbols (packed bits) into index lists for kernels, on the device and without a host sync."""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import custom_op
from dit_accel.kernels.packing import unpack_bits
from dit_accel.kernels.symbols import FULL_TILE, AttentionPlan, Slices, SparseSymbols

ORDERS = ("auto", "head", "length")
_WRITTEN = (
    *("plan_mask64", "plan_kv_count", "plan_kv_index", "plan_full_count", "plan_work_count", "plan_work"),
    *("plan_slices_count", "plan_slices_work_count", "plan_slices_work"),
)
ACROSS_HEADS_ROWS = 1024  # up to this number the keys and values of all heads nearly fit the cache; see lower


def lower(symbols: SparseSymbols, *, order: str = "auto", backend: str = "auto") -> AttentionPlan:
    """Return the plan of a set of symbols; see :class:`~dit_accel.kernels.symbols.AttentionPlan` for its lists.

    A reused row has ``kv_count`` 0 and is in no list. A row that computes but has no tile is listed, with ``kv_count``
    0. ``work`` is sorted from long to short, and by index among rows of equal length. Order "head" sorts each head
    separately, one head after the other, so that rows that share keys run at the same time. Order "length" sorts the
    rows of all heads together, so that no long row starts last.

    Args:
        symbols: as in :class:`~dit_accel.kernels.symbols.SparseSymbols`; ``skip_bits`` None = every tile computes.
        order: "head", "length" or "auto": "length" up to 1024 rows ``B * H * T``, where keys and values nearly fit the
            cache anyway (56 MB at H = 24, 4608 tokens and D = 128), else "head". The choice depends on the shape only.
    """
    if order not in ORDERS:
        raise ShapeError(f"order must be one of {ORDERS}, got {order!r}")
    plan = _empty_plan(symbols)
    rows = plan.work.numel()
    across_heads = order == "length" or (order == "auto" and rows <= ACROSS_HEADS_ROWS)
    _lower(symbols, plan, rows if across_heads else plan.blocks, backend)
    return plan


@custom_op(writes=_WRITTEN)
def _lower(symbols: SparseSymbols, plan: AttentionPlan, ranked_together: int, backend: str) -> None:
    backend = resolve_backend(backend, symbols.cache_bits)
    if backend == "triton":
        from dit_accel.kernels._triton.lowering import lower_into
        from dit_accel.kernels._triton.slices import count_slices_into
    else:
        lower_into, count_slices_into = _lower_reference, _count_slices_reference
    lower_into(symbols, plan, ranked_together)
    if (slices := plan.slices) is not None:
        count_slices_into(plan)
        _list_longest_first(slices.work, slices.count.flatten(0, 1), shortest=1)
        slices.work_count.copy_((slices.count > 0).sum()[None])


def _lower_reference(symbols: SparseSymbols, plan: AttentionPlan, ranked_together: int) -> None:
    heads, blocks = symbols.heads, symbols.blocks
    device = symbols.cache_bits.device
    by_row = unpack_bits(symbols.cache_bits, heads, backend="reference")  # [B, Tq, H]
    plan.mask64.copy_((by_row.long() << torch.arange(heads, device=device)).sum(-1))

    rows = by_row.transpose(1, 2)  # [B, H, Tq]
    tiles = rows[..., None].expand(-1, -1, -1, blocks)
    if symbols.skip_bits is not None:
        tiles = tiles & unpack_bits(symbols.skip_bits, blocks, backend="reference")
    plan.kv_count.copy_(tiles.sum(-1))
    if symbols.masks is None:
        plan.kv_index.copy_(_true_first(tiles))
    else:
        full = tiles & (symbols.masks.codes == FULL_TILE)
        plan.full_count.copy_(full.sum(-1))
        plan.kv_index.copy_(torch.sort(2 - tiles.int() - full.int(), dim=-1, stable=True).indices)
    length = torch.where(rows, plan.kv_count, -1).reshape(-1, ranked_together)  # reused rows come after empty ones
    _list_longest_first(plan.work, length, shortest=0)
    plan.work_count.copy_(rows.sum()[None])


def _count_slices_reference(plan: AttentionPlan) -> None:
    for b in range(plan.batch):
        for h in range(plan.heads):
            keys = unpack_bits(plan.slices.bits[b, h], plan.blocks * plan.block, backend="reference")[:, : plan.tokens]
            computes = plan.mask64[b] >> h & 1
            plan.slices.count[b, h] = keys.sum(-1) * computes


def _list_longest_first(work: torch.Tensor, length: torch.Tensor, shortest: int) -> None:
    """Write the rows of at least that length into ``work``, group by group; ``length`` is ``[groups, rows]``."""
    ranked = torch.sort(length, dim=-1, descending=True, stable=True)
    row = ranked.indices + torch.arange(len(length), device=length.device)[:, None] * length.shape[1]
    work.copy_(row.flatten()[_true_first(ranked.values.flatten() >= shortest)])


def _true_first(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the True entries, ascending, then those of the others: int64, shaped like ``mask``."""
    return torch.sort(mask.logical_not().to(torch.uint8), dim=-1, stable=True).indices


def _empty_plan(symbols: SparseSymbols) -> AttentionPlan:
    batch, heads, blocks = symbols.cache_bits.shape[0], symbols.heads, symbols.blocks

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=symbols.cache_bits.device)

    slices = None
    if symbols.slice_bits is not None:
        slices = Slices(symbols.slice_bits, empty(batch, heads, blocks), empty(1), empty(batch * heads * blocks))
    return AttentionPlan(
        mask64=empty(batch, blocks, dtype=torch.int64),
        kv_count=empty(batch, heads, blocks),
        kv_index=empty(batch, heads, blocks, blocks),
        work_count=empty(1),
        work=empty(batch * heads * blocks),
        tokens=symbols.tokens,
        block=symbols.block,
        full_count=None if symbols.masks is None else empty(batch, heads, blocks),
        masks=symbols.masks,
        linear_bits=symbols.linear_bits,
        slices=slices,
    )
