"""HunyuanVideo's blocks against a naive HunyuanVideo that keeps the padding, computes everything and overwrites."""

import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch.overrides import TorchFunctionMode

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset, restore_pipeline
from dit_accel.models import samples
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families.hunyuan_video import FAMILY
from dit_accel.models.fused import block_hook
from dit_accel.models.fused import hunyuan_video as hunyuan_video_blocks
from tests.models.naive_hunyuan_video import run
from tests.pairs import every_pair
from tests.tiny import tiny_inputs, tiny_pipeline

STEPS = 8
BLOCK_KINDS = ("hunyuan", "hunyuan-i2v")  # the latter's first frame has gates of its own
VARIANTS = (*BLOCK_KINDS, "hunyuan-i2v-concat")
FEW = 3  # steps of tests in which every step computes
PROMPTS = ["a fox", "a large dark forest in the snow"]
SCHEDULE = {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1}  # full ×3, update ×2, dispatch ×3
TILES = {"policy": "sparge", "tau_kv": 0.4}


@pytest.fixture(scope="module")
def pipes():
    """The variants, built when a test first asks for them."""
    built = {}

    def pipe(name):
        if name not in built:
            built[name] = tiny_pipeline(name)
        return built[name]

    return pipe


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Padding is cut off on this CPU as it would be on a GPU."""
    monkeypatch.setattr(FamilyDriver, "cuts_padding", lambda reader, *_: reader.family.cut is not None)


def inputs(name="hunyuan", **overrides):
    # 360 tokens of video and up to 37 of text: 6 blocks of 64, the last of which holds both.
    return tiny_inputs(name, steps=STEPS, **{"height": 96, "width": 80, **overrides})


def preset(level, **overrides):
    """A preset for tests; at level head with rows reused and tiles skipped."""
    sections = {"model": "hunyuan_video", "schedule": SCHEDULE, "forecast": {"level": level, "method": "taylor"}}
    if level == "head":
        sections |= {"blocks": {"size": 64}, "reuse": {"tau_q": 0.9, "ramp": 0.3}, "skip": TILES}
    return load_preset(load_preset("exact", **sections), **overrides)


def skipping(level, **overrides):
    """Tiles are skipped on computed steps too."""
    return preset(level, **{"skip": {**TILES, "steps": "all"}, "blocks.size": 64, **overrides})


def accelerate(pipe, chosen, **call):
    """One accelerated call: its result and its report; the pipeline is plain again afterwards."""
    accelerate_pipeline(pipe, chosen)
    try:
        return pipe(**call)[0], pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


@pytest.mark.parametrize(
    "name, chosen",
    [
        pytest.param("hunyuan", preset("head"), id="rows-and-tiles"),
        pytest.param("hunyuan-i2v", preset("head"), id="rows-and-tiles-first-frame"),
        pytest.param("hunyuan", preset("head", **{"reuse.tau_q": 1.0}), id="every-vision-row-reused"),
        pytest.param("hunyuan-i2v", preset("head", **{"reuse.degrade_below": 0.4}), id="degraded-layers"),
        pytest.param("hunyuan", preset("head", **{"forecast.method": "newton", "forecast.order": 2}), id="newton"),
        pytest.param("hunyuan", skipping("head"), id="rows-and-tiles-on-all-steps"),
        pytest.param("hunyuan", skipping("layer"), id="layers-with-tiles-on-computed-steps"),
        pytest.param("hunyuan-i2v", skipping("output"), id="output-with-tiles-on-computed-steps"),
        pytest.param("hunyuan", preset("layer"), id="layers"),
        pytest.param("hunyuan-i2v", preset("layer"), id="layers-first-frame"),
    ],
)
def test_result_equals_naive_overwriting(pipes, name, chosen):
    """Cut padding, GEMM-Q, sparse attention, cached biases and whole features equal overwriting."""
    pipe = pipes(name)
    expected, processors = run(pipe, chosen, inputs(name))
    result, report = accelerate(pipe, chosen, **inputs(name))
    assert _distance(result, expected) < 2e-5
    assert _distance(expected, pipe(**inputs(name))[0]) > 1e-3, "the case must differ from a plain run"
    assert report.family == "hunyuan_video"
    assert report.fallbacks == []
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 3}
    assert report.computed_fraction < 1
    if chosen.reuse.degrade_below:
        degraded = {processor.vision_density < chosen.reuse.degrade_below for processor in processors}
        assert degraded == {True, False}, "some layers must degrade and some not"


@pytest.mark.parametrize("name", BLOCK_KINDS)
@pytest.mark.parametrize(
    "chosen, count",
    [
        pytest.param(load_preset("exact"), 7 * STEPS, id="exact"),
        pytest.param(preset("layer"), 7 * 5, id="layers"),
        pytest.param(skipping("head"), 7 * 5 + 3 * 3, id="rows-and-tiles-on-all-steps"),
    ],
)
def test_fused_projections_change_nothing(pipes, as_on_a_gpu, monkeypatch, name, chosen, count):
    """GEMM-Q of every row, with norm and RoPE inside, is a projection like any other.

    A computed step has eight of them, one of which carries a hook and is called; a DISPATCH step has the four of keys.
    """
    pipe = pipes(name)
    apart, _ = accelerate(pipe, chosen, **inputs(name, prompt=PROMPTS))
    fused = []
    gemm_q = hunyuan_video_blocks.gemm_q
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    monkeypatch.setattr(
        hunyuan_video_blocks, "gemm_q", lambda *args, **options: fused.append(1) or gemm_q(*args, **options)
    )
    called = []
    handle = pipe.transformer.transformer_blocks[1].attn.to_k.register_forward_hook(lambda *_: called.append(1))
    result, report = accelerate(pipe, chosen, **inputs(name, prompt=PROMPTS))
    handle.remove()
    assert _distance(result, apart) < 1e-5
    assert report.fallbacks == []
    assert len(fused) == count
    assert called


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS], ids=["one-prompt", "unequal-prompts"])
def test_dense_attention_by_the_kernel_changes_nothing(pipes, as_on_a_gpu, monkeypatch, prompt):
    """The op over every tile, which takes each prompt's length, is dense attention without its padding."""
    few = {"prompt": prompt, "num_inference_steps": FEW}
    plain = pipes("hunyuan")(**inputs(**few))[0]
    attended = []
    attention = block_hook.attention

    def counted(*args, **options):
        attended.append(options["kv_len"] is not None)
        return attention(*args, **options)

    monkeypatch.setattr(block_hook, "attention", counted)
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda reader, x: True)
    monkeypatch.setattr(FamilyDriver, "attends_by_kernel", lambda driver, q: True)
    result, report = accelerate(pipes("hunyuan"), "exact", **inputs(**few))
    assert _distance(result, plain) < 1e-5
    assert attended == [prompt == PROMPTS] * 4 * FEW
    assert report.fallbacks == []


