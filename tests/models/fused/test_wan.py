"""The Wan adapter against a naive Wan that computes everything and overwrites the reused parts."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.kernels import unpack_bits
from dit_accel.models.families.wan import FAMILY
from tests.models import naive_wan
from tests.models.tiny import pipeline
from tests.tiny import tiny_inputs, tiny_pipeline

STEPS = 9
HEADS = {
    "model": "wan",
    "schedule": {"control": "interval", "warmup": 2, "interval": 4, "cooldown": 1},
    "forecast": {"level": "head", "method": "taylor"},
    "blocks": {"size": 64},
    "reuse": {"tau_q": 0.6, "ramp": 0.3},
    "skip": {"policy": "sparge", "tau_kv": 0.4},
}
LAYERS = {
    "model": "wan",
    "schedule": {"control": "interval", "warmup": 3, "interval": 3, "cooldown": 1},
    "forecast": {"level": "layer", "method": "taylor"},
}
NOTHING_LEFT_OUT = {"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}


@functools.cache
def plain_result(name):
    return pipeline(name)(**inputs(name))[0]


@pytest.fixture
def pipe():
    return pipeline("wan")


def inputs(name="wan", **overrides):
    # 3 latent frames of 168 tokens: 8 blocks of 64, the last of which is ragged. With guidance, so two branches.
    return tiny_inputs(name, **{"steps": STEPS, "height": 96, "width": 112, **overrides})


def preset(values, **overrides):
    return load_preset(load_preset("exact", **values), **overrides)


def accelerate(pipe, preset, name="wan", **call):
    """One accelerated call: its result and its report; the pipeline is plain again afterwards."""
    accelerate_pipeline(pipe, preset)
    try:
        return pipe(**inputs(name, **call))[0], pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="rows-and-tiles"),
        pytest.param({"skip.policy": "none"}, id="rows-only"),
        pytest.param({"reuse.tau_q": 0.0}, id="tiles-only"),
        pytest.param({"forecast.method": "newton", "forecast.order": 2}, id="newton-second-order"),
        pytest.param({"forecast.method": "reuse", "forecast.order": 0}, id="reuse"),
        pytest.param({"reuse.tau_q": 1.0, "reuse.ramp": 0.01}, id="one-row-a-head"),
        pytest.param({"reuse.degrade_below": 0.45}, id="degraded-layers"),
        pytest.param({"skip.steps": "all"}, id="tiles-on-computed-steps"),
    ],
)
def test_heads_equal_naive_overwriting(pipe, overrides):
    """GEMM-Q by row-block, sparse attention, the cached bias and cross-attention by row-block give what overwriting
    dense outputs gives.
    """
    wanted = preset(HEADS, **overrides)
    expected = naive_wan.run(pipe, wanted, inputs())
    result, report = accelerate(pipe, wanted)
    assert _distance(result, expected) < 2e-5
    assert _distance(expected, plain_result("wan")) > 1e-3, "the case must differ from a plain run to prove anything"
    assert report.fallbacks == []
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 4}
    assert report.computed_fraction < 1


def test_naive_comparison_meets_every_kind_of_row_block(pipe):
    """Under these thresholds a row-block computes all heads, some, or none, which leaves cross-attention out."""
    accelerate_pipeline(pipe, preset(HEADS))
    pipe(**inputs())
    heads = [
        row.sum() for symbols in pipe.dit_accel.symbols().values() for row in unpack_bits(symbols.cache_bits, 3)[0]
    ]
    restore_pipeline(pipe)
    assert {0, 3} < set(map(int, heads))


@pytest.mark.parametrize("values", [HEADS, LAYERS], ids=["heads", "layers"])
@pytest.mark.parametrize("name", ["wan-i2v-clip", "wan22", "wan22-5b-i2v"])
def test_variants_equal_naive_overwriting(name, values):
    """Image tokens with the prompt, two transformers, and a timestep per token, each with two branches."""
    expected = naive_wan.run(pipeline(name), preset(values), inputs(name))
    result, report = accelerate(pipeline(name), preset(values), name)
    assert _distance(result, expected) < 2e-5
    assert _distance(expected, plain_result(name)) > 1e-3
    assert report.fallbacks == []


@pytest.mark.parametrize("name", ["wan", "wan-i2v", "wan-i2v-clip", "wan22-i2v", "wan22-5b"])
def test_variants_at_zero_thresholds_equal_plain(name):
    """With nothing reused and nothing skipped, DISPATCH steps give the plain result in every variant."""
    result, report = accelerate(pipeline(name), preset(HEADS, **NOTHING_LEFT_OUT), name)
    assert _distance(result, plain_result(name)) < 1e-5
    assert report.steps_by_mode["dispatch"] > 0 and report.fallbacks == []


def test_kernels_equal_references(pipe):
    """A step of GEMM-Q by row-block, attention and GEMM-O by the Triton kernels equals the references."""
    call = {"steps": 4, "height": 64, "width": 64, "guidance_scale": 1.0}
    wanted = preset(HEADS, schedule={"warmup": 1, "interval": 2})
    expected, _ = accelerate(pipe, wanted, **call)
    result, report = accelerate(pipe, load_preset(wanted, kernels={"attention": "triton", "gemm": "triton"}), **call)
    assert _distance(result, expected) < 1e-5
    assert report.steps_by_mode == {"full": 2, "update": 1, "dispatch": 1}


@pytest.mark.parametrize("level", ["layer", "output"])
@pytest.mark.parametrize("tiles, method, order", [(False, "taylor", 1), (True, "newton", 2)], ids=["dense", "tiles"])
def test_layers_and_outputs_equal_naive_overwriting(pipe, level, tiles, method, order):
    """Outputs of modules or of the transformer are forecast; computed steps after the warm-up may skip tiles."""
    skip = {"skip": {"policy": "sparge", "steps": "all", "tau_kv": 0.4}, "blocks": {"size": 64}} if tiles else {}
    wanted = preset(LAYERS, forecast={"level": level, "method": method, "order": order}, **skip)
    expected = naive_wan.run(pipe, wanted, inputs())
    result, report = accelerate(pipe, wanted)
    assert _distance(result, expected) < 1e-5
    assert _distance(result, plain_result("wan")) > 1e-3
    assert report.steps_by_mode == {"full": 4, "update": 2, "dispatch": 3}
    assert report.computed_fraction < 6 / 9 if tiles else report.computed_fraction == pytest.approx(6 / 9)


def test_second_transformer_starts_with_computed_steps():
    """Wan 2.2's transformers share the schedule; each layer counts only the steps of its own transformer."""
    _, report = accelerate(pipeline("wan22"), preset(LAYERS, schedule={"warmup": 2, "interval": 8}), "wan22", steps=12)
    called = {
        name: [step for step, share in enumerate(density) if share is not None]
        for name, density in zip(report.layers, report.density, strict=True)
    }
    switch = len(called["transformer.blocks.0"])
    assert 2 < switch < 10, "the switch must come among steps that the schedule forecasts"
    for index in range(2):
        assert called[f"transformer.blocks.{index}"] == list(range(switch))
        assert called[f"transformer_2.blocks.{index}"] == list(range(switch, 12))
    modes = [step.mode for step in report.steps]
    assert modes[switch - 1 : switch + 2] == ["dispatch", "update", "dispatch"]


