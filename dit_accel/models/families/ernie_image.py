"""ERNIE-Image: blocks over the joint sequence, image first; the end of shorter prompts is masked.

The pipeline runs both branches of guidance in one call.
"""

from dit_accel.models.families.family import Family, Stack, heads_of_width, image_tokens

FAMILY = Family(
    name="ernie_image",
    title="ERNIE-Image",
    model="ErnieImageTransformer2DModel",
    stacks=(Stack("layers"),),
    tokens=lambda model, call: image_tokens(model, call, call["text_bth"].shape[1], text_first=False, padding="all"),
    heads=heads_of_width,
    mlp=lambda transformer: 3 * transformer.config.ffn_hidden_size / transformer.config.hidden_size,
    attentions={"self_attention": True},
    parts=("self_attention", "mlp"),
    steps=50,
    unguided=1.0,
    distilled={"ernieimageturbo": 8},
)