@every_pair(name=BLOCK_KINDS, prompt={"one-prompt": PROMPTS[0], "unequal-prompts": PROMPTS}, level=["output", "head"])
def test_nothing_reused_and_nothing_skipped_is_plain(pipes, name, prompt, level):
    """At zero thresholds sites compute everything, in batches of unequal prompts too, and so give the plain result."""
    pipe = pipes(name)
    off = {"skip.tau_kv": 0.0, **({"reuse.tau_q": 0.0} if level == "head" else {"schedule.interval": 1})}
    plain = pipe(**inputs(name, prompt=prompt))[0]
    result, report = accelerate(pipe, skipping(level, **off), **inputs(name, prompt=prompt))
    assert _distance(result, plain) < 1e-5
    assert report.fallbacks == []
    assert report.computed_fraction == pytest.approx(1)


@pytest.mark.parametrize("preset", ["exact", "video-balanced"])  # three steps are all warm-up and final step
@pytest.mark.parametrize("name", VARIANTS)
def test_a_cpu_keeps_the_padding_where_all_is_computed(pipes, name, preset):
    """With everything computed, a CPU's result is diffusers' own to the bit, before, during and after."""
    pipe, few = pipes(name), {"prompt": PROMPTS, "num_inference_steps": FEW}
    plain = pipe(**inputs(name, **few))[0]
    result, report = accelerate(pipe, preset, **inputs(name, **few))
    assert torch.equal(result, plain)
    assert report.computed_fraction == 1
    assert torch.equal(pipe(**inputs(name, **few))[0], plain)
    assert not any("forward" in vars(module) for module in pipe.transformer.modules())


