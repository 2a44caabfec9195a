"""HunyuanVideo 1.5, from text and from an image: dual blocks over the video, then text of two encoders and the image's.

diffusers moves the valid tokens of all three kinds to the front of the text, and masks the others.
"""

from dataclasses import replace

from torch import nn

from dit_accel.models.families import hunyuan_video
from dit_accel.models.families.family import Arguments, Family, OrderFacts, Stack, Tokens

TEXT = ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    text = sum(arguments[name].shape[1] for name in TEXT)
    return replace(hunyuan_video.tokens(transformer, arguments), text=text, padding="all")


FAMILY = Family(
    name="hunyuan_video15",
    title="HunyuanVideo 1.5",
    model="HunyuanVideo15Transformer3DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    parts=("attn", "ff", "ff_context"),
    order=OrderFacts(tables={"rope": {0: 0, 1: 0}}, exit="norm_out"),  # tables [S, D]
    makes="videos",
    steps=50,
)
