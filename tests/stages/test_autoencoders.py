"""Fused kernels give what every autoencoder's own code gives, within rounding: whole, in tiles, slices and frames."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode, FusedEncode
from dit_accel.stages.vae import autoencoder_kl, causal, cogvideox, layers
from tests.stages import ROUNDING
from tests.stages.autoencoders import (
    AUTOENCODERS,
    UPSAMPLED,
    autoencoder,
    decoded,
    enable_frames,
    enable_tiling,
    encoded,
    latents,
)

WAYS = {"whole": lambda vae: None, "tiles": enable_tiling, "slices": lambda vae: vae.enable_slicing()}
WAYS |= {"frames": enable_frames}
IMAGES = [(2, 4, 5, 7), (1, 4, 8, 8)]
SHAPES = {  # of latents, by the first word of an autoencoder's name: odd sizes, several images or videos, few frames
    "flux": IMAGES,
    "hunyuan-image": IMAGES,
    "wan": [(2, 4, frames, 5, 6) for frames in (1, 2, 4)],
    "qwen-image": [(2, 4, frames, 5, 6) for frames in (1, 4)],
    "hunyuan": [(2, 4, frames, 3, 5) for frames in (1, 4)],
    "hunyuan 1.5": [(1, 4, frames, 2, 3) for frames in (1, 3)],  # its own mask has the shape for one video
    "cogvideox": [(2, 4, frames, 3, 5) for frames in (1, 2, 5)],
    "ltx": [(2, 4, frames, 3, 5) for frames in (1, 3)],
    "minimax-h3": [(2, 4, frames, 2, 3) for frames in (3, 7)],
}
IN_PARTS = [
    ("flux", "tiles", [(2, 4, 12, 12)]),
    ("flux", "slices", [(2, 4, 5, 7)]),
    ("hunyuan-image", "tiles", [(2, 4, 5, 7)]),
    *((name, "tiles", [(1, 4, 2, 5, 6)]) for name in ("wan 2.2", "qwen-image")),
    ("hunyuan", "tiles", [(1, 4, 6, 3, 5)]),
    ("hunyuan 1.5", "tiles", [(1, 4, 3, 2, 3)]),
    ("cogvideox", "tiles", [(1, 4, 3, 3, 5)]),
    ("cogvideox", "slices", [(2, 4, 2, 3, 5)]),
    ("ltx 0.9.5", "tiles", [(2, 4, 5, 6, 8)]),
    ("ltx 2", "frames", [(2, 4, 5, 6, 8)]),
    ("minimax-h3", "tiles", [(2, 4, 12, 3, 4), (1, 4, 3, 1, 16)]),  # 15 tiles are two batches
]
ENCODED = [  # of a video the first frame alone, then four frames a call
    *((name, "whole", [(2, 3, 16, 16), (2, 3, 18, 26)]) for name in AUTOENCODERS if name.startswith("flux")),
    *((name, "whole", [(2, 3, 1, 16, 32), (2, 3, 9, 16, 32)]) for name in ("wan 2.1", "wan 2.2", "wan, deep")),
    *((name, "tiles", [(1, 3, 9, 32, 48)]) for name in ("wan 2.2", "qwen-image")),
]


def shapes_of(name):
    return SHAPES.get(name.partition(",")[0]) or SHAPES[name.partition(",")[0].partition(" ")[0]]


def require_same(stage, vae, shapes, backend="reference"):
    """Both the first output of a shape, which is compared, and the second are the autoencoder's own, to rounding."""
    run = decoded if stage is FusedDecode else encoded
    inputs = [latents(*shape) for shape in shapes]
    outputs, fused = [run(vae, values) for values in inputs], stage(vae, backend)
    for _ in range(2 if backend == "reference" else 1):
        for values, output in zip(inputs, outputs, strict=True):
            found = run(vae, values)
            assert (found - output).abs().max() < ROUNDING and (found.is_contiguous() or not output.is_contiguous())
            assert fused.remark == FUSED
    fused.leave()
    assert torch.equal(run(vae, inputs[-1]), outputs[-1])


