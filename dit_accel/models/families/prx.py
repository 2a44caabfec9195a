"""PRX: blocks over the image, whose attention also has keys of the prompt, but no queries.

Text comes first among the keys and is the same in all blocks. The MLP is three linear layers of the block.
"""

from __future__ import annotations

from torch import nn

from dit_accel.models.families.family import (
    Arguments,
    BlockWork,
    Family,
    Stack,
    Tokens,
    batch_of,
    image_tokens,
    work_of_one,
)


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    text = arguments["encoder_hidden_states"].shape[1]
    return Tokens(text, image_tokens(transformer, arguments), padding="mask", text_asks=False)


def work(transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
    """FLOPs of the image's queries, output and gated MLP, and of both keys and values."""
    config, batch = transformer.config, batch_of(arguments)
    width, keys = config.hidden_size, tokens.vision + tokens.text
    projection = 2 * batch * tokens.vision * width**2
    rest = 2 * 2 * batch * keys * width**2 + 3 * config.mlp_ratio * projection
    return work_of_one("attention", 4 * batch * tokens.vision * keys * width, projection, rest)


FAMILY = Family(
    name="prx",
    title="PRX",
    model="PRXTransformer2DModel",
    stacks=(Stack("blocks"),),
    tokens=tokens,
    heads=lambda transformer: (
        transformer.config.num_heads,
        transformer.config.hidden_size // transformer.config.num_heads,
    ),
    work=work,
    attentions={"attention": True},
    parts=("attention", "down_proj"),
    feeds={"down_proj": ("gate_proj", "up_proj")},
    words=("prx",),
    steps=28,
    unguided=1.0,
)
