"""Qwen-Image 2.1: blocks over the prompt and given images, and then the image, which attends to all of them.

Attention is causal, so the tokens before the image do not see it: they count as text that has keys but no queries in
the image's attention. Their own attentions, one for each piece, run as they are. With the key-value cache they run in
the first step alone, whose output has them too.
"""

import math

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, Stack, Tokens

LATENTS_PER_SLOT = 4  # tokens of an image for each of its tokens in the prompt


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    image = math.prod(arguments["img_shapes"][0][-1])
    references = arguments["hidden_states"].shape[1] - image
    text = arguments["encoder_hidden_states"].shape[1] + references - references // LATENTS_PER_SLOT
    return Tokens(text, image, padding="mask", text_asks=False)


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the image's tokens: pipelines drop those before them."""
    return output[:, -math.prod(arguments["img_shapes"][0][-1]) :]


def work(load: Load, block: nn.Module) -> BlockWork:
    width, batch, vision = load.width, load.batch, load.tokens.vision
    text = 0 if load.arguments.get("kv_cache_mode") == "cached" else load.tokens.text
    matrix = 2 * batch * width**2
    before = 4 * batch * text**2 * width  # attention of the tokens before the image, at most
    rest = matrix * (vision + text) * (2 + 3 * load.transformer.config.mlp_ratio) + 2 * matrix * text + before
    return load.one_attention("attn", 4 * batch * vision * load.joint * width, matrix * vision, rest)


FAMILY = Family(
    name="qwen_image_21",
    title="Qwen-Image 2.1",
    model="QwenImage21Transformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    work=work,
    parts=("attn", "img_mlp"),
    used=used,
    steps=40,
    several_images=("QwenImage21Pipeline",),
)
