#!/usr/bin/env python3
"""What each order of a clip's tokens does to blocks: their self-similarity, and the tiles that SpargeAttn leaves out.

SpargeAttn's table 4, on the queries and keys of a demo video model's own denoising steps. Attention does not care for
the order of its tokens, so every order is measured on the same ones. Writes a JSON file and a Markdown table.

    python scripts/token_order.py --model demo-wan --output docs/results/token-order-demo-wan    # minutes on a GPU
    python scripts/token_order.py --model demo-wan --output /tmp/order --prompts 1 --every 25
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from demo_models import clips
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.adapters import denoisers
from dit_accel.bench.origin import describe_run
from dit_accel.demo import demo_arguments, demo_path
from dit_accel.kernels import attention, lower, pack_bits, pooled_map
from dit_accel.layout import TokenLayout
from dit_accel.policies import sparge
from dit_accel.symbols import SparseSymbols
from dit_accel.token_order import TOKEN_ORDERS, Grid, token_order

ORDERS = ("random", *TOKEN_ORDERS)  # random is the floor
COLUMNS = {"q_similarity": "queries", "k_similarity": "keys", "sparsity": "left out", "l1": "L1 error"}


class OrderMeasurement(TorchFunctionMode):
    """While it is on, attention over a clip's own tokens is measured in every order on its way.

    Args:
        pipe: a pipeline of Wan or HunyuanVideo; tokens of text, if any, follow those of the clip.
        blocks: tokens in a block.
        taus: ``skip.tau_kv``, the mass that a row may lose.
        every: one step in so many is measured.
    """

    def __init__(self, pipe: Any, blocks: Sequence[int], taus: Sequence[float], every: int = 1) -> None:
        super().__init__()
        self.figures: dict[tuple[str, int, float], list[dict[str, float]]] = defaultdict(list)
        self._pipe = pipe
        self._blocks = blocks
        self._taus = taus
        self._every = every
        self._grid: Grid | None = None  # of the transformer call in progress, where it is measured
        self._handles: list[Any] = []

    def __enter__(self) -> OrderMeasurement:
        for model in denoisers(self._pipe).values():
            self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        while self._handles:
            self._handles.pop().remove()

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention and self._grid is not None:
            self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _begin(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        step = self._pipe.scheduler.step_index or 0
        latents = kwargs["hidden_states"].shape[2:]
        patch = model.config.patch_size
        patch = patch if isinstance(patch, (tuple, list)) else (model.config.patch_size_t, patch, patch)
        grid = tuple(size // side for size, side in zip(latents, patch, strict=True))
        self._grid = grid if step % self._every == self._every // 2 else None

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Measures ``[B, H, S, D]`` of the clip's own tokens; cross-attention and text refiners have other lengths."""
        vision = torch.Size(self._grid).numel()
        if query.shape[2] != key.shape[2] or query.shape[2] < vision:
            return
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        kv_len = None if attn_mask is None else attn_mask[:, 0, -1].sum(-1, dtype=torch.int32)  # padding comes last
        for name in ORDERS:
            for block in self._blocks:
                places = torch.arange(q.shape[1])
                places[:vision] = self._order(name, vision, block)
                ordered = [x[:, places.to(x.device)] for x in (q, k, v)]
                layout = TokenLayout(q.shape[1] - vision, vision, block, text_first=False)
                for tau, figures in zip(self._taus, measure(*ordered, layout, self._taus, kv_len), strict=True):
                    self.figures[name, block, tau].append(figures)

    def _order(self, name: str, vision: int, block: int) -> torch.Tensor:
        if name == "random":
            return torch.randperm(vision, generator=torch.Generator().manual_seed(0))
        return token_order(name, self._grid, block)

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


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TokenLayout,
    taus: Sequence[float],
    kv_len: torch.Tensor | None = None,
) -> list[dict[str, float]]:
    """Figures of one attention ``[B, S, H, D]`` at each tau.

    ``q_similarity`` and ``k_similarity``: mean pairwise cosine within blocks of the clip. ``sparsity``: share of all
    tiles that is left out. ``l1``: ‖O' − O‖₁ / ‖O‖₁ of the attention's output for that.
    """
    pooled = pooled_map(q, k, layout.block, kv_len=kv_len)
    batch, tokens, heads, _ = q.shape
    similarities = {
        name: getattr(pooled, name)[..., layout.vision_blocks].mean().item()
        for name in ("q_similarity", "k_similarity")
    }
    every_row = pack_bits(torch.ones(batch, layout.blocks, heads, dtype=torch.bool, device=q.device))
    dense = attention(q, k, v, lower(SparseSymbols(every_row, None, heads, tokens, layout.block)), kv_len=kv_len)
    listed = []
    for tau in taus:
        bits = sparge.tile_bits(pooled.probabilities, layout, tau)
        plan = lower(SparseSymbols(every_row, bits, heads, tokens, layout.block))
        error = (attention(q, k, v, plan, kv_len=kv_len) - dense).float().abs().sum() / dense.float().abs().sum()
        kept = plan.kv_count.sum() / plan.kv_index.numel()
        listed.append({**similarities, "sparsity": 1 - kept.item(), "l1": error.item()})
    return listed


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        f"| block | tau_kv | order | {' | '.join(COLUMNS.values())} |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for r in results:
        figures = " | ".join(f"{r[column]:.4f}" if column == "l1" else f"{r[column]:.3f}" for column in COLUMNS)
        lines.append(f"| {r['block']} | {r['tau_kv']} | {r['order']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--model", choices=["demo-wan", "demo-hunyuan"], default="demo-wan")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="one step in so many is measured")
    parser.add_argument("--blocks", type=int, nargs="+", choices=[64, 128], default=[64, 128])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.05, 0.15, 0.3])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    folder = demo_path(options.model)
    if folder is None:
        parser.error(f"--model {options.model} is not in this package")
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=getattr(torch, options.dtype)).to(
        options.device
    )
    pipe.set_progress_bar_config(disable=True)
    measurement = OrderMeasurement(pipe, options.blocks, options.taus, options.every)
    with measurement:
        for prompt in clips.held_out_prompts(options.prompts, "tuning"):
            generator = torch.Generator("cpu").manual_seed(prompt.seed)
            pipe(**demo_arguments(folder), prompt=prompt.prompt, generator=generator, output_type="latent")
    results = measurement.results()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(options, key) for key in ("model", "prompts", "every", "dtype")}
    document = {"settings": settings, **describe_run(pipe.device), "results": results}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
