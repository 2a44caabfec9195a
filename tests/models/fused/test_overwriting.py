"""Hand-written blocks at each level against naive models that compute everything and overwrite the reused parts."""

import pytest
import torch

from dit_accel import load_preset
from dit_accel.models.families import require_family
from tests.models import tiny
from tests.models.naive import Sequence, overwriting
from tests.rounding import distance

BOTH_KINDS = r"(single_)?transformer_blocks\.\d+\.attn"
HUNYUAN = Sequence(BOTH_KINDS, 360, text_first=False, cuts=True), {"height": 96, "width": 80}
WAN = Sequence(r"blocks\.\d+\.attn1", 504, crossed="attn2"), {"height": 96, "width": 112}
FLUX = Sequence(BOTH_KINDS, 420), {"height": 160, "width": 168}  # 8 blocks, one of both, and the last ragged
INTERPRETED = {  # of fewer tokens, for Triton's interpreter
    "flux": (Sequence(BOTH_KINDS, 121), {"height": 88, "width": 88}),
    "wan": (WAN[0]._replace(vision=192), {"height": 64, "width": 64, "guidance_scale": 1.0}),
}
MODELS = {  # sequence of their attention, and arguments of their call
    **dict.fromkeys(("flux", "flux-ip-adapter"), FLUX),
    **dict.fromkeys(("wan", "wan-i2v-clip", "wan22", "wan22-5b-i2v"), WAN),
    **dict.fromkeys(("hunyuan", "hunyuan-i2v"), HUNYUAN),
    "qwen-image": (Sequence(BOTH_KINDS, 132), {"true_cfg_scale": 1.0}),
    "flux2": (Sequence(BOTH_KINDS, 144), {}),
    "z-image": (Sequence(r"layers\.\d+\.attention", 160, text_first=False, pads_end=True), {"guidance_scale": 0.0}),
    "krea2": (Sequence(BOTH_KINDS, 144, cuts=True, gate="to_gate"), {"guidance_scale": 0.0}),
}
TILES = {"policy": "sparge", "tau_kv": 0.4}
EVERY_STEP = {"skip": TILES | {"steps": "all"}, "blocks.size": 64}
TRITON = {"kernels": {"attention": "triton", "gemm": "triton"}, "schedule.warmup": 1, "schedule.interval": 2}
CASES = {  # pipeline, level, changes of the preset
    "rows-and-tiles": ("flux", "head", {}),
    "rows-only": ("flux", "head", {"skip": {"policy": "none"}}),
    "tiles-only": ("flux", "head", {"reuse.tau_q": 0.0}),
    "second-order": ("flux", "head", {"forecast.method": "newton", "forecast.order": 2}),
    "reuse": ("flux", "head", {"forecast.method": "reuse", "forecast.order": 0}),
    "every-row-reused": ("flux", "head", {"reuse.tau_q": 1.0}),
    "degraded-layers": ("flux", "head", {"reuse.degrade_below": 0.366}),
    "tiles-on-all-steps": ("flux", "head", EVERY_STEP),
    "layer-second-order": ("flux", "layer", {"forecast.order": 2}),
    "layer-and-tiles": ("flux", "layer", EVERY_STEP),
    "output-and-tiles": ("flux", "output", EVERY_STEP),
    "image-prompt": ("flux-ip-adapter", "layer", {}),
    "wan": ("wan", "head", {}),
    "wan-one-row-a-head": ("wan", "head", {"reuse.tau_q": 1.0, "reuse.ramp": 0.01}),
    "wan-degraded-layers": ("wan", "head", {"reuse.degrade_below": 0.336}),
    "wan-tiles-on-all-steps": ("wan", "head", EVERY_STEP),
    "wan-layer-and-tiles": ("wan", "layer", EVERY_STEP | {"forecast.method": "newton", "forecast.order": 2}),
    "wan-image": ("wan-i2v-clip", "head", {}),
    "wan-two-transformers": ("wan22", "head", {}),
    "wan-timesteps-of-tokens": ("wan22-5b-i2v", "head", {}),
    "hunyuan": ("hunyuan", "head", {}),
    "hunyuan-first-frame": ("hunyuan-i2v", "head", {}),
    "hunyuan-degraded-layers": ("hunyuan-i2v", "head", {"reuse.degrade_below": 0.4}),
    "hunyuan-tiles-on-all-steps": ("hunyuan", "head", EVERY_STEP),
    "hunyuan-layer-and-tiles": ("hunyuan", "layer", EVERY_STEP),
    "hunyuan-first-frame-layer": ("hunyuan-i2v", "layer", {}),
    **{name: (name, "head", {}) for name in ("qwen-image", "flux2", "z-image", "krea2")},
    **{f"{name}-triton": (name, "head", TRITON) for name in ("flux", "wan")},
}


def preset_of(name, level, **overrides):
    """Two steps to warm up, of the next five two are computed, and the last one."""
    family = require_family(tiny.pipeline(name).transformer).name
    sections = {
        "model": family,
        "schedule": {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1},
        "forecast": {"level": level, "method": "taylor"},
    }
    if level == "head":
        reuse = {"tau_q": 0.6 if family == "wan" else 0.9, "ramp": 0.3}
        sections |= {"blocks": {"size": 64}, "reuse": reuse, "skip": TILES}
    return load_preset(load_preset("exact", **sections), **overrides)


@pytest.mark.parametrize(("name", "level", "changes"), CASES.values(), ids=CASES)
def test_forecasts_equal_overwriting(name, level, changes):
    """GEMM-Q, sparse attention, cached biases and whole features equal overwriting before the output projection."""
    preset, steps, modes = preset_of(name, level, **changes), 8, {"full": 3, "update": 2, "dispatch": 3}
    sequence, arguments = MODELS[name]
    if changes is TRITON:
        steps, modes = 4, {"full": 2, "update": 1, "dispatch": 1}
        sequence, arguments = INTERPRETED.get(name, MODELS[name])
    if name == "krea2":
        arguments = arguments | first_of_both(tiny.built(name)[1])
    with overwriting(tiny.pipeline(name), preset, steps, sequence) as naive:
        expected = tiny.output(name, steps, **arguments)
    result, report = tiny.accelerated_output(name, preset, steps, **arguments)
    assert distance(result, expected) < 2e-5
    assert distance(expected, tiny.output(name, steps, **arguments)) > 1e-3, "the case must differ from a plain run"
    assert report.fallbacks == [] and report.computed_fraction < 1
    assert name not in ("z-image", "krea2") or report.estimated_bytes == report.cache_bytes
    assert name == "wan22" or report.steps_by_mode == modes
    if preset.skip.policy != "none" and changes is not TRITON:
        assert naive.kept and min(naive.kept) < 1
    if below := preset.reuse.degrade_below:
        degraded = {chosen.density < below for site in naive.sites.values() for chosen in site.chosen.values()}
        assert degraded == {True, False}, "some layers must degrade and some not"


def first_of_both(arguments):
    """The first prompt and the first negative prompt of a batch."""
    return {name: value[:1] for name, value in arguments.items() if isinstance(value, torch.Tensor)}
