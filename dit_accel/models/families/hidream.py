"""HiDream: double blocks, then single blocks over the joint sequence, image first.

The image is followed by T5's text and Llama's last layer; each block appends another layer of Llama's. Images that are
not square are padded to the model's largest number of tokens, whose keys diffusers zeroes but does not mask.
"""

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, part_of


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    latents, llama = arguments["hidden_states"], arguments["encoder_hidden_states_llama3"]
    if latents.ndim == 3:  # already patches
        vision = latents.shape[1]
    else:
        height, width = latents.shape[2:]
        vision = (height // transformer.config.patch_size) ** 2 if height == width else transformer.max_seq
    return Tokens(arguments["encoder_hidden_states_t5"].shape[1] + 2 * llama.shape[-2], vision, text_first=False)


def mlp(transformer: nn.Module) -> float:
    """Gated MLPs, as wide as 8/3 of the width: one, or the active experts and a shared one of half the size."""
    config = transformer.config
    return 8 * config.num_activated_experts + 4 if config.num_routed_experts else 8


def text_mlp(transformer: nn.Module, block: nn.Module) -> float:
    """Size of the text's MLP: in double blocks text has its own one, without experts."""
    return 8 if part_of(block, "block.ff_t") is not None else mlp(transformer)


FAMILY = Family(
    name="hidream",
    title="HiDream",
    model="HiDreamImageTransformer2DModel",
    stacks=(Stack("double_stream_blocks"), Stack("single_stream_blocks")),
    tokens=tokens,
    mlp=mlp,
    text_mlp=text_mlp,
    attentions={"block.attn1": True},
    parts=("block.attn1", "block.ff_i", "block.ff_t"),
    steps=50,
    unguided=0.0,
    distilled={"hidreami1dev": 28, "hidreami1fast": 16},
)
