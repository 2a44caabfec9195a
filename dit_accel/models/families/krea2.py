"""Krea 2: blocks over the joint sequence, text first, whose heads share keys and values; attention has an output gate.

The template's end follows the padding of a prompt, so padding lies between its tokens. The text's own blocks run in
every step.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, packed_tokens, width_of


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    return replace(packed_tokens(transformer, arguments), padding="mask")


def mlp(transformer: nn.Module) -> float:
    """Size of the gated MLP and of attention's gate, less the savings of shared keys and values."""
    config = transformer.config
    shared = 1 - config.num_key_value_heads / config.num_attention_heads
    return 3 * config.intermediate_size / width_of(transformer) + 1 - 2 * shared


FAMILY = Family(
    name="krea2",
    title="Krea 2",
    model="Krea2Transformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    mlp=mlp,
    parts=("attn", "ff"),
    words=("krea2",),
    steps=28,
    branches=2,
    unguided=0.0,
    distilled={"krea2turbo": 8},
)
