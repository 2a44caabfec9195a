"""FLUX.3: blocks over the joint sequence, text first; blocks of each kind of token before them run in every step.

Reference images follow the latents and count as vision. The output has the latents alone.
"""

from dataclasses import replace

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, packed_tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    found, references = packed_tokens(transformer, arguments), arguments.get("image_cond_hidden_states")
    return found if references is None else replace(found, vision=found.vision + references.shape[1])


FAMILY = Family(
    name="flux3",
    title="FLUX.3",
    model="Flux3Transformer2DModel",
    stacks=(Stack("single_transformer_blocks"),),
    tokens=tokens,
    mlp=lambda transformer: 3 * transformer.config.mlp_ratio,  # gated: two matrices in, one out
    parts=("attn", "ff"),
    words=("flux3", "flux3imagekleinbase"),
    steps=50,
    distilled={"flux3imageklein": 16},
    is_modular=True,
)
