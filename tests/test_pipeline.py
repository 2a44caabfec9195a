"""Accelerating and restoring whole pipelines: exactness, isolation of runs, and ten kinds of abuse."""

import functools
import warnings
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook, hooks

from dit_accel import accelerate_pipeline, accelerate_transformer, accelerated, load_preset, restore_pipeline
from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.models.beside.host_weights import HostWeights
from tests.levels import CLOSED_LOOP, HEADS, LAYERS
from tests.models.test_transformer import recorded_calls
from tests.rounding import distance, equal_up_to_rounding
from tests.tiny import tiny_output, tiny_pipeline

STEPS = 12
GIVES_STEPS = pytest.mark.skipif(not hasattr(hooks, "CacheContext"), reason="diffusers before 0.42 passes no step")
FLUX_PRESETS = [pytest.param(p, id=i) for p, i in ((CLOSED_LOOP, "output"), (LAYERS, "layer"), (HEADS, "head"))]
FIRST_CALLS: dict[str, torch.Tensor] = {}  # of `fresh`


def call(pipe, name="flux", steps=STEPS, **overrides):
    return tiny_output(pipe, name, steps=steps, **overrides)


@functools.cache
def plain(**overrides):
    """Result of a pipeline that was never accelerated."""
    return call(tiny_pipeline("flux"), **overrides)


def fresh(preset, **overrides):
    """Result of a newly built pipeline's first call."""
    key = repr((preset, overrides))
    if key not in FIRST_CALLS:
        FIRST_CALLS[key] = call(accelerate_pipeline(tiny_pipeline("flux"), preset), **overrides)
    return FIRST_CALLS[key]


@pytest.mark.parametrize(
    "name",
    ["flux", "flux-controlnet", "sd3", "cogvideox", "mochi", "ltx", "qwen-image", "wan22", "hunyuan", "framepack"],
)
def test_closed_loop_skips_steps_and_stays_close(name):
    """Level output serves every family: fewer computed steps, nearly the plain result, the same in a second run."""
    pipe = tiny_pipeline(name)
    plain = call(pipe, name, steps=20)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    first, report = call(pipe, name, steps=20), pipe.dit_accel.report()
    assert report.computed_fraction < 0.75 and distance(first, plain) < 0.05
    assert torch.equal(call(pipe, name, steps=20), first)
    assert all(note.startswith("nothing corrected") for note in report.notes) and report.fallbacks == []


@pytest.mark.parametrize("preset", FLUX_PRESETS)
def test_changed_resolution_steps_and_prompt_equal_fresh_runs(preset):
    """Abuse: after any call, the next equals one of a fresh process."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), preset)
    call(pipe)
    assert equal_up_to_rounding(call(pipe, height=112, width=96), fresh(preset, height=112, width=96))
    assert equal_up_to_rounding(call(pipe, steps=7), fresh(preset, steps=7))
    assert equal_up_to_rounding(call(pipe, prompt="another prompt"), fresh(preset, prompt="another prompt"))


def explode(pipe, *_):
    raise RuntimeError("in the middle")


def interrupt(pipe, *_):
    pipe._interrupt = True


@pytest.mark.parametrize("place", ["callback", "interrupt", "block"])
@pytest.mark.parametrize("preset", FLUX_PRESETS)
def test_a_run_that_ends_in_the_middle_leaves_the_next_one_clean(pipe, preset, place):
    """Abuse: an exception in a callback or in a block, and ``pipe._interrupt``, hand nothing on."""
    accelerate_pipeline(pipe, preset)
    end = interrupt if place == "interrupt" else explode

    def callback(pipe, step, timestep, tensors):
        if step == 6:
            end(pipe)
        return tensors

    if place == "block":
        block = pipe.transformer.single_transformer_blocks[1]
        handle = block.norm.register_forward_hook(lambda *_: explode(pipe) if pipe.scheduler.step_index == 6 else None)
    with suppress(RuntimeError):
        call(pipe, callback_on_step_end=None if place == "block" else callback)
        assert place == "interrupt" and len(pipe.dit_accel.report().steps) == 7
    if place == "block":
        handle.remove()
    assert equal_up_to_rounding(call(pipe), fresh(preset))


def test_an_error_in_the_middle_leaves_nothing(pipe, monkeypatch):
    """If the host has no memory for weights, the hooks that are on the pipeline by then go."""

    def attach(weights):
        raise MemoryError("on the host")

    monkeypatch.setattr(HostWeights, "attach", attach)
    parts = pipe, *pipe.transformer.modules(), *pipe.vae.modules()
    before = [set(vars(part)) for part in parts]
    with pytest.raises(MemoryError, match="on the host"):
        accelerate_pipeline(pipe, "exact", linear={"dtype": "int8", "weights": "host"})
    assert before == [set(vars(part)) for part in parts] and torch.equal(call(pipe), plain())


def test_keys_are_keywords_of_every_front_door(pipe):
    """accelerate_pipeline, accelerated and accelerate_transformer take them; a misspelt one changes nothing."""
    schedule = accelerate_pipeline(pipe, target_error=0.1).dit_accel.preset.schedule
    assert schedule.target_error == 0.1
    with accelerated(pipe, "turbo", warmup=3, order=1):
        assert (pipe.dit_accel.preset.schedule.warmup, pipe.dit_accel.preset.forecast.order) == (3, 1)
    for wrong in (
        accelerate_pipeline,
        lambda pipe, **keys: accelerate_transformer(pipe.transformer, "turbo", [1.0], **keys),
    ):
        with pytest.raises(PresetError, match=r"unknown keyword 'target_eror' \(did you mean 'target_error'\?\)"):
            wrong(pipe, target_eror=0.2)
    assert pipe.dit_accel.preset.schedule == schedule
    assert accelerate_transformer(pipe.transformer, "turbo", [1.0], cooldown=2).preset.schedule.cooldown == 2


def test_accelerating_and_restoring_twice(pipe):
    """Abuse: the new preset takes the old one's place, a wrong one changes nothing, and one restore undoes all."""
    restore_pipeline(pipe)
    accelerate_pipeline(accelerate_pipeline(pipe, HEADS), CLOSED_LOOP)
    with pytest.raises(PresetError, match=r"unknown key 'forecast\.ordre'"):
        accelerate_pipeline(pipe, "balanced", **{"forecast.ordre": 2})
    acceleration = pipe.dit_accel
    assert acceleration.preset == CLOSED_LOOP
    assert equal_up_to_rounding(call(pipe), fresh(CLOSED_LOOP))
    acceleration.restore()
    acceleration.restore()
    restore_pipeline(pipe)
    assert equal_up_to_rounding(call(pipe), plain())


