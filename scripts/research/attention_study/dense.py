"""Error of attention over a subset of (query, key) pairs: relative L1 error against sparsity, many masks at once.

With ``P = softmax(q kᵀ / √D)`` of dense attention, attention over the kept pairs M is ``O' = (P∘M) V / (P∘M) 1``. Both
sums are computed tile by tile once, for ``[V, 1]``; then each mask of whole tiles costs one small product.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout, block_count

SMALLEST_MASS = 1e-30  # a query with less remaining mass attends to nothing and gives 0


class DenseAttention:
    """One dense attention in float32, the reference for masks.

    Args:
        q, k, v: ``[B, S, H, D]``.
        layout: vision tokens; errors and pairs count for vision queries only, not for text.
        kv_len: int32 ``[B]``, valid keys of each sample; None = all.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        kv_len: torch.Tensor | None = None,
    ) -> None:
        self.q, self.k, self.layout, self.kv_len = q.float(), k.float(), layout, kv_len
        batch, tokens, _, head_dim = q.shape
        token = torch.arange(tokens, device=q.device)
        lengths = torch.full((batch,), tokens, device=q.device) if kv_len is None else kv_len
        self._is_key = token < lengths[:, None]  # [B, S]
        self.keys = lengths[:, None, None, None]  # N, number of keys that a query may attend to
        self._is_vision = (token >= layout.vision_start) & (token < layout.vision_start + layout.vision)
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q, self.k) * head_dim**-0.5
        scores.masked_fill_(~self._is_key[:, None, None], -torch.inf)
        self._lse = scores.logsumexp(-1, keepdim=True)  # [B, H, S, 1]
        self.probabilities = scores.softmax(-1)  # [B, H, S, S]
        self._values = functional.pad(v.float().transpose(1, 2), (0, 1), value=1.0)  # [B, H, S, D + 1]
        self._output = (self.probabilities @ self._values)[..., :-1]

    @cached_property
    def _size(self) -> torch.Tensor:
        return self._output[:, :, self._is_vision].abs().sum()

    def maxima(self, block_q: int, block_k: int) -> torch.Tensor:
        """Largest probability of each tile of ``block_q`` queries × ``block_k`` keys: ``[B, H, Tq, Tk]``."""
        return _tiles(self.probabilities, block_q, block_k).amax((-2, -1))

    def masses(self, block: int) -> torch.Tensor:
        """Share of a query block's probability on each key block, float32 ``[B, H, T, T]``; rows sum to 1."""
        masses = _tiles(self.probabilities, block, block).sum((-2, -1))
        return masses / masses.sum(-1, keepdim=True)

    def by_tiles(self, kept: torch.Tensor, block: int, *, means: bool = False) -> torch.Tensor:
        """Compute sparsity and error of masks of square tiles.

        Args:
            kept: bool ``[n, B, H, T, T]``, tiles of ``block`` × ``block`` tokens.
            block: any number of tokens.
            means: whether each skipped tile counts by the means of its keys and values.

        Returns:
            float32 ``[n, 2]``: skipped share of vision's pairs; ``Σ|O' − O| / Σ|O|`` over vision's rows.
        """
        tiles = _tiles(self.probabilities, block, block)  # [B, H, Tq, Tk, block, block]
        values = _blocks(self._values, block, 2)[:, :, None]
        sums = (tiles @ values).flatten(-2)  # [B, H, Tq, Tk, block (D + 1)]
        weights = kept.to(sums.dtype).movedim(0, -2)  # [B, H, Tq, n, Tk]
        sums = (weights @ sums).unflatten(-1, (block, -1)).movedim(-3, 0)  # [n, B, H, Tq, block, D + 1]
        keys = _blocks(self._is_key.float(), block, 1).sum(-1)
        if means:
            weights, values = self._means(block, keys)
            sums = sums + torch.stack([(weights * ~each[:, :, :, None]) @ values for each in kept])
        return torch.stack([self._sparsity(kept, block, keys), self._error(sums)], -1)

    def _means(self, block: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight of each block's mean key for each query, ``[B, H, Tq, block, Tk]``, and ``[v mean, 1]`` of each block,
        ``[B, H, 1, Tk, D + 1]``.
        """
        is_key = self._is_key[:, None, :, None]
        k, values = (
            _blocks(x * is_key, block, 2).sum(3) / keys.clamp(min=1)[:, None, :, None]
            for x in (self.k.transpose(1, 2), self._values)
        )
        scores = self.q.transpose(1, 2) @ k.transpose(2, 3) * self.q.shape[-1] ** -0.5
        weights = (scores - self._lse).exp() * keys[:, None, None]
        return _blocks(weights, block, 2), values[:, :, None]

    def by_slices(self, masks: Iterable[torch.Tensor], block: int) -> torch.Tensor:
        """Sparsity and error of masks of single keys, bool ``[B, H, Tq, S]`` each, for blocks of ``block`` queries."""
        rows = _blocks(self.probabilities, block, 2)  # [B, H, Tq, block, S]
        listed = []
        for kept in masks:
            sums = (rows * kept[:, :, :, None]).flatten(2, 3) @ self._values
            error = self._error(sums.unflatten(2, (-1, block))[None])
            listed.append(torch.cat([self._sparsity(kept[None], block, self._is_key.float()), error]))
        return torch.stack(listed)

    def _sparsity(self, kept: torch.Tensor, block_q: int, keys: torch.Tensor) -> torch.Tensor:
        """Sparsity ``[n]`` of masks ``[n, B, H, Tq, Tk]``; ``keys`` ``[B, Tk]`` = valid keys of each column."""
        queries = _blocks(self._is_vision.float(), block_q, 0).sum(-1)  # [Tq]
        pairs = (queries[:, None] * keys[:, None])[:, None]  # [B, 1, Tq, Tk]
        return 1 - (kept * pairs).sum((1, 2, 3, 4)) / (pairs.sum() * kept.shape[2])

    def _error(self, sums: torch.Tensor) -> torch.Tensor:
        """Error, float32 ``[n]``, of sums over the kept keys, ``[n, B, H, Tq, block, D + 1]``."""
        outputs = (sums[..., :-1] / sums[..., -1:].clamp(min=SMALLEST_MASS)).flatten(3, 4)[..., : self.layout.tokens, :]
        return (outputs - self._output)[..., self._is_vision, :].abs().sum((1, 2, 3, 4)) / self._size


def _tiles(x: torch.Tensor, block_q: int, block_k: int) -> torch.Tensor:
    """Split ``[B, H, S, S]`` into ``[B, H, Tq, Tk, block_q, block_k]``, padded with zeros."""
    return _blocks(_blocks(x, block_k, 3), block_q, 2).transpose(3, 4)


def _blocks(x: torch.Tensor, block: int, axis: int) -> torch.Tensor:
    """Split an axis of tokens into blocks, ``[..., S, ...]`` -> ``[..., T, block, ...]``, padded with zeros."""
    blocks = block_count(x.shape[axis], block)
    padding = [0, 0] * (x.dim() - 1 - axis) + [0, blocks * block - x.shape[axis]]
    return functional.pad(x, padding).unflatten(axis, (blocks, block))
