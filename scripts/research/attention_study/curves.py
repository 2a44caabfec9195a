"""Error of every method against its sparsity, over its threshold, measured while attention runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.selection import select_tiles
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.presets import Skip
from dit_accel.sparse import policies
from dit_accel.sparse.token_order import token_order
from dit_accel.tools.capture import Site

from .dense import DenseAttention

TARGETS = (0.01, 0.03, 0.05)  # relative L1 errors at which methods are compared
LOST = (0.003, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.7, 0.9)  # mass that each row may lose
KEPT = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)  # share of a row's tiles
LEVELS = tuple(2.0 ** (half / 2) for half in range(-10, 15))  # probabilities, in units of 1/N
SLICE_LEVELS = LEVELS[:14]  # up to 2.8 / N; above, queries lose their best keys
BLOCKS = (128, 64)
SMALL_BLOCKS = (32, 16)  # of FG-Attn's table 1; no policy uses blocks this small
JUDGES = (None, 0.3, 0.4, 0.5)  # theta, the mean pairwise cosine that a block needs to be represented by its mean
SPARGE, AVERAGE_QUERY, SLICES_ABOVE = "SpargeAttn", "FG-Attn, average query", "FG-Attn, exact"
WITH_MEANS = ", means"  # skipped tiles count as one key each, by their means
MEANS_OF = (SPARGE, "top-k")
TRUE_MASS, TILES_ABOVE = "tiles by true mass", "tiles with any score above c/N"


@dataclass(frozen=True)
class Method:
    """A policy with a range of thresholds."""

    name: str
    thresholds: tuple[float, ...]
    config: Callable[[float], Skip]


def judged(theta: float | None) -> str:
    """SpargeAttn's name with a self-similarity threshold."""
    return SPARGE if theta is None else f"{SPARGE}, judge {theta}"


def _sparge(theta: float | None) -> Method:
    return Method(judged(theta), LOST, lambda lost: Skip(policy="sparge", tau_kv=lost, similarity=theta))


def _average_query(level: float) -> Skip:
    return Skip(policy="fg_attn", mask="average_query", key_threshold=level)


METHODS = (
    *map(_sparge, JUDGES),
    Method("top-k", KEPT, lambda share: Skip(policy="sparge", top_k=share)),
    Method("SLA, sparse part", KEPT, lambda share: Skip(policy="sla", critical=share, negligible=0.0)),
    Method(AVERAGE_QUERY, SLICE_LEVELS[::2], _average_query),
)


@dataclass
class Curve:
    """Sparsity and error over a method's thresholds, for every attention measured."""

    thresholds: tuple[float, ...]
    layers: list[str] = field(default_factory=list)
    figures: list[torch.Tensor] = field(default_factory=list)  # [n, 2] each, on the device

    def summary(self) -> dict[str, Any]:
        """Means over attentions, the worst error, and the sparsity at each target error: overall and by layer."""
        figures = torch.stack(self.figures).cpu()  # [attentions, n, 2]
        sparsity, error = figures.mean(0).T.tolist()
        by_layer = {}
        for layer in dict.fromkeys(self.layers):
            of_layer = figures[[name == layer for name in self.layers]].mean(0).T.tolist()
            by_layer[layer] = [round(sparsity_at(target, *of_layer), 4) for target in TARGETS]
        return {
            "thresholds": self.thresholds,
            "sparsity": [round(share, 5) for share in sparsity],
            "error": [round(each, 6) for each in error],
            "worst": [round(each, 6) for each in figures[..., 1].amax(0).tolist()],
            "sparsity_at": [round(sparsity_at(target, sparsity, error), 4) for target in TARGETS],
            "sparsity_at_by_layer": by_layer,
        }


def sparsity_at(target: float, sparsity: Sequence[float], error: Sequence[float]) -> float:
    """Return the largest sparsity with an error of at most ``target``; the curve's end if it stays below.

    Between two points the curve is a power law, and a straight line from (0, 0) to the first point.
    """
    best = 0.0
    points = sorted([(0.0, 0.0), *zip(sparsity, error, strict=True)])
    for (share, err), (next_share, next_err) in pairwise(points):
        if err > target:
            continue
        if next_err <= target:
            best = next_share
        elif min(share, err) > 0:
            best = share * (next_share / share) ** (math.log(target / err) / math.log(next_err / err))
        else:
            best = share + (next_share - share) * (target - err) / (next_err - err)
    return best


