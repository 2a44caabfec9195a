"""Where the time of a pipeline's call goes: by component, without anything left on one."""

import copy
import pickle
import time
from contextlib import suppress

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerate_transformer, accelerated, restore_pipeline
from dit_accel.loop.timing import CallParts
from dit_accel.models import component_times
from dit_accel.models.component_times import autoencoder_remark, time_components
from tests.tiny import tiny_inputs, tiny_pipeline

ENCODERS = ["text_encoder", "text_encoder_2"]
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def call(pipe, name="flux", **changes):
    """Seconds of a call that decodes."""
    inputs = tiny_inputs(name, steps=4, **changes) | {"output_type": "pt"}
    started = time.perf_counter()
    pipe(**inputs)
    return time.perf_counter() - started


def hooks(pipe):
    """Our hooks; text encoders of transformers have others."""
    modules = (module for part in vars(pipe).values() if isinstance(part, torch.nn.Module) for module in part.modules())
    every = (hook for module in modules for kind in HOOKS for hook in getattr(module, kind).values())
    return [hook for hook in every if getattr(hook, "func", None) is component_times._eagerly]


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline("flux")


@pytest.fixture
def flux(pipe):
    yield pipe
    restore_pipeline(pipe)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("flux-img2img", [*ENCODERS, "vae.encoder", "transformer", "vae.decoder", "rest"]),
        ("flux-controlnet", [*ENCODERS, "vae.encoder", "controlnet", "transformer", "vae.decoder", "rest"]),
        ("wan", ["text_encoder", "transformer", "vae.decoder", "rest"]),
    ],
)
def test_parts_of_a_call(name, parts):
    """Every part that runs is listed in order; the times add up to the call's; a deferred ControlNet counts once."""
    pipe = accelerate_pipeline(tiny_pipeline(name))
    for _ in range(2):
        whole, report = call(pipe, name), pipe.dit_accel.report()
        assert list(report.parts) == parts and min(report.parts.values()) > 0
        assert 0.5 * whole < sum(report.parts.values()) <= whole
        assert 0 < report.seconds <= report.parts["transformer"]
    assert report.to_json()["parts"] == report.parts and "whole call" in str(report)


def test_nothing_is_left(flux):
    """No component keeps a trace, nor does the pipeline, whose own attribute of the method's name stays."""
    assert hooks(flux) == [] and "check_inputs" not in vars(flux)
    with accelerated(flux):
        assert hooks(flux)
    assert hooks(flux) == [] and "check_inputs" not in vars(flux)
    flux.check_inputs = original = lambda *_, **__: None
    restore_pipeline(accelerate_pipeline(accelerate_pipeline(flux), "exact"))
    assert vars(flux).pop("check_inputs") is original


def test_a_method_replaced_on_the_class_takes_effect_at_the_next_call(flux, monkeypatch):
    """Between accelerating and restoring, as everywhere else; one of the pipeline's own goes first."""
    called = []
    accelerate_pipeline(flux)
    monkeypatch.setattr(type(flux), "check_inputs", lambda self, *_, **__: called.append(self))
    call(flux)
    assert called == [flux] and "rest" in flux.dit_accel.report().parts
    restore_pipeline(flux)
    flux.check_inputs = lambda *_, **__: called.append("own")
    accelerate_pipeline(flux)
    call(flux)
    assert called == [flux, "own"]
    restore_pipeline(flux)
    del flux.check_inputs


def test_pipelines_share_a_component(flux):
    """Each pipeline has its own times, and restoring one does not change the other's."""
    other = tiny_pipeline("sd3")
    other.vae = flux.vae
    accelerate_pipeline(flux)
    accelerate_pipeline(other)
    call(other, "sd3")
    assert flux.dit_accel.report().parts == {}
    restore_pipeline(flux)
    call(other, "sd3")
    assert other.dit_accel.report().parts["vae.decoder"] > 0
    restore_pipeline(other)
    assert hooks(other) == []


