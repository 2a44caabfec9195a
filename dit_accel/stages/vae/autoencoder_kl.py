"""``AutoencoderKL``: Stable Diffusion 3, FLUX.1, FLUX.2, Z-Image and others.

Features stay in channels-last layout, which convolutions on tensor cores want. GroupNorm and SiLU are one op, which
adds the bias of the convolution before; the sum behind a block adds the bias of the last one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from dit_accel.kernels import add_residual
from dit_accel.stages.vae.layers import Layers, attended

SHARED_FROM = 2**15  # latents; two GPUs take 1.3 times longer for half as many
LAST = torch.channels_last


def why_not(coder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return why a call of a decoder or an encoder can't run on this page, or None."""
    if len(args) != 1 or any(item is not None for item in kwargs.values()):
        return "it gets more than one tensor"
    stages = {Decoder: ("up_blocks", UpDecoderBlock2D), Encoder: ("down_blocks", DownEncoderBlock2D)}
    if type(coder) not in stages:
        return f"it is a {type(coder).__name__}"
    name, kind_of_stage = stages[type(coder)]
    for kind, blocks in ((UNetMidBlock2D, [coder.mid_block]), (kind_of_stage, getattr(coder, name))):
        other = next((block for block in blocks if type(block) is not kind), None)
        if other is not None:
            return f"it has a {type(other).__name__}"
    if type(coder.conv_norm_out) is not nn.GroupNorm:
        return f"it ends with a {type(coder.conv_norm_out).__name__}"
    for module in coder.modules():
        if isinstance(module, ResnetBlock2D) and (reason := _why_not_block(module)) is not None:
            return reason
        if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            return f"a convolution pads with {module.padding_mode}"
        if isinstance(module, Upsample2D) and (module.norm is not None or not module.use_conv or module.name != "conv"):
            return "its upsampling is not nearest pixels and a convolution"
        if isinstance(module, Upsample2D) and (module.conv.kernel_size, module.conv.padding) != ((3, 3), (1, 1)):
            return f"it upsamples with a kernel of {module.conv.kernel_size}"
        if isinstance(module, Downsample2D) and (module.norm is not None or not module.use_conv):
            return "its downsampling is not a convolution"
    return None


def _why_not_block(block: ResnetBlock2D) -> str | None:
    if block.time_emb_proj is not None or block.time_embedding_norm == "scale_shift":
        return "its residual blocks take embeddings"
    if type(block.nonlinearity) is not nn.SiLU:
        return f"its activation is {type(block.nonlinearity).__name__}"
    if block.upsample is not None or block.downsample is not None or block.output_scale_factor != 1.0:
        return "its residual blocks scale"
    return None if type(block.norm1) is type(block.norm2) is nn.GroupNorm else "its residual blocks have other norms"


def decode(decoder: Decoder, latents: torch.Tensor, latent_embeds: None = None, *, layers: Layers) -> torch.Tensor:
    """Images ``[B, 3, H, W]`` from latents ``[B, C, h, w]``."""
    x = _middle(decoder.mid_block, convolved(decoder.conv_in, layers.band(latents), layers), layers)
    for stage in decoder.up_blocks:
        for block in stage.resnets:
            x = residual_block(block, x, layers)
        for upsampler in stage.upsamplers or ():
            x = layers.upsampled(upsampler.conv, x[:, :, None], padding=1)[:, :, 0]
    return layers.whole(convolved(decoder.conv_out, layers.group_norm(decoder.conv_norm_out, x), layers))


def encode(encoder: Encoder, images: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return moments of latents ``[B, 2C, h, w]`` of images ``[B, 3, H, W]``."""
    x = convolved(encoder.conv_in, images, layers)
    for stage in encoder.down_blocks:
        for block in stage.resnets:
            x = residual_block(block, x, layers)
        for downsampler in stage.downsamplers or ():
            x = convolved(downsampler.conv, x if downsampler.padding else F.pad(x, (0, 1, 0, 1)), layers)
    x = _middle(encoder.mid_block, x, layers)
    return convolved(encoder.conv_out, layers.group_norm(encoder.conv_norm_out, x), layers)


def _middle(middle: UNetMidBlock2D, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    x = residual_block(middle.resnets[0], x, layers)
    for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
        x = residual_block(block, x if attention is None else _attended(attention, x, layers), layers)
    return x


def _attended(attention: Attention, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    if not has_one_head(attention):
        return layers.band(attention(layers.whole(x), temb=None))
    norm = layers.group_norm(attention.group_norm, x, silu=False)
    return x + attended(norm[:, :, None], *projections(attention), layers=layers)[:, :, 0]


def has_one_head(attention: Attention) -> bool:
    """Return True if it is a group norm, attention with one head by diffusers' usual processor, and a sum."""
    return (
        type(attention.processor) is AttnProcessor2_0
        and (attention.heads, attention.rescale_output_factor, attention.residual_connection) == (1, 1.0, True)
        and attention.spatial_norm is attention.norm_q is attention.norm_k is None
        and attention.group_norm is not None
    )


def projections(attention: Attention) -> tuple[nn.Module, ...]:
    """Return the layers that make query, key, value and the result."""
    return attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]


def residual_block(block: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Features behind a block of two norms and two convolutions, with or without a convolution as shortcut."""
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
    """A convolution in channels-last layout, with its bias or without."""
    weight, padding = convolution.weight.contiguous(memory_format=LAST), convolution.padding
    bias = convolution.bias if biased else None
    x = x.contiguous(memory_format=LAST)
    if layers.bands is not None and padding == (1, 1):
        x, padding = layers.bands.bordered(x[:, :, None])[:, :, 0], 0
    return F.conv2d(x, weight, bias, convolution.stride, padding, convolution.dilation, convolution.groups)
