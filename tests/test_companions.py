"""What else users put on a pipeline, before or after accelerating it: it keeps its effect, and so does the loop.

Compiled blocks stand in tests/models/test_compile.py, fused projections and autocast in tests/models/fused.
"""

import functools

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.tools.testing import PROMPT, flux, tiny_flux_lora, tiny_inputs, tiny_output, tiny_pipeline
from dit_accel.tools.testing.inputs import left_half, random_tensor

STEPS, CPU = 6, torch.device("cpu")
CLOSED_LOOP = load_preset("turbo", target_error=0.25)
LAYERS = load_preset("flux-taylorseer", schedule={"interval": 3})
HEADS = load_preset(
    "flux-flashomni",
    schedule={"warmup": 2, "interval": 3},
    blocks={"size": 64},
    reuse={"tau_q": 0.9, "ramp": 0.3},
)
HOOKED, GROUP = "it carries hooks (offload, layerwise casting, …)", "another hook of diffusers lies on the block"
ADAPTED = "not a plain linear layer"


@pytest.fixture(autouse=True)
def own_attention_backend():
    """What ``set_attention_backend`` sets is of the whole process."""
    with attention_backend("native"):
        yield


def hot_swap(pipe):
    """A second LoRA in the tensors of the first."""
    pytest.importorskip("peft")
    pipe.enable_lora_hotswap(target_rank=4)
    pipe.load_lora_weights(tiny_flux_lora(pipe), adapter_name="style")
    pipe.load_lora_weights(tiny_flux_lora(pipe, seed=1), adapter_name="style", hotswap=True)


def ip_adapter(pipe):
    """A picture prompt's projections, of weights that have an effect."""
    flux.add_ip_adapter(pipe)
    generator = torch.Generator().manual_seed(0)
    added = [pipe.transformer.encoder_hid_proj, *pipe.transformer.attn_processors.values()]
    for parameter in (each for part in added if isinstance(part, torch.nn.Module) for each in part.parameters()):
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)


def group_offload(pipe, kind):
    pipe.transformer.enable_group_offload(CPU, offload_type=kind, num_blocks_per_group=1)


# name: (what puts it on, why blocks run densely at level head, or None)
COMPANIONS = {
    "layerwise-casting": (
        lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        HOOKED,
    ),
    "lora-hot-swap": (hot_swap, ADAPTED),
    "ip-adapter": (ip_adapter, None),
    "group-offload-blocks": (functools.partial(group_offload, kind="block_level"), GROUP),
    "group-offload-leaves": (functools.partial(group_offload, kind="leaf_level"), HOOKED),
    "model-offload": (lambda pipe: pipe.enable_model_cpu_offload(device=CPU), None),
    "sequential-offload": (lambda pipe: accelerate.cpu_offload(pipe.transformer, CPU, offload_buffers=True), HOOKED),
    "attention-backend": (lambda pipe: pipe.transformer.set_attention_backend("_native_math"), None),
}
every_companion = pytest.mark.parametrize("companion", COMPANIONS)
every_order = pytest.mark.parametrize("order", ["before", "after"])


def call(pipe, companion, name="flux"):
    embeddings = {}
    if companion == "ip-adapter" and pipe.transformer.encoder_hid_proj is not None:
        embeddings = flux.ip_adapter_inputs(torch.Generator().manual_seed(1))
        embeddings = {key: value for key, value in embeddings.items() if "ip_adapter" in key}
    return tiny_output(pipe, name, steps=STEPS, **embeddings)


@functools.cache
def plainly(companion):
    """What the pipeline with that companion gives without us."""
    pipe = tiny_pipeline("flux")
    COMPANIONS[companion][0](pipe)
    return call(pipe, companion)


def joined(companion, order, preset):
    """An accelerated pipeline that was given its companion before that, or after a first call."""
    pipe = tiny_pipeline("flux")
    add, _ = COMPANIONS[companion]
    if order == "before":
        add(pipe)
    accelerate_pipeline(pipe, preset)
    if order == "after":
        tiny_output(pipe, "flux", steps=2)
        add(pipe)
    return pipe


@every_order
@every_companion
def test_it_keeps_its_effect_and_so_does_the_loop(companion, order):
    """Under exact the plain bits; under the closed loop steps are forecast and the result is near; then plain again."""
    plain = plainly(companion)
    pipe = joined(companion, order, "exact")
    assert torch.equal(call(pipe, companion), plain)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    assert distance(call(pipe, companion), plain) < 0.05
    report = pipe.dit_accel.report()
    assert report.computed_fraction < 0.8 and report.notes == [] and report.fallbacks == []
    assert torch.equal(call(restore_pipeline(pipe), companion), plain)


