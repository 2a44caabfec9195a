"""``AutoencoderKLMiniMaxH3``, whose decoder is a transformer over the latents of a tile.

    x' = x + s attention(RMSNorm(x))          x'' = x' + s_2 mlp(RMSNorm(x'))

diffusers decodes the overlapping tiles of some frames one by one; here they are a batch. A sum and the next norm are
one op, and so are norm and RoPE of queries and keys. x, s and the norms' weights stay float32 in half precision.
"""

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from dit_accel.kernels import add_gated_norm_modulate, norm_rope_pair
from dit_accel.models.fused.parts import Rotary, feed_forward, query_key_value
from dit_accel.stages.vae.layers import Layers

TILES = 12  # of a batch; 12 of 256 x 256 pixels cover 480 x 832
PARTS = ("ViTDecoder3d", "RotaryPosEmbed", "TransformerBlock", "Attention")
KNOWN = {"FeedForward", "SwiGLU", *(f"MiniMaxH3Video{part}" for part in PARTS)}
REQUIRED: dict[str, tuple] = {}
FLOAT32 = ("RMSNorm", "LayerNorm", "MiniMaxH3VideoTransformerBlock")  # as published


def why_not_module(module: nn.Module) -> str | None:
    is_other = hasattr(module, "processor") and type(module.processor).__name__ != "MiniMaxH3VideoAttnProcessor"
    return "is not the attention of diffusers" if is_other else None


def decode_clip(autoencoder: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Return frames of a chunk's latents ``[B, C, t, h, w]``, whose tiles have one size."""
    if not autoencoder.use_tiling:
        return autoencoder.decoder(autoencoder.post_quant_conv(latents))
    ratio, splits = autoencoder.spatial_compression_ratio, []
    for side, name in zip(latents.shape[-2:], ("height", "width"), strict=True):
        sizes = (getattr(autoencoder, f"tile_sample_min_{kind}{name}") for kind in ("", "overlap_"))
        splits.append(autoencoder._split_tiles(side * ratio, *sizes))
    (rows, heights, down), (columns, widths, right) = splits
    height, width = heights[0] // ratio, widths[0] // ratio
    tiles = [latents[..., top // ratio :, left // ratio :][..., :height, :width] for top in rows for left in columns]
    decoded: list[torch.Tensor] = []
    for start in range(0, len(tiles), TILES):
        batch = autoencoder.post_quant_conv(torch.cat(tiles[start : start + TILES]))
        decoded += autoencoder.decoder(batch).split(len(latents))
    each_row = [decoded[start : start + len(columns)] for start in range(0, len(tiles), len(columns))]
    return autoencoder._stitch_tiles(each_row, down, right)


def decode(decoder: nn.Module, latents: torch.Tensor, *, layers: Layers) -> torch.Tensor:
    """Return frames ``[B, 3, T, H, W]`` of latents ``[B, C, t, h, w]``."""
    x = decoder.proj_in(latents.flatten(2).transpose(1, 2))
    registers = decoder.register_tokens.to(x.dtype).expand(len(x), -1, -1)
    x = F.pad(torch.cat([x, registers], 1), (0, 0, 0, 1))  # the last token is zeros
    rotary = _rotary(decoder, latents.shape[2:], x)
    blocks = decoder.transformer_blocks
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)] + [decoder.norm_out]
    dtype, x = x.dtype, x.float()
    normed = norms[0](x).to(dtype)
    for index, block in enumerate(blocks):
        update = _attended(block.attn, normed, rotary, layers)
        x, normed = _added(x, update, block.scale1, norms[2 * index + 1], layers)
        x, normed = _added(x, feed_forward(block.ff, normed), block.scale2, norms[2 * index + 2], layers)
    time, side = decoder.patch_size_t, decoder.patch_size
    y = decoder.proj_out(normed)[:, : latents[0, 0].numel()].unflatten(1, latents.shape[2:])
    y = y.unflatten(4, (-1, time, side, side)).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return y.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _rotary(decoder: nn.Module, grid: torch.Size, x: torch.Tensor) -> Rotary:
    """Return cosines and sines ``[1, S, 1, R]`` of x's tokens; those behind the grid have position 0."""
    positions = torch.cartesian_prod(*(torch.linspace(1 / n - 1, 1 - 1 / n, n, device=x.device) for n in grid))
    tables = decoder.rope(F.pad(positions, (0, 0, 0, x.shape[1] - len(positions)))[None])
    cos, sin = (table[..., : table.shape[-1] // 2].float().contiguous() for table in tables)  # halves are equal
    return cos, sin


def _attended(attention: nn.Module, x: torch.Tensor, rotary: Rotary, layers: Layers) -> torch.Tensor:
    q, k, v = query_key_value(attention, x)
    ones = q.new_ones(q.shape[-1])
    q, k = norm_rope_pair(q, k, (ones, ones), rotary, eps=attention.norm_q.eps, backend=layers.backend)
    output = dispatch_attention_fn(q, k, v, backend=attention.processor._attention_backend)
    return attention.to_out[0](output.flatten(2))


def _added(
    x: torch.Tensor, update: torch.Tensor, scale: torch.Tensor, norm: nn.Module, layers: Layers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + scale * update``, and its norm in the update's dtype."""
    rows = [scale, norm.weight.float() - 1] + ([] if isinstance(norm, nn.RMSNorm) else [norm.bias.float()])
    values, settings = [row[None, None] for row in rows], {"eps": norm.eps, "rms": len(rows) == 2}
    return add_gated_norm_modulate(x, update, *values, **settings, backend=layers.backend)
