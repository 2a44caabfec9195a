"""Qwen-Image: joint blocks, text first; the padding of shorter prompts lies between text and image.

The edit pipelines' reference images follow the latents and count as vision.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dit_accel.models.family import Arguments, BlockWork, Family, Stack, Tokens, joint_work, width_of

MLP_RATIO = 4


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    return Tokens(arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1])


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Latent tokens only: pipelines drop what comes out at reference images, which ``img_shapes`` lists behind them."""
    shapes = arguments.get("img_shapes")
    first = shapes[0][0] if shapes else None  # of the first sample; a flat list has no samples
    return output[:, : math.prod(first)] if isinstance(first, (tuple, list)) else output


def work(transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
    batch = arguments["hidden_states"].shape[0]
    return joint_work("attn", batch, tokens.text + tokens.vision, width_of(transformer), MLP_RATIO)


FAMILY = Family(
    name="qwen_image",
    model="QwenImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    work=work,
    parts=("attn", "img_mlp", "txt_mlp"),
    text_mask="encoder_hidden_states_mask",
    used=used,
)