@every_companion
def test_levels_inside_of_blocks_run_or_say_why_not(companion):
    """Blocks that can't be cut, or not be replaced, are computed as they are, to the bit, and the report names why."""
    plain, (_, of_heads) = plainly(companion), COMPANIONS[companion]
    pipe = joined(companion, "before", "exact")
    for preset, reason in ((LAYERS, of_heads if of_heads == GROUP else None), (HEADS, of_heads)):
        accelerate_pipeline(pipe, preset)
        result, report = call(pipe, companion), pipe.dit_accel.report()
        if reason is None:
            assert report.computed_fraction < 1 and distance(result, plain) < 0.05
        else:
            assert torch.equal(result, plain)
            assert all(reason in entry["reason"] for entry in report.fallbacks) and report.fallbacks


@pytest.mark.parametrize("preset", [CLOSED_LOOP, LAYERS, HEADS], ids=["output", "layer", "head"])
def test_group_offload_that_comes_later_changes_nothing(preset):
    """Its hooks lie above ours then, so that every level goes on as before."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), preset)
    expected = tiny_output(pipe, "flux", steps=STEPS)
    group_offload(pipe, "block_level")
    assert torch.equal(tiny_output(pipe, "flux", steps=STEPS), expected)
    assert pipe.dit_accel.report().computed_fraction < 1


def test_prompt_embeddings_equal_their_prompt():
    """A prompt that was encoded before gives what the prompt itself gives, forecasts included."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), CLOSED_LOOP)
    expected = tiny_output(pipe, "flux", steps=STEPS)
    with torch.no_grad():
        embeddings, pooled, _ = pipe.encode_prompt(PROMPT, PROMPT, max_sequence_length=37)
    inputs = tiny_inputs("flux", steps=STEPS, prompt=None, prompt_embeds=embeddings, pooled_prompt_embeds=pooled)
    assert torch.equal(pipe(**inputs)[0], expected)


def test_inpainting_keeps_what_the_mask_keeps():
    """After each step the pipeline puts the picture's own latents back where nothing is painted."""
    parts = tiny_pipeline("flux").components
    pipe = diffusers.FluxInpaintPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)

    def run(seed=0):
        generator = torch.Generator().manual_seed(seed)
        picture = random_tensor(torch.Generator().manual_seed(9), flux.HEIGHT, flux.WIDTH)
        mask = left_half(generator, flux.HEIGHT, flux.WIDTH)
        inputs = tiny_inputs("flux", steps=STEPS, image=picture, mask_image=mask, strength=1.0)
        return pipe(**{**inputs, "generator": generator})[0]

    plain = run()
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(run(), plain)
    for preset in (CLOSED_LOOP, LAYERS, HEADS):
        accelerate_pipeline(pipe, preset)
        assert 0 < distance(run(), plain) < 0.05
        assert pipe.dit_accel.report().computed_fraction < 1


def test_a_callback_may_change_the_latents():
    """It is called after every step, forecast or not, and the loop goes on from what it gives back."""
    pipe, seen = tiny_pipeline("flux"), []

    def darken(pipe, step, timestep, tensors):
        seen.append(step)
        return {"latents": 0.98 * tensors["latents"]}

    plain = tiny_output(pipe, "flux", steps=STEPS, callback_on_step_end=darken)
    for preset in (CLOSED_LOOP, LAYERS, HEADS):
        accelerate_pipeline(pipe, preset)
        seen.clear()
        result = tiny_output(pipe, "flux", steps=STEPS, callback_on_step_end=darken)
        assert seen == list(range(STEPS))
        assert 0 < distance(result, plain) < 0.05 < distance(tiny_output(pipe, "flux", steps=STEPS), plain)


def test_several_control_nets_run_in_computed_steps_only():
    """diffusers puts them into one module, whose call waits as that of one does."""
    one = tiny_pipeline("flux-controlnet")
    other = tiny_pipeline("flux-controlnet", seed=1).controlnet
    pipe = diffusers.FluxControlNetPipeline(
        **{**one.components, "controlnet": diffusers.FluxMultiControlNetModel([one.controlnet, other])}
    )
    pipe.set_progress_bar_config(disable=True)
    calls = []
    other.x_embedder.register_forward_hook(lambda *_: calls.append(1))

    def run():
        calls.clear()
        picture = random_tensor(torch.Generator().manual_seed(9), flux.HEIGHT, flux.WIDTH)
        scales = {"control_image": [picture, 1 - picture], "controlnet_conditioning_scale": [0.5, 0.8]}
        return tiny_output(pipe, "flux-controlnet", steps=STEPS, **scales)

    plain = run()
    assert len(calls) == STEPS
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(run(), plain)
    accelerate_pipeline(pipe, CLOSED_LOOP)
    assert distance(run(), plain) < 0.05
    assert len(calls) == STEPS - pipe.dit_accel.report().steps_by_mode["dispatch"] < STEPS
    assert torch.equal(restore_pipeline(pipe) and run(), plain)


def distance(result, expected):
    return float((result - expected).norm() / expected.norm())
