"""Stability of FG-Attn's masks over steps (its figure 9): scores that matter later but did not before."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from dit_accel.tools.capture import Site

SLICES = (128, 64, 32, 16, 8)  # queries that share one mask of single keys
THRESHOLD = 0.5  # in units of 1 / N, the paper's
APART = 5  # steps between compared masks, as in the figure
HEADS = 4  # of each attention layer, in one sample


class Flips:
    """A visitor of an :class:`~dit_accel.tools.capture.AttentionTap`.

    It measures for each slice size the share of skipped single keys (no query of the slice gave them more than
    ``THRESHOLD / N``) that are no longer skipped ``APART`` steps later. Guidance branches that run one after the other
    are compared separately.
    """

    def __init__(self) -> None:
        self._visits: Counter[tuple[str, int]] = Counter()  # visits of a block in a step, one per branch
        self._kept: dict[tuple[str, int, int], torch.Tensor] = {}  # by block, branch and slice size
        self._flips: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)

    def visit(self, site: Site, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if site.step % APART:
            return
        branch = self._visits[site.block, site.step]
        self._visits[site.block, site.step] += 1
        q, k = (x[0, :, :HEADS].transpose(0, 1).float() for x in (q, k))  # [H, S, D]
        shares = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) * k.shape[1]
        for size in SLICES:
            whole = shares.shape[1] // size * size
            kept = shares[:, :whole].unflatten(1, (-1, size)).amax(2) > THRESHOLD
            before = self._kept.get((site.block, branch, size))
            if before is not None:
                steps = f"{site.step - APART} to {site.step}"
                self._flips[size, steps].append((int((kept & ~before).sum()), int((~before).sum())))
            self._kept[site.block, branch, size] = kept

    def results(self) -> list[dict[str, int | str | float]]:
        """Shares over all attention layers, by slice size and steps."""
        return [
            {
                "slice": size,
                "steps": steps,
                "left_out": sum(left for _, left in counts),
                "flipped": sum(flipped for flipped, _ in counts) / max(1, sum(left for _, left in counts)),
            }
            for (size, steps), counts in self._flips.items()
        ]
