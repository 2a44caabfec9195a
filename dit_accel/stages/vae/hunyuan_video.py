"""The decoder of ``AutoencoderKLHunyuanVideo``: causal convolutions whose borders repeat pixels and the first frame.

Features stay in channels-last layout. Group normalisation and SiLU write their output with its border, so nothing is
padded or converted, and bias and residual are added where a convolution stores its sums. The middle block attends
frame by frame, each to the frames up to it, instead of masking half of all scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoDecoder3D,
    HunyuanVideoResnetBlockCausal3D,
    HunyuanVideoUpsampleCausal3D,
)
from torch import nn

from dit_accel.stages.vae.autoencoder_kl import has_one_head, projections
from dit_accel.stages.vae.layers import Layers, attended

SHARED_FROM = 2**12  # latents
FACTORS = ((1, 2, 2), (2, 2, 2))


def why_not(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return why a call of a decoder can't run on this page, or None."""
    if len(args) != 1 or kwargs:
        return "the decoder gets more than latents"
    if type(decoder) is not HunyuanVideoDecoder3D:
        return f"its decoder is a {type(decoder).__name__}"
    for module in decoder.modules():
        if isinstance(module, HunyuanVideoResnetBlockCausal3D) and type(module.nonlinearity) is not nn.SiLU:
            return f"its activation is {type(module.nonlinearity).__name__}"
        if isinstance(module, HunyuanVideoUpsampleCausal3D) and tuple(module.upsample_factor) not in FACTORS:
            return f"it upsamples by {module.upsample_factor}"
        if getattr(module, "pad_mode", "replicate") != "replicate":
            return f"a convolution pads with {module.pad_mode}"
        if isinstance(module, Attention) and not has_one_head(module):
            return "its attention is not that of diffusers, with one head"
    return None


def decode(decoder: HunyuanVideoDecoder3D, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Frames ``[B, 3, T, H, W]`` from latents ``[B, C, t, h, w]``."""
    x = layers.convolved(decoder.conv_in.conv, layers.padded(layers.band(latents), 2))
    for part in _in_order(decoder):
        if isinstance(part, Attention):
            x = _attended(part, x, layers)
        elif isinstance(part, HunyuanVideoUpsampleCausal3D):
            frames = part.upsample_factor[0] == 2
            x = layers.upsampled(part.conv.conv, layers.padded(x, 1 if frames else 2), frames=frames)
        else:
            h = _behind_norm(part.norm1, part.conv1, x, layers)
            if part.conv_shortcut is not None:  # here, so that nothing holds the block's input, a third of the peak
                x = layers.convolved(part.conv_shortcut.conv, x)
            x = _behind_norm(part.norm2, part.conv2, h, layers, x, input_bias=part.conv1.conv.bias, biased=True)
            del h
    return layers.whole(_behind_norm(decoder.conv_norm_out, decoder.conv_out, x, layers, biased=True))


def _in_order(decoder: HunyuanVideoDecoder3D) -> Iterator[nn.Module]:
    """Yield residual blocks, attentions and upsamplers."""
    middle = decoder.mid_block
    yield middle.resnets[0]
    for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
        if attention is not None:
            yield attention
        yield block
    for stage in decoder.up_blocks:
        yield from stage.resnets
        yield from stage.upsamplers or ()


def _behind_norm(
    norm: nn.GroupNorm,
    convolution: nn.Module,
    x: torch.Tensor,
    layers: Layers,
    residual: torch.Tensor | None = None,
    *,
    input_bias: torch.Tensor | None = None,
    biased: bool = False,
) -> torch.Tensor:
    """Normalise, apply SiLU and convolve."""
    moments = layers.moments(norm, x, input_bias)

    def some(frames: slice) -> torch.Tensor:
        return layers.group_norm(norm, x, input_bias, moments, before=2, border=1, frames=frames)

    return layers.convolved_by_frames(convolution.conv, x, some, residual, biased=biased)


def _attended(attention: Attention, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    norm = layers.group_norm(attention.group_norm, x, silu=False)
    return x + attended(norm, *projections(attention), layers=layers, causal=True)
