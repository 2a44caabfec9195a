"""GLM-Image: blocks over the joint sequence, text first, whose MLP runs once for the image and once for the text.

Keys and values of given images are kept before the first step, and the branch with the prompt attends to them too;
there no tiles are skipped. On a GPU none are for the released model: kernels do not support its heads' 40 features.
"""

from torch import nn

from dit_accel.models.families.family import BlockWork, Family, Load, Stack, image_tokens


def work(load: Load, block: nn.Module) -> BlockWork:
    caches = load.arguments.get("kv_caches")
    reads = caches is not None and caches[0].mode == "read"
    kept = max((keys.shape[1] for keys in caches[0].k_caches), default=0) if reads else 0
    projection = 2 * load.batch * load.joint * load.width**2
    pairs = 4 * load.batch * load.joint * (load.joint + kept) * load.width
    return load.one_attention("attn1", pairs, projection, (2 + 8) * projection)


FAMILY = Family(
    name="glm_image",
    title="GLM-Image",
    model="GlmImageTransformer2DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=image_tokens,
    work=work,
    attentions={"attn1": True},
    parts=("attn1", "ff"),
    calls={"ff": 2},
    steps=50,
    unguided=1.0,
)