def without_scheduler():
    """Echo's modular pipeline has its noise levels in its blocks."""
    pipe = SimpleNamespace(components={"transformer": tiny_pipeline("flux").transformer})
    pipe.transformer = pipe.components["transformer"]
    return pipe


TILES = {"skip": {"policy": "sparge", "steps": "all"}}
NO_BLOCKS = r"can't run on HunyuanVideoFramepackTransformer3DModel.*amilies that can: flux, .*, sd3, qwen_image"
REFUSED = {  # pipeline, preset, keys, error
    "no-pipeline": (lambda: SimpleNamespace(), "balanced", {}, r"named transformer, transformer_2 or .*, got Simple"),
    "no-scheduler": (without_scheduler, "exact", {}, r"must have a scheduler, .*, got SimpleNamespace; accelerate_"),
    "family": (
        partial(tiny_pipeline, "sd3"),
        "flux-fora",
        {},
        r"flux models, and SD3Transformer2DModel is not one; presets that fit it: balanced, balanced-8bit, exact,",
    ),
    "family-with-blocks": (
        partial(tiny_pipeline, "wan"),
        "flux-fora",
        {},
        r"WanTransformer3DModel is not one; .*: balanced, .*wan21-taylorseer",
    ),
    "unknown-blocks": (partial(tiny_pipeline, "framepack"), "balanced", {"level": "layer"}, NO_BLOCKS),
    "unknown-attention": (partial(tiny_pipeline, "framepack"), "balanced", TILES, NO_BLOCKS),
}


