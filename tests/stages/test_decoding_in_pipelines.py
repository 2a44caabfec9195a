"""The decode stage of accelerated pipelines: what the report says, and what stays on an autoencoder."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import nn

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.loop.timing import CallParts
from dit_accel.stages.decode import FUSED, PART, Decoding, FusedDecode, FusedEncode
from tests.stages import ROUNDING
from tests.tiny import tiny_inputs, tiny_pipeline


def call(pipe, output_type="pt"):
    return pipe(**tiny_inputs("flux", steps=2) | {"output_type": output_type})[0]


def fused(pipe, **changes):
    """The pipeline, accelerated, with kernels' reference code on the CPU."""
    accelerate_pipeline(pipe, "exact", **changes)
    if (stage := FusedDecode.on(getattr(pipe.vae, "_orig_mod", pipe.vae))) is not None:
        stage._backend = "reference"
    return pipe


def decoding(pipe):
    return pipe.dit_accel.report().decoding


def traces(vae):
    """Methods and hooks on an autoencoder that its class does not have."""
    names = "forward", "_decode", "_encode", "decode"
    methods = [name for part in vae.modules() for name in names if name in vars(part)]
    return methods + [hook for part in vae.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]


@pytest.fixture
def flux():
    return tiny_pipeline("flux")


@pytest.fixture
def other(flux):
    pipe = tiny_pipeline("flux")
    pipe.vae = flux.vae
    return pipe


class Other(AutoencoderKL):
    def _decode(self, z, return_dict=True):
        return super()._decode(2 * z, return_dict)


def _replace_the_autoencoder(pipe):
    pipe.vae = AutoencoderTiny(latent_channels=pipe.vae.config.latent_channels)
    pipe.vae.config.shift_factor, pipe.vae.config.scaling_factor = 0.0, 1.0


OWN = {  # change of the pipeline, keys of the preset, remark
    "cpu": (lambda pipe: None, {}, "kernels need a CUDA GPU"),
    "key": (lambda pipe: None, {"stages.decode": False}, "stages.decode is false"),
    "class": (_replace_the_autoencoder, {}, "by the autoencoder's own decoder: AutoencoderTiny is not known"),
    "subclass": (lambda pipe: setattr(pipe.vae, "__class__", Other), {}, "Other is not known"),
}


@pytest.mark.parametrize(("change", "keys", "remark"), OWN.values(), ids=OWN)
def test_a_pipeline_may_decode_as_ever(change, keys, remark, flux):
    """To the bit, and the report says why; nothing is left once it is restored."""
    change(flux)
    plain = call(flux)
    accelerate_pipeline(flux, "exact", **keys)
    assert torch.equal(call(flux), plain) and remark in str(flux.dit_accel.report())
    call(flux, "latent")
    assert decoding(flux) is None
    restore_pipeline(flux)
    assert FusedDecode.on(flux.vae) is None and traces(flux.vae) == []


def test_the_report_is_of_the_runs_own_decode(flux):
    """A run that returns latents has none, and what is decoded outside of a run is not the run's."""
    fused(flux)
    assert decoding(flux) is None
    call(flux)
    assert decoding(flux) == FUSED
    call(flux, "latent")
    flux.vae.decode(torch.zeros(1, flux.vae.config.latent_channels, 4, 4))
    assert decoding(flux) is None
    call(flux)
    flux.dit_accel.reset()
    assert decoding(flux) is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_closed_stage_leaves_the_call_and_the_other_stages_alone(first, flux, other):
    """Its decoder and its encoder, what it does at a call's beginning, and its remark; twice does nothing."""
    stages = [Decoding(pipe, CallParts()) for pipe in (flux, other)]
    decode, encode = FusedDecode.on(flux.vae), FusedEncode.on(flux.vae)
    for count, stage in ((2, stages[first]), (1, stages[1 - first])):
        assert (decode.holders, encode.holders, len(decode.sharing)) == (count, count, count)
        assert stage.parts.at_beginning and PART in stage.parts.remark_of
        stage.close(), stage.close()
        assert not stage.parts.at_beginning and PART not in stage.parts.remark_of and stage not in decode.sharing
    assert FusedDecode.on(flux.vae) is None and traces(flux.vae) == []


def test_a_pipeline_without_the_stage_shares_an_autoencoder(flux, other):
    """It decodes fused where another pipeline wants that, and says so; each report keeps its own."""
    fused(other, **{"stages.decode": False})
    fused(flux)
    call(other), call(flux)
    assert decoding(other) == decoding(flux) == FUSED
    flux.vae.train()
    call(flux)
    assert "training mode" in decoding(flux) and decoding(other) == FUSED
    restore_pipeline(flux)
    call(other)
    assert "stages.decode is false" in decoding(other)


