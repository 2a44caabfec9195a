"""LTX-Video: blocks of self-attention over the video, cross-attention to the prompt, and an MLP."""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, Stack, Tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of the video, including given frames; the prompt is not in the sequence."""
    return Tokens(0, arguments["hidden_states"].shape[1])


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the output without given tokens, which have timestep 0; only the video's output has such tokens."""
    timestep = arguments["timestep"]
    if timestep.shape != output.shape[:2]:
        return output
    return output * (timestep > 0).to(output.dtype).unsqueeze(-1)


def work(load: Load, block: nn.Module) -> BlockWork:
    prompt = load.arguments["encoder_hidden_states"].shape[1]
    return load.beside_prompt("attn1", load.tokens.vision, prompt, load.width, 8)


FAMILY = Family(
    name="ltx",
    title="LTX-Video",
    model="LTXVideoTransformer3DModel",
    stacks=(Stack("transformer_blocks", features=3),),
    tokens=tokens,
    work=work,
    attentions={"attn1": False},
    parts=("attn1", "attn2", "ff"),
    used=used,
    makes="videos",
    words=("ltxvideo",),
    steps=50,
    unguided=1.0,
    sharing=("ulysses",),
)
