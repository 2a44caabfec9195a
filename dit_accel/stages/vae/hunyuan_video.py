"""The decoder of ``AutoencoderKLHunyuanVideo``: causal convolutions whose borders repeat pixels and the first frame.

Group normalisation and SiLU write their output with its border, and bias and residual are added where a convolution
stores its sums. The middle block attends frame by frame, each to the frames up to it, instead of masking half of all.
"""

from typing import Any

import torch
from torch import nn

from dit_accel.stages.vae.autoencoder_kl import has_one_head, projections
from dit_accel.stages.vae.layers import Layers, MaybeTensor, attended, parts_of

PEAKS = ((89_000, 30_600),)
SHARED_FROM = 2**12  # latents
PARTS = ("Decoder3D", "MidBlock3D", "UpBlock3D", "CausalConv3d", "ResnetBlockCausal3D", "UpsampleCausal3D")
KNOWN = {"Attention", *(f"HunyuanVideo{part}" for part in PARTS)}
REQUIRED = {"pad_mode": ("replicate",), "upsample_factor": ((1, 2, 2), (2, 2, 2))}


def why_not_module(module: nn.Module) -> str | None:
    """Return why an attention can't run on this page, or None."""
    is_other = type(module).__name__ == "Attention" and not has_one_head(module)
    return "is not the attention of diffusers, with one head" if is_other else None


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return frames ``[B, 3, T, H, W]`` of latents ``[B, C, t, h, w]``."""
    x = layers.convolved(decoder.conv_in.conv, layers.padded(layers.band(latents), 2))
    for part in (part for stage in (decoder.mid_block, *decoder.up_blocks) for part in parts_of(stage)):
        kind = type(part).__name__
        if kind == "Attention":
            x = _attended(part, x, layers)
        elif kind == "HunyuanVideoUpsampleCausal3D":
            frames = part.upsample_factor[0] == 2
            x = layers.upsampled(part.conv.conv, layers.padded(x, 1 if frames else 2), frames=frames)
        else:
            h = _behind_norm(part.norm1, part.conv1, x, layers, biased=False)
            if part.conv_shortcut is not None:  # here, so that nothing holds the block's input, a third of the peak
                x = layers.convolved(part.conv_shortcut.conv, x)
            x = _behind_norm(part.norm2, part.conv2, h, layers, part.conv1.conv.bias, residual=x)
            del h
    return layers.whole(_behind_norm(decoder.conv_norm_out, decoder.conv_out, x, layers))


def _behind_norm(
    norm: nn.Module, layer: nn.Module, x: torch.Tensor, layers: Layers, bias: MaybeTensor = None, **options: Any
) -> torch.Tensor:
    """Add a bias, normalise, apply SiLU and convolve."""
    moments = layers.moments(norm, x, bias)

    def some(frames: slice) -> torch.Tensor:
        return layers.group_norm(norm, x, bias, moments, before=2, border=1, frames=frames)

    return layers.convolved_by_frames(layer.conv, x, some, **options)


def _attended(attention: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    norm = layers.group_norm(attention.group_norm, x, silu=False)
    return x + attended(norm, *projections(attention), layers=layers, causal=True)
