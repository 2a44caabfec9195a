"""The decoder of ``AutoencoderKLHunyuanImage`` (HunyuanImage 2.1): blocks as in ``AutoencoderKL``, another upsampling.

Its upsampling moves channels into pixels and adds the input in the same way. Here the input is added where the channels
are, and one copy in channels-last layout moves both and adds the bias of the convolution.
"""

import torch
from torch import nn

from dit_accel.kernels import add_residual
from dit_accel.stages.vae.autoencoder_kl import convolved, residual_block
from dit_accel.stages.vae.layers import Layers, attended, parts_of, point_projections

SHARED_FROM = 2**12  # latents
PEAKS = ((655_400, 394_400),)
KNOWN = {f"HunyuanImage{part}" for part in ("Decoder2D", "MidBlock", "ResnetBlock", "AttentionBlock", "Upsample")}
REQUIRED = {"padding_mode": ("zeros",), "conv_shortcut": (None,)}


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return images ``[B, 3, H, W]`` of latents ``[B, C, h, w]``."""
    first, latents = decoder.conv_in, layers.band(latents)
    repeated = latents.repeat_interleave(decoder.repeat, dim=1)
    x = add_residual(repeated, convolved(first, latents, layers, biased=False), first.bias, backend=layers.backend)
    for part in (*parts_of(decoder.mid_block), *decoder.up_blocks):
        kind = type(part).__name__.removeprefix("HunyuanImage")
        x = {"ResnetBlock": residual_block, "AttentionBlock": _attended, "Upsample": _upsampled}[kind](part, x, layers)
    return layers.whole(convolved(decoder.conv_out, layers.group_norm(decoder.norm_out, x), layers))


def _attended(attention: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    norm = layers.group_norm(attention.norm, x, silu=False)[:, :, None]
    projections = point_projections(attention.to_q, attention.to_k, attention.to_v, attention.proj)
    return x + attended(norm, *projections, layers=layers)[:, :, 0]


def _upsampled(upsampling: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Double the height and width; channels are in the order ``[row, column, channel]`` of the result."""
    y = convolved(upsampling.conv, x, layers, biased=False).permute(0, 2, 3, 1)
    y.unflatten(-1, (-1, upsampling.repeats)).add_(x.permute(0, 2, 3, 1)[..., None])
    y = y.unflatten(-1, (2, 2, -1)).transpose(2, 3)  # [B, H, 2, W, 2, C]
    bias = upsampling.conv.bias.unflatten(0, (2, 1, 2, -1))
    return torch.add(y, bias, out=y.new_empty(y.shape)).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
