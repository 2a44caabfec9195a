"""Tiny image encoders, their image processors, and the pictures of image-to-video pipelines."""

import torch

SIDE, PATCH = 16, 8  # pixels of what the encoders see: 4 patches
PICTURE_TOKENS = (SIDE // PATCH) ** 2
FEATURES = 32  # of one patch
_SIZES = {
    "hidden_size": FEATURES,
    "intermediate_size": 2 * FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def clip_vision_config():
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(**_SIZES, projection_dim=FEATURES)


def clip_image_encoder():
    """`CLIPVisionModel`; hidden states `[B, PICTURE_TOKENS + 1, FEATURES]`, the class token first."""
    from transformers import CLIPVisionModel

    return CLIPVisionModel(clip_vision_config())


def clip_image_processor():
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def siglip_image_encoder():
    """`SiglipVisionModel`; hidden states `[B, PICTURE_TOKENS, FEATURES]`."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**_SIZES))


def siglip_image_processor():
    from transformers import SiglipImageProcessor

    return SiglipImageProcessor(size={"height": SIDE, "width": SIDE})


def random_picture(generator: torch.Generator, height: int, width: int):
    """A PIL picture of patches of 8×8 pixels in random colours, which an encoder's coarse view can tell apart."""
    from PIL import Image

    patches = torch.randint(256, (-(-height // 8), -(-width // 8), 3), generator=generator, dtype=torch.uint8)
    pixels = patches.repeat_interleave(8, 0).repeat_interleave(8, 1)[:height, :width]
    return Image.fromarray(pixels.numpy())
