"""diffusers' ``enable_cache`` with our config: the same as ``accelerate_pipeline``, and removed without a trace."""

import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

from dit_accel import (
    ClosedLoopConfig,
    accelerate_pipeline,
    accelerate_transformer,
    accelerated,
    report,
    restore_pipeline,
)
from dit_accel.errors import PresetError, UnsupportedError
from tests.models.test_every_pipeline import attributes
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 8
GUIDED = {
    "flux": {"true_cfg_scale": 2.0, "negative_prompt": "blur"},
    "qwen-image": {"true_cfg_scale": 2.0, "negative_prompt": "blur"},
    "wan": {"guidance_scale": 3.0},
}


def call(pipe, name="flux", **overrides):
    return tiny_output(pipe, name, steps=STEPS, **overrides)


@pytest.mark.parametrize("name", GUIDED)
def test_enable_cache_decides_as_accelerate_pipeline_does(name):
    """Same bits and same report; after disable_cache the plain bits are back and nothing is left."""
    pipe = tiny_pipeline(name)
    plain, left = call(pipe, name, **GUIDED[name]), attributes(pipe)
    with accelerated(pipe, "turbo", target_error=0.2):
        expected, known = call(pipe, name, **GUIDED[name]), report(pipe)
    pipe.transformer.enable_cache(ClosedLoopConfig("turbo", target_error=0.2))
    assert pipe.transformer.is_cache_enabled
    assert torch.equal(call(pipe, name, **GUIDED[name]), expected)
    found = report(pipe.transformer)
    assert (found.steps_by_mode, found.preset, found.notes) == (known.steps_by_mode, known.preset, known.notes)
    assert found.steps_by_mode["dispatch"] > 0 and not torch.equal(expected, plain)
    pipe.transformer.disable_cache()
    assert not pipe.transformer.is_cache_enabled
    assert torch.equal(call(pipe, name, **GUIDED[name]), plain) and attributes(pipe) == left


def test_keys_alone_change_balanced():
    assert repr(ClosedLoopConfig(target_error=0.1)) == "ClosedLoopConfig(target_error=0.1)"
    with pytest.raises(PresetError, match=r"target_eror.*target_error"):
        ClosedLoopConfig(target_eror=0.1)


def test_a_second_cache_is_diffusers_error(pipe):
    """Whichever of two caches is first, and the first one stays as it is."""
    for first, second in ((ClosedLoopConfig(), FirstBlockCacheConfig()), (FirstBlockCacheConfig(), ClosedLoopConfig())):
        for item in (second, first):
            pipe.transformer.enable_cache(first)
            with pytest.raises(ValueError, match=f"already been enabled with .*{type(first).__name__}"):
                pipe.transformer.enable_cache(item)
            pipe.transformer.disable_cache()


def test_a_config_that_does_not_fit_changes_nothing(pipe):
    left = attributes(pipe)
    with pytest.raises(UnsupportedError, match="'wan21-sparge-balanced' is for wan models"):
        pipe.transformer.enable_cache(ClosedLoopConfig("wan21-sparge-balanced"))
    with pytest.raises(ValueError, match="is not supported"):
        pipe.transformer.enable_cache(object())
    assert attributes(pipe) == left and not pipe.transformer.is_cache_enabled


def test_models_without_caches_keep_diffusers_error():
    with pytest.raises(AttributeError, match="enable_cache"):
        tiny_pipeline("sd3").transformer.enable_cache(ClosedLoopConfig())


def test_one_way_refuses_the_other_and_names_it(pipe):
    """A transformer is accelerated in one way; the error says in which, and how to end it."""
    pipe.transformer.enable_cache(ClosedLoopConfig("turbo"))
    expected = call(pipe)
    way_off = r"by enable_cache\(ClosedLoopConfig\(preset='turbo'\)\).*pipe\.transformer\.disable_cache\(\)"
    with pytest.raises(UnsupportedError, match=way_off):
        accelerate_pipeline(pipe)
    with pytest.raises(UnsupportedError, match=way_off):
        accelerate_transformer(pipe.transformer)
    assert torch.equal(call(pipe), expected)
    pipe.transformer.disable_cache()
    accelerate_pipeline(pipe, "turbo")
    with pytest.raises(UnsupportedError, match=r"by Acceleration\(preset='turbo'.*restore_pipeline\(pipe\)"):
        pipe.transformer.enable_cache(ClosedLoopConfig())
    assert not pipe.transformer.is_cache_enabled and torch.equal(call(pipe), expected)


def test_restore_pipeline_undoes_it_on_all_pipelines(pipe):
    """Pipelines over one transformer each have a run and a report."""
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    plain = call(pipe)
    pipe.transformer.enable_cache(ClosedLoopConfig("turbo"))
    call(pipe)
    tiny_output(other, "flux-img2img", steps=8)
    assert (len(report(pipe).steps), len(report(other).steps)) == (STEPS, 6)
    restore_pipeline(other)
    assert not pipe.transformer.is_cache_enabled and torch.equal(call(pipe), plain)
    with pytest.raises(UnsupportedError, match="FluxPipeline is not accelerated: call accelerate_pipeline"):
        report(pipe)
