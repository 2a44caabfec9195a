"""The decoder of ``AutoencoderKLHunyuanImage`` (HunyuanImage 2.1): blocks as in ``AutoencoderKL``, another upsampling.

Its upsampling moves channels into pixels and adds the input in the same way. Here the input is added where the channels
are, and one copy in channels-last layout moves both and adds the bias of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dit_accel.kernels import add_residual
from dit_accel.stages.vae.autoencoder_kl import convolved, residual_block
from dit_accel.stages.vae.layers import Layers, attended, point_projections

SHARED_FROM = 2**12  # latents
PREFIX = "HunyuanImage"
PARTS = ("Decoder2D", "MidBlock", "ResnetBlock", "AttentionBlock", "Upsample")  # by their names behind the prefix
KNOWN = {*(f"{PREFIX}{part}" for part in PARTS), "ModuleList", "Conv2d", "GroupNorm", "SiLU"}


def why_not(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why a call of a decoder can't run on this page, or None."""
    if len(args) != 1 or kwargs:
        return "the decoder gets more than latents"
    if type(decoder).__name__ != f"{PREFIX}Decoder2D":
        return f"its decoder is a {type(decoder).__name__}"
    for module in decoder.modules():
        if type(module).__name__ not in KNOWN:
            return f"its decoder has a {type(module).__name__}"
        if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            return f"a convolution pads with {module.padding_mode}"
        if getattr(module, "conv_shortcut", None) is not None:
            return "its residual blocks change the number of channels"
    return None


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Images ``[B, 3, H, W]`` from latents ``[B, C, h, w]``."""
    first, middle, latents = decoder.conv_in, decoder.mid_block, layers.band(latents)
    repeated = latents.repeat_interleave(decoder.repeat, dim=1)
    x = add_residual(repeated, convolved(first, latents, layers, biased=False), first.bias, backend=layers.backend)
    x = residual_block(middle.resnets[0], x, layers)
    for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
        x = residual_block(block, _attended(attention, x, layers), layers)
    for block in decoder.up_blocks:
        is_upsampling = type(block).__name__ == f"{PREFIX}Upsample"
        x = _upsampled(block, x, layers) if is_upsampling else residual_block(block, x, layers)
    return layers.whole(convolved(decoder.conv_out, layers.group_norm(decoder.norm_out, x), layers))


def _attended(attention: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    norm = layers.group_norm(attention.norm, x, silu=False)[:, :, None]
    projections = point_projections(attention.to_q, attention.to_k, attention.to_v, attention.proj)
    return x + attended(norm, *projections, layers=layers)[:, :, 0]


def _upsampled(upsampling: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Twice the height and width; channels are in the order ``[row, column, channel]`` of the result."""
    y = convolved(upsampling.conv, x, layers, biased=False).permute(0, 2, 3, 1)
    y.unflatten(-1, (-1, upsampling.repeats)).add_(x.permute(0, 2, 3, 1)[..., None])
    y = y.unflatten(-1, (2, 2, -1)).transpose(2, 3)  # [B, H, 2, W, 2, C]
    bias = upsampling.conv.bias.unflatten(0, (2, 1, 2, -1))
    return torch.add(y, bias, out=y.new_empty(y.shape)).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
