"""HunyuanVideo, from text and from a picture: dual blocks, then single blocks over the joint sequence, text last.

diffusers masks the padding behind the text in every attention, which keeps a GPU from its fastest kernels (34 ms a
layer where 21 do, at 33K tokens). Here the padding is cut off instead, at the transformer's entrance. Norms and RoPE of
queries and keys, which take longer than the projections before them, are fused into these on a GPU.

Framepack and HunyuanVideo 1.5 are other transformers, which the adapter for any model serves at level ``output``:
Framepack cuts its padding itself, and 1.5 has three kinds of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.controller import Controller
from dit_accel.loop.memory import ModelSize, SiteSize
from dit_accel.loop.rows import take_rows
from dit_accel.models.block_adapter import BlockWork, joint_work
from dit_accel.models.fused.block_hook import BlockHook
from dit_accel.models.fused.hunyuan_video import DualBlockHook, SingleBlockHook
from dit_accel.models.token_order_hook import ReorderInput, ReorderOutput, TokenOrder, VideoAdapter
from dit_accel.sparse.site_state import symbol_bytes
from dit_accel.sparse.token_order import Grid


@dataclass(frozen=True)
class Prompts:
    """How long the prompts of a batch are.

    Args:
        lengths: text tokens of each sample that attention may read; they come first.
        counts: the same on the device, int32 ``[B]``.
        end: text tokens behind which every sample has padding only.
    """

    lengths: tuple[int, ...]
    counts: torch.Tensor
    end: int

    @property
    def ragged(self) -> bool:
        """Whether some sample still has padding among its first ``end`` tokens."""
        return min(self.lengths) < self.end


class HunyuanVideoAdapter(VideoAdapter):
    """Drives ``HunyuanVideoTransformer3DModel``."""

    family = "hunyuan_video"

    def __init__(self, transformer: nn.Module, controller: Controller, name: str) -> None:
        super().__init__(transformer, controller, name)
        self.prompts: Prompts | None = None  # of the call in progress; None where its padding stays
        self._measured = WeakIdKeyDictionary()  # mask -> its version, Prompts; pipelines pass one object at every step

    def blocks(self) -> dict[str, nn.Module]:
        """Dual, then single blocks, by name."""
        kinds = ("transformer_blocks", "single_transformer_blocks")
        return {f"{kind}.{i}": block for kind in kinds for i, block in enumerate(getattr(self.transformer, kind))}

    def hook(self, name: str, block: nn.Module) -> BlockHook:
        is_dual = name.startswith("transformer_blocks")
        return (DualBlockHook if is_dual else SingleBlockHook)(self.controller, name, self)

    def cuts_padding(self, device: torch.device) -> bool:
        """Whether padding goes: always where tiles, rows or layers may be skipped, and on a GPU.

        Elsewhere it stays, so that a CPU's steps are diffusers' own to the bit.
        """
        return self.works_inside or device.type != "cpu"

    def forward(self, original: Any, context: str | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One transformer call, without the padding behind its longest prompt."""
        arguments = self.named(args, kwargs)
        text, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
        try:
            if text is not None and mask is not None and self.cuts_padding(text.device):
                self.prompts = self._measure(mask)
                end = self.prompts.end
                arguments |= {"encoder_hidden_states": text[:, :end], "encoder_attention_mask": mask[:, :end]}
            return super().forward(original, context, (), arguments)
        finally:
            self.prompts = None

    def _measure(self, mask: torch.Tensor) -> Prompts:
        """The prompts' lengths from the mask ``[B, T]``; the host waits for them once a mask.

        The transformer reads as many text tokens as the mask has ones, wherever they are, and its text refiner reads
        those that the mask marks.
        """
        version = 0 if mask.is_inference() else mask._version
        known = self._measured.get(mask)
        if known is None or known[0] != version:
            counts = mask.sum(dim=1, dtype=torch.int32).clamp(min=1)  # no prompt at all is no number in diffusers
            position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            last = (position * (mask != 0)).amax(dim=1)
            lengths, ends = torch.stack([counts, last]).tolist()
            self._measured[mask] = known = version, Prompts(tuple(lengths), counts, max(*lengths, *ends))
        return known[1]

    def take_rows(self, arguments: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
        """The lengths of their prompts, too, where padding is cut off."""
        if self.prompts is not None and len(self.prompts.lengths) > 1:  # one length may stand for all
            lengths = tuple(self.prompts.lengths[row] for row in rows)
            self.prompts = replace(self.prompts, lengths=lengths, counts=take_rows(self.prompts.counts, rows))
        return super().take_rows(arguments, rows)

    def layout(self, arguments: dict[str, Any]) -> TokenLayout:
        """Tokens of a call: patches of the latents, then text."""
        text, vision = arguments["encoder_hidden_states"].shape[1], math.prod(self.grid(arguments))
        return TokenLayout(text, vision, self.controller.preset.blocks.size, text_first=False)

    def grid(self, arguments: dict[str, Any]) -> Grid:
        config = self.transformer.config
        _, _, frames, height, width = arguments["hidden_states"].shape
        return frames // config.patch_size_t, height // config.patch_size, width // config.patch_size

    @property
    def first_frame_apart(self) -> bool:
        """Where the picture replaces the first frame, whose tokens blocks tell by their place."""
        return self.transformer.config.image_condition_type == "token_replace"

    def order_hooks(self, order: TokenOrder) -> dict[nn.Module, ModelHook]:
        """RoPE tables ``[S, D]``, which image tokens alone have."""
        transformer = self.transformer
        return {
            transformer.rope: ReorderOutput(order, {0: 0, 1: 0}),
            next(iter(self.blocks().values())): ReorderInput(order),
            transformer.norm_out: ReorderInput(order, undo=True),
        }

    def judged(self, output: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Latents ``[B, C, F, H, W]`` without a first frame that the picture replaces."""
        return output[:, :, 1:] if self.first_frame_apart else output

    def size(self, arguments: dict[str, Any]) -> ModelSize:
        """Dual blocks remember attention and MLP apart, and project the image stream alone with a cached bias."""
        config, layout = self.transformer.config, self.layout(arguments)
        dual = SiteSize(stream=layout.vision, features=2 * layout.tokens)
        single = SiteSize(stream=layout.tokens, features=layout.tokens)
        latents = arguments["hidden_states"]
        batch, channels = latents.shape[:2]
        return ModelSize(
            output=latents.numel() // channels * config.out_channels,
            itemsize=latents.element_size(),
            batch=batch,
            layout=layout,
            heads=config.num_attention_heads,
            symbols=symbol_bytes(self.controller.preset, layout, batch, config.num_attention_heads),
            width=config.num_attention_heads * config.attention_head_dim,
            sites=(dual,) * config.num_layers + (single,) * config.num_single_layers,
        )

    def work(self, arguments: dict[str, Any]) -> BlockWork:
        """Both block kinds do the same amount a token."""
        config = self.transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        batch, tokens = arguments["hidden_states"].shape[0], self.layout(arguments).tokens
        return joint_work(batch, tokens, width, config.mlp_ratio)
