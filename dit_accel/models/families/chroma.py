"""Chroma: FLUX's blocks without guidance or a pooled prompt; a mask marks the text tokens that count.

diffusers passes a float attention mask in the encoder's dtype. Added to the scores, it raises those of valid tokens but
hides no padding, so attention stays dense. A bool mask hides it: encode the prompt first and pass its mask as bool.
"""

from dit_accel.models.families.family import Family, Stack, masked_tokens

FAMILY = Family(
    name="chroma",
    title="Chroma",
    model="ChromaTransformer2DModel",
    stacks=(Stack("transformer_blocks"), Stack("single_transformer_blocks", features=1)),
    tokens=masked_tokens,
    parts=("attn", "ff", "ff_context", "proj_out"),
    feeds={"proj_out": ("attn", "proj_mlp")},  # of a single block
    words=("chroma1",),
    steps=35,
    unguided=1.0,
)
