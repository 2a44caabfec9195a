"""FLUX.2, dev and Klein: double blocks, then single blocks whose attention and MLP are one module, text first.

Reference images follow the latents and count as vision. If Klein's key-value cache holds their keys from the first step
on, attention has more keys than queries and runs unaccelerated.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, packed_tokens


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the latent tokens, whose first position id is 0; a call that fills Klein's cache returns no others."""
    ids = arguments["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    return output * (ids[:, :1] == 0) if len(ids) == output.shape[1] else output


FAMILY = Family(
    name="flux2",
    title="FLUX.2",
    model="Flux2Transformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1, joint=True)),
    tokens=packed_tokens,
    mlp=lambda transformer: 3 * transformer.config.mlp_ratio,  # gated: two matrices in, one out
    used=used,
    words=("flux2", "flux2kleinbase"),
    steps=50,
    distilled={"klein": 4},
    sharing=("ulysses",),
    several_images=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline"),
    fused="head",
)
