"""MiniMax-H3: blocks over one sequence of text, given images and sounds, the audio, and the video.

Everything but text counts as vision. Audio and video have schedules of their own. Attention is wider than the tokens.
"""

import torch
from torch import nn

from dit_accel.models.families.family import Arguments, BlockWork, Family, Load, Stack, Tokens


def tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    video, audio, text = (arguments[f"{kind}hidden_states"].shape[1] for kind in ("", "audio_", "encoder_"))
    return Tokens(text, video + audio, split_as_one=True)


def used(transformer: nn.Module, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return an output without given tokens, which come first and have a timestep of their own, close to no noise."""
    is_video = output.shape[-1] == arguments["hidden_states"].shape[-1]  # else audio, with other channels
    timesteps = arguments["timestep_indices"][arguments["video_indices" if is_video else "audio_indices"]]
    return output * (timesteps == timesteps[-1]).unsqueeze(-1)


def work(load: Load, block: nn.Module) -> BlockWork:
    """FLOPs of attention, whose heads are together wider than the tokens, and of the gated MLP."""
    config, rows = load.transformer.config, load.batch * load.joint
    projection = 2 * rows * config.hidden_size * load.width
    rest = 2 * projection + 6 * rows * config.hidden_size * config.ffn_dim
    return load.one_attention("attn", 4 * rows * load.joint * load.width, projection, rest)


FAMILY = Family(
    name="minimax_h3",
    title="MiniMax-H3",
    model="MiniMaxH3Transformer3DModel",
    stacks=(Stack("transformer_blocks"),),
    tokens=tokens,
    width=lambda transformer: transformer.config.hidden_size,
    work=work,
    parts=("attn", "ff"),
    used=used,
    names_transformer=True,
    makes="videos",
    is_modular=True,
    sharing=("ulysses",),
    computes_in="encoder_hidden_states",  # the patch projections, and so the latents, are float32
    fused="layer",
)
