"""Selection of the tiles and rows that compute, by their mass in the pooled map, and of single keys, as packed bits.

Tiles and rows need a threshold instead of sorting: the largest mass such that all masses up to it sum to at most
a share of the total. Masses are counted in integer units, rounded up. So their sums are equal in any order and on any
backend, and a positive mass never counts as 0. Equal masses are all selected or all skipped.
"""

import torch

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.constants import BEST_SHARE, COUNT_SLACK, SMALLEST_SHARE, UNITS
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.layout import BLOCK_SIZES, block_count
from dit_accel.kernels.packing import pack_bits


@eager_op
def select_tiles(
    probabilities: torch.Tensor,
    tau: float | None,
    *,
    top_k: float | None = None,
    always: slice = slice(0, 0),
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return S_s, the tiles that a row needs (SpargeAttn, section 3.3, with its τ = 1 − ``tau``).

    A tile's mass is ``ceil(2^30 P)``. It is skipped if and only if the masses of its row that are at most its own sum
    to at most ``tau`` of the row's total. Tiles of the largest mass are never skipped, so each row keeps one. If
    ``columns`` leave a row little mass, it is counted in finer units, ``2^(30 + s)`` with the largest s that keeps it
    within 2^30. With ``top_k`` the tiles of largest probability are kept: ``ceil(top_k · n)`` of the n tiles with
    positive probability, and all tiles equal to the last of them.

    Args:
        probabilities: float32 ``[B, H, T, T]``, rows that sum to 1 or are 0.
        tau: share of a row's mass that may be skipped, 0..1; None with ``top_k``.
        top_k: share of a row's tiles that is kept, above 0 and up to 1.
        always: blocks whose rows and columns compute whole.
        rows: bool ``[B, H, T]``, query blocks whose rows compute whole; None = none.
        columns: bool ``[B, H, T]``, key blocks whose columns compute whole; they do not count in masses and numbers of
            tiles. None = none.

    Returns:
        ``skip_bits`` of :class:`~dit_accel.kernels.symbols.SparseSymbols`.
    """
    if (tau is None) == (top_k is None):
        raise ShapeError(f"one of tau and top_k must be given, got {'none' if tau is None else 'both'}")
    backend = _resolve(probabilities, 0.0 if tau is None else tau, backend)
    if top_k is not None and not 0 < top_k <= 1:
        raise ShapeError(f"top_k must be above 0 and at most 1, got {top_k}")
    of_blocks = tuple(probabilities.shape[:3])
    checks.require_typed("probabilities", probabilities, of_blocks, torch.bool, rows=rows, columns=columns)
    blocks = probabilities.shape[-1]
    start, stop, _ = always.indices(blocks)
    units = tau_units(1 - top_k if tau is None else tau)
    if backend == "reference":
        return _select_tiles_reference(probabilities, tau, units, start, stop, rows, columns)
    from dit_accel.kernels._triton.selection import select_tiles_into

    skip_bits = probabilities.new_empty(*probabilities.shape[:3], block_count(blocks, 8), dtype=torch.uint8)
    rows, columns = (None if kept is None else kept.contiguous() for kept in (rows, columns))
    select_tiles_into(skip_bits, probabilities.contiguous(), units, start, stop, tau is None, rows, columns)
    return skip_bits


@eager_op
def select_rows(
    probabilities: torch.Tensor, tau: float, *, text: slice, vision: slice, backend: str = "auto"
) -> torch.Tensor:
    """Return S_c, the rows that text needs or that need text (FlashOmni, section 3.3, equation 1).

    Vision block i is scored by its contribution to text, ``C_i = Σ_{text j} P[j, i]``, and by the guidance it takes
    from text, ``G_i = Σ_{text j} softmax_vision(P[vision, j])_i``, both in integer units. It is reused if and only if
    in both scores the masses of its head that are at most its own sum to at most ``tau`` of the head's total.

    Probabilities of a long sequence are small, so ``exp(P)`` is close to 1 and G nearly flat: at 33K tokens differences
    between blocks are 1e-5 of G. So G is split into ``(exp(P) - 1) / Z``, in fine units, and ``1 / Z`` for all blocks.

    Args:
        probabilities: float32 ``[B, H, T, T]``, rows that sum to 1 or are 0.
        tau: share of the scores that may be reused, 0..1.
        text: blocks that hold text; nothing is reused if there are none.
        vision: blocks that hold vision tokens only. Rows of all other blocks compute.
        backend: "auto", "reference" or "triton". They agree up to the rounding of exponentials in G.

    Returns:
        ``cache_bits`` of :class:`~dit_accel.kernels.symbols.SparseSymbols`.
    """
    backend = _resolve(probabilities, tau, backend)
    batch, heads, blocks, _ = probabilities.shape
    text_range, vision_range = (range(*part.indices(blocks)) for part in (text, vision))
    if not text_range or not vision_range:
        return pack_bits(torch.ones(batch, blocks, heads, dtype=torch.bool, device=probabilities.device))
    units = UNITS >> (len(text_range) - 1).bit_length()  # so that sums over text rows fit 32 bits too
    if backend == "reference":
        return _select_rows_reference(probabilities, tau, text, vision, units)
    from dit_accel.kernels._triton.selection import select_rows_into

    cache_bits = probabilities.new_empty(batch, blocks, block_count(heads, 8), dtype=torch.uint8)
    select_rows_into(cache_bits, probabilities.contiguous(), units, tau_units(tau), text_range, vision_range)
    return cache_bits


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
    """Return bits of the keys that any query of a group needs (FG-Attn, section 4.3), without storing the scores.

    For a group of queries that share a row of bits, key j is selected if and only if for any of them

        e^(s_ij - L_i) > min(threshold / N, 0.999 max_j e^(s_ij - L_i))      L_i = log sum_j e^(s_ij)

    with s the scaled scores and N the number of keys. The second term only matters for a ``threshold`` of 0.999 or
    more, where all keys may lie below the first: every query keeps its best key.

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


def tau_units(tau: float) -> int:
    """``tau`` in units of 2^-30, so that ``total * tau_units * 2^-30`` in float64 is equal on every backend."""
    return round(tau * UNITS)


def _select_tiles_reference(probabilities, tau, units, start, stop, rows, columns) -> torch.Tensor:
    if columns is not None:
        probabilities = probabilities.masked_fill(columns[:, :, None], 0.0)
    if tau is not None:
        mass = (probabilities * UNITS).ceil().long()
        if columns is not None:
            finer = (UNITS // mass.sum(-1, keepdim=True).clamp(min=1)).clamp(min=1).double().log2().floor()
            mass = (probabilities.double() * UNITS * finer.exp2()).ceil().long()
        lowest = _lowest_mass(mass, tau)
    else:
        mass = probabilities.contiguous().view(torch.int32)  # bits of positive floats sort like the floats
        counts = (mass > 0).long()
        lowest = _lowest(mass, counts, (counts.sum(-1, keepdim=True) * units + COUNT_SLACK) // UNITS)
    tiles = ~lowest | (mass == mass.amax(-1, keepdim=True))
    tiles[..., start:stop] = True
    tiles[:, :, start:stop] = True
    if rows is not None:
        tiles |= rows[..., None]
    if columns is not None:
        tiles |= columns[:, :, None]
    return pack_bits(tiles, backend="reference")


def _select_rows_reference(probabilities, tau, text, vision, units) -> torch.Tensor:
    contribution = (probabilities[:, :, text, vision] * units).ceil().long().sum(2)  # [B, H, vision blocks]
    excess = probabilities[:, :, vision, text].expm1()  # [B, H, vision blocks, text blocks]
    sum_of_exponentials = excess.shape[2] + excess.sum(2, keepdim=True)
    share = (excess / sum_of_exponentials).sum(3)
    common = (1 / sum_of_exponentials).sum(3)
    share_units = UNITS / torch.maximum(share.sum(2, keepdim=True), common * SMALLEST_SHARE)
    guidance = (share * share_units).ceil().long() + (common * share_units).ceil().long()
    rows = torch.ones(probabilities.shape[:3], dtype=torch.bool, device=probabilities.device)
    rows[:, :, vision] = ~(_lowest_mass(contribution, tau) & _lowest_mass(guidance, tau))
    return pack_bits(rows.transpose(1, 2), backend="reference")


def _lowest_mass(mass: torch.Tensor, tau: float) -> torch.Tensor:
    """Mark entries of int64 ``[..., n]`` for which the masses up to their own sum to at most ``tau`` of the total."""
    return _lowest(mass, mass, (mass.sum(-1, keepdim=True).double() * tau_units(tau) * 2.0**-30).long())


def _lowest(rank: torch.Tensor, weight: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Mark entries of ``[..., n]`` for which the weights of ranks up to their own sum to at most a budget."""
    ascending, order = rank.sort(dim=-1)
    running = weight.gather(-1, order).cumsum(dim=-1)
    last = torch.searchsorted(ascending, ascending, right=True) - 1  # equal ranks share the last one's running sum
    fits = running.gather(-1, last) <= budget
    return torch.zeros_like(fits).scatter(-1, order, fits)


def _resolve(probabilities: torch.Tensor, tau: float, backend: str) -> str:
    checks.require_shape("probabilities", probabilities, ("B", "H", "T", "T"))
    blocks = probabilities.shape[-1]
    checks.require_shape("probabilities", probabilities, ("B", "H", blocks, blocks))
    checks.require_dtype("probabilities", probabilities, (torch.float32,))
    if not 0 <= tau <= 1:
        raise ShapeError(f"tau must be between 0 and 1, got {tau}")
    return resolve_backend(backend, probabilities)


def _select_keys_reference(bits, q, k, threshold, group, kv_len) -> None:
    batch, _, heads, head_dim = q.shape
    lengths = [k.shape[1]] * batch if kv_len is None else kv_len.clamp(0, k.shape[1]).tolist()
    for b, length in enumerate(lengths):
        for h in range(heads if length else 0):
            key = k[b, :length, h].float()
            for row, query in enumerate(q[b, :, h].float().split(group)):
                probability = (query @ key.T * head_dim**-0.5).softmax(-1)
                bound = (BEST_SHARE * probability.amax(-1, keepdim=True)).clamp(max=threshold / length)
                packed = pack_bits((probability > bound).any(0), backend="reference")
                bits[b, h, row, : len(packed)] = packed