def test_pipelines_over_one_transformer_report_their_own_decoding(flux):
    twin = tiny_pipeline("flux")
    twin.transformer = flux.transformer
    fused(twin), fused(flux)
    flux.vae.train()
    call(flux), call(twin)
    report = flux.dit_accel.report
    assert "training mode" in report(flux).decoding and "training mode" not in report(twin).decoding


def _bypass(pipe):
    """Replace the decode by one that, as compiled code, runs the decoder's class's own code."""
    decoder = pipe.vae.decoder
    pipe.vae.decode = lambda latents, return_dict: (type(decoder).forward(decoder, latents),)


def _compile(pipe):
    pipe.vae.decoder._compiled_call_impl = lambda *args: type(pipe.vae.decoder).forward(pipe.vae.decoder, *args)


def _cast_layers(pipe):
    pipe.vae.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)


def _offload_groups(pipe):
    pipe.vae.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


def _set_decoder(wrap):
    return lambda pipe: setattr(pipe.vae, "decoder", wrap(pipe.vae.decoder))


BYPASSED = "replaced or compiled"
CHANGES = {
    "autoencoder": (lambda pipe: setattr(pipe, "vae", copy.deepcopy(pipe.vae)), "was replaced", FUSED),
    "decoder": (_set_decoder(copy.deepcopy), "was replaced", FUSED),
    "replaced-decode": (_bypass, BYPASSED, BYPASSED),
    "compiled-autoencoder": (lambda pipe: setattr(pipe, "vae", torch.compile(pipe.vae, backend="eager")), FUSED, FUSED),
    "compiled-in-place": (_compile, BYPASSED, BYPASSED),
    "wrapped-decoder": (_set_decoder(lambda decoder: nn.DataParallel(decoder).eval()), FUSED, "DataParallel"),
    "group-offload": (_offload_groups, "has hooks", "has hooks"),
    "layerwise-casting": (_cast_layers, "has hooks", "has hooks"),
}


@pytest.mark.parametrize(("change", "before", "after"), CHANGES.values(), ids=CHANGES)
def test_changes_of_an_accelerated_pipeline(change, before, after, flux):
    """Images stay, the report says the truth, and accelerating again brings the stage back where it can."""
    plain = call(flux)
    call(fused(flux))
    change(flux)
    tolerance = 1e-2 if change is _cast_layers else ROUNDING
    for remark in (before, after):
        assert (call(flux) - plain).abs().max() < tolerance and remark in str(decoding(flux))
        fused(flux)
    restore_pipeline(flux)
    assert (call(flux) - plain).abs().max() < tolerance


@pytest.mark.parametrize("name", ["_decode", "forward"])
def test_a_patch_over_ours_outlives_it(name, flux):
    """It is left alone by restoring, and once it is gone the stage can come back."""
    owner = flux.vae if name == "_decode" else flux.vae.decoder
    plain, calls = call(fused(flux)), []
    beneath = getattr(owner, name)

    def patch(*args, **kwargs):
        calls.append(None)
        return beneath(*args, **kwargs)

    setattr(owner, name, patch)
    assert torch.equal(call(flux), plain) and decoding(flux) == FUSED and calls
    restore_pipeline(flux)
    assert vars(owner)[name] is patch and (call(flux) - plain).abs().max() < ROUNDING
    setattr(owner, name, beneath)
    assert torch.equal(call(fused(flux)), plain) and decoding(flux) == FUSED
    restore_pipeline(flux)
    assert (call(flux) - plain).abs().max() < ROUNDING


def test_an_offloaded_decoder_decodes_itself(flux):
    """accelerate's hooks on each layer, put on before or after ours."""

    def offload():
        for layer in flux.vae.modules():
            if not list(layer.children()):
                add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))

    plain = call(flux)
    offload()
    call(fused(flux))
    assert "has hooks" in decoding(flux)
    remove_hook_from_module(flux.vae, recurse=True)
    assert (call(flux) - plain).abs().max() < ROUNDING and decoding(flux) == FUSED
    offload()
    assert torch.equal(call(flux), plain) and "has hooks" in decoding(flux)
    restore_pipeline(flux)
    remove_hook_from_module(flux.vae, recurse=True)
    assert torch.equal(call(flux), plain)
