"""Krea 2: blocks over the joint sequence, text first, whose heads share keys and values; attention has an output gate.

The template's end follows the padding of a prompt, so padding lies between its tokens. diffusers masks it in every
attention. Here it is taken out before the transformer runs: all text tokens have the same position, so their order
changes nothing. The text's own blocks run in every step.
"""

from dataclasses import replace

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, masked_tokens, width_of
from dit_accel.models.samples import TextLengths

MASK = "encoder_attention_mask"


def cut(arguments: Arguments, lengths: TextLengths) -> tuple[Arguments, TextLengths]:
    """Put the valid tokens first, cut the text behind the longest prompt, and drop a mask that hides nothing."""
    text, mask, places = (arguments[name] for name in ("encoder_hidden_states", MASK, "position_ids"))
    lengths = replace(lengths, end=max(lengths.lengths), leading=True)
    order = (mask == 0).int().argsort(dim=1, stable=True)[:, : lengths.end]
    hides = lengths.ragged or lengths.end == 1  # an empty prompt has length 1 too
    return arguments | {
        "encoder_hidden_states": text.take_along_dim(order[..., None, None], 1),
        MASK: mask.take_along_dim(order, 1) if hides else None,
        "position_ids": places[text.shape[1] - lengths.end :],
    }, lengths


def mlp(transformer: nn.Module) -> float:
    """Size of the gated MLP and of attention's gate, less the savings of shared keys and values."""
    config = transformer.config
    shared = 1 - config.num_key_value_heads / config.num_attention_heads
    return 3 * config.intermediate_size / width_of(transformer) + 1 - 2 * shared


FAMILY = Family(
    name="krea2",
    title="Krea 2",
    model="Krea2Transformer2DModel",
    stacks=(Stack("transformer_blocks", joint=True),),
    tokens=masked_tokens,
    mlp=mlp,
    parts=("attn", "ff"),
    text_mask=MASK,
    cut=cut,
    steps=28,
    unguided=0.0,
    distilled={"krea2turbo": 8},
    fused="head",
)