@pytest.mark.parametrize("name", BLOCK_KINDS)
@pytest.mark.parametrize(
    "prompt", [PROMPTS[0], [PROMPTS[0]] * 2, PROMPTS], ids=["one-prompt", "equal-prompts", "unequal-prompts"]
)
def test_cut_padding_equals_masked_padding(pipes, as_on_a_gpu, name, prompt):
    """Without padding, attention has no mask and no token beyond the longest prompt, and the result is the same."""
    pipe, few = pipes(name), {"prompt": prompt, "num_inference_steps": FEW}
    plain = pipe(**inputs(name, **few))[0]
    seen = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
        for block in [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    ]
    try:
        result, report = accelerate(pipe, "exact", **inputs(name, **few))
    finally:
        for hook in hooks:
            hook.remove()
    assert _distance(result, plain) < 1e-6
    assert report.fallbacks == []
    assert len(seen) >= FEW * 4
    assert all(kwargs.get("attention_mask") is None for kwargs in seen)
    lengths = {kwargs["encoder_hidden_states"].shape[1] for kwargs in seen}
    assert len(lengths) == (2 if prompt == PROMPTS else 1)
    assert max(lengths) < 37


def test_mask_is_read_once_a_branch_and_run(pipes, as_on_a_gpu, monkeypatch):
    """The host waits for the prompts' lengths once for each mask, whatever the number of steps."""
    read = []

    class Counted(samples.TextLengths):
        def __init__(self, lengths, *others):
            read.append(lengths)
            super().__init__(lengths, *others)

    monkeypatch.setattr(samples, "TextLengths", Counted)
    accelerate(pipes("hunyuan"), preset("output"), **inputs(negative_prompt="blurred", true_cfg_scale=3.0))
    assert len(read) == len(set(read)) == 2


