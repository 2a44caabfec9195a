"""Lumina Image 2: blocks over the joint sequence, text first; its refiners before them run in every step.

Prompts have no padding, so the images of a batch begin at different positions, and the end of shorter samples is
masked. On a GPU no tiles are skipped for the released model: kernels do not support its heads' 96 features.
"""

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, heads_of_width, image_tokens
from dit_accel.models.samples import TextMasks

_masks = TextMasks()  # diffusers reads them in every call


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    text = max(_masks.lengths(arguments["encoder_attention_mask"]).lengths)
    return image_tokens(transformer, arguments, text, padding="all")


def mlp(transformer: nn.Module) -> float:
    """Size of a gated MLP, three matrices of four times the width, less the savings of shared keys and values."""
    config = transformer.config
    return 12 - 2 * (1 - (config.num_kv_heads or config.num_attention_heads) / config.num_attention_heads)


FAMILY = Family(
    name="lumina2",
    title="Lumina Image 2",
    model="Lumina2Transformer2DModel",
    stacks=(Stack("layers", features=2),),
    tokens=tokens,
    heads=heads_of_width,
    mlp=mlp,
    parts=("attn", "feed_forward"),
    words=("luminaimage2",),
    steps=30,
    unguided=1.0,
)
