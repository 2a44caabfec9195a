"""FLUX: double blocks with an image and a text stream, then single blocks over the joint sequence, text first.

Kontext's reference tokens follow the latents and count as vision.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, packed_tokens


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the latent tokens, whose first position id is 0, unless the output has no others, as of Klein's cache."""
    ids = arguments["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    return output * (ids[:, :1] == 0) if len(ids) == output.shape[1] else output


FAMILY = Family(
    name="flux",
    title="FLUX.1",
    model="FluxTransformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1, joint=True)),
    tokens=packed_tokens,
    used=used,
    steps=28,
    distilled={"schnell": 4},
    sharing=("ulysses",),
    fused="head",
)
