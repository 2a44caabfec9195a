"""The decoder of ``AutoencoderKLCogVideoX``: causal convolutions over time, and norms that latents scale and shift.

diffusers passes the last two frames before every causal convolution from call to call. Each of its norms enlarges the
latents to the size of the features and projects them to a scale and a shift of each pixel; here the projections run on
latents as they are. Frames are repeated behind the convolution of an upsampling, which has half as many to read.
"""

from typing import Any

import torch
from torch import nn

from dit_accel.kernels import pad_video
from dit_accel.stages.vae.layers import Layers, MaybeTensor

PARTS = ("Decoder3D", "MidBlock3D", "UpBlock3D", "ResnetBlock3D", "SpatialNorm3D", "Upsample3D")
KNOWN = {f"CogVideoX{part}" for part in (*PARTS, "CausalConv3d", "SafeConv3d")}
REQUIRED = {"pad_mode": ("first", "constant"), "use_conv_shortcut": (False,)}
PAST = 2  # frames before the first one that a convolution reads


def decode(
    decoder: nn.Module, latents: torch.Tensor, conv_cache: dict[str, Any] | None = None, *, layers: Layers
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return frames ``[B, 3, T, H, W]`` of latents ``[B, C, t, h, w]``, and the past of the next call.

    ``conv_cache`` has the frames before each convolution, by the names of modules; None = this call is the first one.
    """
    run, past, kept = _CogVideoXRun(latents, layers), conv_cache or {}, {}
    x, kept["conv_in"] = run.convolved(decoder.conv_in, pad_video(latents, before=PAST), past.get("conv_in"))
    for name, stage in (("mid_block", decoder.mid_block), *_numbered("up_block", decoder.up_blocks)):
        earlier, kept[name] = past.get(name) or {}, {}
        for block_name, block in _numbered("resnet", stage.resnets):
            x, kept[name][block_name] = run.block(block, x, earlier.get(block_name) or {})
        for upsampler in getattr(stage, "upsamplers", None) or ():
            x = run.upsampled(upsampler, x)
    x, kept["conv_out"] = run.convolved(decoder.conv_out, run.normed(decoder.norm_out, x), past.get("conv_out"))
    return x, kept


class _CogVideoXRun:
    """One call of the decoder, whose latents are ``[B, C, t, h, w]``."""

    def __init__(self, latents: torch.Tensor, layers: Layers) -> None:
        self._latents = latents
        self._layers = layers

    def convolved(
        self, layer: nn.Module, frames: torch.Tensor, past: MaybeTensor, residual: MaybeTensor = None, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve causally; return the frames that the next call reads before its own too.

        ``frames`` are behind two copies of the first one, which the past replaces.
        """
        if past is not None:
            frames[:, :, :PAST] = past
        features = self._layers.convolved(layer.conv, frames, residual, padding=layer.conv.padding[1], **options)
        return features, frames[:, :, -PAST:].clone()

    def normed(self, norm: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise behind two copies of the first frame, with the scale and shift of the latents."""
        projected = (self._layers.convolved(item.conv, self._latents) for item in (norm.conv_y, norm.conv_b))
        scale, shift = (_nearest_frames(item, x.shape[2]) for item in projected)
        return self._layers.group_norm(norm.norm_layer, x, bias, scale=scale, shift=shift, before=PAST)

    def block(
        self, block: nn.Module, x: torch.Tensor, past: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        kept = {}
        first, second = block.conv1, block.conv2
        h, kept["conv1"] = self.convolved(first, self.normed(block.norm1, x), past.get("conv1"), biased=False)
        frames = self.normed(block.norm2, h, first.conv.bias)
        del h  # a quarter of the peak
        if block.in_channels != block.out_channels:
            x = self._layers.convolved(block.conv_shortcut, x)
        x, kept["conv2"] = self.convolved(second, frames, past.get("conv2"), x)
        return x, kept

    def upsampled(self, upsampler: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self._layers.upsampled(upsampler.conv, x, padding=1)
        return _nearest_frames(x, 2 * x.shape[2] - x.shape[2] % 2) if upsampler.compress_time else x


def _nearest_frames(x: torch.Tensor, frames: int) -> torch.Tensor:
    """Repeat frames of ``[B, C, T, H, W]``; of an odd number of frames the first one stays one."""
    if frames == x.shape[2]:
        return x
    alone = frames % 2
    places = (torch.arange(frames, device=x.device) - alone) // ((frames - alone) // (x.shape[2] - alone)) + alone
    return x.permute(0, 2, 3, 4, 1).index_select(1, places).permute(0, 4, 1, 2, 3)


def _numbered(name: str, modules: nn.ModuleList) -> list[tuple[str, nn.Module]]:
    return [(f"{name}_{place}", module) for place, module in enumerate(modules)]