@pytest.mark.parametrize(
    ("stage", "name", "way", "shapes"),
    [
        *((FusedDecode, name, "whole", shapes_of(name)) for name in AUTOENCODERS),
        *((FusedDecode, *case) for case in IN_PARTS),
        *((FusedEncode, *case) for case in ENCODED),
    ],
)
def test_outputs_are_those_of_the_autoencoder(stage, name, way, shapes):
    vae = autoencoder(name)
    WAYS[way](vae)
    require_same(stage, vae, shapes)


@pytest.mark.parametrize("limit", [1, 4096, 40_000])
@pytest.mark.parametrize("name", ["hunyuan", "hunyuan 1.5"])
def test_large_videos_are_convolved_a_few_frames_at_a_time(name, limit, monkeypatch):
    monkeypatch.setattr(layers, "BYTES", limit)
    require_same(FusedDecode, autoencoder(name), [(1, 4, 3, 2, 3)])


@pytest.mark.parametrize(
    ("stage", "name", "shape"),
    [
        (FusedEncode, "flux", (1, 3, 6, 10)),
        *((FusedDecode, name, (1, 4, 2, 3)) for name in ("flux", "hunyuan-image")),
        *((FusedDecode, name, (1, 4, 2, 1, 2)) for name in ("hunyuan 1.5", "cogvideox")),
        *((FusedDecode, f"ltx {kind}", (1, 4, 2, 2, 3)) for kind in ("0.9.0", "0.9.5", "2")),
        (FusedDecode, "minimax-h3", (1, 4, 3, 1, 1)),
    ],
)
def test_kernels_give_the_same(stage, name, shape):
    require_same(stage, autoencoder(name), [shape], "triton")


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("flux", torch.float16, 1.1),
        *((name, torch.bfloat16, 1.2) for name in ("hunyuan-image", "hunyuan 1.5", "cogvideox", "minimax-h3")),
        *((name, torch.bfloat16, 1.2) for name in AUTOENCODERS if name.startswith("ltx")),
    ],
)
def test_half_precision_errs_no_more_than_the_decoder(name, dtype, most):
    """Compared with the same weights in float64 or float32, at a second call."""
    shape = (1, 4, 8, 8) if shapes_of(name) is IMAGES else (1, 4, 3, 4, 4)
    vae, values, wide = autoencoder(name, dtype), latents(*shape, dtype=dtype), torch.float32
    if dtype is torch.float16:
        wide = torch.float64
    exact, output = decoded(autoencoder(name, dtype).to(wide), latents(*shape).to(wide)), decoded(vae, values)
    fused = FusedDecode(vae, "reference")
    decoded(vae, values)
    error, usual = ((item.to(wide) - exact).norm() / exact.norm() for item in (decoded(vae, values), output))
    assert fused.remark == FUSED and error <= most * usual < BOUNDS[dtype]


def test_operands_may_be_narrower_than_features(monkeypatch):
    """Norms write float16 where products would be TF32; what they keep for the next call is compared too."""
    monkeypatch.setattr(causal, "operand_dtype", lambda *_, **options: torch.float16)
    vae, values = autoencoder("wan 2.1"), latents(1, 4, 2, 5, 6)
    output, fused = decoded(vae, values), FusedDecode(vae, "reference")
    for _ in range(2):
        assert 0 < (decoded(vae, values) - output).norm() / output.norm() < BOUNDS[torch.float32]
        assert fused.remark == FUSED


def test_biases_of_a_block_are_added_in_float32():
    """2048 + 1 has no place in half precision; with features of −2048 it makes 1."""
    block = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=None, groups=8).half()
    for weight in block.parameters():
        weight.zero_()
    block.conv_shortcut.weight.fill_(-256)
    block.conv_shortcut.bias.fill_(2048)
    block.conv2.bias.fill_(1)
    features = torch.ones(1, 8, 2, 3, dtype=torch.float16)
    output = autoencoder_kl.residual_block(block, features, layers.Layers("reference"))
    assert torch.equal(output, torch.ones_like(output))