def test_branches_keep_apart(pipe):
    """Each branch reuses its own past: with the same prompt on both sides guidance changes nothing."""
    guided, _ = accelerate(pipe, preset(HEADS), prompt="a fox", negative_prompt="a fox", guidance_scale=5.0)
    single, _ = accelerate(pipe, preset(HEADS), prompt="a fox", guidance_scale=1.0)
    assert _distance(guided, single) < 1e-4


def test_closed_loop_goes_by_the_worse_branch(pipe):
    """The error of a computed step is that of the branch with the larger forecast error."""
    outputs: list[torch.Tensor] = []
    handle = pipe.transformer.proj_out.register_forward_hook(lambda module, args, output: outputs.append(output))
    loop = {"control": "adaptive", "target_error": 0.2, "warmup": 1}
    wanted = load_preset("exact", schedule=loop, forecast={"method": "reuse", "order": 0})
    try:
        _, report = accelerate(pipe, wanted, steps=14, prompt="a red fox")
    finally:
        handle.remove()
    computed = [step for step in report.steps if step.mode != "dispatch"]
    assert len(outputs) == 2 * len(computed) < 2 * len(report.steps)
    worse = set()
    for index, step in enumerate(computed[1:], start=1):
        errors = [_distance(outputs[2 * index - 2 + branch], outputs[2 * index + branch]) for branch in (0, 1)]
        worse.add(errors.index(max(errors)))
        assert step.error == pytest.approx(max(errors), rel=1e-4)
    assert worse == {0, 1}, "each branch must be the worse in some step"


@pytest.mark.parametrize("name", ["wan", "wan-i2v-clip"])
def test_work_is_what_torch_counts(name):
    """FLOPs of a block, including cross-attention to prompt and image tokens, equal its products'."""
    transformer, calls = pipeline(name).transformer, []
    handle = transformer.register_forward_pre_hook(lambda *call: calls.append(call[2]), with_kwargs=True)
    pipeline(name)(**inputs(name, steps=1, guidance_scale=1.0))
    handle.remove()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        transformer(**calls[0])
    counted = sum(counter.get_flop_counts()["WanTransformer3DModel.blocks.1"].values())
    tokens = FAMILY.tokens(transformer, calls[0])
    assert FAMILY.work(transformer, calls[0], tokens, transformer.blocks[1]).plain == counted


