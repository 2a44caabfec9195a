"""The decoder of ``AutoencoderKLWan`` (2.1 and 2.2) and ``AutoencoderKLQwenImage``: causal convolutions over time.

diffusers decodes one latent frame per call and keeps the last two frames before every causal convolution in
``feat_cache``. Here features stay in channels-last layout, and the norm before a convolution writes its output behind
those two frames, so nothing is padded, concatenated or converted. The first frame has zeros before it, so its
convolutions are two-dimensional. ``feat_cache`` holds the same frames as in diffusers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dit_accel.kernels import add_residual, causal_norm, upsample_nearest

LAST = torch.channels_last_3d
PREFIXES = ("Wan", "QwenImage")
PARTS = (  # of the decoder, by their names behind the prefix
    *("Decoder3d", "MidBlock", "UpBlock", "ResidualUpBlock", "ResidualBlock", "AttentionBlock"),
    *("Resample", "Upsample", "CausalConv3d", "RMS_norm"),
)
FURTHER = ("ModuleList", "Sequential", "Conv2d", "SiLU", "Dropout", "Identity", "DupUp3D")
PAST = 2  # frames before the first one that a convolution reads


def why_not(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why a call of a decoder can't run on this page, or None."""
    prefix = next((each for each in PREFIXES if type(decoder).__name__ == f"{each}Decoder3d"), None)
    if prefix is None:
        return f"its decoder is a {type(decoder).__name__}"
    if (
        len(args) != 1
        or kwargs.get("feat_cache") is None
        or not set(kwargs) <= {"feat_cache", "feat_idx", "first_chunk"}
    ):
        return "the decoder is not called frame by frame"
    known = {*(f"{prefix}{part}" for part in PARTS), *FURTHER}
    for module in decoder.modules():
        kind = type(module).__name__
        if kind not in known:
            return f"its decoder has a {kind}"
        if kind == f"{prefix}RMS_norm" and isinstance(module.bias, torch.Tensor):
            return "its norms have a bias"
    return None


def decode(
    decoder: nn.Module,
    x: torch.Tensor,
    *,
    feat_cache: list,
    feat_idx: list[int],
    first_chunk: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Frames ``[B, C, T, H, W]`` from a latent frame ``[B, c, t, h, w]``; updates ``feat_cache`` and ``feat_idx``.

    Args:
        backend: of the kernels.
    """
    run = _Call(feat_cache, feat_idx, backend)
    past = run.past()
    x = run.convolved(decoder.conv_in, _dense(x) if past is None and x.shape[2] == 1 else _behind(x, past))
    x = run.block(decoder.mid_block.resnets[0], x)
    for attention, block in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
        x = x if attention is None else _dense(attention(x))
        x = run.block(block, x)
    for stage in decoder.up_blocks:
        before = x
        for block in stage.resnets:
            x = run.block(block, x)
        for resample in _resamples(stage):
            x = run.resampled(resample, x)
        if getattr(stage, "avg_shortcut", None) is not None:
            x = x + stage.avg_shortcut(before, first_chunk=first_chunk)
    return run.convolved(decoder.conv_out, run.normed(decoder.norm_out, x))


class _Call:
    """One call of the decoder, which walks through the kept frames of its convolutions."""

    def __init__(self, feat_cache: list, feat_idx: list[int], backend: str) -> None:
        self._cache = feat_cache
        self._index = feat_idx
        self._backend = backend

    def past(self) -> torch.Tensor | None:
        """Frames that were kept for the next convolution; None = there are none."""
        kept = self._cache[self._index[0]]
        return kept if isinstance(kept, torch.Tensor) else None

    def normed(self, norm: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Normalised features behind the frames that were kept."""
        weight, past = norm.gamma.flatten(), self.past()
        frames = 0 if past is None and x.shape[2] == 1 else PAST
        return causal_norm(x, weight, past, frames=frames, input_bias=bias, backend=self._backend)

    def convolved(self, convolution: nn.Conv3d, frames: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """A causal convolution over its past and its input; the last two frames are kept."""
        bias, (width, _, height, *_) = convolution.bias if biased else None, convolution._padding
        is_first = frames.shape[2] == 1  # with zeros before it
        self._keep(frames)
        if is_first:
            weight = convolution.weight[:, :, -1].contiguous(memory_format=torch.channels_last)
            return F.conv2d(frames[:, :, -1], weight, bias, padding=(height, width))[:, :, None]
        weight = convolution.weight.contiguous(memory_format=LAST)
        return F.conv3d(frames, weight, bias, padding=(0, height, width))

    def block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        shortcut, x = block.conv_shortcut, _dense(x)
        h = self.convolved(block.conv1, self.normed(block.norm1, x), biased=False)
        frames = self.normed(block.norm2, h, block.conv1.bias)
        del h  # a quarter of the peak
        h = self.convolved(block.conv2, frames, biased=False)
        del frames
        if not isinstance(shortcut, nn.Identity):
            x = F.conv3d(x, shortcut.weight.contiguous(memory_format=LAST), shortcut.bias)
        return _as_video(add_residual(_as_images(x), _as_images(h), block.conv2.bias, backend=self._backend), x)

    def resampled(self, resample: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Features at twice the width and height, and of twice as many frames where the module has that."""
        if resample.mode == "upsample3d":
            if self._cache[self._index[0]] is None:  # the first frame stays one
                self._cache[self._index[0]] = "Rep"
                self._index[0] += 1
            else:
                x = self._twice_the_frames(resample.time_conv, x)
        _, convolution = resample.resample
        images = upsample_nearest(_as_images(x), backend=self._backend)
        weight = convolution.weight.contiguous(memory_format=torch.channels_last)
        return _as_video(F.conv2d(images, weight, convolution.bias, padding=convolution.padding), x)

    def _twice_the_frames(self, convolution: nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
        frames = _behind(x, self.past())
        self._keep(frames)
        y = F.conv3d(frames, convolution.weight.contiguous(memory_format=LAST), convolution.bias)
        batch, channels, time, height, width = x.shape
        y = y.permute(0, 2, 3, 4, 1).reshape(batch, time, height, width, 2, channels).permute(0, 1, 4, 2, 3, 5)
        return y.reshape(batch, 2 * time, height, width, channels).permute(0, 4, 1, 2, 3)

    def _keep(self, frames: torch.Tensor) -> None:
        self._cache[self._index[0]] = frames[:, :, -PAST:].clone()
        self._index[0] += 1


def _behind(x: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
    """x behind two frames of the past, in channels-last layout."""
    known = 0 if past is None else past.shape[2]
    zeros = x.new_zeros(*x.shape[:2], PAST - known, *x.shape[3:])
    return torch.cat([zeros, *([] if past is None else [past]), x], 2).contiguous(memory_format=LAST)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=LAST)


def _as_images(x: torch.Tensor) -> torch.Tensor:
    """``[B, C, T, H, W]`` as ``[B T, C, H, W]``."""
    return _dense(x).permute(0, 2, 1, 3, 4).flatten(0, 1)


def _as_video(images: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[B T, C, H, W]`` as ``[B, C, T, H, W]``, with the frames of ``like``."""
    return images.unflatten(0, (like.shape[0], like.shape[2])).permute(0, 2, 1, 3, 4)


def _resamples(stage: nn.Module) -> list[nn.Module]:
    single = getattr(stage, "upsampler", None)
    return [single] if single is not None else list(getattr(stage, "upsamplers", None) or ())
