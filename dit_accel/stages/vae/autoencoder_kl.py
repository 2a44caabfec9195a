"""``AutoencoderKL``: Stable Diffusion 3, FLUX.1, FLUX.2, Z-Image and others.

Features stay in channels-last layout, which convolutions on tensor cores want. GroupNorm and SiLU are one op, which
adds the bias of the convolution before; the sum behind a block adds the bias of the last one.
"""

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import nn

from dit_accel.kernels import add_residual
from dit_accel.stages.vae.layers import Layers, attended, parts_of

PEAKS = ((77_900, 44_600),)
SHARED_FROM = 2**15  # latents; two GPUs take 1.3 times longer for half as many
LAST = torch.channels_last
KNOWN = {"Decoder", "Encoder", "UNetMidBlock2D", "UpDecoderBlock2D", "DownEncoderBlock2D", "ResnetBlock2D"}
KNOWN |= {"Attention", "Upsample2D", "Downsample2D"}
REQUIRED = {"padding_mode": ("zeros",), "use_conv": (True,), "norm": (None,), "output_scale_factor": (1,)}
REQUIRED |= {f"ResnetBlock2D.{name}": (None,) for name in ("time_emb_proj", "upsample", "downsample")}


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return images ``[B, 3, H, W]`` of latents ``[B, C, h, w]``."""
    x = convolved(decoder.conv_in, layers.band(latents), layers)
    return layers.whole(_coded(decoder, (decoder.mid_block, *decoder.up_blocks), x, layers))


def encode(encoder: nn.Module, images: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return moments of latents ``[B, 2C, h, w]`` of images ``[B, 3, H, W]``."""
    x = convolved(encoder.conv_in, images, layers)
    return _coded(encoder, (*encoder.down_blocks, encoder.mid_block), x, layers)


def _coded(coder: nn.Module, stages: tuple[nn.Module, ...], x: torch.Tensor, layers: Layers) -> torch.Tensor:
    for part in (part for stage in stages for part in parts_of(stage)):
        kind = type(part).__name__
        if kind == "ResnetBlock2D":
            x = residual_block(part, x, layers)
        elif kind == "Attention":
            x = _attended(part, x, layers)
        elif kind == "Upsample2D":
            x = layers.upsampled(part.conv, x[:, :, None], padding=1)[:, :, 0]
        else:
            x = convolved(part.conv, x if part.padding else F.pad(x, (0, 1, 0, 1)), layers)
    return convolved(coder.conv_out, layers.group_norm(coder.conv_norm_out, x), layers)


def _attended(attention: Attention, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    if not has_one_head(attention):
        return layers.band(attention(layers.whole(x), temb=None))
    norm = layers.group_norm(attention.group_norm, x, silu=False)
    return x + attended(norm[:, :, None], *projections(attention), layers=layers)[:, :, 0]


def has_one_head(attention: Attention) -> bool:
    """Return True for a group norm, attention with one head by diffusers' usual processor, and a sum."""
    return (
        type(attention.processor) is AttnProcessor2_0
        and (attention.heads, attention.rescale_output_factor, attention.residual_connection) == (1, 1.0, True)
        and attention.spatial_norm is attention.norm_q is attention.norm_k is None
        and attention.group_norm is not None
    )


def projections(attention: Attention) -> tuple[nn.Module, ...]:
    return attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]


def residual_block(block: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Run a block of two norms and two convolutions, with or without a convolution as shortcut."""
    h = convolved(block.conv1, layers.group_norm(block.norm1, x), layers, biased=False)
    h = layers.group_norm(block.norm2, h, block.conv1.bias)
    h = convolved(block.conv2, h, layers, biased=False)
    bias = block.conv2.bias
    if block.conv_shortcut is not None:
        x = convolved(block.conv_shortcut, x, layers, biased=False)
        biases = [item for item in (bias, block.conv_shortcut.bias) if item is not None]
        bias = torch.stack(biases).sum(0, dtype=torch.float32) if biases else None
    return add_residual(x, h, bias, backend=layers.backend)


def convolved(convolution: nn.Conv2d, x: torch.Tensor, layers: Layers, *, biased: bool = True) -> torch.Tensor:
    weight, padding = convolution.weight.contiguous(memory_format=LAST), convolution.padding
    bias = convolution.bias if biased else None
    x = x.contiguous(memory_format=LAST)
    if layers.bands is not None and padding == (1, 1):
        x, padding = layers.bands.bordered(x[:, :, None])[:, :, 0], 0
    return F.conv2d(x, weight, bias, convolution.stride, padding, convolution.dilation, convolution.groups)