def test_clean_frames_are_not_judged():
    """The closed loop ignores outputs at tokens with timestep 0, which pipelines keep unchanged."""
    timestep = torch.full((1, 3, 2, 4), 700.0)
    timestep[:, 0] = 0
    timestep[:, 2, 1, 3] = 0
    arguments = {"hidden_states": torch.zeros(1, 16, 3, 4, 8), "timestep": timestep.flatten(1)}
    judged = FAMILY.used(pipeline("wan22-5b-i2v").transformer, torch.ones(1, 16, 3, 4, 8), arguments)
    expected = torch.ones(1, 16, 3, 4, 8)
    expected[:, :, 0] = 0
    expected[:, :, 2, 2:, 6:] = 0
    assert torch.equal(judged, expected)


@pytest.mark.parametrize("level", ["head", "layer", "output"])
def test_batch_equals_single_clips(pipe, level):
    """A batch of two prompts equals two single calls."""
    wanted = preset(HEADS) if level == "head" else preset(LAYERS, **{"forecast.level": level})
    prompts, seeds = ["a fox", "a large dark forest"], [3, 4]

    def call(prompt, generators):
        return accelerate(pipe, wanted, prompt=prompt, generator=generators)[0]

    both = call(prompts, [torch.Generator().manual_seed(seed) for seed in seeds])
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = call([prompt], [torch.Generator().manual_seed(seed)])
        assert _distance(both[index : index + 1], alone) < 1e-4


@pytest.mark.parametrize("name", ["wan", "wan-i2v-clip"])
def test_fused_projections_change_nothing(name):
    """``fuse_qkv_projections`` gives the same video, with slices of the fused weights."""
    pipe = tiny_pipeline(name)
    apart, _ = accelerate(pipe, preset(HEADS), name)
    pipe.transformer.fuse_qkv_projections()
    fused, report = accelerate(pipe, preset(HEADS), name)
    assert report.fallbacks == []
    assert _distance(fused, apart) < 1e-5


def test_lora_falls_back_and_keeps_its_effect():
    """With a LoRA the projections' weights are not sliced: blocks use dense attention at level head, and say so.

    Level layer, and tiles on computed steps, call the projections themselves and need not fall back.
    """
    peft = pytest.importorskip("peft")
    pipe = tiny_pipeline("wan")
    pipe.transformer.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False))
    with_lora = pipe(**inputs())[0]
    heads, report = accelerate(pipe, preset(HEADS))
    tiles = preset(LAYERS, skip={"policy": "sparge", "steps": "all", "tau_kv": 0.4}, blocks={"size": 64})
    layers, layers_report = accelerate(pipe, tiles)
    assert _distance(with_lora, plain_result("wan")) > 1e-3
    assert _distance(heads, with_lora) < 1e-5
    assert {entry["site"] for entry in report.fallbacks} == {f"transformer.blocks.{index}" for index in range(2)}
    assert all("not a plain linear layer" in entry["reason"] for entry in report.fallbacks)
    assert _distance(layers, naive_wan.run(pipe, tiles, inputs())) < 1e-5
    assert layers_report.fallbacks == []


class EightBitLinear(nn.Linear):
    """A quantised layer in the manner of those libraries that keep nn.Linear's interface."""

    def forward(self, x):
        scale = self.weight.abs().amax(1, keepdim=True) / 127
        return nn.functional.linear(x, (self.weight / scale).round() * scale, self.bias)


@pytest.mark.parametrize("projection", ["attn1.to_q", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0"])
def test_quantised_projections_fall_back(projection):
    """A block with a quantised projection uses dense attention; the other block uses sparse attention."""
    pipe, call = tiny_pipeline("wan"), {"steps": 5, "height": 64, "width": 64}
    pipe.transformer.blocks[1].get_submodule(projection).__class__ = EightBitLinear
    plain = pipe(**inputs(**call))[0]
    result, report = accelerate(pipe, preset(HEADS, **NOTHING_LEFT_OUT), **call)
    assert _distance(result, plain) < 1e-5
    assert [entry["site"] for entry in report.fallbacks] == ["transformer.blocks.1"]
    assert "EightBitLinear" in report.fallbacks[0]["reason"]


def test_half_precision_stays_close_to_naive(pipe):
    """In bfloat16 the difference to the naive run is of the order of its rounding."""
    half = tiny_pipeline("wan").to(torch.bfloat16)
    half.transformer.rope.float()  # as diffusers loads it
    expected = naive_wan.run(half, preset(HEADS), inputs())
    result, report = accelerate(half, preset(HEADS))
    rounding = _distance(expected, naive_wan.run(pipe, preset(HEADS), inputs()))
    assert report.fallbacks == []
    assert _distance(result, expected) < rounding


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
