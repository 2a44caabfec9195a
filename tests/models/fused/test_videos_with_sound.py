"""Blocks of LTX-2 and MiniMax-H3: parts that are called, layers in 8 bits, forecasts, and what runs as before."""

import copy

import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models import drive
from tests.models import tiny
from tests.models.fused.test_flux_relatives import distance

STEPS = 3
SCHEDULE = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 1}
ATTENTION = {"ltx2": "attn1", "minimax-h3": "attn"}  # over the video, in each block
NORMS = {"ltx2": ("audio_norm2", "audio_to_video_norm"), "minimax-h3": ("norm2",)}
OTHERS = {
    "ltx2": ("attn1", "audio_attn2", "video_to_audio_attn", "attn1.norm_k", "ff", "audio_ff.net.0"),
    "minimax-h3": ("attn", "attn.norm_k", "ff", "ff.net.0"),
}
ADAPTED = {
    "ltx2": ("attn1.to_q", "audio_to_video_attn.to_k", "ff.net.0.proj", "audio_attn2.to_out.0"),
    "minimax-h3": ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "adaln_proj.linear"),
}


def pipeline(name):
    return copy.deepcopy(tiny.pipeline(name))


def made(name, pipe, steps=STEPS, **given):
    """All outputs in one vector."""
    arguments = tiny.built(name)[1] | {"num_inference_steps": steps} | given
    return torch.cat([output.flatten() for output in tiny.outputs(pipe, arguments)])


def accelerated(name, pipe, preset, **given):
    """All outputs, and the report; the pipeline is plain again afterwards."""
    accelerate_pipeline(pipe, preset)
    try:
        return made(name, pipe, **given), pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


def call_of(name, pipe):
    """Arguments that a pipeline passes to its transformer."""
    given = {}
    handle = pipe.transformer.register_forward_pre_hook(lambda *call: given.update(call[2]), with_kwargs=True)
    made(name, pipe, steps=1)
    handle.remove()
    return given


@pytest.fixture(params=ATTENTION)
def name(request):
    return request.param


@pytest.fixture
def pipe(name):
    return pipeline(name)


def of_each(parts):
    """Parametrise by the name of a model and one of its parts."""
    return pytest.mark.parametrize(("name", "part"), [(name, each) for name in parts for each in parts[name]])


def hooked(name, part):
    """Report of a call in which a part of a block carries a hook, which sees each step."""
    pipe, calls = pipeline(name), []
    plain = made(name, pipe, steps=2)
    pipe.transformer.transformer_blocks[1].get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    fused, report = accelerated(name, pipe, "exact", steps=2)
    assert distance(fused, plain) < 1e-5 and len(calls) == 2
    return report


@of_each(NORMS)
def test_a_hooked_norm_leaves_the_block_to_diffusers(name, part, as_on_a_gpu):
    assert [each["reason"] for each in hooked(name, part).fallbacks] == [f"its {part} carries hooks"]


@of_each(OTHERS)
def test_other_parts_that_carry_hooks_are_called(name, part, as_on_a_gpu):
    """A hook of the MLP, or in an attention, leaves that part to it."""
    assert hooked(name, part).fallbacks == []


@of_each(ADAPTED)
def test_lora_keeps_its_effect(name, part, pipe, as_on_a_gpu):
    """Layers with an adapter are called, not read."""
    peft = pytest.importorskip("peft")
    plain = made(name, pipe, steps=2)
    pipe.transformer.add_adapter(peft.LoraConfig(r=4, target_modules=[part], init_lora_weights=False))
    adapted = made(name, pipe, steps=2)
    assert distance(adapted, plain) > 1e-4
    assert distance(accelerated(name, pipe, "exact", steps=2)[0], adapted) < 1e-5


def test_layers_in_8_bits(name, pipe, as_on_a_gpu, by_hand, monkeypatch):
    """Fused blocks run the same rounded layers as diffusers' own."""
    preset, plain = load_preset("exact", linear={"dtype": "int8"}), made(name, pipe)
    fused, report = accelerated(name, pipe, preset)
    assert report.fallbacks == [] and by_hand
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    expected, _ = accelerated(name, pipe, preset)
    assert distance(expected, plain) > 1e-3 and distance(fused, expected) < 0.01


@pytest.mark.parametrize("level", ["layer", "output"])
def test_features_are_forecast(level, name, pipe, as_on_a_gpu, by_hand, monkeypatch):
    """Level layer gives what it gives where each part is remembered by itself."""
    forecasts_equal(by_hand, monkeypatch, name, pipe, level)


def forecasts_equal(by_hand, monkeypatch, name, pipe, level, **given):
    """Compare fused blocks with diffusers' own in a run with forecast steps."""
    preset = load_preset("exact", forecast={"level": level}, schedule=SCHEDULE)
    result, report = accelerated(name, pipe, preset, steps=8, **given)
    assert report.fallbacks == [] and report.steps_by_mode["dispatch"] > 1 and by_hand
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    assert distance(result, accelerated(name, pipe, preset, steps=8, **given)[0]) < 1e-5


def test_autocast_at_level_layer(name, pipe):
    """Outputs of parts have another dtype than the tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        result, report = accelerated(name, pipe, load_preset("exact", forecast={"level": "layer"}))
    assert result.isfinite().all() and report.fallbacks == []


def test_gradients_are_diffusers(name, pipe):
    """Kernels have none, so blocks run as before."""
    given, attn = call_of(name, pipe), pipe.transformer.transformer_blocks[0].get_submodule(ATTENTION[name])
    (expected,) = torch.autograd.grad(pipe.transformer(**given)[0].sum(), attn.to_q.weight)
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(torch.autograd.grad(pipe.transformer(**given)[0].sum(), attn.to_q.weight)[0], expected)
