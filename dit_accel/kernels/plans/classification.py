"""Classification of tiles into SLA's three classes (section 4.1, equation 3) by the pooled map, as packed bits.

In each row the tiles of highest probability are critical and attend, tiles of lowest probability are negligible and are
skipped, and the others are marginal and use linear attention. Among equal probabilities the earlier key block ranks
higher, so that the classes have the same sizes in every row and are equal on all backends.
"""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.constants import SHARE_BITS
from dit_accel.kernels.custom_ops import custom_op
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.packing import pack_bits


def _empty(probabilities: torch.Tensor, **_) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, blocks = probabilities.shape
    shape = *rows, block_count(blocks, 8)
    return probabilities.new_empty(shape, dtype=torch.uint8), probabilities.new_empty(shape, dtype=torch.uint8)


@custom_op(_empty)
def classify_tiles(
    probabilities: torch.Tensor,
    critical: float,
    negligible: float,
    *,
    always: slice = slice(0, 0),
    valid_blocks: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the critical and the marginal tiles of each row.

    Both shares refer to the row's candidates: n key blocks that are valid and not in ``always``. ``critical * n``
    tiles, rounded, but at least one, are critical. ``negligible * n`` of the other tiles, rounded, are negligible, or
    all others if there are fewer. Rows and valid columns of ``always`` are critical as a whole.

    Args:
        probabilities: float32 ``[B, H, T, T]``, rows that sum to 1 or are 0.
        critical: share of a row's candidates, 0..1; 0 = none.
        negligible: share of a row's candidates, 0..1; with ``critical`` at most 1.
        always: blocks whose rows and columns are critical.
        valid_blocks: int32 ``[B]``, number of key blocks with a valid token; later ones are in no class. None = all.

    Returns:
        ``skip_bits`` (critical), ``linear_bits`` (marginal) of :class:`~dit_accel.kernels.symbols.SparseSymbols`.
    """
    checks.require_shape("probabilities", probabilities, ("B", "H", "T", "T"))
    batch, _, blocks, _ = probabilities.shape
    checks.require_shape("probabilities", probabilities, ("B", "H", blocks, blocks))
    checks.require_dtype("probabilities", probabilities, (torch.float32,))
    require_shares(critical, negligible)
    checks.require_typed("probabilities", probabilities, (batch,), torch.int32, valid_blocks=valid_blocks)
    start, stop, _ = always.indices(blocks)
    units = round(critical * (1 << SHARE_BITS)), round(negligible * (1 << SHARE_BITS))
    if resolve_backend(backend, probabilities) == "reference":
        return _classify_reference(probabilities, *units, start, stop, valid_blocks)
    from dit_accel.kernels._triton.classification import classify_tiles_into

    bits = _empty(probabilities)
    lengths = None if valid_blocks is None else valid_blocks.contiguous()  # kernels read it by address
    classify_tiles_into(*bits, probabilities.contiguous(), *units, start, stop, lengths)
    return bits


def require_shares(critical: float, negligible: float) -> None:
    """Check that both shares and their sum lie between 0 and 1."""
    for name, share in (("critical", critical), ("negligible", negligible)):
        if not 0 <= share <= 1:
            raise ShapeError(f"{name} must be between 0 and 1, got {share}")
    if critical + negligible > 1:
        raise ShapeError(f"critical and negligible must sum to at most 1, got {critical} + {negligible}; lower one")


def _classify_reference(
    probabilities, critical_units, negligible_units, start, stop, valid_blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, blocks, _ = probabilities.shape
    column = torch.arange(blocks, device=probabilities.device)
    is_always = (column >= start) & (column < stop)
    is_valid = torch.ones(batch, blocks, dtype=torch.bool, device=probabilities.device)
    if valid_blocks is not None:
        is_valid = column < valid_blocks[:, None]
    is_candidate = is_valid & ~is_always
    count = is_candidate.sum(1)
    critical = _share_of(count, critical_units)
    if critical_units:
        critical = critical.clamp(min=1).minimum(count)
    negligible = torch.minimum(_share_of(count, negligible_units), count - critical)

    scores = torch.where(is_candidate[:, None, None], probabilities, -1.0)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, column.expand_as(order))
    is_critical = rank < critical[:, None, None, None]
    is_marginal = ~is_critical & (rank < (count - negligible)[:, None, None, None])
    whole = is_valid[:, None, None] & (is_always | is_always[:, None])  # rows and columns that are critical as a whole
    return (pack_bits(is_critical | whole, backend="reference"), pack_bits(is_marginal & ~whole, backend="reference"))


def _share_of(count: torch.Tensor, units: int) -> torch.Tensor:
    """``count * units / 2^30``, rounded."""
    return (count * units + (1 << SHARE_BITS - 1)) >> SHARE_BITS
