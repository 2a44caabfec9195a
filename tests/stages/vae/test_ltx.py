"""Decoding with fused kernels gives the videos of LTX-Video's and LTX-2's autoencoders within rounding."""

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video, AutoencoderKLLTXVideo
from torch import nn

from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode
from tests.stages import ROUNDING

ENCODER = {"block_out_channels": (8, 8), "layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False)}
SHALLOW = {**ENCODER, "latent_channels": 6, "patch_size": 2}
UPSAMPLED = {"upsample_residual": (True, True), "upsample_factor": (2, 2), "decoder_inject_noise": (False,) * 3}
DECODER = {"decoder_layers_per_block": (1, 1, 2), "decoder_spatio_temporal_scaling": (True, True)}
VIDEO = {
    **SHALLOW,
    "decoder_block_out_channels": (8, 16),
    **DECODER,
    "decoder_inject_noise": (False,) * 3,
    "down_block_types": ("LTXVideoDownBlock3D",) * 2,
}
VIDEO2 = {
    **SHALLOW,
    "decoder_block_out_channels": (16, 32),
    **DECODER,
    **UPSAMPLED,
    "down_block_types": ("LTX2VideoDownBlock3D",) * 2,
    "downsample_type": ("spatiotemporal",) * 2,
    "upsample_type": ("spatiotemporal",) * 2,
}
NEWER = {**UPSAMPLED, "decoder_block_out_channels": (16, 32)}
CASES = {
    "ltx-0.9.0": (AutoencoderKLLTXVideo, VIDEO),
    "ltx-0.9.5": (AutoencoderKLLTXVideo, VIDEO | NEWER | {"timestep_conditioning": True}),
    "ltx-causal": (AutoencoderKLLTXVideo, VIDEO | {"decoder_causal": True}),
    "ltx2": (AutoencoderKLLTX2Video, VIDEO2 | {"decoder_causal": False}),
    "ltx2-causal": (AutoencoderKLLTX2Video, VIDEO2),
    "ltx2-zeros": (AutoencoderKLLTX2Video, VIDEO2 | {"decoder_spatial_padding_mode": "zeros"}),
    "ltx2-widens": (AutoencoderKLLTX2Video, VIDEO2 | {"upsample_factor": (1, 1), "upsample_residual": False}),
    "ltx2-by-axis": (
        AutoencoderKLLTX2Video,
        VIDEO2 | {"upsample_type": ("temporal", "spatial"), "timestep_conditioning": True},
    ),
}
every_case = pytest.mark.parametrize(("kind", "config"), CASES.values(), ids=CASES)


def autoencoder(kind, config, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = kind(**config).to(dtype).eval()
        for module in made.decoder.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.3)
                nn.init.normal_(module.bias, 0.0, 0.3)
    made.spatial_compression_ratio, made.temporal_compression_ratio = 8, 4  # of the decoder
    return made


def decoded(made, *shape, dtype=torch.float32, **options):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    temb = torch.linspace(0.05, 0.3, len(given)).to(dtype) if made.config.timestep_conditioning else None
    return made.decode(given, temb, **options).sample


def hooked(made, backend="reference"):
    return FusedDecode(made, backend)


@torch.no_grad()
@every_case
@pytest.mark.parametrize("frames", [1, 3])
def test_videos_are_the_decoders_own(kind, config, frames):
    """Of odd sizes, of several videos, at the second call as at the first; once restored, to the bit."""
    made = autoencoder(kind, config)
    own = decoded(made, 2, 6, frames, 3, 5)
    hook = hooked(made)
    for _ in range(2):
        assert (decoded(made, 2, 6, frames, 3, 5) - own).abs().max() < ROUNDING
        assert hook.remark == FUSED
    hook.leave()
    assert torch.equal(decoded(made, 2, 6, frames, 3, 5), own)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ltx-0.9.0", "ltx-0.9.5", "ltx2"])
def test_kernels_give_the_decoders_videos(name):
    made = autoencoder(*CASES[name])
    own = decoded(made, 1, 6, 2, 2, 3)
    hook = hooked(made, "triton")
    assert (decoded(made, 1, 6, 2, 2, 3) - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
@every_case
def test_bfloat16_errs_no_more_than_the_decoder(kind, config):
    """Over the same weights in float32, at a second call."""
    dtype, shape = torch.bfloat16, (1, 6, 3, 4, 4)
    made = autoencoder(kind, config, dtype)
    own, exact = decoded(made, *shape, dtype=dtype), autoencoder(kind, config, dtype).float()
    exact = decoded(exact, *shape)
    hook = hooked(made)
    fused = [decoded(made, *shape, dtype=dtype) for _ in range(2)][-1]
    assert hook.remark == FUSED
    error, own_error = ((each.float() - exact).norm() / exact.norm() for each in (fused, own))
    assert error <= 1.2 * own_error < BOUNDS[dtype]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "way"),
    [("ltx-0.9.5", "tiles"), ("ltx-0.9.5", "frames"), ("ltx2", "tiles"), ("ltx2", "frames"), ("ltx2", "slices")],
)
def test_videos_in_parts(name, way):
    """Each part is a call of the decoder, and parts have several sizes."""
    made = autoencoder(*CASES[name])
    if way == "tiles":
        made.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    elif way == "frames":
        made.use_framewise_decoding, made.tile_sample_min_num_frames = True, 8
        made.tile_sample_stride_num_frames = 4
    else:
        made.enable_slicing()
    own = decoded(made, 2, 6, 5, 6, 8)
    hook = hooked(made)
    for _ in range(2):
        assert (decoded(made, 2, 6, 5, 6, 8) - own).abs().max() < ROUNDING
        assert hook.remark == FUSED


@torch.no_grad()
def test_a_call_may_be_causal():
    """Where the decoder is not."""
    made = autoencoder(*CASES["ltx2"])
    own, other = (decoded(made, 1, 6, 3, 3, 3, causal=causal) for causal in (True, None))
    hook = hooked(made)
    for causal, expected in ((True, own), (None, other)):
        assert (decoded(made, 1, 6, 3, 3, 3, causal=causal) - expected).abs().max() < ROUNDING
        assert hook.remark == FUSED
    assert (own - other).abs().max() > 1e-3


REASONS = {
    "noise": (AutoencoderKLLTXVideo, VIDEO | NEWER | {"decoder_inject_noise": (True, False, False)}, "add noise"),
    "circular": (AutoencoderKLLTX2Video, VIDEO2 | {"decoder_spatial_padding_mode": "circular"}, "pads with circular"),
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "config", "reason"), REASONS.values(), ids=REASONS)
def test_other_decoders_run_themselves(kind, config, reason):
    made = autoencoder(kind, config)
    hook = hooked(made)
    decoded(made, 1, 6, 1, 3, 3)
    assert reason in hook.remark


@torch.no_grad()
def test_another_activation_runs_itself():
    made = autoencoder(*CASES["ltx2"])
    made.decoder.up_blocks[0].resnets[0].nonlinearity = nn.ReLU()
    hook = hooked(made)
    decoded(made, 1, 6, 1, 3, 3)
    assert "ReLU" in hook.remark
