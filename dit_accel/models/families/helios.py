"""Helios: blocks like Wan's over a part of the video and its history, which comes first in three resolutions.

The history counts as vision. Cross-attention to the prompt may leave it out.
"""

import math

from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, Stack, Tokens

SCALES = {"short": 1, "mid": 2, "long": 4}  # of the patches of the history


def part_tokens(transformer: nn.Module, arguments: Arguments) -> int:
    return patches(arguments["hidden_states"].shape[2:], transformer.config.patch_size)


def patches(sizes: tuple[int, ...], patch_size: tuple[int, ...], scale: int = 1) -> int:
    """Number of patches of frames, height and width, which are filled up to whole ones."""
    return math.prod(-(-size // (scale * patch)) for size, patch in zip(sizes, patch_size, strict=True))


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of this part and its history; the prompt is not in the sequence."""
    count = part_tokens(transformer, arguments)
    for name, scale in SCALES.items():
        latents, places = (arguments.get(f"{kind}latents_history_{name}") for kind in ("", "indices_"))
        if latents is not None and places is not None:
            count += patches(latents.shape[2:], transformer.config.patch_size, scale)
    return Tokens(0, count)


def work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs of self-attention, cross-attention to the prompt, which may leave out the history, and the MLP."""
    config, width, vision = load.transformer.config, load.width, load.tokens.vision
    prompt = load.arguments["encoder_hidden_states"].shape[1]
    asking = part_tokens(load.transformer, load.arguments) if config.guidance_cross_attn else vision
    matrix = 2 * load.batch * width**2
    rest = matrix * (vision * (2 + 2 * config.ffn_dim / width) + 2 * prompt + 2 * asking)
    rest += 4 * load.batch * asking * prompt * width
    return load.one_attention("attn1", 4 * load.batch * vision**2 * width, matrix * vision, rest)


FAMILY = Family(
    name="helios",
    title="Helios",
    model="HeliosTransformer3DModel",
    stacks=(Stack("blocks", features=3),),
    tokens=tokens,
    work=work,
    attentions={"attn1": False},
    parts=("attn1", "attn2", "ffn"),
    makes="videos",
    words=("heliosbase",),  # other checkpoints have another pipeline, which takes no number of steps
    steps=50,
    unguided=1.0,
    streamed=("HeliosPipeline", "HeliosPyramidPipeline"),
)
