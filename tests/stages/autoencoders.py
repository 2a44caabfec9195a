"""Small autoencoders of every page, and ways to call them."""

import diffusers
import torch
from torch import nn

from scripts.bench.model_speed.models import as_loaded

FLUX = {"block_out_channels": (16, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}
FLUX |= {"use_quant_conv": False, "use_post_quant_conv": False}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
WAN |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
WAN_2 = {"decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
HUNYUAN = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}
HUNYUAN_15 = {"latent_channels": 4, "block_out_channels": (8, 16, 32, 32), "layers_per_block": 1}
HUNYUAN_15 |= {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
HUNYUAN_IMAGE = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64, 64)}
HUNYUAN_IMAGE |= {"layers_per_block": 1, "spatial_compression_ratio": 4, "sample_size": 16}
COGVIDEOX = {"block_out_channels": (8, 8, 16, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
COGVIDEOX |= {"sample_height": 32, "sample_width": 48}
LTX = {"block_out_channels": (8, 8), "layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False)}
LTX |= {"latent_channels": 4, "patch_size": 2, "decoder_layers_per_block": (1, 1, 2)}
LTX |= {"decoder_spatio_temporal_scaling": (True, True), "decoder_inject_noise": (False,) * 3}
LTX_1 = {**LTX, "decoder_block_out_channels": (8, 16), "down_block_types": ("LTXVideoDownBlock3D",) * 2}
UPSAMPLED = {"decoder_block_out_channels": (16, 32), "upsample_residual": (True, True), "upsample_factor": (2, 2)}
LTX_2 = {**LTX, **UPSAMPLED, "down_block_types": ("LTX2VideoDownBlock3D",) * 2}
LTX_2 |= {"downsample_type": ("spatiotemporal",) * 2, "upsample_type": ("spatiotemporal",) * 2}
BY_AXIS = {"upsample_type": ("temporal", "spatial"), "timestep_conditioning": True}
H3 = {"latent_channels": 4, "block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 4}
H3 |= {"decoder_num_layers": 2, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16}
AUTOENCODERS = {  # class and configuration, by page and what differs
    "flux": (diffusers.AutoencoderKL, FLUX),
    "flux, deeper": (diffusers.AutoencoderKL, FLUX | {"block_out_channels": (8, 16, 16), "layers_per_block": 2}),
    "flux, no attention": (diffusers.AutoencoderKL, FLUX | {"mid_block_add_attention": False}),
    "flux, post-quant": (diffusers.AutoencoderKL, FLUX | {"use_post_quant_conv": True}),
    "wan 2.1": (diffusers.AutoencoderKLWan, WAN),
    "wan 2.2": (diffusers.AutoencoderKLWan, WAN | WAN_2),
    "wan, deep": (
        diffusers.AutoencoderKLWan,
        WAN | {"dim_mult": [1, 1, 2, 2], "temperal_downsample": [False, True, True]},
    ),
    "qwen-image": (diffusers.AutoencoderKLQwenImage, WAN),
    "hunyuan": (diffusers.AutoencoderKLHunyuanVideo, HUNYUAN),
    "hunyuan, no attention": (diffusers.AutoencoderKLHunyuanVideo, HUNYUAN | {"mid_block_add_attention": False}),
    "hunyuan 1.5": (diffusers.AutoencoderKLHunyuanVideo15, HUNYUAN_15),
    "hunyuan 1.5, twice": (diffusers.AutoencoderKLHunyuanVideo15, HUNYUAN_15 | {"temporal_compression_ratio": 2}),
    "hunyuan 1.5, channels": (diffusers.AutoencoderKLHunyuanVideo15, HUNYUAN_15 | {"upsample_match_channel": False}),
    "hunyuan-image": (diffusers.AutoencoderKLHunyuanImage, HUNYUAN_IMAGE),
    "cogvideox": (diffusers.AutoencoderKLCogVideoX, COGVIDEOX),
    "cogvideox, frames twice": (diffusers.AutoencoderKLCogVideoX, COGVIDEOX | {"temporal_compression_ratio": 2}),
    "ltx 0.9.0": (diffusers.AutoencoderKLLTXVideo, LTX_1),
    "ltx 0.9.5": (diffusers.AutoencoderKLLTXVideo, LTX_1 | UPSAMPLED | {"timestep_conditioning": True}),
    "ltx, causal": (diffusers.AutoencoderKLLTXVideo, LTX_1 | {"decoder_causal": True}),
    "ltx 2": (diffusers.AutoencoderKLLTX2Video, LTX_2 | {"decoder_causal": False}),
    "ltx 2, causal": (diffusers.AutoencoderKLLTX2Video, LTX_2),
    "ltx 2, zeros": (diffusers.AutoencoderKLLTX2Video, LTX_2 | {"decoder_spatial_padding_mode": "zeros"}),
    "ltx 2, wide": (diffusers.AutoencoderKLLTX2Video, LTX_2 | {"upsample_factor": (1, 1), "upsample_residual": False}),
    "ltx 2, by axis": (diffusers.AutoencoderKLLTX2Video, LTX_2 | BY_AXIS),
    "minimax-h3": (diffusers.AutoencoderKLMiniMaxH3, H3),
}


@torch.no_grad()
def autoencoder(name="flux", dtype=torch.float32, **config):
    """Build an autoencoder of the table, whose norms have random weights."""
    kind, settings = AUTOENCODERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = len(settings.get("block_out_channels", ()))
        if kind is diffusers.AutoencoderKL:
            settings = settings | {"down_block_types": ("DownEncoderBlock2D",) * blocks}
            settings = settings | {"up_block_types": ("UpDecoderBlock2D",) * blocks}
        output = kind(**settings | config)
        for module in output.modules():
            if isinstance(module, nn.GroupNorm | nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
                nn.init.normal_(module.weight, 1.0, 0.3)
                if getattr(module, "bias", None) is not None:
                    nn.init.normal_(module.bias, 0.0, 0.3)
            for name in ("gamma", "scale1", "scale2"):
                if hasattr(module, name):
                    nn.init.uniform_(getattr(module, name), 0.5, 1.5)
    if name.startswith("ltx"):
        output.spatial_compression_ratio, output.temporal_compression_ratio = 8, 4  # of the decoder
    return as_loaded(output.to(dtype)).eval()


def latents(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def decoded(autoencoder, latents, **options):
    """Images or videos of latents; several have several timesteps."""
    timesteps = []
    if autoencoder.config.get("timestep_conditioning"):
        timesteps = [torch.linspace(0.05, 0.3, len(latents)).to(latents.dtype)]
    return autoencoder.decode(latents, *timesteps, **options).sample


def encoded(autoencoder, images):
    return autoencoder.encode(images).latent_dist.parameters


def enable_tiling(autoencoder):
    """Decode, and encode where the class can, in tiles of a few latents."""
    kind = type(autoencoder)
    if kind is diffusers.AutoencoderKLHunyuanImage:
        autoencoder.use_tiling, autoencoder.tile_latent_min_size = True, 4
    elif kind is diffusers.AutoencoderKL:
        autoencoder.tile_sample_min_size, autoencoder.tile_latent_min_size = 16, 8
        autoencoder.enable_tiling()
    elif kind is diffusers.AutoencoderKLHunyuanVideo15:
        autoencoder.enable_tiling(16, 16, 2, 2, 0.5)
    elif kind is diffusers.AutoencoderKLCogVideoX:
        autoencoder.enable_tiling(16, 24)
    elif kind is diffusers.AutoencoderKLMiniMaxH3:
        autoencoder.enable_tiling(32, 32, 16, 16)
    elif kind in (diffusers.AutoencoderKLLTXVideo, diffusers.AutoencoderKLLTX2Video):
        autoencoder.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    else:
        autoencoder.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)


def enable_frames(autoencoder):
    """Decode a few frames of LTX at a time."""
    autoencoder.use_framewise_decoding, autoencoder.tile_sample_min_num_frames = True, 8
    autoencoder.tile_sample_stride_num_frames = 4
