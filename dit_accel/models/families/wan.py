"""Wan 2.1 and 2.2: blocks of self-attention over the video, cross-attention to the prompt, and an MLP."""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, OrderFacts, Stack, Tokens, video_tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of the video; the prompt is not in the sequence."""
    return video_tokens(arguments["hidden_states"].shape[2:], transformer.config.patch_size)


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the output without given frames, which pipelines drop; their tokens have timestep 0."""
    timestep = arguments["timestep"]
    if timestep.ndim < 2:
        return output
    grid = tokens(transformer, arguments).grid
    denoised = (timestep > 0).to(output.dtype).unflatten(1, grid)  # [B, frames, rows, columns]
    return output * nn.functional.interpolate(denoised[:, None], size=output.shape[2:], mode="nearest")


def work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs of self-attention, cross-attention to prompt and image tokens, and the MLP; equal in all blocks."""
    image = load.arguments.get("encoder_hidden_states_image")
    prompt = load.arguments["encoder_hidden_states"].shape[1]
    prompt += 0 if image is None else image.shape[0] * image.shape[1] // load.batch  # a first and a last frame: 2 rows
    mlp = 2 * load.transformer.config.ffn_dim / load.width
    return load.beside_prompt("attn1", load.tokens.vision, prompt, load.width, mlp)


FAMILY = Family(
    name="wan",
    title="Wan 2.1 and 2.2",
    model="WanTransformer3DModel",
    stacks=(Stack("blocks", features=3, crossed=1, joint=True),),
    tokens=tokens,
    work=work,
    attentions={"attn1": False},
    used=used,
    # RoPE tables [1, S, 1, D], and the blocks' modulation [B, S, 6C] where each token has its own timestep.
    order=OrderFacts(tables={"rope": {0: 1, 1: 1}, "condition_embedder": {1: 1}}, exit="norm_out"),
    names_transformer=True,
    makes="videos",
    frames_per_second=lambda config: 24.0 if config.get("expand_timesteps") else 16.0,  # 2.2 TI2V 5B, and all others
    words=("wan2",),
    steps=50,
    unguided=1.0,
    distilled={"fastwan": None, "turbowan": None, "wan22lightning": 4},
    sharing=("ulysses", "branches"),
    fused="head",
)
