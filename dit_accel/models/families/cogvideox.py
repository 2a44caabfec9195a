"""CogVideoX, from text and from an image: joint blocks, text first, with one MLP for both."""

import math

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    config = transformer.config
    _, frames, _, height, width = arguments["hidden_states"].shape
    grid = -(-frames // (config.patch_size_t or 1)), height // config.patch_size, width // config.patch_size
    return Tokens(arguments["encoder_hidden_states"].shape[1], math.prod(grid), grid=grid)


FAMILY = Family(
    name="cogvideox",
    title="CogVideoX",
    model="CogVideoXTransformer3DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    attentions={"attn1": True},
    parts=("attn1", "ff"),
    makes="videos",
    frames_per_second=lambda _: 8.0,
    steps=50,
    unguided=1.0,
)
