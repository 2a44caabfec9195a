"""FLUX: double blocks with an image and a text stream, then single blocks over the joint sequence, text first.

ControlNet residuals and the transformer's own ends stay with diffusers: hooks sit on blocks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dit_accel.adapters.flux_blocks import DoubleBlockHook, SingleBlockHook
from dit_accel.adapters.generic import GenericAdapter, register_hook, remove_hook
from dit_accel.layout import TokenLayout
from dit_accel.schedule import StepMode
from dit_accel.state import Call

MLP_RATIO = 4


class FluxAdapter(GenericAdapter):
    """Scopes ``stack``, ``layer`` and ``head`` for ``FluxTransformer2DModel``."""

    family = "flux"
    scopes = ("stack", "layer", "head")

    def blocks(self) -> dict[str, nn.Module]:
        """Double, then single blocks, by name."""
        kinds = ("transformer_blocks", "single_transformer_blocks")
        return {f"{kind}.{i}": block for kind in kinds for i, block in enumerate(getattr(self.transformer, kind))}

    def layers(self) -> list[str]:
        return list(self.blocks())

    def attach(self, acceleration: Any) -> None:
        super().attach(acceleration)
        if self.controller.preset.forecast.scope != "stack":
            for name, block in self.blocks().items():
                is_double = name.startswith("transformer_blocks")
                register_hook(block, (DoubleBlockHook if is_double else SingleBlockHook)(self.controller, name))

    def detach(self) -> None:
        super().detach()
        for block in self.blocks().values():
            remove_hook(block)

    def layout(self, arguments: dict[str, Any]) -> TokenLayout:
        """Tokens of a call; Kontext's reference tokens follow the latents and count as vision."""
        text, vision = arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1]
        return TokenLayout(text, vision, self.controller.preset.blocks.size, text_first=True)

    def judged(self, output: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Latent tokens only: pipelines drop what comes out at reference tokens, whose first position id is not 0."""
        ids = arguments["img_ids"]
        ids = ids[0] if ids.ndim == 3 else ids
        return output * (ids[:, :1] == 0)

    def account(self, call: Call, arguments: dict[str, Any]) -> None:
        """FLOPs of each block, linear layers and attention; both block kinds do the same amount a token."""
        self.controller.read_densities(call)
        config = self.transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        batch, tokens = arguments["hidden_states"].shape[0], self.layout(arguments).tokens
        projection = 2 * batch * tokens * width * width  # one of q, k, v, out
        mlp = 2 * MLP_RATIO * projection
        attention = 4 * batch * tokens * tokens * width
        plain = 4 * projection + mlp + attention
        scope = self.controller.preset.forecast.scope
        if scope == "head":
            self.controller.last_layout = self.layout(arguments)
        for name in self.layers():
            site = call.branch.sites.get(name)
            sparse = scope == "head" and site is not None and site.plan is not None and name not in call.dense
            computed = plain
            if call.mode is StepMode.DISPATCH:
                computed = plain if scope == "head" or name in call.dense else 0.0
                if sparse:
                    rows, tiles = site.row_density, site.tile_density
                    sites_work = 2 * projection * (1 + rows) + mlp + attention * tiles
                    computed = 0.0 if site.degraded else sites_work
            elif sparse and call.mode is StepMode.UPDATE:
                computed = plain + projection * (1 - site.row_density) * (len(site.bias_coordinates) - 1)
            call.work[name] = (computed, plain)
