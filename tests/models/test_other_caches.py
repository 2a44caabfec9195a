"""Other caches on an accelerated transformer are refused by name, and with what takes them off."""

import diffusers
import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    HookRegistry,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
)

from dit_accel import accelerate_pipeline, accelerate_transformer, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.other_caches import _cache_of, refuse_other_cache
from dit_accel.tools.testing import tiny_output, tiny_pipeline

STEPS = 6
CONFIGS = {
    "FirstBlockCache": lambda: FirstBlockCacheConfig(threshold=0.1),
    "FasterCache": lambda: FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 1000,
        is_guidance_distilled=True,
        tensor_format="BCHW",
    ),
    "MagCache": lambda: MagCacheConfig(threshold=0.1, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS),
    "TaylorSeerCache": lambda: TaylorSeerCacheConfig(use_lite_mode=True),
    "PyramidAttentionBroadcast": lambda: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    ),
}


@pytest.fixture
def pipe():
    return tiny_pipeline("flux")


def refused(cache, way_off):
    return pytest.raises(
        UnsupportedError, match=rf"pipe\.transformer .* has {cache} on it.* take that one off with {way_off}"
    )


@pytest.mark.parametrize("cache", CONFIGS)
def test_a_cache_that_is_there_is_refused(pipe, cache):
    """Nothing is changed, and what the message says to do helps."""
    plain = tiny_output(pipe, "flux", steps=STEPS)
    pipe.transformer.enable_cache(CONFIGS[cache]())
    way_off = r"pipe\.transformer\.disable_cache\(\)"
    with refused(f"diffusers' {cache}", way_off):
        accelerate_pipeline(pipe, "flux-flashomni")
    with refused(f"diffusers' {cache}", way_off):
        accelerate_transformer(pipe.transformer, "turbo", [2.0, 1.0])
    assert not hasattr(pipe, "dit_accel")
    pipe.transformer.disable_cache()
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), plain)


@pytest.mark.parametrize("cache", CONFIGS)
def test_a_cache_that_comes_later_is_refused_at_the_first_call(pipe, cache):
    """Either of both can be taken off then, and the other works."""
    expected = tiny_output(accelerate_pipeline(pipe, "turbo"), "flux", steps=STEPS)
    for keep_ours in (True, False):
        pipe.transformer.enable_cache(CONFIGS[cache]())
        with refused(
            f"diffusers' {cache}", r"pipe\.transformer\.disable_cache\(\), or keep it and call restore_pipeline"
        ):
            tiny_output(pipe, "flux", steps=STEPS)
        if keep_ours:
            pipe.transformer.disable_cache()
            assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), expected)
    restore_pipeline(pipe)
    cached = tiny_pipeline("flux")
    cached.transformer.enable_cache(CONFIGS[cache]())
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), tiny_output(cached, "flux", steps=STEPS))
    for each in (pipe, cached):
        each.transformer.disable_cache()
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), tiny_output(cached, "flux", steps=STEPS))


def test_hooks_without_enable_cache_are_refused_too(pipe):
    """Before and after; then the message names each hook, for disable_cache knows nothing of them."""
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
    way_off = r'`registry = .*remove_hook\("fbc_leader_block_hook"\); registry.remove_hook\("fbc_block_hook"\)`'
    with refused("diffusers' FirstBlockCache", way_off):
        accelerate_pipeline(pipe)
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.remove_hook("fbc_leader_block_hook")
    registry.remove_hook("fbc_block_hook")
    accelerate_pipeline(pipe)
    tiny_output(pipe, "flux", steps=STEPS)
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
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
    """By the module of its config, whose hooks are there too; that of a prompt's keys and values forecasts nothing."""
    configs = [getattr(diffusers.hooks, name) for name in dir(diffusers.hooks) if name.endswith("CacheConfig")]
    assert len(configs) >= 5
    for config in (*configs, PyramidAttentionBroadcastConfig):
        name = config.__name__.removesuffix("Config")
        known = None if name == "TextKVCache" else name
        assert _cache_of(object.__new__(config)) == known
    for foreign in ("first_block_cache", "mine.first_block_cache", "diffusers.hooks.mine", "diffusers.mag_cache"):
        assert _cache_of(type("Config", (), {"__module__": foreign})()) is None


def test_a_cache_that_forecasts_nothing_is_left_alone(pipe):
    """Also one of somebody else's, whose config stands where diffusers has its own."""
    for config in (object(), None):
        pipe.transformer._cache_config = config
        refuse_other_cache(pipe.transformer, "transformer")
    pipe.transformer._is_cached = False
    refuse_other_cache(pipe.transformer, "transformer")


def test_hooks_are_looked_for_where_there_is_time(pipe):
    """Walking over all modules takes milliseconds, which a step has not; its own marks are always seen."""
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
    refuse_other_cache(pipe.transformer, "other", by_hooks=False)
    with pytest.raises(UnsupportedError, match=r"pipe\.other .* on it.*check_if_exists_or_initialize\(pipe\.other\)"):
        refuse_other_cache(pipe.transformer, "other")
    pipe.transformer._is_cached = True
    with pytest.raises(UnsupportedError, match="a cache of cache-dit"):
        refuse_other_cache(pipe.transformer, "other", by_hooks=False)