class Measurement:
    """Errors of all methods on each attention that it visits; :meth:`visit` is for an ``AttentionTap``.

    Args:
        orders: orders of a video's tokens, named as in ``dit_accel.sparse.token_order``.
        every: measure every n-th step.
        methods: policies to measure. Methods that need all probabilities are always measured: tiles by their true
            masses, tiles and slices by their largest probabilities.
    """

    def __init__(self, orders: Sequence[str], every: int = 1, methods: Sequence[Method] = METHODS) -> None:
        self.attentions = 0
        self._orders = orders
        self._every = every
        self._methods = methods
        self._curves: dict[tuple[str, str, str], Curve] = {}  # by method, order and tile size
        self._layer = ""  # of the attention in progress
        self._order = ""

    def visit(self, site: Site, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Measure the attention of ``[B, S, H, D]`` without changing it."""
        if site.step % self._every != self._every // 2:
            return
        self.attentions += 1
        self._layer = site.block
        for order in self._orders if site.grid else ("raster",):
            self._order = order
            for block in BLOCKS:
                places = _places(site, order, block).to(q.device)
                dense = DenseAttention(
                    *(x[:, places] for x in (q, k, v)), replace(site.layout, block=block), site.kv_len
                )
                self._measure_policies(dense)
                self._measure_levels(dense, (block, *SMALL_BLOCKS) if block == min(BLOCKS) else (block,))

    def results(self) -> list[dict[str, Any]]:
        """Summary of each curve."""
        return [
            {"method": method, "order": order, "tile": tile, **curve.summary()}
            for (method, order, tile), curve in self._curves.items()
        ]

    def _measure_policies(self, dense: DenseAttention) -> None:
        q, k, layout, kv_len = dense.q, dense.k, dense.layout, dense.kv_len
        pooled = pooled_map(q, k, layout.block, kv_len=kv_len)
        tiles = {}  # masks of whole tiles, by method name and thresholds
        for method in self._methods:
            configs = map(method.config, method.thresholds)
            drawn = [policies.draw(q, k, layout, config, kv_len=kv_len, pooled=pooled) for config in configs]
            if drawn[0].slice_bits is None:
                tiles[method.name, method.thresholds] = torch.stack([kept_tiles(symbols) for symbols in drawn])
            else:
                slices = dense.by_slices(map(kept_keys, drawn), layout.block)
                self._add(method.name, f"{layout.block} x 1", method.thresholds, slices)
        masses = dense.masses(layout.block)
        by_mass = [select_tiles(masses, lost, always=layout.text_blocks) for lost in LOST]
        tiles[TRUE_MASS, LOST] = unpack_bits(torch.stack(by_mass), layout.blocks)
        stacked, sizes = torch.cat(list(tiles.values())), [len(kept) for kept in tiles.values()]
        for means in (False, True):
            figures = dense.by_tiles(stacked, layout.block, means=means).split(sizes)
            for (name, thresholds), each in zip(tiles, figures, strict=True):
                if not means or name in MEANS_OF:
                    self._add(name + WITH_MEANS * means, f"{layout.block} x {layout.block}", thresholds, each)

    def _measure_levels(self, dense: DenseAttention, sizes: Sequence[int]) -> None:
        """Measure tiles and slices with a probability above c/N (FG-Attn, table 1)."""
        block = dense.layout.block
        for size in sizes:
            maxima = levels(dense, size, size)
            kept = torch.stack([maxima > level for level in LEVELS])
            self._add(TILES_ABOVE, f"{size} x {size}", LEVELS, dense.by_tiles(kept, size))
        maxima = levels(dense, block, 1)
        figures = dense.by_slices((maxima > level for level in SLICE_LEVELS), block)
        self._add(SLICES_ABOVE, f"{block} x 1", SLICE_LEVELS, figures)

    def _add(self, method: str, tile: str, thresholds: tuple[float, ...], figures: torch.Tensor) -> None:
        curve = self._curves.setdefault((method, self._order, tile), Curve(thresholds))
        curve.layers.append(self._layer)
        curve.figures.append(figures)


def levels(dense: DenseAttention, block_q: int, block_k: int) -> torch.Tensor:
    """Compute the level c up to which a tile of ``block_q`` × ``block_k`` is kept: ``[B, H, Tq, Tk]``.

    It is N times the tile's largest probability; keys in blocks with text are always kept, as in the policies. Single
    keys above a level are FG-Attn's exact mask; from level 1 on the policy also keeps each query's best key.
    """
    block, text = dense.layout.block, dense.layout.text_blocks
    maxima = dense.maxima(block_q, block_k) * dense.keys
    maxima[..., text.start * block // block_k : text.stop * block // block_k] = torch.inf
    return maxima


def kept_tiles(symbols: SparseSymbols) -> torch.Tensor:
    """Computed tiles, bool ``[B, H, T, T]``, of symbols whose rows are all computed."""
    return unpack_bits(symbols.skip_bits, symbols.blocks)


def kept_keys(symbols: SparseSymbols) -> torch.Tensor:
    """Keys that a query block attends to, bool ``[B, H, T, S]``: keys of whole tiles, and single keys."""
    single = unpack_bits(symbols.slice_bits, symbols.blocks * symbols.block)
    return (single | kept_tiles(symbols).repeat_interleave(symbols.block, -1))[..., : symbols.tokens]


def _places(site: Site, order: str, block: int) -> torch.Tensor:
    """Source index of each token, int64 ``[S]``: video tokens in the given order, text tokens unchanged."""
    layout = site.layout
    places = torch.arange(layout.tokens)
    if site.grid:
        clip = slice(layout.vision_start, layout.vision_start + layout.vision)
        places[clip] = layout.vision_start + token_order(order, site.grid, block)
    return places
