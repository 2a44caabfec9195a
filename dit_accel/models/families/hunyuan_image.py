"""HunyuanImage 2.1 and its refiner: dual blocks, then single blocks over the joint sequence, image first.

Text comes from one or two encoders. diffusers moves the valid tokens of both to the front of the text, and masks the
others. The refiner's given image is among the channels of the latents, which have a dimension for frames.
"""

import math

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    sizes = zip(arguments["hidden_states"].shape[2:], transformer.config.patch_size, strict=True)
    text, glyphs = arguments["encoder_hidden_states"].shape[1], arguments.get("encoder_hidden_states_2")
    if transformer.context_embedder_2 is not None and glyphs is not None:
        text += glyphs.shape[1]
    return Tokens(text, math.prod(size // patch for size, patch in sizes), text_first=False, padding="all")


FAMILY = Family(
    name="hunyuan_image",
    title="HunyuanImage 2.1",
    model="HunyuanImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1)),
    tokens=tokens,
    parts=("attn", "ff", "ff_context", "proj_out"),
    feeds={"proj_out": ("attn", "proj_mlp")},  # of a single block
    words=("hunyuanimage2",),
    steps=50,
    distilled={"hunyuanimage21distilled": 8, "hunyuanimage21refiner": 4},
)