def test_a_call_may_be_causal_where_the_decoder_is_not():
    vae, values = autoencoder("ltx 2"), latents(1, 4, 3, 3, 3)
    output, other = decoded(vae, values, causal=True), decoded(vae, values)
    fused = FusedDecode(vae, "reference")
    assert (decoded(vae, values, causal=True) - output).abs().max() < ROUNDING < (other - output).abs().max()
    assert fused.remark == FUSED


@pytest.mark.parametrize(
    ("way", "remark"),
    [
        ("differs", "fused kernels differ from the decoder"),
        ("keeps others", "for the next call fused kernels differ from the decoder"),
        ("fails", "no memory"),
    ],
)
@pytest.mark.parametrize("name", ["wan 2.1", "cogvideox"])
def test_a_later_frame_may_differ_or_fail(name, way, remark, monkeypatch):
    """The decoder goes on from the frames that were kept, which are compared too, or begins anew."""
    page = causal if name == "wan 2.1" else cogvideox
    vae, values, decode = autoencoder(name), latents(1, 4, 4, 5, 6), page.decode
    output = decoded(vae, values)

    def other(decoder, x, **kwargs):
        is_later = kwargs["feat_cache"][0] is not None if page is causal else bool(kwargs["conv_cache"])
        if is_later and way == "fails":
            raise torch.OutOfMemoryError("no memory")
        result = decode(decoder, x, **kwargs)
        frames, kept = (result, kwargs["feat_cache"]) if page is causal else result
        if is_later and way == "differs":
            frames *= 1.05
        if way == "keeps others":
            pytree.tree_map_only(torch.Tensor, lambda item: item.mul_(2), kept)
        return result

    fused = FusedDecode(vae, "reference")
    if way == "fails":
        decoded(vae, values)  # all forms are known
    monkeypatch.setattr(page, "decode", other)
    for _ in range(2):
        assert (decoded(vae, values) - output).abs().max() < ROUNDING and remark in fused.remark


BLOCK, FIRST, ATTENTION = "up_blocks.0.resnets.0", "conv_in", "mid_block.attentions.0"
NOISY = {**UPSAMPLED, "decoder_inject_noise": (True, False, False)}


@pytest.mark.parametrize(
    ("name", "config", "part", "changes", "reason"),
    [
        ("flux", {}, BLOCK, {"nonlinearity": nn.ReLU()}, "nonlinearity is a ReLU"),
        ("hunyuan-image", {}, "up_blocks.0", {"nonlinearity": nn.ReLU()}, "nonlinearity is a ReLU"),
        ("hunyuan 1.5", {}, BLOCK, {"nonlinearity": nn.ReLU()}, "nonlinearity is a ReLU"),
        ("hunyuan 1.5", {}, FIRST, {"pad_mode": "constant"}, "conv_in has pad_mode = constant"),
        ("hunyuan", {}, ATTENTION, {"processor": AttnProcessor()}, f"{ATTENTION} is not the attention of diffusers"),
        ("hunyuan", {}, ATTENTION, {"rescale_output_factor": 2.0}, f"{ATTENTION} is not the attention of diffusers"),
        ("cogvideox", {}, BLOCK, {"nonlinearity": nn.ReLU()}, "nonlinearity is a ReLU"),
        ("cogvideox", {}, FIRST, {"pad_mode": "replicate"}, "conv_in has pad_mode = replicate"),
        ("ltx 2", {}, BLOCK, {"nonlinearity": nn.ReLU()}, "nonlinearity is a ReLU"),
        ("ltx 0.9.0", NOISY, "", {}, "has per_channel_scale1 = Parameter"),
        ("ltx 2", {"decoder_spatial_padding_mode": "circular"}, "", {}, "has padding_mode = circular"),
    ],
)
def test_a_decoder_that_its_page_does_not_know_runs_itself(name, config, part, changes, reason):
    vae = autoencoder(name, **config)
    for attribute, value in changes.items():
        setattr(vae.decoder.get_submodule(part), attribute, value)
    fused = FusedDecode(vae, "reference")
    decoded(vae, latents(1, 4, 3, 3) if shapes_of(name) is IMAGES else latents(1, 4, 2, 3, 3))
    assert reason in fused.remark
