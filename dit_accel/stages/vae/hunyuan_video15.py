"""The decoder of ``AutoencoderKLHunyuanVideo15``: causal convolutions whose borders repeat pixels and the first frame.

RMS normalisation and SiLU write their output with its border. The middle block attends frame by frame, each to the
frames up to it. An upsampling moves channels into pixels and frames, in one copy that adds its shortcut.
"""

from typing import Any

import torch
from torch import nn

from dit_accel.kernels import pad_video, pixel_norm
from dit_accel.stages.vae.layers import Layers, MaybeTensor, attended, parts_of, point_projections

PARTS = ("Decoder3D", "MidBlock", "UpBlock3D", "ResnetBlock", "AttnBlock", "Upsample", "CausalConv3d", "RMS_norm")
KNOWN = {f"HunyuanVideo15{part}" for part in PARTS}
REQUIRED = {"pad_mode": ("replicate",)}
PADDING = {"before": 2, "border": 1}


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return frames ``[B, 3, T, H, W]`` of latents ``[B, C, t, h, w]``."""
    repeated = latents.repeat_interleave(decoder.repeat, dim=1)
    x = layers.convolved(decoder.conv_in.conv, pad_video(latents, **PADDING), repeated)
    for part in (part for stage in (decoder.mid_block, *decoder.up_blocks) for part in parts_of(stage)):
        kind = type(part).__name__.removeprefix("HunyuanVideo15")
        x = {"ResnetBlock": _block, "AttnBlock": _attended, "Upsample": _upsampled}[kind](part, x, layers)
    return _behind_norm(decoder.norm_out, decoder.conv_out, x, layers)


def _block(block: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    h = _behind_norm(block.norm1, block.conv1, x, layers, biased=False)
    if block.conv_shortcut is not None:
        x = layers.convolved(block.conv_shortcut, x)
    return _behind_norm(block.norm2, block.conv2, h, layers, block.conv1.conv.bias, residual=x)


def _behind_norm(
    norm: nn.Module, layer: nn.Module, x: torch.Tensor, layers: Layers, bias: MaybeTensor = None, **options: Any
) -> torch.Tensor:
    """Add a bias, normalise, apply SiLU and convolve."""
    weight = norm.gamma.flatten()

    def normed(frames: slice) -> torch.Tensor:
        start = max(0, frames.start - PADDING["before"])
        padding = PADDING | {"before": PADDING["before"] - (frames.start - start)}
        return pixel_norm(x[:, :, start : frames.stop], weight, input_bias=bias, backend=layers.backend, **padding)

    return layers.convolved_by_frames(layer.conv, x, normed, **options)


def _attended(attention: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    normed = pixel_norm(x, attention.norm.gamma.flatten(), silu=False, backend=layers.backend)
    projections = point_projections(attention.to_q, attention.to_k, attention.to_v, attention.proj_out)
    return x + attended(normed, *projections, layers=layers, causal=True)


def _upsampled(upsampler: nn.Module, x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Double the height and width, and the frames after the first if the module has that."""
    times = 2 if upsampler.add_temporal_upsample else 1
    y = layers.convolved(upsampler.conv.conv, pad_video(x, **PADDING))
    batch, channels, frames, height, width = y.shape
    out = y.new_empty(batch, 1 + times * (frames - 1), 2 * height, 2 * width, channels // (4 * times))
    y, x = (item.permute(0, 2, 3, 4, 1) for item in (y, x))
    _spread_into(out[:, :1], y[:, :1], x[:, :1], 1)
    _spread_into(out[:, 1:], y[:, 1:], x[:, 1:], times)
    return out.permute(0, 4, 1, 2, 3)


def _spread_into(out: torch.Tensor, y: torch.Tensor, x: torch.Tensor, times: int) -> None:
    """Add y, whose first channels count, and x, whose are repeated: ``[times, 2, 2, C]`` of the result."""
    y, x = (item.unflatten(-1, (times, 2, 2, -1)) for item in (y, x))  # [B, T, H, W, times, 2, 2, C]
    split = x.shape[-1], -1
    y = y[..., : out.shape[-1]].unflatten(-1, split)
    into = out.unflatten(1, (-1, times)).unflatten(3, (-1, 2)).unflatten(5, (-1, 2)).unflatten(-1, split)
    order = (0, 1, 4, 2, 5, 3, 6, 7, 8)  # [B, T, times, H, 2, W, 2, C of x, repeats]
    torch.add(y.permute(order), x[..., None].permute(order), out=into)