def test_an_error_in_the_autoencoder_leaves_nothing_behind(flux):
    """The next call has its own times alone, and a restored pipeline none of the hooks."""

    def fail(*_):
        raise KeyboardInterrupt

    accelerate_pipeline(flux)
    failing = flux.vae.decoder.conv_in.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        call(flux)
    assert "rest" not in flux.dit_accel.report().parts
    failing.remove()
    time.sleep(0.2)
    whole, parts = call(flux), flux.dit_accel.report().parts
    assert list(parts) == [*ENCODERS, "transformer", "vae.decoder", "rest"] and sum(parts.values()) <= whole
    restore_pipeline(flux)
    assert hooks(flux) == []


def test_a_part_that_fails_in_a_call_that_goes_on_hides_no_other():
    """If a pipeline catches a component's error and continues, later parts are reported, and nothing twice."""

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    class Pipe:
        def __init__(self):
            self.safety, self.head = Fails(), torch.nn.Identity()

        def check_inputs(self):
            pass

    pipe, parts = Pipe(), CallParts()
    with time_components(pipe, parts):
        for _ in range(2):
            pipe.check_inputs()
            with suppress(RuntimeError):
                pipe.safety(torch.ones(1))
            pipe.head(torch.ones(1))
            parts.end()
            assert list(parts.seconds()) == ["safety", "head", "rest"]


def test_what_is_called_outside_of_a_call_is_no_part_of_it(flux):
    """A prompt that is encoded before, and latents that are decoded afterwards."""
    accelerate_pipeline(flux)
    prompt, pooled, _ = flux.encode_prompt("a fox", "a fox")
    call(flux, prompt=None, prompt_embeds=prompt, pooled_prompt_embeds=pooled)
    flux.text_encoder(torch.zeros(1, 4, dtype=torch.long))
    assert list(flux.dit_accel.report().parts) == ["transformer", "vae.decoder", "rest"]


def test_compiled_decoding_stays_whole(flux):
    """Hooks break no graph; parts inside the compiled graph count as the rest."""
    accelerate_pipeline(flux)
    flux.vae.decode = torch.compile(flux.vae.decode, backend="eager", fullgraph=True)
    call(flux)
    del flux.vae.decode
    assert list(flux.dit_accel.report().parts) == [*ENCODERS, "transformer", "rest"]


def test_a_component_is_copied_and_pickled_as_ever(flux):
    accelerate_pipeline(flux)
    call(flux)
    before = flux.dit_accel.report().parts
    for copied in (copy.deepcopy(flux.vae), pickle.loads(pickle.dumps(flux.vae))):
        copied.decode(torch.zeros(1, flux.vae.config.latent_channels, 4, 4))
    assert flux.dit_accel.report().parts == before


def test_a_shallow_copy_frees_models_of_its_own(flux, monkeypatch):
    """It has our stand-ins for methods of the pipeline; diffusers ends runs of most transformers itself."""
    monkeypatch.setattr(type(flux), "maybe_free_model_hooks", lambda pipe: freed.append(pipe))
    with accelerated(flux, "exact"):
        freed, copied = [], copy.copy(flux)
        call(copied)
    assert [item is copied for item in freed] == [True]


def test_a_transformer_of_its_own_has_no_parts(flux):
    acceleration = accelerate_transformer(flux.transformer, "balanced", [1000.0, 500.0])
    assert hooks(flux) == []
    acceleration.restore()


def test_an_autoencoder_that_takes_much_is_remarked():
    """More than a quarter of a call that is over; text encoders take no part in it."""
    coders = {"vae.encoder": 4.0, "vae.decoder": 1.0, "audio_vae.decoder": 1.0}
    assert "took 50% of the call" in autoencoder_remark(coders | {"transformer": 5.0, "rest": 1.0})
    for seconds in (
        {"transformer": 2.0, "vae.decoder": 1.0, "rest": 1.0},
        {"text_encoder": 8.0, "transformer": 1.0, "rest": 1.0},
        {"transformer": 1.0, "vae.decoder": 1.0},
        {},
    ):
        assert autoencoder_remark(seconds) is None
