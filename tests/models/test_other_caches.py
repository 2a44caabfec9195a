"""Other caches on an accelerated transformer are refused by name, with instructions for removing them."""

import functools

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, hooks

from dit_accel import accelerate_pipeline, accelerate_transformer, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.beside.other_caches import _cache_of, refuse_other_cache
from tests.models.test_transformer import recorded_calls
from tests.rounding import equal_up_to_rounding
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 6
SPATIAL = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (0, 1000)}
CONFIGS = {
    "FirstBlockCache": lambda: hooks.FirstBlockCacheConfig(threshold=0.1),
    "FasterCache": lambda: hooks.FasterCacheConfig(
        **SPATIAL, current_timestep_callback=lambda: 1000, is_guidance_distilled=True, tensor_format="BCHW"
    ),
    "MagCache": lambda: hooks.MagCacheConfig(threshold=0.1, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS),
    "TaylorSeerCache": lambda: hooks.TaylorSeerCacheConfig(use_lite_mode=True),
    "PyramidAttentionBroadcast": lambda: hooks.PyramidAttentionBroadcastConfig(
        **SPATIAL, current_timestep_callback=lambda: 500
    ),
}

OWN = FluxTransformer2DModel.forward


def teacache_forward(self, *args, **kwargs):
    return OWN(self, *args, **kwargs)


def magcache_flux_forward(self, *args, **kwargs):
    return OWN(self, *args, **kwargs)


@functools.wraps(OWN)
def timed(self, *args, **kwargs):
    """A wrapper that is no cache."""
    return OWN(self, *args, **kwargs)


def bare(self, *args, **kwargs):
    """One whose arguments have no names."""
    return OWN(self, *args, **kwargs)


def refused(cache, way_off):
    reason = rf"pipe\.transformer .* has {cache} on it.* remove that one with {way_off}"
    return pytest.raises(UnsupportedError, match=reason)


@pytest.mark.parametrize("cache", CONFIGS)
def test_a_cache_that_is_there_is_refused(pipe, cache):
    """Nothing changes, and the message's instructions work."""
    plain = tiny_output(pipe, "flux", steps=STEPS)
    pipe.transformer.enable_cache(CONFIGS[cache]())
    way_off = r"pipe\.transformer\.disable_cache\(\)"
    with refused(f"diffusers' {cache}", way_off):
        accelerate_pipeline(pipe, "flux-flashomni-paper")
    with refused(f"diffusers' {cache}", way_off):
        accelerate_transformer(pipe.transformer, "turbo", [2.0, 1.0])
    assert not hasattr(pipe, "dit_accel")
    pipe.transformer.disable_cache()
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), plain)


@pytest.mark.parametrize("cache", ["FirstBlockCache", "FasterCache"])
def test_a_cache_that_comes_later_is_refused_at_the_first_call(pipe, cache):
    """Either of the two can be removed then, and the other works."""
    expected = tiny_output(accelerate_pipeline(pipe, "turbo"), "flux", steps=STEPS)
    for keep_ours in (True, False):
        pipe.transformer.enable_cache(CONFIGS[cache]())
        with refused(f"diffusers' {cache}", r"pipe\.transformer\.disable_cache\(\), or keep it and call restore"):
            tiny_output(pipe, "flux", steps=STEPS)
        if keep_ours:
            pipe.transformer.disable_cache()
            assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), expected)
    restore_pipeline(pipe)
    cached = tiny_pipeline("flux")
    cached.transformer.enable_cache(CONFIGS[cache]())
    assert equal_up_to_rounding(tiny_output(pipe, "flux", steps=STEPS), tiny_output(cached, "flux", steps=STEPS))
    for item in (pipe, cached):
        item.transformer.disable_cache()
    assert equal_up_to_rounding(tiny_output(pipe, "flux", steps=STEPS), tiny_output(cached, "flux", steps=STEPS))


def test_hooks_without_enable_cache_are_refused_too(pipe):
    """Before and after; then the message names each hook, for disable_cache knows nothing of them."""
    hooks.apply_first_block_cache(pipe.transformer, hooks.FirstBlockCacheConfig(threshold=0.1))
    way_off = r'`registry = .*remove_hook\("fbc_leader_block_hook"\); registry.remove_hook\("fbc_block_hook"\)`'
    with refused("diffusers' FirstBlockCache", way_off):
        accelerate_pipeline(pipe)
    registry = hooks.HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.remove_hook("fbc_leader_block_hook")
    registry.remove_hook("fbc_block_hook")
    accelerate_pipeline(pipe)
    tiny_output(pipe, "flux", steps=STEPS)
    hooks.apply_first_block_cache(pipe.transformer, hooks.FirstBlockCacheConfig(threshold=0.1))
    with refused("diffusers' FirstBlockCache", way_off):
        tiny_output(pipe, "flux", steps=STEPS)


def test_cache_dit_is_refused(pipe):
    """It marks the transformers that it has patched."""
    accelerate_pipeline(pipe)
    pipe.transformer._is_cached = True
    with refused("a cache of cache-dit", r"cache_dit\.disable_cache\(pipe\)"):
        tiny_output(pipe, "flux", steps=STEPS)
    with refused("a cache of cache-dit", r"cache_dit\.disable_cache\(pipe\)"):
        accelerate_pipeline(restore_pipeline(pipe))


