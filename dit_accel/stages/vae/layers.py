"""Layers of decoders with fused kernels, on features in channels-last layout."""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dit_accel import kernels
from dit_accel.stages.rows import Rows


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, C, T, H, W]`` in channels-last layout."""
    return x.contiguous(memory_format=torch.channels_last_3d)


MaybeTensor = torch.Tensor | None
Frames = Callable[[slice], torch.Tensor]  # some of them
BYTES = 2**30  # of normalised features at a time, at least one frame
CONVERSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of weights [O, C, kt, kh, kw]
    "dense": dense,
    "last tap": lambda weight: dense(weight[:, :, -1:]),
    "upsampling": kernels.fold_upsampling,
    "upsampling of frames": partial(kernels.fold_upsampling, frames=True),
}


class Layers:
    """Layers of one decode, which converts each weight once; with ``bands`` features are this rank's band of rows."""

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.bands: Rows | None = None
        self.convolutions = "reference" if backend == "reference" else "auto"  # small channels are cuDNN's
        self._converted: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def band(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's band of whole features, or all of them."""
        return x if self.bands is None else self.bands.band(x)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bands is None else self.bands.whole(x)

    def moments(self, norm: nn.GroupNorm, x: torch.Tensor, input_bias: MaybeTensor = None) -> torch.Tensor:
        """Return mean and variance of each group of whole features, ``[B, groups, 2]``."""
        output = kernels.group_moments(x, groups=norm.num_groups, input_bias=input_bias, backend=self.backend)
        return output if self.bands is None else self.bands.merged(output)

    def group_norm(
        self, norm: nn.Module, x: torch.Tensor, bias: MaybeTensor = None, moments: MaybeTensor = None, **settings: Any
    ) -> torch.Tensor:
        """Normalise features with settings of :func:`dit_accel.kernels.group_norm`.

        A border has neighbours' rows, or repeats pixels. ``moments`` are those of whole features; None = compute them.
        """
        moments = self.moments(norm, x, bias) if moments is None else moments
        settings |= {"groups": norm.num_groups, "eps": norm.eps, "backend": self.backend}
        output = kernels.group_norm(x, norm.weight, norm.bias, input_bias=bias, moments=moments, **settings)
        if settings.get("border") and self.bands is not None:
            self.bands.exchange_border(output)
        return output

    def padded(self, x: torch.Tensor, before: int) -> torch.Tensor:
        """Return x behind copies of its first frame, with a border of one pixel, of neighbours' rows or repeated."""
        output = kernels.pad_video(x, before=before, border=1)
        if self.bands is not None:
            self.bands.exchange_border(output)
        return output

    def convolved(
        self,
        layer: nn.Conv2d | nn.Conv3d,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        padding: int = 0,
        biased: bool = True,
        last_tap: bool = False,
    ) -> torch.Tensor:
        """Convolve ``[B, C, T, H, W]``, which has its border or gets ``padding`` zeros, and add a residual.

        ``last_tap`` = only the kernel's last tap over time, because all frames before are zeros.
        """
        weight = self.converted(layer.weight, "last tap" if last_tap else "dense", x.dtype)
        bias = layer.bias if biased else None
        if padding and self.bands is not None:
            x, padding = self.bands.bordered(x), 0
        options = {"padding": padding, "dtype": layer.weight.dtype, "backend": self.convolutions}
        return kernels.convolution(x, weight, bias, residual, **options)

    def convolved_by_frames(
        self, layer: nn.Conv3d, x: torch.Tensor, normed: Frames, residual: MaybeTensor = None, **options: bool
    ) -> torch.Tensor:
        """Normalise and convolve ``[B, C, T, H, W]``, and add a residual; large videos a few frames at a time.

        ``normed`` returns some frames of x behind the norm, with the padding that their convolution reads.
        """
        batch, _, frames, height, width = x.shape
        rows = height if self.bands is None else self.bands.tallest(x)  # ranks take as many frames at a time
        some = max(1, BYTES * frames * height // (x.numel() * rows * x.element_size()))
        if some >= frames:
            return self.convolved(layer, normed(slice(0, frames)), residual, **options)
        out = x.new_empty(batch, frames, height, width, layer.out_channels).permute(0, 4, 1, 2, 3)
        for start in range(0, frames, some):
            part = slice(start, min(start + some, frames))
            added = None if residual is None else residual[:, :, part]
            out[:, :, part] = self.convolved(layer, normed(part), added, **options)
        return out

    def upsampled(
        self, layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor, *, frames: bool = False, padding: int = 0
    ) -> torch.Tensor:
        """Convolve features that are twice as wide and high, and have twice the frames after the first with frames.

        x has a border of one pixel or gets ``padding`` zeros; with frames, it is behind the frame before the first one.
        """
        weight = self.converted(layer.weight, "upsampling of frames" if frames else "upsampling")
        if padding:
            x = F.pad(dense(x), (padding,) * 4) if self.bands is None else self.bands.bordered(x)
        return kernels.upsampled_convolution(x, weight, layer.bias, backend=self.convolutions)

    def halved(self, layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """Convolve features that have their border, with strides of time, rows and columns."""
        return F.conv3d(dense(x), self.converted(layer.weight, "dense"), layer.bias, stride)

    def converted(self, weight: torch.Tensor, form: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight in another layout and dtype, converted once a decode."""
        key = (id(weight), form, dtype)
        if key not in self._converted:  # the weight too, so that its id stays its own
            converted = CONVERSIONS[form](weight if weight.ndim == 5 else weight[:, :, None])
            self._converted[key] = weight, converted.to(dtype)
        return self._converted[key][1]


def attended(
    x: torch.Tensor, *projections: Callable[[torch.Tensor], torch.Tensor], layers: Layers, causal: bool = False
) -> torch.Tensor:
    """Attend with one head over ``[B, C, T, H, W]``, whose frames attend to themselves.

    Projections are of tokens ``[B, tokens, C]`` to query, key and value, in one or three, and of the result. With
    ``causal``, frames attend to those before them too; scores that a mask would hide are not computed.
    """
    whole = layers.whole(x)
    tokens = whole.permute(0, 2, 3, 4, 1).flatten(1, 3)
    inner = [project(tokens) for project in projections[:-1]]
    query, key, value = inner if len(inner) == 3 else inner[0].chunk(3, -1)
    if layers.bands is not None:
        query = layers.band(query.unflatten(1, whole.shape[2:]).movedim(-1, 1)).permute(0, 2, 3, 4, 1).flatten(1, 3)
    output = query.new_empty(query.shape)
    pixels, all_pixels = (item.shape[3] * item.shape[4] for item in (x, whole))
    for frame in range(x.shape[2]):
        rows = slice(frame * pixels, (frame + 1) * pixels)
        keys = slice(0 if causal else frame * all_pixels, (frame + 1) * all_pixels)
        qkv = query[:, rows], key[:, keys], value[:, keys]
        output[:, rows] = kernels.single_head_attention(*qkv, backend=layers.backend)
    return projections[-1](output).unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)


def point_projections(*layers: nn.Conv2d | nn.Conv3d) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return convolutions of one pixel as projections of tokens ``[B, tokens, C]``."""
    return [partial(F.linear, weight=item.weight.flatten(1), bias=item.bias) for item in layers]


def parts_of(stage: nn.Module) -> list[nn.Module]:
    """Return the blocks, attentions and resamplers of a stage in the order of a call; a stage may be one of them."""
    blocks = list(getattr(stage, "resnets", [stage]))
    parts, attentions = blocks[:1], getattr(stage, "attentions", [])  # between the blocks of a middle block
    for attention, block in zip_longest(attentions, blocks[1:]):
        parts += [attention, block]
    for name in ("upsampler", "upsamplers", "downsampler", "downsamplers"):
        resamplers = getattr(stage, name, None)
        parts += resamplers if isinstance(resamplers, nn.ModuleList) else [resamplers]
    return [part for part in parts if part is not None]
