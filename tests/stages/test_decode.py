"""Decoding with fused kernels gives the autoencoder's own images within rounding, or its own code runs."""

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import nn

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.models.hooks import find_hook, register_hook
from dit_accel.stages import decode
from dit_accel.stages.decode import BOUNDS, FUSED, DecoderHook, Decoding
from dit_accel.stages.vae import autoencoder_kl, page_of
from tests.tiny import tiny_output, tiny_pipeline

SMALL = {"block_out_channels": (16, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}
DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
CONFIGS = {
    "as-flux": {},
    "deeper": {"block_out_channels": (8, 16, 16), "layers_per_block": 2},
    "no-attention": {"mid_block_add_attention": False},
    "post-quant": {"use_post_quant_conv": True},
}


def autoencoder(dtype=torch.float32, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = {"use_quant_conv": False, "use_post_quant_conv": False, **SMALL, **config}
        blocks = len(config["block_out_channels"])
        made = AutoencoderKL(down_block_types=(DOWN,) * blocks, up_block_types=(UP,) * blocks, **config)
        for norm in (module for module in made.modules() if isinstance(module, nn.GroupNorm)):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return made.to(dtype).eval()


def latents(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def hooked():
    """Puts the hook on an autoencoder's decoder, with kernels of a backend."""

    def put(made, backend="reference"):
        hook = DecoderHook(page_of(made), backend)
        register_hook(made.decoder, hook)
        return hook

    return put


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_images_are_the_decoders_own(config, hooked):
    """Of odd sizes, of several images, and at the second call as at the first."""
    made = autoencoder(**config)
    for shape in ((2, 4, 5, 7), (1, 4, 8, 8), (2, 4, 5, 7)):
        given = latents(*shape)
        own = made.decode(given).sample
        hook = hooked(made)
        for _ in range(2):
            assert (made.decode(given).sample - own).abs().max() < 2e-5
            assert hook.remark == FUSED
        decode.remove_hook(made.decoder)
        assert torch.equal(made.decode(given).sample, own)


@torch.no_grad()
def test_kernels_give_the_decoders_images(hooked):
    made, given = autoencoder(), latents(1, 4, 2, 3)
    own = made.decode(given).sample
    hook = hooked(made, "triton")
    assert (made.decode(given).sample - own).abs().max() < 2e-5
    assert hook.remark == FUSED


@torch.no_grad()
def test_half_precision_errs_no_more_than_the_decoder(hooked):
    """Over the same weights in float64."""
    made, given = autoencoder(torch.float16), latents(1, 4, 16, 16, dtype=torch.float16)
    exact = autoencoder().half().double().decode(given.double()).sample
    own = made.decode(given).sample
    hooked(made)
    error, own_error = ((each.double() - exact).norm() / exact.norm() for each in (made.decode(given).sample, own))
    assert error <= 1.1 * own_error


@torch.no_grad()
@pytest.mark.parametrize("way", ["tiling", "slicing"])
def test_tiling_and_slicing_stay_on(way, hooked):
    """Each tile and each image is a call of the decoder."""
    made, given = autoencoder(sample_size=16), latents(2, 4, 24, 24)
    getattr(made, f"enable_{way}")()
    own = made.decode(given).sample
    hook = hooked(made)
    assert (made.decode(given).sample - own).abs().max() < 2e-5
    assert hook.remark == FUSED


@torch.no_grad()
def test_an_output_that_differs_is_not_taken(hooked, monkeypatch):
    """The decoder's own output is returned, then and later, and the remark names the error."""
    made, given = autoencoder(), latents(1, 4, 8, 8)
    own, fused = made.decode(given).sample, autoencoder_kl.decode
    monkeypatch.setattr(autoencoder_kl, "decode", lambda *given: 1.01 * fused(*given))
    hook = hooked(made)
    for _ in range(2):
        assert torch.equal(made.decode(given).sample, own)
        assert "differ from the decoder by 0.01, more than 0.003" in hook.remark


def _hook_a_part(made):
    made.decoder.mid_block.register_forward_hook(lambda *_: None)


def _replace_an_activation(made):
    made.decoder.up_blocks[0].resnets[0].nonlinearity = nn.ReLU()


def _wrap_a_convolution(made):
    class Wrapped(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    made.decoder.conv_in = Wrapped(made.decoder.conv_in)


def _train(made):
    made.train()


def _keep_a_weight_in_float64(made):
    made.decoder.conv_norm_out.weight.data = made.decoder.conv_norm_out.weight.data.double()


CHANGES = {
    "hooked": (_hook_a_part, "mid_block has hooks"),
    "activation": (_replace_an_activation, "its activation is ReLU"),
    "wrapped": (_wrap_a_convolution, "conv_in is not the code of torch or diffusers"),
    "training": (_train, "training mode"),
    "dtypes": (_keep_a_weight_in_float64, "conv_norm_out has its weight in torch.float64"),
}


@torch.no_grad()
@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_decoder_that_is_not_known_runs_itself(change, reason, hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8)
    change(made)
    hook = hooked(made)
    try:
        made.decode(given)
    except RuntimeError:  # torch's own norm takes no float64 weight
        assert change is _keep_a_weight_in_float64
    assert reason in hook.remark


def test_gradients_flow_through_the_decoders_own_code(hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8).requires_grad_()
    hooked(made)
    made.decode(given).sample.sum().backward()
    assert given.grad.abs().sum() > 0


def test_classes_without_a_page_are_named():
    pipe = tiny_pipeline("flux")
    pipe.vae = AutoencoderTiny()
    stage = Decoding(pipe)
    assert stage.remark == "by the autoencoder's own decoder: AutoencoderTiny is not known"
    stage.close()


def test_a_pipeline_on_a_cpu_decodes_as_ever():
    """To the bit, and the report says why; nothing is left once it is restored."""
    pipe = tiny_pipeline("flux")
    plain = tiny_output(pipe, "flux", steps=3)
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(tiny_output(pipe, "flux", steps=3), plain)
    pipe.vae.decode(latents(1, pipe.vae.config.latent_channels, 4, 4))
    assert "kernels need a CUDA GPU" in str(pipe.dit_accel.report())
    restore_pipeline(pipe)
    assert find_hook(pipe.vae.decoder) is None and "forward" not in vars(pipe.vae.decoder)


def test_one_key_switches_it_off():
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "exact", **{"stages.decode": False})
    assert find_hook(pipe.vae.decoder) is None
    assert "stages.decode is false" in str(pipe.dit_accel.report())


def test_pipelines_may_share_an_autoencoder():
    """The later acceleration has the hook, and restoring the earlier one leaves it."""
    first, second = tiny_pipeline("flux"), tiny_pipeline("flux")
    second.vae = first.vae
    accelerate_pipeline(first, "exact"), accelerate_pipeline(second, "exact")
    hook = find_hook(first.vae.decoder)
    restore_pipeline(first)
    assert find_hook(first.vae.decoder) is hook
    restore_pipeline(second)
    assert find_hook(first.vae.decoder) is None


def test_bounds_follow_the_dtype():
    assert BOUNDS[torch.float32] < BOUNDS[torch.float16] < BOUNDS[torch.bfloat16]
