"""``AutoencoderKLWan`` (2.1 and 2.2) and ``AutoencoderKLQwenImage``: causal convolutions over time.

diffusers decodes one latent frame per call and encodes four frames, and keeps the last two frames before every causal
convolution in ``feat_cache``. Here the norm before a convolution writes its output behind those two frames, or this
rank's band of them. The first frame has zeros before it, so its convolutions are two-dimensional.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dit_accel.kernels import causal_norm, operand_dtype, pixel_norm
from dit_accel.stages.vae.layers import Layers, attended, dense, parts_of, point_projections

SHARED_FROM = 2**12  # latents
PEAKS = ((135_400, 88_000), (376_900, 282_200))  # of the first latent frame, and of others
PARTS = ("Encoder3d", "ResidualDownBlock", "Decoder3d", "MidBlock", "UpBlock", "ResidualUpBlock", "ResidualBlock")
PARTS += ("AttentionBlock", "Resample", "Upsample", "CausalConv3d", "RMS_norm")
KNOWN = {"DupUp3D", "AvgDown3D", *(f"{prefix}{part}" for prefix in ("Wan", "QwenImage") for part in PARTS)}
REQUIRED = {"RMS_norm.bias": (0.0,)}
PAST = 2  # frames before the first one that a convolution reads


def decode(
    decoder: nn.Module, x: torch.Tensor, *, feat_cache: list, feat_idx: list, first_chunk: bool = False, layers: Layers
) -> torch.Tensor:
    """Return frames ``[B, C, T, H, W]`` of a latent frame ``[B, c, t, h, w]``; update both lists."""
    run, x = _CausalRun(feat_cache, feat_idx, layers), layers.band(x)
    x = run.convolved(decoder.conv_in, run.behind(x), padding=1)
    for stage in (decoder.mid_block, *decoder.up_blocks):
        x = run.stage(stage, x, first_chunk=first_chunk)
    return layers.whole(run.convolved(decoder.conv_out, run.normed(decoder.norm_out, x, decoder.conv_out)))


def encode(
    encoder: nn.Module, x: torch.Tensor, *, feat_cache: list, feat_idx: list[int], layers: Layers
) -> torch.Tensor:
    """Return moments of latents ``[B, 2c, t, h, w]`` of frames ``[B, C, T, H, W]``; update both lists."""
    run = _CausalRun(feat_cache, feat_idx, layers)
    x = run.convolved(encoder.conv_in, run.behind(x), padding=1)
    for stage in (*encoder.down_blocks, encoder.mid_block):
        x = run.stage(stage, x)
    return run.convolved(encoder.conv_out, run.normed(encoder.norm_out, x, encoder.conv_out))


class _CausalRun:
    def __init__(self, feat_cache: list, feat_idx: list[int], layers: Layers) -> None:
        self._cache = feat_cache
        self._index = feat_idx
        self._layers = layers

    def past(self) -> torch.Tensor | None:
        kept = self._cache[self._index[0]]
        return kept if isinstance(kept, torch.Tensor) else None

    def normed(
        self, norm: nn.Module, x: torch.Tensor, layer: nn.Conv3d, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise behind the frames that were kept, with a border of zeros: the input of a convolution."""
        past, weight = self.past(), norm.gamma.flatten()
        frames = 0 if past is None and x.shape[2] == 1 else PAST
        dtype = operand_dtype(x, layer.out_channels, backend=self._layers.convolutions)
        past = None if past is None else past.to(dtype)  # frames that the decoder itself kept are float32
        options = {"input_bias": bias, "dtype": dtype, "backend": self._layers.backend}
        output, kept = causal_norm(x, weight, past, frames=frames, border=1, **options)
        self._keep(kept)
        if self._layers.bands is not None:
            self._layers.bands.exchange_border(output, x.dtype)
        return output

    def convolved(
        self, layer: nn.Conv3d, x: torch.Tensor, residual: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Convolve causally, with options of :meth:`Layers.convolved`; the input has its past."""
        return self._layers.convolved(layer, x, residual, last_tap=x.shape[2] == 1, **options)  # behind zeros

    def behind(self, x: torch.Tensor) -> torch.Tensor:
        past = self.past()
        if past is not None or x.shape[2] > 1:
            known = [] if past is None else [past]
            missing = PAST - sum(item.shape[2] for item in known)
            x = torch.cat([x.new_zeros(*x.shape[:2], missing, *x.shape[3:]), *known, x], 2)
        self._keep(x[:, :, -PAST:].clone())
        return x

    def _keep(self, frames: torch.Tensor) -> None:
        self._cache[self._index[0]] = frames
        self._index[0] += 1

    def stage(self, stage: nn.Module, x: torch.Tensor, **shortcut_options: Any) -> torch.Tensor:
        """Run residual blocks, attentions and a resampling, and add a shortcut where the module has one."""
        shortcut = getattr(stage, "avg_shortcut", None)
        before = None if shortcut is None else x
        for part in parts_of(stage):
            if hasattr(part, "conv_shortcut"):
                x = self.block(part, x)
            elif not hasattr(part, "mode"):
                x = self.attended(part, x)
            else:
                x = self.upsampled(part, x) if part.mode.startswith("upsample") else self.downsampled(part, x)
        return x if shortcut is None else x + shortcut(before, **shortcut_options)

    def block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = dense(x)
        h = self.convolved(block.conv1, self.normed(block.norm1, x, block.conv1), biased=False)
        frames = self.normed(block.norm2, h, block.conv2, block.conv1.bias)
        del h  # a quarter of the peak
        if not isinstance(block.conv_shortcut, nn.Identity):
            x = self._layers.convolved(block.conv_shortcut, x)
        return self.convolved(block.conv2, frames, x)

    def attended(self, attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
        norm = pixel_norm(x, attention.norm.gamma.flatten(), silu=False, backend=self._layers.backend)
        return x + attended(norm, *point_projections(attention.to_qkv, attention.proj), layers=self._layers)

    def upsampled(self, resample: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if resample.mode == "upsample3d":
            if self._cache[self._index[0]] is None:  # the first frame stays one
                self._cache[self._index[0]] = "Rep"
                self._index[0] += 1
            else:
                y = self.convolved(resample.time_conv, self.behind(x)).permute(0, 2, 3, 4, 1).unflatten(4, (2, -1))
                x = y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2).permute(0, 4, 1, 2, 3)  # of [B, T, H, W, 2, C]
        return self._layers.upsampled(resample.resample[1], x, padding=1)

    def downsampled(self, resample: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self._layers.halved(resample.resample[1], F.pad(dense(x), (0, 1, 0, 1)), (1, 2, 2))
        if resample.mode != "downsample3d":
            return x
        past = self.past()
        self._keep(x[:, :, -1:].clone())
        return x if past is None else self._layers.halved(resample.time_conv, torch.cat([past, x], 2), (2, 1, 1))
