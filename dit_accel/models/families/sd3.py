"""Stable Diffusion 3 and 3.5: joint blocks, image first; some of 3.5-medium have a second attention, over the image."""

from dit_accel.models.families.family import Family, Stack, image_tokens

FAMILY = Family(
    name="sd3",
    title="Stable Diffusion 3 and 3.5",
    model="SD3Transformer2DModel",
    stacks=(Stack("transformer_blocks", features=3),),
    tokens=lambda *call: image_tokens(*call, text_first=False),
    # The last block returns no text: it has neither an MLP nor an output projection for it.
    text_mlp=lambda _, block: -1 if block.ff_context is None else 8,
    attentions={"attn": True, "attn2": False},
    parts=("attn", "attn2", "ff", "ff_context"),
    words=("stablediffusion3", "sd3"),
    steps=28,
    unguided=0.0,
    distilled={"35largeturbo": 4},
)
