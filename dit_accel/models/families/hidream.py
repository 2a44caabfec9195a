"""HiDream: double blocks, then single blocks over the joint sequence, image first.

Behind the image lie T5's text and Llama's last layer, and each block adds a layer of Llama's of its own. Images that
are not square fill all of the tokens that the model knows; diffusers zeroes the keys of the rest and masks none.
"""

from __future__ import annotations

from torch import nn

from dit_accel.models.families.family import Arguments, Family, Stack, Tokens, part_of


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    latents, llama = arguments["hidden_states"], arguments["encoder_hidden_states_llama3"]
    if latents.ndim == 3:  # patches already
        vision = latents.shape[1]
    else:
        height, width = latents.shape[2:]
        is_square = height == width
        vision = (height // transformer.config.patch_size) ** 2 if is_square else transformer.max_seq
    return Tokens(arguments["encoder_hidden_states_t5"].shape[1] + 2 * llama.shape[-2], vision, text_first=False)


def mlp(transformer: nn.Module) -> float:
    """Gated MLPs of two and two thirds of four times the width: one, or some of several experts and half of one."""
    config = transformer.config
    return 8 * config.num_activated_experts + 4 if config.num_routed_experts else 8


def text_mlp(transformer: nn.Module, block: nn.Module) -> float:
    """Double blocks have one without experts for text; their text comes alone."""
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
    words=("hidream",),
)
