"""Decoding with fused kernels gives the videos of CogVideoX's autoencoder within rounding."""

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from torch import nn

from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode
from dit_accel.stages.vae import cogvideox
from tests.stages import ROUNDING

CONFIG = {
    "block_out_channels": (8, 8, 16, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_height": 32,
    "sample_width": 48,
}


def autoencoder(dtype=torch.float32, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoencoderKLCogVideoX(**CONFIG | config)
        for norm in (module for module in made.modules() if isinstance(module, nn.GroupNorm)):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return made.to(dtype).eval()


def decoded(made, *shape, dtype=torch.float32):
    return made.decode(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)).sample


def hooked(made, backend="reference"):
    return FusedDecode(made, backend)


@torch.no_grad()
@pytest.mark.parametrize(
    ("way", "frames"), [("tiles", 5), ("slices", 5), *(("whole", frames) for frames in (1, 2, 3, 5, 6))]
)
def test_videos_are_the_decoders_own(way, frames):
    """Two frames a call, of several videos, at the second decode as at the first; once restored, to the bit."""
    made, shape = autoencoder(), (2, 4, frames, 3, 5)
    if way == "tiles":
        made.enable_tiling(16, 24)
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
def test_frames_may_be_compressed_less():
    """Then one upsampling fewer doubles them."""
    made, shape = autoencoder(temporal_compression_ratio=2), (1, 4, 5, 3, 5)
    own = decoded(made, *shape)
    hook = hooked(made)
    assert (decoded(made, *shape) - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
def test_kernels_give_the_decoders_videos():
    made = autoencoder()
    own = decoded(made, 1, 4, 3, 1, 2)
    hook = hooked(made, "triton")
    assert (decoded(made, 1, 4, 3, 1, 2) - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
@pytest.mark.parametrize("way", ["differs", "fails"])
def test_the_decoder_goes_on_in_the_middle(way, monkeypatch):
    """From the frames that fused kernels kept, or anew."""
    made, shape, fused = autoencoder(), (1, 4, 6, 3, 5), cogvideox.decode
    own = decoded(made, *shape)

    def other_later(decoder, latents, conv_cache=None, **more):
        frames, kept = fused(decoder, latents, conv_cache, **more)
        if conv_cache and way == "fails":
            raise torch.OutOfMemoryError("no memory")
        return frames * (1.05 if conv_cache else 1.0), kept

    hook = hooked(made)
    if way == "fails":
        decoded(made, *shape)  # all forms are known
    monkeypatch.setattr(cogvideox, "decode", other_later)
    for _ in range(2):
        assert (decoded(made, *shape) - own).abs().max() < ROUNDING
        assert {"differs": "differ from the decoder", "fails": "no memory"}[way] in hook.remark


@torch.no_grad()
def test_bfloat16_errs_no_more_than_the_decoder():
    """Over the same weights in float32, at a second decode."""
    dtype, shape = torch.bfloat16, (1, 4, 4, 4, 4)
    made = autoencoder(dtype)
    own, exact = decoded(made, *shape, dtype=dtype), decoded(autoencoder(dtype).float(), *shape)
    hook = hooked(made)
    fused = [decoded(made, *shape, dtype=dtype) for _ in range(2)][-1]
    assert hook.remark == FUSED
    error, own_error = ((each.float() - exact).norm() / exact.norm() for each in (fused, own))
    assert error <= 1.2 * own_error < BOUNDS[dtype]


def _replace_an_activation(made):
    made.decoder.up_blocks[0].resnets[0].nonlinearity = nn.ReLU()


def _repeat_borders(made):
    made.decoder.conv_in.pad_mode = "replicate"


REASONS = {
    "activation": (_replace_an_activation, "its decoder has a ReLU"),
    "padding": (_repeat_borders, "its convolutions pad with replicate"),
}


@torch.no_grad()
@pytest.mark.parametrize(("change", "reason"), REASONS.values(), ids=REASONS)
def test_other_decoders_run_themselves(change, reason):
    made = autoencoder()
    change(made)
    hook = hooked(made)
    decoded(made, 1, 4, 2, 2, 2)
    assert reason in hook.remark
