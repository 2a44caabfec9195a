"""GLM-Image: blocks over the joint sequence, text first, whose MLP runs once for the image and once for the text.

Keys and values of given images are kept before the first step, and the branch with the prompt attends to them too;
there no tiles are skipped. On a GPU none are skipped for the released model, because its heads have 40 features, which
kernels do not support.
"""

from __future__ import annotations

from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Stack, Tokens, batch_of, width_of


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    height, width = (side // transformer.config.patch_size for side in arguments["hidden_states"].shape[2:])
    return Tokens(arguments["encoder_hidden_states"].shape[1], height * width)


def kept_keys(arguments: Arguments) -> int:
    """Number of keys of given images that each attention of the call reads."""
    caches = arguments.get("kv_caches")
    reads = caches is not None and caches[0].mode == "read"
    return max((keys.shape[1] for keys in caches[0].k_caches), default=0) if reads else 0


def work(transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
    """FLOPs of projections, attention to the joint sequence and kept keys, and the MLP."""
    joint, width, batch = tokens.text + tokens.vision, width_of(transformer), batch_of(arguments)
    projection = 2 * batch * joint * width**2
    return BlockWork(
        tiles={"attn1": 4 * batch * joint * (joint + kept_keys(arguments)) * width},
        rest=(2 + 8) * projection,
        rows=2 * projection,
        bias=projection,
    )


FAMILY = Family(
    name="glm_image",
    title="GLM-Image",
    model="GlmImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    work=work,
    attentions={"attn1": True},
    parts=("attn1", "ff"),
    calls={"ff": 2},
    words=("glmimage",),
    steps=50,
    unguided=1.0,
)
