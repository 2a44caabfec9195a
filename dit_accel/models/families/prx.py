"""PRX: blocks over the image, whose attention also has keys of the prompt, but no queries.

Text comes first among the keys and is the same in all blocks. The MLP is three linear layers of the block.
"""

from torch import nn

from dit_accel.models.families.family import BlockWork, Family, Load, Stack, image_tokens


def work(load: Load, block: nn.Module) -> BlockWork:
    config, batch, vision = load.transformer.config, load.batch, load.tokens.vision
    width = config.hidden_size
    projection = 2 * batch * vision * width**2
    rest = 2 * 2 * batch * load.joint * width**2 + 3 * config.mlp_ratio * projection
    return load.one_attention("attention", 4 * batch * vision * load.joint * width, projection, rest)


FAMILY = Family(
    name="prx",
    title="PRX",
    model="PRXTransformer2DModel",
    stacks=(Stack("blocks"),),
    tokens=lambda *call: image_tokens(*call, padding="mask", text_asks=False),
    heads=lambda model: (model.config.num_heads, model.config.hidden_size // model.config.num_heads),
    work=work,
    attentions={"attention": True},
    parts=("attention", "down_proj"),
    feeds={"down_proj": ("gate_proj", "up_proj")},
    steps=28,
    unguided=1.0,
)