def test_every_cache_of_diffusers_that_forecasts_is_known():
    """The module of its config identifies a cache, with its hooks; caches of a prompt's keys and values are allowed."""
    configs = [getattr(diffusers.hooks, name) for name in dir(diffusers.hooks) if name.endswith("CacheConfig")]
    assert len(configs) >= 5
    for config in (*configs, hooks.PyramidAttentionBroadcastConfig):
        name = config.__name__.removesuffix("Config")
        assert _cache_of(object.__new__(config)) == (None if name == "TextKVCache" else name)
    for foreign in ("first_block_cache", "mine.first_block_cache", "diffusers.hooks.mine", "diffusers.mag_cache"):
        assert _cache_of(type("Config", (), {"__module__": foreign})()) is None


def test_a_cache_that_forecasts_nothing_is_left_alone(pipe):
    """A third-party cache with its config in diffusers' place is allowed too."""
    pipe.transformer._cache_config, pipe.transformer._is_cached = object(), False
    refuse_other_cache(pipe.transformer, "transformer")


def test_hooks_are_looked_for_where_there_is_time(pipe):
    """Walking over all modules takes milliseconds, which a step has not; its own marks are always seen."""
    hooks.apply_first_block_cache(pipe.transformer, hooks.FirstBlockCacheConfig(threshold=0.1))
    refuse_other_cache(pipe.transformer, "other", by_hooks=False)
    with pytest.raises(UnsupportedError, match=r"pipe\.other .* on it.*check_if_exists_or_initialize\(pipe\.other\)"):
        refuse_other_cache(pipe.transformer, "other")
    pipe.transformer._is_cached = True
    with pytest.raises(UnsupportedError, match="a cache of cache-dit"):
        refuse_other_cache(pipe.transformer, "other", by_hooks=False)


@functools.wraps(magcache_flux_forward)
def wrapped(self, *args, **kwargs):
    return magcache_flux_forward(self, *args, **kwargs)


@pytest.mark.parametrize("on", ["class", "transformer"])
@pytest.mark.parametrize(
    "cache, forward",
    [("TeaCache", teacache_forward), ("MagCache", magcache_flux_forward), ("MagCache", wrapped)],
    ids=["teacache", "magcache", "beneath-a-wrapper"],
)
def test_a_cache_that_replaces_the_forward_is_refused(pipe, cache, forward, on, monkeypatch):
    """Scripts set it on the class or on one transformer; without it the pipeline is accelerated."""
    way_off = r"FluxTransformer2DModel\.forward = original"
    named = rf"{cache} \({forward.__code__.co_name} of .*test_other_caches.py:\d+\)"
    if on == "class":
        accelerate_pipeline(pipe, "exact")
        with monkeypatch.context() as patched:
            patched.setattr(FluxTransformer2DModel, "forward", forward)
            with refused(named, way_off):
                tiny_output(pipe, "flux", steps=2)
            restore_pipeline(pipe)
            with refused(named, way_off):
                accelerate_pipeline(pipe, "exact")
    else:
        pipe.transformer.forward = forward.__get__(pipe.transformer)
        with refused(named, way_off):
            accelerate_pipeline(pipe, "exact")
        del pipe.transformer.forward
    plain = tiny_output(pipe, "flux", steps=2)
    assert torch.equal(tiny_output(accelerate_pipeline(pipe, "exact"), "flux", steps=2), plain)


def test_teacache_that_is_switched_off_is_no_cache(pipe, monkeypatch):
    """Its scripts use an attribute of the class as a switch, for any name of the function."""
    monkeypatch.setattr(FluxTransformer2DModel, "forward", teacache_forward)
    monkeypatch.setattr(FluxTransformer2DModel, "enable_teacache", False, raising=False)
    accelerate_pipeline(pipe, "exact")
    monkeypatch.setattr(FluxTransformer2DModel, "forward", timed)
    monkeypatch.setattr(FluxTransformer2DModel, "enable_teacache", True)
    with refused(r"TeaCache \(timed of .*\)", r"FluxTransformer2DModel\.enable_teacache = False"):
        tiny_output(pipe, "flux", steps=2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("forward", [timed, bare])
def test_a_forward_that_is_no_cache_stays_and_is_named(pipe, forward, when, monkeypatch):
    """Each run's report names the function; a user's own class gets no remark."""
    expected = tiny_output(accelerate_pipeline(pipe, "turbo"), "flux", steps=8)
    if when == "before":
        restore_pipeline(pipe)
    monkeypatch.setattr(FluxTransformer2DModel, "forward", forward)
    if when == "before":
        accelerate_pipeline(pipe, "turbo")
    for _ in range(2):
        assert torch.equal(tiny_output(pipe, "flux", steps=8), expected)
        (note,) = pipe.dit_accel.report().notes
        assert note.startswith(f"pipe.transformer runs {forward.__code__.co_name} of ") and "remove it" in note
        assert pipe.dit_accel.report().computed_fraction < 1
    monkeypatch.undo()
    pipe.transformer.__class__ = type("Mine", (FluxTransformer2DModel,), {"forward": timed, "__module__": "mine"})
    tiny_output(pipe, "flux", steps=8)
    assert pipe.dit_accel.report().notes == []


def test_positional_arguments_without_names_run_plainly(pipe, monkeypatch):
    """A forward with ``*args`` gives no argument names; a note says how to fix it."""
    arguments = recorded_calls(pipe, "flux")[0]
    monkeypatch.setattr(FluxTransformer2DModel, "forward", bare)
    latents = arguments.pop("hidden_states")
    with torch.no_grad():
        plain = pipe.transformer(latents, **arguments)[0]
        accelerate_pipeline(pipe, "turbo")
        with pytest.warns(UserWarning, match=r"decorate that with functools\.wraps"):
            assert torch.equal(pipe.transformer(latents, **arguments)[0], plain)
