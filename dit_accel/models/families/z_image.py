"""Z-Image: blocks over the joint sequence, image first; its refiners before them run in every step.

Latents and prompts come in lists of samples, and each sequence is padded to a multiple of 32 tokens. In the Omni model
prompts come first, alternating with images, and images from an encoder last.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, tensors_in

MULTIPLE = 32  # tokens; diffusers pads to a multiple of it


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Sequence of the longest sample; padding behind shorter ones is masked."""
    patch, frames = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)

    def images(sample: list | torch.Tensor) -> int:
        sides = (tensor.shape[1:] for tensor in tensors_in(sample))
        return _filled(math.prod(side) // (frames * patch * patch) for side in sides)

    vision = [images(sample) for sample in arguments["x"]]
    text = [_filled(len(tensor) for tensor in tensors_in(sample)) for sample in arguments["cap_feats"]]
    for place, sample in enumerate(arguments.get("siglip_feats") or ()):
        vision[place] += _filled(math.prod(tensor.shape[:2]) for tensor in tensors_in(sample))
    longest = max(map(sum, zip(vision, text, strict=True)))
    return Tokens(longest - vision[0], vision[0], text_first=isinstance(arguments["x"][0], list), padding="all")


def _filled(lengths: Iterable[int]) -> int:
    return sum(-(-length // MULTIPLE) * MULTIPLE for length in lengths)


FAMILY = Family(
    name="z_image",
    title="Z-Image",
    model="ZImageTransformer2DModel",
    stacks=(Stack("layers", features=2, joint=True),),
    tokens=tokens,
    heads=lambda transformer: (transformer.config.n_heads, transformer.config.dim // transformer.config.n_heads),
    attentions={"attention": True},
    parts=("attention", "feed_forward"),
    steps=50,
    unguided=0.0,
    distilled={"zimageturbo": 8},
    fused="head",
)
