"""Qwen-Image: joint blocks, text first; the padding of shorter prompts lies between text and image.

The edit pipelines' reference images follow the latents and count as vision. The layered model generates several images
at once, and the image that it separates into layers follows them.
"""

import math

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, packed_tokens


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the latent tokens: pipelines drop those of reference images, which come later in ``img_shapes``."""
    shapes = arguments.get("img_shapes")
    images = shapes[0] if shapes else ()  # of the first sample; a flat list has no samples
    if not images or not isinstance(images[0], (tuple, list)):
        return output
    count = len(images) - 1 if getattr(transformer.config, "use_layer3d_rope", False) else 1
    return output[:, : sum(map(math.prod, images[:count]))]


FAMILY = Family(
    name="qwen_image",
    title="Qwen-Image and Qwen-Image-Edit",
    model="QwenImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=packed_tokens,
    text_mask="encoder_hidden_states_mask",
    used=used,
    steps=50,
    guided={"negative_prompt": " "},
    sharing=("ulysses",),
    several_images=("QwenImageEditPlusPipeline",),
    fused="head",
)
