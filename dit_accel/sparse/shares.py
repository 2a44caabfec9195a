"""How many tiles each head keeps in each step, where a preset names their mean alone (``skip.density: adaptive``).

Heads differ: some spread their attention and lose much with every tile, others lose next to nothing with most of them
gone. Which is which hardly depends on the step, so it is measured once a run, in its last dense step: a few rows attend
with each of some shares s of their tiles, and head h of an attention is off by

    e_h(s) = ‖O_h(s) − O_h‖² / ‖O‖²,   O = the dense output of all its heads.

Steps differ too: an error counts by what it does to the result of the run, w_i in step i
(:func:`~dit_accel.loop.growth.error_weights`). The shares of all heads of a branch in all steps to come are those of
least ``Σ_i w_i² Σ_h e_h(s_ih)`` whose mean is the preset's. With a price λ for a tile each takes the s of least
``w_i² e_h(s) + λ s``, and λ is the least price at which the mean is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.symbols import SparseSymbols

SHARES = (0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)  # of a row's tiles, that are measured
ROW_BLOCKS = 8  # on which they are, spread over the sequence
PRICE_STEP = 0.025  # decades
PRICES = [10 ** (PRICE_STEP * step) for step in range(-560, 241)]  # λ
LEAST_WEIGHT = 1e-6


def errors_of_shares(
    dense: torch.Tensor,
    draw: Callable[[float], SparseSymbols],
    attend: Callable[[SparseSymbols], torch.Tensor],
    rows: Sequence[slice],
) -> torch.Tensor:
    """``e_h(s)`` of one attention for each of :data:`SHARES`, float32 ``[H, n]`` on the device, the mean over samples.

    Args:
        dense: O ``[B, S, H, D]``.
        draw: symbols, every row computing, that keep such a share of tiles.
        attend: attention ``[B, S, H, D]`` under symbols; rows that don't compute may hold anything.
        rows: tokens of the row-blocks that are measured, at least one.
    """
    wanted = torch.cat([dense[:, row] for row in rows], 1).float()
    size = wanted.square().sum((1, 2, 3)).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    errors = []
    for share in SHARES:
        symbols = draw(share)
        computes = torch.zeros(len(dense), symbols.blocks, symbols.heads, dtype=torch.bool, device=dense.device)
        computes[:, [row.start // symbols.block for row in rows]] = True
        made = attend(replace(symbols, cache_bits=pack_bits(computes)))
        missed = torch.cat([made[:, row] for row in rows], 1).float() - wanted
        errors.append((missed.square().sum((1, 3)) / size).mean(0))
    return torch.stack(errors, 1)


def allotted(curves: Sequence[Sequence[float]], mean: float, weights: Sequence[float]) -> torch.Tensor:
    """The share of tiles of each head in each step, float32 ``[steps, heads]`` on the host.

    Args:
        curves: of each head, its errors at :data:`SHARES`; with all tiles it has none.
        mean: share that heads keep together over the steps, 0..1.
        weights: w of each step.

    Returns:
        Of :data:`SHARES` and 1, with a mean of at most ``mean``. All are ``mean`` where nothing can be told from the
        errors, because they are no numbers, or because it is less than the least of the shares.
    """
    shares = torch.tensor((*SHARES, 1.0), dtype=torch.float64)
    errors = torch.tensor([(*curve, 0.0) for curve in curves], dtype=torch.float64)
    chosen = torch.stack([shares[(errors + price * shares).argmin(1)] for price in PRICES])  # [prices, heads]
    cheaper = [round(2 * math.log10(max(weight, LEAST_WEIGHT)) / PRICE_STEP) for weight in weights]
    places = torch.arange(len(PRICES))[:, None] - torch.tensor(cheaper)  # of λ / w², [prices, steps]
    places = places.clamp(0, len(PRICES) - 1)
    fits = (chosen.mean(1)[places].mean(1) <= mean + 1e-9).nonzero()
    if not errors.isfinite().all() or not len(fits):
        return torch.full((len(weights), len(curves)), mean)
    return chosen[places[int(fits[0])]].float()
