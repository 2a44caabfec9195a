"""The FLUX adapter against a naive FLUX that computes everything and overwrites the reused parts."""

import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.sparse import head_site
from tests.models.naive_flux import run_heads, run_layers
from tests.tiny import tiny_flux_lora, tiny_inputs, tiny_pipeline

STEPS = 9
FEW = 5  # steps with one of each mode under ``HEADS``
TEXT = 37
SMALL_PICTURE = {"height": 88, "width": 88}  # 3 blocks, of both, of image and ragged, for Triton's interpreter
ATTENTION = 457 / (457 + 6 * 96)  # its share of a block's FLOPs, of 457 tokens and 96 features
HEADS = {
    "schedule": {"warmup": 2, "interval": 4, "cooldown": 1},
    "blocks": {"size": 64},
    "reuse": {"tau_q": 0.9, "ramp": 0.3},
    "skip": {"tau_kv": 0.4},
}


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline("flux")


def inputs(name="flux", **overrides):
    # 420 image tokens and 37 of text: 8 blocks of 64, the first of which holds both and the last of which is ragged.
    return tiny_inputs(name, **{"steps": STEPS, "height": 160, "width": 168, **overrides})


def head_preset(**overrides):
    return load_preset(load_preset("flux-flashomni-paper", **HEADS), **overrides)


def skipping_preset(level, **overrides):
    """Tiles are skipped on computed steps too, at the schedule of ``HEADS``."""
    if level == "head":
        return head_preset(**{"skip.steps": "all"}, **overrides)
    skip = {"policy": "sparge", "steps": "all", "tau_kv": 0.4}
    sections = {"schedule": HEADS["schedule"], "blocks": HEADS["blocks"], "skip": skip, "forecast.level": level}
    return load_preset("flux-taylorseer", **sections, **overrides)


def accelerate(pipe, preset, **call):
    """One accelerated call: its result and its report; the pipeline is plain again afterwards."""
    accelerate_pipeline(pipe, preset)
    try:
        return pipe(**inputs(**call))[0], pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


@pytest.mark.parametrize(
    "backend, overrides",
    [
        pytest.param("reference", {}, id="taylor-rows-and-tiles"),
        pytest.param("triton", {}, id="taylor-rows-and-tiles-triton"),
        pytest.param("reference", {"skip": {"policy": "none"}}, id="rows-only"),
        pytest.param("reference", {"reuse.tau_q": 0.0}, id="tiles-only"),
        pytest.param("reference", {"forecast.method": "newton", "forecast.order": 2}, id="newton-second-order"),
        pytest.param("reference", {"forecast.method": "reuse", "forecast.order": 0}, id="reuse"),
        pytest.param("reference", {"reuse.tau_q": 1.0}, id="every-vision-row-reused"),
        pytest.param("reference", {"reuse.degrade_below": 0.354}, id="degraded-layers"),
    ],
)
def test_heads_equal_naive_overwriting(pipe, backend, overrides):
    """GEMM-Q, sparse attention and the cached bias equal overwriting O before the projection."""
    preset = head_preset(**overrides, kernels={"attention": backend, "gemm": backend})
    picture = SMALL_PICTURE if backend == "triton" else {}
    expected, processors = run_heads(pipe, preset, inputs(**picture), TEXT)
    plain = pipe(**inputs(**picture))[0]
    result, report = accelerate(pipe, preset, **picture)
    assert _distance(result, expected) < 2e-5
    assert _distance(expected, plain) > 1e-3, "the case must differ from a plain run to prove anything"
    assert report.fallbacks == []
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 4}
    assert report.computed_fraction < 1
    if "reuse.degrade_below" in overrides:
        degraded = {processor.vision_density < 0.354 for processor in processors}
        assert degraded == {True, False}, "some layers must degrade and some not"


