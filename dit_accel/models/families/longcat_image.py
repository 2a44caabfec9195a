"""LongCat-Image, from text and for edits: double blocks, then single blocks over the joint sequence, text first.

Prompts fill all text tokens, without a mask. In edits the reference image follows the latents, counted as vision.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, packed_tokens


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the latent tokens, whose first position id is 1: the pipeline drops those of the reference, which is 2."""
    return output * (arguments["img_ids"][:, :1] == 1)


FAMILY = Family(
    name="longcat_image",
    title="LongCat-Image",
    model="LongCatImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1)),
    tokens=packed_tokens,
    parts=("attn", "ff", "ff_context", "proj_out"),
    feeds={"proj_out": ("attn", "proj_mlp")},  # of a single block
    used=used,
    steps=50,
    unguided=1.0,
)
