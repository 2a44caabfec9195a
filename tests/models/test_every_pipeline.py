"""Every pipeline: exact and restored runs are bit-identical, and no run hears of the one before it."""

import functools

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated, load_preset, restore_pipeline
from dit_accel.models.families import pipeline_family
from tests.tiny import TINY_PIPELINES, VIDEO_PIPELINES, tiny_output, tiny_pipeline

# By transformers and timesteps; others differ from these in what their images add to the inputs.
ONE_OF_A_KIND = ("wan", "wan22", "wan22-5b", "hunyuan", "framepack", "hunyuan15")

STEPS = 6
SCHEDULE = {"control": "interval", "warmup": 2, "interval": 2}  # FULL FULL UPDATE DISPATCH UPDATE FULL
OUTPUT = load_preset("balanced", schedule=SCHEDULE)
# Everything that a run can carry on: cached heads and layers, their biases, and tiles skipped on computed steps too.
HEADS = {
    family: load_preset(
        preset,
        schedule={**SCHEDULE, "cooldown": 1},
        blocks={"size": 64},
        reuse={"tau_q": 0.8, "ramp": 0.3, "degrade_below": 0.4},
        skip={"policy": "sparge", "steps": "all", "tau_kv": 0.2},
    )
    for family, preset in (("hunyuan_video", "hunyuan-flashomni-paper"), ("wan", "wan21-flashomni"))
}

pipeline = functools.cache(tiny_pipeline)


def guidance(name: str, on: bool) -> dict:
    """Arguments that switch the second branch on or off; HunyuanVideo 1.5 has a component for it, which is set."""
    if name.startswith("hunyuan15"):
        pipeline(name).guider = pipeline(name).guider.new(guidance_scale=6.0 if on else 1.0)
        return {}
    if name not in VIDEO_PIPELINES:
        return {}
    if name.startswith("wan"):
        return {"guidance_scale": 5.0 if on else 1.0}
    return {"negative_prompt": "blurred", "true_cfg_scale": 3.0} if on else {}


# Arguments that change between calls; a batch of HunyuanVideo's image-to-video can't be guided.
CALLS = {
    "guided": lambda name: guidance(name, on=True),
    "unguided": lambda name: guidance(name, on=False),
    "batch": lambda name: guidance(name, on=name.startswith("wan")) | {"prompt": ["a fox", "two blue whales asleep"]},
    "prompt": lambda name: {**guidance(name, on=True), "prompt": "two blue whales asleep"},
    "resolution": lambda name: {**guidance(name, on=True), "height": 80, "width": 48},
}


def call(name: str, kind: str, steps: int = STEPS) -> torch.Tensor:
    return tiny_output(pipeline(name), name, steps=steps, **CALLS[kind](name))


def caching(name: str):
    """The preset that makes most use of caches on this pipeline."""
    return HEADS.get(getattr(pipeline_family(pipeline(name)), "name", None), OUTPUT)


@functools.cache
def fresh(name: str, kind: str) -> torch.Tensor:
    """Result of the first call after `accelerate_pipeline`."""
    with accelerated(pipeline(name), caching(name)):
        return call(name, kind)


def attributes(pipe) -> dict[str, set[str]]:
    """Names of the attributes of a pipeline and of every module in it."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    modules = {f"{name}.{key}": module for name, part in parts.items() for key, module in part.named_modules()}
    return {"pipe": set(vars(pipe))} | {key: set(vars(module)) for key, module in modules.items()}


@pytest.mark.parametrize(  # batches of HunyuanVideo are unguided
    ("name", "kind"), [*((name, "guided") for name in TINY_PIPELINES), ("wan22", "batch"), ("hunyuan", "batch")]
)
def test_exact_and_restored_are_bit_identical(name, kind):
    """Preset exact gives the plain bits; so does the pipeline once a caching preset is restored, and keeps no trace."""
    pipe = pipeline(name)
    plain = call(name, kind)
    before = attributes(pipe)  # the pipeline's own first call adds one, for its cache contexts
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(call(name, kind), plain) and pipe.dit_accel.report().computed_fraction == 1.0
    accelerate_pipeline(pipe, caching(name))
    assert not torch.equal(call(name, kind), plain)
    assert pipe.dit_accel.report().computed_fraction < 1.0
    restore_pipeline(pipe)
    assert torch.equal(call(name, kind), plain) and attributes(pipe) == before


@pytest.mark.parametrize(("name", "kind"), zip(ONE_OF_A_KIND, ["prompt", "resolution", "unguided"] * 2, strict=True))
def test_a_run_after_another_equals_a_fresh_one(name, kind):
    """After a guided run, one that differs in prompt, resolution or guidance equals a first one."""
    with accelerated(pipeline(name), caching(name)):
        call(name, "guided")
        assert torch.equal(call(name, kind), fresh(name, kind)), kind
    assert not torch.equal(fresh(name, kind), fresh(name, "guided"))