def test_any_mask_in_a_loop_of_ones_own(pipes, as_on_a_gpu):
    """Lengths follow a mask that changes in place, has a hole, or comes by position; results are the plain ones."""
    transformer = pipes("hunyuan").transformer
    config, generator = transformer.config, torch.Generator().manual_seed(0)
    latents, text, pooled = (
        torch.randn(2, *shape, generator=generator)
        for shape in ((config.in_channels, 3, 12, 10), (37, config.text_embed_dim), (config.pooled_projection_dim,))
    )
    guidance = torch.full((2,), 6000.0)
    changes = [(slice(None), slice(30, None)), (0, slice(9, None)), (1, 3)]
    masks = [torch.ones(2, 37)]
    for change in changes:
        masks.append(masks[-1].clone())
        masks[-1][change] = 0
    timesteps = [900.0, 600.0, 300.0]

    def step(timestep, mask):
        return transformer(latents, torch.full((2,), timestep), text, mask, pooled, guidance, return_dict=False)[0]

    with torch.no_grad():
        plain = [step(timestep, mask) for timestep, mask in zip(timesteps, masks[1:], strict=True)]
        acceleration = accelerate_transformer(transformer, "exact", timesteps)
        try:
            for timestep, change, expected in zip(timesteps, changes, plain, strict=True):
                masks[0][change] = 0
                assert _distance(step(timestep, masks[0]), expected) < 1e-6
        finally:
            acceleration.restore()


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(preset("output"), id="output"),
        pytest.param(preset("layer"), id="layer"),
        # Without rows reused: padded queries of the shorter prompt take part in the scores of rows.
        pytest.param(skipping("head", **{"reuse.tau_q": 0.0}), id="tiles-at-level-head"),
    ],
)
def test_batch_of_unequal_prompts_equals_single_clips(pipes, as_on_a_gpu, chosen):
    """Each prompt of a batch gets the same result as alone: the other's length does not matter."""
    pipe = pipes("hunyuan")
    noise = [torch.randn(1, 4, 3, 24, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    both, _ = accelerate(pipe, chosen, **inputs(prompt=PROMPTS, latents=torch.cat(noise)))
    for clip, prompt, latents in zip(both, PROMPTS, noise, strict=True):
        alone, _ = accelerate(pipe, chosen, **inputs(prompt=prompt, latents=latents))
        assert _distance(clip[None], alone) < 1e-5


def test_guidance_branches_keep_apart(pipes):
    """Each branch reuses its own past: with the same prompt on both sides guidance changes nothing."""
    guided = {"prompt": "a fox", "negative_prompt": "a fox", "true_cfg_scale": 4.0}
    with_guidance, report = accelerate(pipes("hunyuan"), preset("head"), **inputs(**guided))
    without, _ = accelerate(pipes("hunyuan"), preset("head"), **inputs(prompt="a fox"))
    assert _distance(with_guidance, without) < 1e-4
    assert len(report.steps) == STEPS


def test_replaced_first_frame_is_not_judged(pipes):
    """The pipeline drops the output at the frame that the image replaces, and so does the closed loop."""
    arguments, output = {}, torch.randn(1, 4, 3, 8, 8)
    for name, frames in (("hunyuan-i2v", slice(1, None)), ("hunyuan", slice(None))):
        assert torch.equal(FAMILY.used(pipes(name).transformer, output, arguments), output[:, :, frames])


class PlainlyOther(HunyuanVideoAttnProcessor2_0):
    """A processor of the user's own, which happens to do the same."""


class ByMatrixProducts(HunyuanVideoAttnProcessor2_0):
    """A processor of the user's own, whose attention does not pass by torch's."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        with AttendingByProducts():
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


class AttendingByProducts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, key, value = args or (kwargs[name] for name in ("query", "key", "value"))
        return (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1) @ value


@pytest.mark.parametrize("level", ["output", "layer"])
def test_a_processor_of_ones_own_runs_sparsely_too(pipes, level):
    """A custom processor's call to torch's attention is intercepted, like that of diffusers' own processor."""
    pipe = tiny_pipeline("hunyuan")
    everywhere, _ = accelerate(pipe, skipping(level), **inputs())
    pipe.transformer.transformer_blocks[0].attn.set_processor(PlainlyOther())
    result, report = accelerate(pipe, skipping(level), **inputs())
    assert report.fallbacks == []
    assert _distance(result, everywhere) < 1e-5


@pytest.mark.parametrize(
    "level, processor", [("output", ByMatrixProducts), ("layer", ByMatrixProducts), ("head", PlainlyOther)]
)
def test_foreign_processor_keeps_its_attention(pipes, level, processor):
    """A block whose attention can't be intercepted keeps it, and the report says so; the others are sparse."""
    pipe = tiny_pipeline("hunyuan")
    chosen = skipping(level)
    everywhere, _ = accelerate(pipe, chosen, **inputs())
    pipe.transformer.transformer_blocks[0].attn.set_processor(processor())
    result, report = accelerate(pipe, chosen, **inputs())
    assert [entry["site"] for entry in report.fallbacks] == ["transformer_blocks.0"]
    told = "PlainlyOther" if level == "head" else "attends without calling torch's"
    assert told in report.fallbacks[0]["reason"]
    assert 1e-4 < _distance(result, everywhere) < 0.5
    steps = {step.index for step in report.steps if step.index >= 2 and step.mode != "dispatch"}
    assert all(report.density[0][step] == 1 for step in steps)
    assert all(report.density[1][step] != 1 for step in steps)


def test_hooked_projection_falls_back_at_level_head_alone(pipes):
    """GEMM-Q and GEMM-O need the weight itself; tiles are skipped around a projection that only may be called."""
    pipe = tiny_pipeline("hunyuan")
    block = pipe.transformer.single_transformer_blocks[1]
    handle = block.proj_out.register_forward_hook(lambda module, args, output: output)
    _, head_report = accelerate(pipe, preset("head"), **inputs())
    _, output_report = accelerate(pipe, skipping("output"), **inputs())
    handle.remove()
    assert [entry["site"] for entry in head_report.fallbacks] == ["single_transformer_blocks.1"]
    assert "carries hooks" in head_report.fallbacks[0]["reason"]
    assert output_report.fallbacks == []


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
