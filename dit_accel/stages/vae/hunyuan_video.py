"""The decoder of ``AutoencoderKLHunyuanVideo``: causal convolutions whose borders repeat pixels and the first frame.

Features stay in channels-last layout. Group normalisation and SiLU write their output with its border, so nothing is
padded or converted, and bias and residual are added where a convolution stores its sums. The middle block attends
frame by frame, each to the frames up to it, instead of masking half of all scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoDecoder3D,
    HunyuanVideoResnetBlockCausal3D,
    HunyuanVideoUpsampleCausal3D,
)
from torch import nn

from dit_accel.kernels import group_norm
from dit_accel.stages.vae.layers import Layers, dense

FACTORS = ((1, 2, 2), (2, 2, 2))
BYTES = 2**30  # of normalised features at a time, at least one frame


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
        if isinstance(module, Attention) and (
            type(module.processor) is not AttnProcessor2_0 or module.heads != 1 or module.rescale_output_factor != 1.0
        ):
            return "its attention is not that of diffusers, with one head"
    return None


def decode(decoder: HunyuanVideoDecoder3D, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Frames ``[B, 3, T, H, W]`` from latents ``[B, C, t, h, w]``."""
    x = layers.convolved(decoder.conv_in.conv, _bordered(dense(latents), 2), padding=0)
    middle = decoder.mid_block
    x = _block(middle.resnets[0], x, layers)
    for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
        x = x if attention is None else _attended(attention, x, layers)
        x = _block(block, x, layers)
    for stage in decoder.up_blocks:
        for block in stage.resnets:
            x = _block(block, x, layers)
        for upsampler in stage.upsamplers or ():
            frames = upsampler.upsample_factor[0] == 2
            x = layers.upsampled(upsampler.conv.conv, _bordered(x, 1 if frames else 2), frames=frames, padding=0)
    return _behind_norm(decoder.conv_norm_out, decoder.conv_out, x, layers, biased=True)


def _block(block: HunyuanVideoResnetBlockCausal3D, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    h = _behind_norm(block.norm1, block.conv1, x, layers)
    if block.conv_shortcut is not None:
        x = layers.convolved(block.conv_shortcut.conv, x, padding=0)
    return _behind_norm(block.norm2, block.conv2, h, layers, x, input_bias=block.conv1.conv.bias, biased=True)


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
    """Normalise, apply SiLU and convolve; large videos a few frames at a time."""
    frames = x.shape[2]
    some = max(1, min(frames, BYTES * frames // (x.numel() * x.element_size())))
    parts = []
    for start in range(0, frames, some):
        part = slice(start, min(start + some, frames))
        normed = group_norm(
            x, norm.weight, norm.bias, groups=norm.num_groups, eps=norm.eps, input_bias=input_bias, before=2, border=1,
            frames=part, backend=layers.backend,
        )  # fmt: skip
        own = None if residual is None else residual[:, :, part]
        parts.append(layers.convolved(convolution.conv, normed, own, padding=0, biased=biased))
    return parts[0] if len(parts) == 1 else dense(torch.cat(parts, 2))


def _attended(attention: Attention, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    norm = attention.group_norm
    normed = group_norm(
        x, norm.weight, norm.bias, groups=norm.num_groups, eps=norm.eps, silu=False, backend=layers.backend
    )
    frames, pixels = x.shape[2], x.shape[3] * x.shape[4]
    tokens = normed.permute(0, 2, 3, 4, 1).flatten(1, 3)  # [B, T H W, C]
    query, key, value = (project(tokens)[:, None] for project in (attention.to_q, attention.to_k, attention.to_v))
    attended = [
        F.scaled_dot_product_attention(query[:, :, end - pixels : end], key[:, :, :end], value[:, :, :end])
        for end in range(pixels, frames * pixels + 1, pixels)
    ]
    made = attention.to_out[0](torch.cat(attended, 2)[:, 0]).unflatten(1, (frames, *x.shape[3:]))
    return x + made.permute(0, 4, 1, 2, 3)


def _bordered(x: torch.Tensor, before: int) -> torch.Tensor:
    """x behind copies of its first frame, with a border of one pixel that repeats the outermost ones."""
    batch, channels, time, height, width = x.shape
    out = x.new_empty(batch, time + before, height + 2, width + 2, channels).permute(0, 4, 1, 2, 3)
    out[:, :, before:, 1:-1, 1:-1] = x
    for border, outermost in ((0, 1), (-1, -2)):
        out[:, :, before:, border, 1:-1] = out[:, :, before:, outermost, 1:-1]
    for border, outermost in ((0, 1), (-1, -2)):
        out[:, :, before:, :, border] = out[:, :, before:, :, outermost]
    out[:, :, :before] = out[:, :, before : before + 1]
    return out
