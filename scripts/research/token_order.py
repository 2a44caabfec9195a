#!/usr/bin/env python3
"""Measure the effect of each order of a video's tokens: self-similarity of blocks, and tiles that SpargeAttn skips.

SpargeAttn's table 4, on the queries and keys of a demo video model's own denoising steps. Attention does not depend on
the order of its tokens, so every order is measured on the same data. Writes a JSON file and a Markdown table.

    # minutes on a GPU
    python -m scripts.research.token_order --model demo-wan --output docs/results/token-order-demo-wan
    # on a CPU
    python -m scripts.research.token_order --model demo-wan --output /tmp/order --prompts 1 --every 25 --heads 1
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dit_accel.kernels import attention, pooled_map
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.policies import plan
from dit_accel.sparse.token_order import TOKEN_ORDERS
from dit_accel.tools.capture import AttentionTap, Site
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.origin import describe_run
from scripts.demo_training import clips
from scripts.demo_training.loading import demo_folder, load_demo, run_prompts, study_parser
from scripts.tables import write_table

ORDERS = ("random", *TOKEN_ORDERS)  # random is the lower bound
COLUMNS = {"q_similarity": "queries", "k_similarity": "keys", "sparsity": "left out", "l1": "L1 error"}


class OrderMeasurement:
    """Attention over a video's own tokens, measured in every order; :meth:`visit` is for an ``AttentionTap``.

    Args:
        blocks: tokens per block.
        taus: ``skip.tau_kv``, the mass that a row may lose.
        every: measure every n-th step.
        heads: number of heads to measure in each attention layer, the following ones in the next; None = all.
    """

    def __init__(self, blocks: Sequence[int], taus: Sequence[float], every: int = 1, heads: int | None = None) -> None:
        self.figures: dict[tuple[str, int, float], list[dict[str, float]]] = defaultdict(list)
        self._blocks = blocks
        self._taus = taus
        self._every = every
        self._heads = heads
        self._visits = 0

    def visit(self, site: Site, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Measure the attention of ``[B, S, H, D]`` without changing it."""
        if site.step % self._every != self._every // 2:
            return
        if self._heads is not None:
            chosen = (torch.arange(self._heads) + self._visits * self._heads) % q.shape[2]
            q, k, v = (x[:, :, chosen.to(x.device)] for x in (q, k, v))
        self._visits += 1
        dense = attention(q, k, v, plan(q, k, Skip()), kv_len=site.kv_len)
        for block in self._blocks:
            in_blocks = replace(site, layout=replace(site.layout, block=block))
            for name in ORDERS:
                places = _shuffled(site.layout) if name == "random" else in_blocks.places(name)
                ordered = [x[:, places.to(x.device)] for x in (q, k, v, dense)]
                measured = measure(*ordered, in_blocks.layout, self._taus, site.kv_len)
                for tau, figures in zip(self._taus, measured, strict=True):
                    self.figures[name, block, tau].append(figures)

    def results(self) -> list[dict[str, Any]]:
        """Means over all measured calls, by order, block and tau."""
        return [
            {
                "block": block,
                "tau_kv": tau,
                "order": name,
                "attentions": len(each),
                **{column: statistics.fmean(figures[column] for figures in each) for column in COLUMNS},
            }
            for (name, block, tau), each in sorted(
                self.figures.items(), key=lambda item: (*item[0][1:], ORDERS.index(item[0][0]))
            )
        ]


def _shuffled(layout: TokenLayout) -> torch.Tensor:
    """Random order of the video's tokens, int64 ``[S]``; text stays after them."""
    places = torch.arange(layout.tokens)
    places[: layout.vision] = torch.randperm(layout.vision, generator=torch.Generator().manual_seed(0))
    return places


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dense: torch.Tensor,
    layout: TokenLayout,
    taus: Sequence[float],
    kv_len: torch.Tensor | None = None,
) -> list[dict[str, float]]:
    """Figures of one attention ``[B, S, H, D]`` at each tau; ``dense`` is its output with every tile.

    ``q_similarity`` and ``k_similarity``: mean pairwise cosine within blocks of the video. ``sparsity``: skipped share
    of all tiles. ``l1``: ‖O' − O‖₁ / ‖O‖₁ of the resulting output.
    """
    pooled = pooled_map(q, k, layout.block, kv_len=kv_len)
    similarities = {
        name: getattr(pooled, name)[..., layout.vision_blocks].mean().item()
        for name in ("q_similarity", "k_similarity")
    }
    listed = []
    for tau in taus:
        config = Skip(policy="sparge", tau_kv=tau)
        tiles = plan(q, k, config, layout=layout, kv_len=kv_len, pooled=pooled)
        error = (attention(q, k, v, tiles, kv_len=kv_len) - dense).float().abs().sum() / dense.float().abs().sum()
        kept = tiles.kv_count.sum() / tiles.kv_index.numel()
        listed.append({**similarities, "sparsity": 1 - kept.item(), "l1": error.item()})
    return listed


def table(results: list[dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    lines = [
        f"| block | tau_kv | order | {' | '.join(COLUMNS.values())} |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for r in results:
        figures = " | ".join(f"{r[column]:.4f}" if column == "l1" else f"{r[column]:.3f}" for column in COLUMNS)
        lines.append(f"| {r['block']} | {r['tau_kv']} | {r['order']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__, ["demo-wan", "demo-hunyuan"], model="demo-wan", prompts=5, writes=".json and .md")
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step")
    parser.add_argument("--heads", type=int, help="heads to measure per attention layer, in turn; default: all")
    parser.add_argument("--blocks", type=int, nargs="+", choices=[64, 128], default=[64, 128])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.05, 0.15, 0.3])
    options = parser.parse_args()

    pipe = load_demo(options.model, options.dtype, options.device)
    measurement = OrderMeasurement(options.blocks, options.taus, options.every, options.heads)
    with AttentionTap(pipe, measurement.visit):
        arguments = demo_arguments(demo_folder(options.model))
        run_prompts(pipe, clips.held_out_prompts(options.prompts, "tuning"), arguments)
    results = measurement.results()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(options, key) for key in ("model", "prompts", "every", "heads", "dtype")}
    document = {"settings": settings, **describe_run(pipe.device), "results": results}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_table(options.output.with_suffix(".md"), table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
