"""Decoding with fused kernels gives the autoencoder's own images within rounding, or its own code runs."""

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from diffusers.models.resnet import ResnetBlock2D
from peft import LoraConfig
from torch import nn

from dit_accel.kernels.kept import capturing
from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode, FusedEncode
from dit_accel.stages.vae import autoencoder_kl, causal, layers
from tests.stages import ROUNDING

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


@torch.no_grad()
def images(made, given):
    return made.decode(given).sample


@pytest.fixture
def hooked():
    """Fuses an autoencoder's decoder, with kernels of a backend."""

    def put(made, backend="reference"):
        return FusedDecode(made, backend)

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
            assert (made.decode(given).sample - own).abs().max() < ROUNDING
            assert hook.remark == FUSED
        hook.leave()
        assert torch.equal(made.decode(given).sample, own)


@torch.no_grad()
def test_kernels_give_the_decoders_images(hooked):
    made, given = autoencoder(), latents(1, 4, 2, 3)
    own = made.decode(given).sample
    hook = hooked(made, "triton")
    assert (made.decode(given).sample - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


VIDEO = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
RESIDUAL = {"decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
CAUSAL = {
    "wan-2.1": (AutoencoderKLWan, {}),
    "wan-2.2": (AutoencoderKLWan, RESIDUAL),
    "deeper": (AutoencoderKLWan, {"dim_mult": [1, 1, 2, 2], "temperal_downsample": [False, True, True]}),
    "qwen-image": (AutoencoderKLQwenImage, {}),
}


def video_autoencoder(kind, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = kind(**VIDEO | config, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).eval()
        for norm in (module for module in made.modules() if type(module).__name__.endswith("RMS_norm")):
            nn.init.uniform_(norm.gamma, 0.5, 1.5)
    return made


@torch.no_grad()
@pytest.mark.parametrize(("kind", "config"), CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_videos_are_the_decoders_own(kind, config, frames, hooked):
    """Frame by frame, of several videos, at the second call as at the first, and of tiles."""
    made, given = video_autoencoder(kind, **config), latents(2, 4, frames, 5, 6)
    own = made.decode(given).sample
    hook = hooked(made)
    for _ in range(2):
        assert (made.decode(given).sample - own).abs().max() < ROUNDING
        assert hook.remark == FUSED
    made.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    tiled = made.decode(given).sample
    hook.leave()
    assert (made.decode(given).sample - tiled).abs().max() < ROUNDING


HUNYUAN = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}


def hunyuan_autoencoder(**config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoencoderKLHunyuanVideo(**HUNYUAN | config).eval()
        for norm in (module for module in made.modules() if isinstance(module, nn.GroupNorm)):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return made


@torch.no_grad()
@pytest.mark.parametrize("config", [{}, {"mid_block_add_attention": False}], ids=["attention", "no-attention"])
@pytest.mark.parametrize("frames", [1, 3, 6])
def test_borders_that_repeat_pixels_are_the_decoders_own(config, frames, hooked, monkeypatch):
    """Of several videos, in parts of a few frames, in tiles of frames, and in tiles of pixels."""
    made, given = hunyuan_autoencoder(**config), latents(2, 4, frames, 3, 5)
    own = made.decode(given).sample
    hook = hooked(made)
    for limit in (layers.BYTES, 1000):
        monkeypatch.setattr(layers, "BYTES", limit)
        assert (made.decode(given).sample - own).abs().max() < ROUNDING
        assert hook.remark == FUSED
    made.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    tiled = made.decode(given).sample
    hook.leave()
    assert (made.decode(given).sample - tiled).abs().max() < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (18, 26)], ids=["even", "odd-latents"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_images_are_encoded_as_by_the_encoder(config, size):
    """Of several images, at the second call as at the first."""
    made, given = autoencoder(**config), latents(2, 3, *size)
    own = made.encode(given).latent_dist.parameters
    stage = FusedEncode(made, "reference")
    for _ in range(2):
        assert (made.encode(given).latent_dist.parameters - own).abs().max() < ROUNDING
        assert stage.remark == FUSED
    stage.leave()
    assert torch.equal(made.encode(given).latent_dist.parameters, own)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "config"), CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("frames", [1, 5, 9])
def test_videos_are_encoded_as_by_the_encoder(kind, config, frames):
    """A first frame alone, then four frames a call, of several videos and of tiles."""
    made, given = video_autoencoder(kind, **config), latents(2, 3, frames, 32, 48)
    own = made.encode(given).latent_dist.parameters
    stage = FusedEncode(made, "reference")
    for _ in range(2):
        assert (made.encode(given).latent_dist.parameters - own).abs().max() < ROUNDING
        assert stage.remark == FUSED
    made.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    tiled = made.encode(given).latent_dist.parameters
    stage.leave()
    assert (made.encode(given).latent_dist.parameters - tiled).abs().max() < ROUNDING


@torch.no_grad()
def test_kernels_encode_images():
    made, given = autoencoder(), latents(1, 3, 6, 10)
    own = made.encode(given).latent_dist.parameters
    stage = FusedEncode(made, "triton")
    assert (made.encode(given).latent_dist.parameters - own).abs().max() < ROUNDING
    assert stage.remark == FUSED


@torch.no_grad()
def test_a_frame_that_differs_ends_it_in_the_middle(hooked, monkeypatch):
    """The rest of the video is the decoder's own, which goes on from the frames that were kept."""
    made, given = video_autoencoder(AutoencoderKLWan), latents(1, 4, 4, 5, 6)
    own, fused = made.decode(given).sample, causal.decode

    def wrong_later(decoder, x, *, feat_cache, **more):
        is_later = feat_cache[0] is not None
        return fused(decoder, x, feat_cache=feat_cache, **more) * (1.05 if is_later else 1.0)

    monkeypatch.setattr(causal, "decode", wrong_later)
    hook = hooked(made)
    for _ in range(2):
        assert (made.decode(given).sample - own).abs().max() < ROUNDING
        assert "differ from the decoder" in hook.remark


@torch.no_grad()
def test_frames_kept_for_the_next_call_are_compared(hooked, monkeypatch):
    made, given = video_autoencoder(AutoencoderKLWan), latents(1, 4, 4, 5, 6)
    own, fused = made.decode(given).sample, causal.decode

    def keeps_others(decoder, x, *, feat_cache, **more):
        output = fused(decoder, x, feat_cache=feat_cache, **more)
        feat_cache[:] = [2 * each if isinstance(each, torch.Tensor) else each for each in feat_cache]
        return output

    monkeypatch.setattr(causal, "decode", keeps_others)
    hook = hooked(made)
    assert (made.decode(given).sample - own).abs().max() < ROUNDING
    assert "for the next call fused kernels differ from the decoder" in hook.remark


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
def test_biases_of_a_block_are_added_in_float32():
    """2048 + 1 has no place in half precision; with features of −2048 it makes 1."""
    block = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=None, groups=8).half()
    for weight in block.parameters():
        weight.zero_()
    block.conv_shortcut.weight.fill_(-256)
    block.conv_shortcut.bias.fill_(2048)
    block.conv2.bias.fill_(1)
    features = torch.ones(1, 8, 2, 3, dtype=torch.float16)
    made = autoencoder_kl.residual_block(block, features, layers.Layers("reference"))
    assert torch.equal(made, torch.ones_like(made))


@torch.no_grad()
@pytest.mark.parametrize("way", ["tiling", "slicing"])
def test_tiling_and_slicing_stay_on(way, hooked):
    """Each tile and each image is a call of the decoder."""
    made, given = autoencoder(sample_size=16), latents(2, 4, 24, 24)
    getattr(made, f"enable_{way}")()
    own = made.decode(given).sample
    hook = hooked(made)
    assert (made.decode(given).sample - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
@pytest.mark.parametrize("factors", [(1.01, 1.01), (1.015, 1.0), (1.0, 1.015)], ids=["both", "first", "second"])
def test_an_output_that_differs_is_not_taken(factors, hooked, monkeypatch):
    """The decoder's own output is returned, then and later, and the remark names the error, whichever image errs."""
    made, given = autoencoder(), latents(2, 4, 8, 12)
    own, fused = made.decode(given).sample, autoencoder_kl.decode
    scale = torch.tensor(factors).view(2, 1, 1, 1)
    monkeypatch.setattr(autoencoder_kl, "decode", lambda *given, **more: scale * fused(*given, **more))
    hook = hooked(made)
    for _ in range(2):
        assert torch.equal(made.decode(given).sample, own)
        assert "differ from the decoder by 0.01" in hook.remark and "more than 0.003" in hook.remark


@torch.no_grad()
def test_each_dtype_is_compared(hooked, monkeypatch):
    """After a form that fits, the same latents in half precision are compared with the decoder's own images again."""
    made, given, fused = autoencoder(), latents(1, 4, 8, 12), autoencoder_kl.decode
    errors = {torch.float32: 1.0, torch.float16: 1.1}
    monkeypatch.setattr(autoencoder_kl, "decode", lambda *args, **more: errors[args[1].dtype] * fused(*args, **more))
    hook = hooked(made)
    made.decode(given)
    assert hook.remark == FUSED
    made.half().decode(given.half())
    assert "differ from the decoder by 0.1" in hook.remark


@torch.no_grad()
def test_images_of_another_dtype_are_not_taken(hooked, monkeypatch):
    made, given, fused = autoencoder(), latents(1, 4, 8, 12), autoencoder_kl.decode
    monkeypatch.setattr(autoencoder_kl, "decode", lambda *args, **more: fused(*args, **more).double())
    hook = hooked(made)
    assert made.decode(given).sample.dtype == torch.float32 and "of torch.float64, the decoder" in hook.remark


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


@torch.no_grad()
def test_layers_of_a_lora_run_themselves(hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8)
    made.add_adapter(LoraConfig(r=2, target_modules=["conv1", "conv2"], init_lora_weights=False))
    own = made.decode(given).sample
    hook = hooked(made)
    assert torch.equal(made.decode(given).sample, own)
    assert "is not the code of torch or diffusers" in hook.remark


@torch.no_grad()
def test_a_decoder_that_is_compiled_stays_compiled(hooked):
    """Its graph is that of its own code, and has no break."""
    made, given, nodes = autoencoder(), latents(1, 4, 8, 8), []
    hooked(made)

    def count(graph, _):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    own = made.decode(given).sample
    compiled = torch.compile(made.decode, backend=count, fullgraph=True)
    assert (compiled(given).sample - own).abs().max() < ROUNDING
    assert len(nodes) == 1 and nodes[0] > 20


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 1], ids=["first-call", "later-call"])
def test_a_lack_of_memory_costs_no_image(place, hooked, monkeypatch):
    """The decoder's own image is returned, and the next call is fused again."""
    made, given, fused = autoencoder(), latents(1, 4, 8, 8), autoencoder_kl.decode
    own = made.decode(given).sample
    hook, calls = hooked(made), []

    def decode(*arguments, **more):
        calls.append(None)
        if len(calls) == 1 + place:
            raise torch.OutOfMemoryError("no memory")
        return fused(*arguments, **more)

    monkeypatch.setattr(autoencoder_kl, "decode", decode)
    for _ in range(place):
        made.decode(given)
    assert torch.equal(made.decode(given).sample, own)
    assert "fused kernels raised OutOfMemoryError: no memory" in hook.remark
    made.decode(given)
    assert hook.remark == FUSED


@torch.no_grad()
def test_a_lasting_lack_of_memory_is_met_twice(hooked, monkeypatch):
    made, given, calls = autoencoder(), latents(1, 4, 8, 8), []

    def decode(*_, **more):
        calls.append(None)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(autoencoder_kl, "decode", decode)
    hook = hooked(made)
    for _ in range(4):
        made.decode(given)
        assert "no memory" in hook.remark
    assert len(calls) == 2


@torch.no_grad()
def test_latents_that_are_no_numbers_decide_nothing(hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8)
    hook = hooked(made)
    made.decode(given * float("nan"))
    assert "is no image" in hook.remark
    made.decode(given)
    assert hook.remark == FUSED


@torch.no_grad()
@pytest.mark.parametrize("way", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["copy", "pickle"])
def test_a_copy_decodes_by_itself(way, hooked):
    """With its own weights and its class's code."""
    made, given = autoencoder(), latents(1, 4, 8, 8)
    own = made.decode(given).sample
    hook = hooked(made)
    copied = way(made)
    for weight in made.decoder.parameters():
        weight.zero_()
    assert torch.equal(copied.decode(given).sample, own) and hook.remark is None


def test_a_forward_of_somebody_else_is_put_back():
    """It ran beneath, and runs again."""
    made, calls = autoencoder(), []

    def forward(sample):
        calls.append(sample)
        return sample

    made.decoder.forward = forward
    stage = FusedDecode(made)
    made.decoder(latents(1, 4, 2, 2))
    stage.leave()
    assert len(calls) == 1 and made.decoder.forward is forward


def test_gradients_flow_through_the_decoders_own_code(hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8).requires_grad_()
    hooked(made)
    made.decode(given).sample.sum().backward()
    assert given.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("place", [1, 3], ids=["compared", "known"])
def test_an_interrupted_decode_leaves_no_state(place, hooked, monkeypatch):
    """Neither of the decode nor of its frames, in a call that is compared or not; the next decode is fused."""
    made, given, fused, calls = video_autoencoder(AutoencoderKLWan), latents(1, 4, 4, 5, 6), causal.decode, []
    own = made.decode(given).sample
    hook = hooked(made)

    def interrupted(*arguments, **more):
        calls.append(None)
        if len(calls) == place:
            raise KeyboardInterrupt
        return fused(*arguments, **more)

    monkeypatch.setattr(causal, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.decode(given)
    assert hook._current.decode is None
    assert (made.decode(given).sample - own).abs().max() < ROUNDING
    assert hook.remark == FUSED


@torch.no_grad()
def test_a_decode_that_begins_anew_has_freed_its_weights(hooked, monkeypatch):
    """Converted weights are a copy of all weights, and memory is short where a kernel failed for want of it."""
    made, given, fused, decodes = autoencoder(), latents(1, 4, 8, 8), autoencoder_kl.decode, []
    hook = hooked(made)
    made.decode(given)

    def fails(*arguments, layers, **more):
        decodes.append(weakref.ref(layers))
        fused(*arguments, layers=layers, **more)
        raise torch.OutOfMemoryError("no memory")

    freed = []
    made.decoder.register_forward_pre_hook(lambda *_: freed.extend(layers() is None for layers in decodes))
    monkeypatch.setattr(autoencoder_kl, "decode", fails)
    made.decode(given)
    assert freed == [True] and "no memory" in hook.remark


@torch.no_grad()
def test_threads_may_decode_with_one_autoencoder(hooked):
    """Each decode converts its own weights and knows its own frames."""
    made, given = autoencoder(), [latents(1, 4, side, 8) for side in (4, 6, 8, 10)]
    own = [made.decode(each).sample for each in given]
    hook = hooked(made)
    with torch.inference_mode(), ThreadPoolExecutor(4) as pool:
        decoded = [each for _ in range(3) for each in pool.map(lambda z: images(made, z), given)]
    assert max((a - b).abs().max() for a, b in zip(decoded, 3 * own, strict=True)) < ROUNDING
    assert hook.remark == FUSED


MODES = {
    "inference": (torch.inference_mode, FUSED),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "capture": (capturing, "a graph is being captured"),
}


@torch.no_grad()
@pytest.mark.parametrize(("mode", "remark"), MODES.values(), ids=MODES)
def test_modes_of_torch(mode, remark, hooked):
    """Nothing that one decode makes is kept for a later one in another mode."""
    made, given = autoencoder(), latents(1, 4, 8, 8)
    with mode():
        own = made.decode(given).sample
    hook = hooked(made)
    for _ in range(2):
        with mode():
            assert (made.decode(given).sample - own).abs().max() < ROUNDING
            assert remark in hook.remark
    made.decode(given)
    assert hook.remark == FUSED


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_trace_is_of_the_decoders_own_code(hooked):
    made, given = autoencoder(), latents(1, 4, 8, 8)
    hook = hooked(made)
    traced = torch.jit.trace(made.decoder, given, check_trace=False)
    assert "captured or traced" in hook.remark
    assert (traced(given) - made.decoder(given)).abs().max() < ROUNDING


@torch.no_grad()
def test_changes_between_decodes_take_effect(hooked):
    """Tiling, another dtype, new weights, and arguments by name."""
    made, given = autoencoder(sample_size=16), latents(1, 4, 24, 24)
    hook = hooked(made)

    def check(change, remark, z):
        change()
        own = images(copy.deepcopy(made), z)  # by its own code
        for _ in range(2):
            error = (made.decode(z).sample - own).norm() / own.norm()
            assert error < BOUNDS[z.dtype] and remark in hook.remark

    check(lambda: None, FUSED, given)
    check(made.enable_tiling, FUSED, given)
    check(made.disable_tiling, FUSED, given)
    check(made.half, FUSED, given.half())
    check(made.float, FUSED, given)
    check(lambda: made.load_state_dict({k: v + 0.01 for k, v in made.state_dict().items()}), FUSED, given)
    assert made._decode(z=given, return_dict=False)[0].shape == (1, 3, 48, 48) and hook.remark == FUSED


def test_bounds_follow_the_dtype():
    assert BOUNDS[torch.float32] < BOUNDS[torch.float16] < BOUNDS[torch.bfloat16]
