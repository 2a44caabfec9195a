"""FLUX: double blocks with an image and a text stream, then single blocks over the joint sequence, text first.

ControlNet residuals and the transformer's own ends stay with diffusers: hooks sit on blocks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.memory import ModelSize, SiteSize
from dit_accel.models.block_adapter import BlockAdapter, BlockWork, joint_work
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.flux import DoubleBlockHook, SingleBlockHook
from dit_accel.sparse.site_state import symbol_bytes

MLP_RATIO = 4


class FluxAdapter(BlockAdapter):
    """Drives ``FluxTransformer2DModel``."""

    family = "flux"

    def blocks(self) -> dict[str, nn.Module]:
        """Double, then single blocks, by name."""
        kinds = ("transformer_blocks", "single_transformer_blocks")
        return {f"{kind}.{i}": block for kind in kinds for i, block in enumerate(getattr(self.transformer, kind))}

    def hook(self, name: str, block: nn.Module) -> BlockHook:
        is_double = name.startswith("transformer_blocks")
        return (DoubleBlockHook if is_double else SingleBlockHook)(self.controller, name, self)

    def layout(self, arguments: dict[str, Any]) -> TokenLayout:
        """Tokens of a call; Kontext's reference tokens follow the latents and count as vision."""
        text, vision = arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1]
        return TokenLayout(text, vision, self.controller.preset.blocks.size, text_first=True)

    def judged(self, output: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Latent tokens only: pipelines drop what comes out at reference tokens, whose first position id is not 0."""
        ids = arguments["img_ids"]
        ids = ids[0] if ids.ndim == 3 else ids
        return output * (ids[:, :1] == 0)

    def size(self, arguments: dict[str, Any]) -> ModelSize:
        """Double blocks remember attention and MLP apart, and project the image stream alone with a cached bias."""
        config, layout = self.transformer.config, self.layout(arguments)
        double = SiteSize(stream=layout.vision, features=2 * layout.tokens)
        single = SiteSize(stream=layout.tokens, features=layout.tokens)
        latents = arguments["hidden_states"]
        batch = latents.shape[0]
        return ModelSize(
            output=batch * layout.vision * (config.out_channels or config.in_channels),
            itemsize=latents.element_size(),
            batch=batch,
            layout=layout,
            heads=config.num_attention_heads,
            symbols=symbol_bytes(self.controller.preset, layout, batch, config.num_attention_heads),
            width=config.num_attention_heads * config.attention_head_dim,
            sites=(double,) * config.num_layers + (single,) * config.num_single_layers,
        )

    def work(self, arguments: dict[str, Any]) -> BlockWork:
        """Both block kinds do the same amount a token."""
        config = self.transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        return joint_work(arguments["hidden_states"].shape[0], self.layout(arguments).tokens, width, MLP_RATIO)
