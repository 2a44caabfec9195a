"""Wan 2.1 and 2.2: blocks of self-attention over the clip, cross-attention to the prompt, and an MLP.

Wan 2.2's two transformers are two adapters of one controller: they share the schedule, and nothing that one remembers
reaches the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn
from torch.nn import functional

from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.memory import ModelSize, SiteSize
from dit_accel.models.block_adapter import BlockWork
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.wan import WanBlockHook
from dit_accel.models.token_order_hook import ReorderInput, ReorderOutput, TokenOrder, VideoAdapter
from dit_accel.sparse.site_state import symbol_bytes
from dit_accel.sparse.token_order import Grid


class WanAdapter(VideoAdapter):
    """Drives ``WanTransformer3DModel``."""

    family = "wan"

    def blocks(self) -> dict[str, nn.Module]:
        """Blocks by name, which says whose they are where a pipeline has two transformers."""
        return {f"{self.name}.blocks.{index}": block for index, block in enumerate(self.transformer.blocks)}

    def hook(self, name: str, block: nn.Module) -> BlockHook:
        return WanBlockHook(self.controller, name, self)

    def grid(self, arguments: dict[str, Any]) -> Grid:
        latents = arguments["hidden_states"].shape[2:]
        return tuple(size // patch for size, patch in zip(latents, self.transformer.config.patch_size, strict=True))

    def order_hooks(self, order: TokenOrder) -> dict[nn.Module, ModelHook]:
        """RoPE tables ``[1, S, 1, D]``; where each token has its own timestep, the blocks' modulation ``[B, S, 6C]``.

        The modulation at the exit, another part of that output, stays as it is, for the order is taken off before it.
        """
        transformer = self.transformer
        return {
            transformer.rope: ReorderOutput(order, {0: 1, 1: 1}),
            transformer.condition_embedder: ReorderOutput(order, {1: 1}),
            transformer.blocks[0]: ReorderInput(order),
            transformer.norm_out: ReorderInput(order, undo=True),
        }

    def layout(self, arguments: dict[str, Any]) -> TokenLayout:
        """The clip's tokens; the prompt is no part of the sequence."""
        return TokenLayout(0, math.prod(self.grid(arguments)), self.controller.preset.blocks.size)

    def judged(self, output: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """All but frames that are given, for pipelines drop what comes out there: their tokens have timestep 0."""
        timestep = arguments["timestep"]
        if timestep.ndim < 2:
            return output
        made = (timestep > 0).to(output.dtype).unflatten(1, self.grid(arguments))  # [B, frames, rows, columns]
        return output * functional.interpolate(made[:, None], size=output.shape[2:], mode="nearest")

    def size(self, arguments: dict[str, Any]) -> ModelSize:
        """Each block remembers attention, cross-attention and MLP; at level head cross-attention in any case."""
        config, layout = self.transformer.config, self.layout(arguments)
        latents = arguments["hidden_states"]
        batch, channels = latents.shape[:2]
        site = SiteSize(stream=layout.tokens, features=3 * layout.tokens, sparse_features=layout.tokens)
        return ModelSize(
            output=latents.numel() // channels * config.out_channels,
            itemsize=latents.element_size(),
            batch=batch,
            layout=layout,
            heads=config.num_attention_heads,
            symbols=symbol_bytes(self.controller.preset, layout, batch, config.num_attention_heads),
            width=config.num_attention_heads * config.attention_head_dim,
            sites=(site,) * config.num_layers,
        )

    def work(self, arguments: dict[str, Any]) -> BlockWork:
        """Self-attention, cross-attention to prompt and image tokens, and the MLP; all blocks do the same."""
        config = self.transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        batch, tokens = arguments["hidden_states"].shape[0], self.layout(arguments).tokens
        image = arguments.get("encoder_hidden_states_image")
        context = arguments["encoder_hidden_states"].shape[1]
        context += 0 if image is None else image.shape[0] * image.shape[1] // batch  # a first and a last frame: 2 rows
        projection = 2 * batch * tokens * width * width
        return BlockWork(
            rows=projection,
            row_blocks=3 * projection,  # queries of both attentions, and the output of cross-attention
            tiles=4 * batch * tokens * tokens * width,
            rest=2 * projection  # keys and values
            + 4 * batch * context * width * (width + tokens)  # of the prompt, and the softmax over them
            + 4 * batch * tokens * width * config.ffn_dim,
            bias=projection,
        )
