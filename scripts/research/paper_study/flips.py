"""How stable FG-Attn's masks are over steps (its figure 9): scores that come to matter after they did not."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from dit_accel.tools.capture import Site

SLICES = (128, 64, 32, 16, 8)  # queries that share one mask of single keys
THRESHOLD = 0.5  # in units of 1 / N, the paper's
APART = 5  # steps between masks that are compared, as in the figure
HEADS = 4  # of each attention that are looked at, in one sample


class Flips:
    """A visitor of an :class:`~dit_accel.tools.capture.AttentionTap`.

    For each slice size the share of single keys that were left out (no query of the slice gave them more than
    ``THRESHOLD / N``) and ``APART`` steps later are not. Branches of guidance that run one after the other are compared
    each with itself.
    """

    def __init__(self) -> None:
        self._visits: Counter[tuple[str, int]] = Counter()  # of a block in a step, one a branch
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
        """Of all attentions together, by slice size and steps."""
        return [
            {
                "slice": size,
                "steps": steps,
                "left_out": sum(left for _, left in counts),
                "flipped": sum(flipped for flipped, _ in counts) / max(1, sum(left for _, left in counts)),
            }
            for (size, steps), counts in self._flips.items()
        ]
