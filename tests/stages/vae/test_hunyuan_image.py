"""Decoding with fused kernels gives the images of HunyuanImage's autoencoder within rounding."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanImage
from torch import nn

from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode
from tests.stages import ROUNDING

CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 8,
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "sample_size": 16,
}


def autoencoder(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoencoderKLHunyuanImage(**CONFIG)
        for norm in (module for module in made.modules() if isinstance(module, nn.GroupNorm)):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return made.to(dtype).eval()


def decoded(made, *shape, dtype=torch.float32):
    return made.decode(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)).sample


def hooked(made, backend="reference"):
    return FusedDecode(made, backend)


@torch.no_grad()
@pytest.mark.parametrize("way", ["whole", "tiles", "slices"])
def test_images_are_the_decoders_own(way):
    """Of odd sizes, of several images, at the second call as at the first; once restored, to the bit."""
    made, shape = autoencoder(), (2, 8, 5, 7)
    if way == "tiles":
        made.use_tiling, made.tile_latent_min_size = True, 4
    elif way == "slices":
        made.enable_slicing()
    own = decoded(made, *shape)
    hook = hooked(made)
    for _ in range(2):
        assert (decoded(made, *shape) - own).abs().max() < ROUNDING
        assert hook.remark == FUSED
    hook.leave()
    assert torch.equal(decoded(made, *shape), own)


@torch.no_grad()
def test_kernels_give_the_decoders_images():
    made = autoencoder()
    own = decoded(made, 1, 8, 2, 3)
    hook = hooked(made, "triton")
    assert (decoded(made, 1, 8, 2, 3) - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
def test_bfloat16_errs_no_more_than_the_decoder():
    """Over the same weights in float32, at a second call."""
    dtype, shape = torch.bfloat16, (1, 8, 8, 8)
    made = autoencoder(dtype)
    own, exact = decoded(made, *shape, dtype=dtype), decoded(autoencoder(dtype).float(), *shape)
    hook = hooked(made)
    fused = [decoded(made, *shape, dtype=dtype) for _ in range(2)][-1]
    assert hook.remark == FUSED
    error, own_error = ((each.float() - exact).norm() / exact.norm() for each in (fused, own))
    assert error <= 1.2 * own_error < BOUNDS[dtype]


@torch.no_grad()
def test_another_activation_runs_itself():
    made = autoencoder()
    made.decoder.up_blocks[0].nonlinearity = nn.ReLU()
    hook = hooked(made)
    decoded(made, 1, 8, 2, 2)
    assert "its decoder has a ReLU" in hook.remark
