"""Decoding with fused kernels gives the videos of HunyuanVideo 1.5's autoencoder within rounding."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import nn

from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode
from dit_accel.stages.vae import layers
from tests.stages import ROUNDING

SMALL = {"latent_channels": 4, "block_out_channels": (8, 16, 32, 32), "layers_per_block": 1}
CONFIG = {**SMALL, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
CONFIGS = {
    "as-released": {},
    "one-upsampling-of-frames": {"temporal_compression_ratio": 2},
    "blocks-change-channels": {"upsample_match_channel": False},
}


def autoencoder(dtype=torch.float32, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoencoderKLHunyuanVideo15(**CONFIG | config)
        for norm in (module for module in made.modules() if hasattr(module, "gamma")):
            nn.init.uniform_(norm.gamma, 0.5, 1.5)
    return made.to(dtype).eval()


def decoded(made, *shape, dtype=torch.float32):
    return made.decode(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)).sample


def hooked(made, backend="reference"):
    return FusedDecode(made, backend)


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("frames", [1, 3])
def test_videos_are_the_decoders_own(config, frames, monkeypatch):
    """Of odd sizes, in parts of a few frames, and in tiles; once restored, to the bit.

    Several videos are decoded in slices, because the decoder's own mask has the shape for one.
    """
    made, shape = autoencoder(**config), (2, 4, frames, 2, 3)
    made.enable_slicing()
    own = decoded(made, *shape)
    hook = hooked(made)
    for limit in (layers.BYTES, 40_000, 1):
        monkeypatch.setattr(layers, "BYTES", limit)
        assert (decoded(made, *shape) - own).abs().max() < ROUNDING
        assert hook.remark == FUSED
    made.enable_tiling(16, 16, 2, 2, 0.5)
    tiled = decoded(made, *shape)
    assert hook.remark == FUSED
    hook.leave()
    assert (decoded(made, *shape) - tiled).abs().max() < ROUNDING
    made.use_tiling = False
    assert torch.equal(decoded(made, *shape), own)


@torch.no_grad()
def test_kernels_give_the_decoders_videos():
    made = autoencoder()
    own = decoded(made, 1, 4, 2, 1, 2)
    hook = hooked(made, "triton")
    assert (decoded(made, 1, 4, 2, 1, 2) - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
def test_bfloat16_errs_no_more_than_the_decoder():
    """Over the same weights in float32, at a second call."""
    dtype, shape = torch.bfloat16, (1, 4, 3, 4, 4)
    made = autoencoder(dtype)
    own, exact = decoded(made, *shape, dtype=dtype), decoded(autoencoder(dtype).float(), *shape)
    hook = hooked(made)
    fused = [decoded(made, *shape, dtype=dtype) for _ in range(2)][-1]
    assert hook.remark == FUSED
    error, own_error = ((each.float() - exact).norm() / exact.norm() for each in (fused, own))
    assert error <= 1.2 * own_error < BOUNDS[dtype]


def _replace_an_activation(made):
    made.decoder.up_blocks[0].resnets[0].nonlinearity = nn.ReLU()


def _pad_with_zeros(made):
    made.decoder.conv_in.pad_mode = "constant"


REASONS = {
    "activation": (_replace_an_activation, "its decoder has a ReLU"),
    "padding": (_pad_with_zeros, "a convolution pads with constant"),
}


@torch.no_grad()
@pytest.mark.parametrize(("change", "reason"), REASONS.values(), ids=REASONS)
def test_other_decoders_run_themselves(change, reason):
    made = autoencoder()
    change(made)
    hook = hooked(made)
    decoded(made, 1, 4, 1, 2, 2)
    assert reason in hook.remark