@pytest.mark.parametrize(("make", "preset", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_accelerated_is_refused(make, preset, keys, message):
    """Abuse: the error says what came and what would fit, and nothing is changed."""
    pipe = make()
    with pytest.raises(UnsupportedError, match=message):
        accelerate_pipeline(pipe, preset, **keys)
    assert not hasattr(pipe, "dit_accel")


def test_a_pipeline_is_no_transformer(pipe):
    """The error says where a pipeline goes."""
    with pytest.raises(UnsupportedError, match=r"must be a module, got FluxPipeline; .* accelerate_pipeline"):
        accelerate_transformer(pipe, "balanced", [1.0, 0.5])


@pytest.mark.parametrize("keys", [{"level": "layer"}, TILES], ids=["layer", "tiles"])
def test_presets_of_any_family_may_need_blocks(keys):
    flux = accelerate_pipeline(tiny_pipeline("flux"), **keys)
    named = accelerate_pipeline(tiny_pipeline("flux"), **keys, model="flux")
    assert equal_up_to_rounding(call(flux), call(named)) and flux.dit_accel.report().computed_fraction < 1.0


@pytest.mark.parametrize(("name", "usual"), [("flux", "balanced"), ("wan", "video-balanced")])
def test_without_a_name_it_is_balanced(name, usual):
    """The video form for videos; a Preset stays unchanged, and a transformer goes by its family."""
    pipe = accelerate_pipeline(tiny_pipeline(name))
    assert pipe.dit_accel.preset == load_preset(usual)
    with accelerated(pipe, load_preset("turbo")):
        assert pipe.dit_accel.preset.name == "turbo"
    restore_pipeline(pipe)
    with accelerated(pipe):
        assert pipe.dit_accel.preset.name == usual
    assert accelerate_transformer(pipe.transformer, "balanced", [2.0, 1.0]).preset.name == usual


def test_accelerated_restores_whatever_happens(pipe):
    """The context manager puts back the earlier preset, or none."""
    with pytest.raises(RuntimeError, match="inside"), accelerated(pipe, HEADS):
        raise RuntimeError("inside")
    assert not hasattr(pipe, "dit_accel")
    accelerate_pipeline(pipe, CLOSED_LOOP)
    with accelerated(pipe, "exact") as inside:
        assert inside is pipe and pipe.dit_accel.preset.name == "exact"
    assert pipe.dit_accel.preset == CLOSED_LOOP


@pytest.mark.parametrize("gives_steps", [False, pytest.param(True, marks=GIVES_STEPS)], ids=["timesteps", "context"])
@torch.no_grad()
def test_own_loop_with_accelerate_transformer(pipe, gives_steps):
    """A caller's own denoising loop is accelerated by its timesteps, or by the steps it gives, run after run."""
    transformer, (arguments, *_) = pipe.transformer, recorded_calls(pipe, "flux")
    timesteps = torch.linspace(1.0, 0.05, 20)

    def velocity(x, timestep):
        return transformer(**arguments | {"hidden_states": x, "timestep": timestep.expand(1), "return_dict": False})[0]

    def loop():
        x = arguments["hidden_states"]
        for index, timestep in enumerate(timesteps):
            following = timesteps[index + 1] if index + 1 < len(timesteps) else 0.0
            place = {"step_index": index, "num_inference_steps": len(timesteps)} if gives_steps else {}
            with transformer.cache_context("cond", **place):
                x = x + (following - timestep) * velocity(x, timestep)
        return x

    plain = loop()
    acceleration = accelerate_transformer(transformer, CLOSED_LOOP, None if gives_steps else timesteps)
    first, second = loop(), loop()
    assert acceleration.report().computed_fraction < 0.8 and torch.equal(first, second)
    assert distance(first, plain) < 0.05
    if gives_steps:
        with pytest.raises(UnsupportedError, match="got no step_index"):
            velocity(arguments["hidden_states"], timesteps[0])
    acceleration.restore()
    assert torch.equal(loop(), plain)


def test_branch_that_begins_late_is_measured_before_it_is_forecast():
    """SD3's skip-layer guidance adds a call after some steps: its first two are computed and all stays close."""
    pipe = tiny_pipeline("sd3")
    guidance = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.3, "skip_layer_guidance_stop": 0.9}
    plain = call(pipe, "sd3", steps=30, **guidance)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    result = call(pipe, "sd3", steps=30, **guidance)
    assert pipe.dit_accel.report().computed_fraction < 0.8 and distance(result, plain) < 0.05


@pytest.mark.parametrize("preset", [pytest.param(LAYERS, id="layer"), pytest.param(HEADS, id="head")])
def test_blocks_that_carry_another_hook_run_through_it(pipe, preset):
    """A hook of diffusers that was there first (group offload, say) is called at every step, and the report says so."""

    class Counter(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    counter = Counter()
    HookRegistry.check_if_exists_or_initialize(pipe.transformer.transformer_blocks[0]).register_hook(counter, "counter")
    accelerate_pipeline(pipe, preset)
    call(pipe)
    assert counter.calls == STEPS
    reason = "another hook of diffusers lies on the block: counter"
    assert pipe.dit_accel.report().fallbacks == [{"site": "transformer_blocks.0", "reason": reason}]
    restore_pipeline(pipe)
    assert list(pipe.transformer.transformer_blocks[0]._diffusers_hook.hooks) == ["counter"]


def test_outputs_may_hold_what_is_no_tensor():
    """An output with a None next to the sample is forecast with the None in its place."""

    class Transformer(torch.nn.Module):
        def forward(self, hidden_states, timestep):
            return hidden_states * timestep, None

    transformer, timesteps = Transformer(), [float(t) for t in range(10, 0, -1)]
    accelerate_transformer(transformer, CLOSED_LOOP, timesteps, **{"schedule.target_error": 0.05})
    outputs = [transformer(torch.ones(1, 3), timestep=timestep) for timestep in timesteps]
    assert all(extra is None for _, extra in outputs)
    assert [float(sample.mean()) for sample, _ in outputs] == pytest.approx(timesteps, rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU makes the host wait")
@pytest.mark.parametrize("preset", ["turbo", "flux-sparge-balanced"])
def test_the_host_waits_once_a_computed_call(preset):
    """Errors and densities are read together; a forecast step reads nothing."""
    pipe = accelerate_pipeline(tiny_pipeline("flux").to("cuda", torch.bfloat16), preset)
    waits = []
    forward = pipe.transformer.forward

    def counted(*args, **kwargs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return forward(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchroniz" in str(item.message) for item in caught))

    pipe.transformer.forward = counted
    try:
        for _ in range(2):  # the first call of all also compiles
            waits.clear()
            call(pipe, steps=20)
    finally:
        pipe.transformer.forward = forward
    computed = [step.mode != "dispatch" for step in pipe.dit_accel.report().steps]
    assert waits[1:] == [int(item) for item in computed][1:]  # the first output has no forecast to compare with