@pytest.mark.parametrize("history_dtype", [None, "float8"], ids=["plain", "float8"])
def test_update_projects_heads_whose_symbol_changed(pipe, history_dtype, monkeypatch):
    """The second UPDATE starts from the first one's biases, and its cost shows it; from float8 it recomputes them."""
    updates = {}

    def spy(o, weight, *arguments, previous, **options):
        out, stack = kernel(o, weight, *arguments, previous=previous, **options)
        updates.setdefault(weight.data_ptr(), []).append((previous, stack, arguments[1].mask64))
        return out, stack

    kernel = head_site.gemm_o_update
    monkeypatch.setattr(head_site, "gemm_o_update", spy)
    _, report = accelerate(pipe, head_preset(**{"memory.history_dtype": history_dtype}))
    assert report.fallbacks == []
    second = [step.index for step in report.steps if step.mode == "update"][1]
    for layer, ((no_previous, first_stack, before), (previous, stack, after)) in zip(
        report.density, updates.values(), strict=True
    ):
        assert no_previous is None and len(first_stack) == len(stack) == 2
        heads = torch.arange(3)
        changed, reused = ((words[..., None] >> heads & 1).double().mean() for words in (before ^ after, ~after))
        assert 0 < changed < reused
        if history_dtype == "float8":
            assert previous is None
        else:
            assert previous[0].data_ptr() == first_stack.data_ptr() and torch.equal(previous[1], before)
        projected = reused if history_dtype == "float8" else changed
        assert layer[second] == pytest.approx(1 + (1 - ATTENTION) / 12 * projected)


@pytest.mark.parametrize("level", ["output", "layer", "head"])
def test_tiles_skipped_on_computed_steps_equal_naive_masking(pipe, level):
    """With ``skip.steps: all`` every computed step after the warm-up has its own tiles, and they count."""
    preset = skipping_preset(level)
    expected, processors = run_heads(pipe, preset, inputs(), TEXT)
    result, report = accelerate(pipe, preset)
    assert _distance(result, expected) < 2e-5
    every_tile, _ = accelerate(pipe, load_preset(preset, **{"skip.tau_kv": 0.0}))
    assert _distance(expected, every_tile) > 1e-3, "the case must differ from dense attention to prove anything"
    assert report.fallbacks == []
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 4}
    # An UPDATE of level head also refreshes cached biases, which this share leaves out.
    counted = [step.index for step in report.steps if step.mode == "full" or (step.mode, level) == ("update", "layer")]
    for layer, processor in zip(report.density, processors, strict=True):
        kept = [processor.kept[step] for step in counted]
        assert kept[:2] == [1.0, 1.0] and max(kept[2:]) < 1.0, "the warm-up attends to all tiles, later steps do not"
        assert [layer[step] for step in counted] == pytest.approx([1 - ATTENTION * (1 - share) for share in kept])


@pytest.mark.parametrize("method, order", [("taylor", 1), ("taylor", 2), ("newton", 2), ("reuse", 0)])
def test_layers_equal_naive_overwriting(pipe, method, order):
    """Level layer forecasts the modules' outputs before the gates."""
    preset = load_preset("flux-taylorseer", forecast={"method": method, "order": order}, schedule={"interval": 3})
    expected = run_layers(pipe, preset, inputs())
    result, report = accelerate(pipe, preset)
    assert _distance(result, expected) < 1e-5
    assert _distance(result, pipe(**inputs())[0]) > 1e-3
    assert report.steps_by_mode == {"full": 2, "update": 3, "dispatch": 4}
    assert report.computed_fraction == pytest.approx(5 / 9)


