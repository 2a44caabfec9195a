"""Kandinsky 5, images and videos: blocks of self-attention over their tokens, cross-attention to text, and an MLP.

Checkpoints with their own sparse attention (``attention_type`` is ``nabla``) keep its mask: nothing is skipped.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, Stack, Tokens, video_tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Patches of latents ``[B, F, H, W, C]``; text has its own blocks."""
    return video_tokens(arguments["hidden_states"].shape[1:4], transformer.config.patch_size)


def work(load: Load, block: nn.Module) -> BlockWork:
    config, prompt = load.transformer.config, load.arguments["encoder_hidden_states"].shape[1]
    mlp = 2 * config.ff_dim / config.model_dim
    return load.beside_prompt("self_attention", load.tokens.vision, prompt, config.model_dim, mlp)


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the output without given frames, which a mask in the last channel of the latents marks."""
    return output * (1 - arguments["hidden_states"][..., -1:]) if transformer.config.visual_cond else output


def heads(transformer: nn.Module) -> tuple[int, int]:
    head_dim = sum(transformer.config.axes_dims)
    return transformer.config.model_dim // head_dim, head_dim


FAMILY = Family(
    name="kandinsky5",
    title="Kandinsky 5",
    model="Kandinsky5Transformer3DModel",
    stacks=(Stack("visual_transformer_blocks", features=3),),
    tokens=tokens,
    heads=heads,
    work=work,
    attentions={"self_attention": False},
    parts=("self_attention", "cross_attention", "feed_forward"),
    used=used,
    makes="both",
    steps=50,
    unguided=1.0,
    distilled={"distilled16steps": 16},
)
