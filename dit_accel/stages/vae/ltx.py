"""The decoders of ``AutoencoderKLLTXVideo`` and ``AutoencoderKLLTX2Video``, which decode whole videos at once.

One op normalises, applies the shift and scale of the timestep and SiLU, and writes into the padded input of the
convolution. The next norm adds the bias of a convolution. An upsampling moves channels into pixels: its convolution
gives them in an order in which one copy reads and writes contiguous memory.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dit_accel.kernels import pad_video, pixel_norm
from dit_accel.stages.vae.layers import Layers, MaybeTensor, dense

PARTS = ("Decoder3d", "MidBlock3d", "UpBlock3d", "ResnetBlock3d", "Upsampler3d", "CausalConv3d")
PEAKS = ((456_900, 329_200),)
KNOWN = {"PerChannelRMSNorm", "PixArtAlphaCombinedTimestepSizeEmbeddings", "Timesteps", "TimestepEmbedding"}
KNOWN |= {f"{prefix}Video{part}" for prefix in ("LTX", "LTX2") for part in PARTS}
REQUIRED = {"per_channel_scale1": (None,), "padding_mode": ("zeros", "reflect"), "RMSNorm.weight": (None,)}


def decode(
    decoder: nn.Module, latents: torch.Tensor, temb: MaybeTensor = None, causal: bool | None = None, *, layers: Layers
) -> torch.Tensor:
    """Return frames ``[B, C, T, H, W]`` of latents ``[B, c, t, h, w]``.

    ``temb`` is the timestep ``[B]`` of the latents, if the decoder takes one. In a causal call convolutions read no
    later frames; None = as the decoder says.
    """
    default = decoder.is_causal if hasattr(decoder, "is_causal") else decoder.conv_in.is_causal
    run = _LTXRun(bool(causal or default), layers)
    x = run.convolved(decoder.conv_in.conv, run.padded(latents, decoder.conv_in.conv))
    if decoder.timestep_scale_multiplier is not None:
        temb = temb * decoder.timestep_scale_multiplier
    for stage in (decoder.mid_block, *decoder.up_blocks):
        if getattr(stage, "conv_in", None) is not None:
            x = run.block(stage.conv_in, x, None)
        embedding = _embedding(stage.time_embedder, temb, x)
        for upsampler in getattr(stage, "upsamplers", None) or ():
            x = run.upsampled(upsampler, x)
        for block in stage.resnets:
            x = run.block(block, x, embedding)
    modulation = _modulation(decoder.scale_shift_table, _embedding(decoder.time_embedder, temb, x)) or (None, None)
    convolution = decoder.conv_out.conv
    x = run.convolved(convolution, run.normed(decoder.norm_out, x, modulation, convolution))
    time, side = decoder.patch_size_t, decoder.patch_size
    x = x.unflatten(1, (-1, time, side, side)).permute(0, 1, 5, 2, 6, 4, 7, 3)  # rows are the last of a patch's axes
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class _LTXRun:
    def __init__(self, is_causal: bool, layers: Layers) -> None:
        self._frames = {"before": 2, "after": 0} if is_causal else {"before": 1, "after": 1}
        self._layers = layers

    def padded(self, x: torch.Tensor, convolution: nn.Conv3d) -> torch.Tensor:
        return pad_video(x, border=_border(convolution, "reflect"), reflect=True, **self._frames)

    def normed(
        self, norm: nn.Module, x: torch.Tensor, modulation: tuple, convolution: nn.Conv3d, bias: MaybeTensor = None
    ) -> torch.Tensor:
        """Return the input of a convolution behind a norm, with a shift and a scale, and SiLU."""
        settings = {"eps": norm.eps, "border": _border(convolution, "reflect"), "reflect": True, **self._frames}
        return pixel_norm(x, None, *modulation, input_bias=bias, backend=self._layers.backend, **settings)

    def convolved(
        self, convolution: nn.Conv3d, padded: torch.Tensor, residual: torch.Tensor | None = None, *, biased: bool = True
    ) -> torch.Tensor:
        padding = _border(convolution, "zeros")
        return self._layers.convolved(convolution, padded, residual, padding=padding, biased=biased)

    def block(self, block: nn.Module, x: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        first, second = block.conv1.conv, block.conv2.conv
        modulation = _modulation(block.scale_shift_table, embedding) or (None,) * 4
        h = self.convolved(first, self.normed(block.norm1, x, modulation[:2], first), biased=False)
        padded = self.normed(block.norm2, h, modulation[2:], second, first.bias)
        del h  # a quarter of the peak
        if block.conv_shortcut is not None:
            x = block.norm3(x.movedim(1, -1)).movedim(-1, 1)
            x = self.convolved(getattr(block.conv_shortcut, "conv", block.conv_shortcut), x)
        return self.convolved(second, padded, x)

    def upsampled(self, upsampler: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Move channels into pixels and frames, without the first ``times - 1`` frames."""
        convolution, (times, downs, rights) = upsampler.conv.conv, upsampler.stride
        places = times * downs * rights
        weight = convolution.weight.unflatten(0, (-1, places)).permute(1, 0, 3, 4, 5, 2).flatten(0, 1)
        space = _border(convolution, "zeros")
        y = F.conv3d(self.padded(x, convolution), weight.permute(0, 4, 1, 2, 3), padding=(0, space, space))
        y = y.permute(0, 2, 3, 4, 1).unflatten(4, (times, downs, rights, -1)).permute(0, 1, 4, 2, 5, 3, 6, 7)
        bias = convolution.bias.unflatten(0, (-1, places)).t().reshape(times, 1, downs, 1, rights, -1)
        out = torch.add(y, bias, out=y.new_empty(y.shape))  # [B, T, times, H, downs, W, rights, C]
        if upsampler.residual:
            shortcut = x.permute(0, 2, 3, 4, 1).unflatten(4, (-1, times, downs, rights)).permute(0, 1, 5, 2, 6, 3, 7, 4)
            out.unflatten(-1, (-1, shortcut.shape[-1])).add_(shortcut[..., None, :])
        return dense(out.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, times - 1 :].permute(0, 4, 1, 2, 3))


def _border(convolution: nn.Conv3d, mode: str) -> int:
    """Return the number of pixels that a convolution adds at each border in a mode, "zeros" or "reflect"."""
    return convolution.padding[1] if convolution.padding_mode == mode else 0


def _embedding(embedder: nn.Module | None, temb: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    if embedder is None:
        return None
    return embedder(temb.flatten(), None, None, batch_size=x.shape[0], hidden_dtype=x.dtype)


def _modulation(table: torch.Tensor | None, embedding: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return shift, scale, shift, scale and so on, ``[B, C]``; None = the module has no table."""
    return None if table is None else (embedding.unflatten(1, table.shape) + table).unbind(1)