@pytest.mark.parametrize(
    "name", ["flux-schnell", "flux-fill", "flux-control", "flux-kontext", "flux-controlnet", "flux-img2img"]
)
def test_variants_at_zero_thresholds_equal_plain(name):
    """With nothing reused and nothing skipped, DISPATCH steps give the plain result in every variant."""
    pipe = tiny_pipeline(name)
    plain = pipe(**tiny_inputs(name, steps=STEPS))[0]
    accelerate_pipeline(pipe, head_preset(**{"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}))
    result = pipe(**tiny_inputs(name, steps=STEPS))[0]
    report = pipe.dit_accel.report()
    assert _distance(result, plain) < 1e-5
    assert report.steps_by_mode["dispatch"] > 0 and report.fallbacks == []


def test_kontext_reference_tokens_are_vision():
    """Reference tokens follow the latents, can be reused, and do not enter the closed loop's error."""
    pipe = tiny_pipeline("flux-kontext")
    accelerate_pipeline(pipe, head_preset())
    pipe(**tiny_inputs("flux-kontext", steps=FEW))
    layout = pipe.dit_accel.layout
    assert (layout.text, layout.vision) == (TEXT, 180)


def test_ip_adapter_sites_run_densely_and_say_so():
    """A block with an IP-Adapter's processor is computed as it is; the others run sparsely."""
    pipe = tiny_pipeline("flux-ip-adapter")
    plain = pipe(**tiny_inputs("flux-ip-adapter", steps=FEW))[0]
    accelerate_pipeline(pipe, head_preset(**{"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}))
    result = pipe(**tiny_inputs("flux-ip-adapter", steps=FEW))[0]
    fallbacks = pipe.dit_accel.report().fallbacks
    assert _distance(result, plain) < 1e-5
    assert [entry["site"] for entry in fallbacks] == ["transformer_blocks.0", "transformer_blocks.1"]
    assert "FluxIPAdapterAttnProcessor" in fallbacks[0]["reason"]


def test_ip_adapter_at_level_layer_forecasts_its_output_too():
    """The image prompt's own output is a third feature of the block."""
    pipe = tiny_pipeline("flux-ip-adapter")
    preset = load_preset("flux-taylorseer", schedule={"interval": 3})
    expected = run_layers(pipe, preset, tiny_inputs("flux-ip-adapter", steps=STEPS))
    accelerate_pipeline(pipe, preset)
    assert _distance(pipe(**tiny_inputs("flux-ip-adapter", steps=STEPS))[0], expected) < 1e-5


def test_fused_projections_change_nothing(pipe):
    """``fuse_qkv_projections`` before or after accelerating gives the same image."""
    apart, _ = accelerate(pipe, head_preset())
    accelerate_pipeline(pipe, head_preset())
    pipe.transformer.fuse_qkv_projections()
    try:
        fused = pipe(**inputs())[0]
        assert pipe.dit_accel.report().fallbacks == []
    finally:
        pipe.transformer.unfuse_qkv_projections()
        restore_pipeline(pipe)
    assert _distance(fused, apart) < 1e-5


def test_true_cfg_branches_keep_apart(pipe):
    """Each branch reuses its own past: with the same prompt on both sides guidance changes nothing."""
    call = {"prompt": "a fox", "negative_prompt": "a fox", "true_cfg_scale": 4.0}
    guided, report = accelerate(pipe, head_preset(), **call)
    single, _ = accelerate(pipe, head_preset(), prompt="a fox")
    assert _distance(guided, single) < 1e-4
    assert len(report.steps) == STEPS


@pytest.mark.parametrize("level", ["head", "layer", "output"])
def test_batch_equals_single_pictures(pipe, level):
    """A batch of two prompts equals two single calls."""
    preset = {
        "head": head_preset(),
        "layer": load_preset("flux-taylorseer", schedule={"interval": 3}),
        "output": load_preset("exact", schedule={"interval": 3, "warmup": 3}),
    }[level]
    prompts, seeds = ["a fox", "a large dark forest"], [3, 4]

    def call(prompt, generators):
        return accelerate(pipe, preset, prompt=prompt, generator=generators)[0]

    both = call(prompts, [torch.Generator().manual_seed(seed) for seed in seeds])
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = call([prompt], [torch.Generator().manual_seed(seed)])
        assert _distance(both[index : index + 1], alone) < 1e-4


def test_autocast_runs_densely(pipe):
    """Autocast casts the modules' inputs, and the sparse path calls no modules: every block runs its own forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = pipe(**inputs(steps=FEW))[0]
        accelerate_pipeline(pipe, head_preset())
        accelerated = pipe(**inputs(steps=FEW))[0]
    assert {entry["reason"] for entry in pipe.dit_accel.report().fallbacks} == {"autocast"}
    assert torch.equal(accelerated, plain)


def test_lora_loaded_after_accelerating_falls_back(pipe):
    """With a LoRA on the projections their weights are not sliced; unloading it brings the sparse path back."""
    pytest.importorskip("peft")
    pipe = tiny_pipeline("flux")
    accelerate_pipeline(pipe, head_preset(**{"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}))
    before = pipe(**inputs())[0]
    pipe.load_lora_weights(tiny_flux_lora(pipe))
    with_lora = pipe(**inputs())[0]
    reasons = {entry["reason"] for entry in pipe.dit_accel.report().fallbacks}
    assert reasons == {"a projection is a Linear of peft, not a plain linear layer"}
    half = pipe(**inputs(joint_attention_kwargs={"scale": 0.5}))[0]
    pipe.fuse_lora()
    fused = pipe(**inputs())[0]
    pipe.unfuse_lora()
    restore_pipeline(pipe)
    assert _distance(with_lora, pipe(**inputs())[0]) < 1e-5
    assert _distance(half, pipe(**inputs(joint_attention_kwargs={"scale": 0.5}))[0]) < 1e-5
    assert _distance(fused, with_lora) < 1e-4
    assert _distance(with_lora, before) > 1e-3
    accelerate_pipeline(pipe, head_preset(**{"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}))
    pipe.unload_lora_weights()
    assert _distance(pipe(**inputs())[0], before) < 1e-5
    assert pipe.dit_accel.report().fallbacks == []


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
