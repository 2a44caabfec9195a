"""ERNIE-Image: blocks over the joint sequence, image first; the end of shorter prompts is masked.

The pipeline runs both branches of guidance in one call.
"""

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, heads_of_width, image_tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    return Tokens(arguments["text_bth"].shape[1], image_tokens(transformer, arguments), text_first=False, padding="all")


FAMILY = Family(
    name="ernie_image",
    title="ERNIE-Image",
    model="ErnieImageTransformer2DModel",
    stacks=(Stack("layers"),),
    tokens=tokens,
    heads=heads_of_width,
    mlp=lambda transformer: 3 * transformer.config.ffn_hidden_size / transformer.config.hidden_size,
    attentions={"self_attention": True},
    parts=("self_attention", "mlp"),
    words=("ernieimage",),
    steps=50,
    unguided=1.0,
    distilled={"ernieimageturbo": 8},
)
