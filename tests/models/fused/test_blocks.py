"""Properties of all hand-written blocks: they compute what diffusers' blocks do, and call what they can't replace."""

import re

import pytest
import torch
from torch import nn

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.models import drive
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families import require_family
from dit_accel.models.hooks import find_hook
from tests.models import tiny
from tests.models.fused.test_overwriting import first_of_both, preset_of
from tests.models.tiny.parts import TOKENS, WIDTH, text
from tests.rounding import distance
from tests.tiny import tiny_flux_lora

NOTHING_LEFT_OUT = {"reuse.tau_q": 0.0, "skip.tau_kv": 0.0}
TWO_PROMPTS = ["a fox", "a large dark forest in the snow"]
SCHEDULE = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 1}


def sound_prompts(count, padded=0):
    """Prompts for LTX-2, the first of which is padded."""
    mask = torch.ones(count, TOKENS, dtype=torch.long)
    mask[0, :padded] = 0
    kinds = {"": 2, "negative_": 3}
    embeddings = {f"{kind}prompt_embeds": text(count, TOKENS, WIDTH, seed=seed) for kind, seed in kinds.items()}
    return embeddings | {f"{kind}prompt_attention_mask": mask for kind in kinds}


def z_prompts(*tokens):
    kinds = zip(("", "negative_"), tokens, strict=True)
    return {f"{kind}prompt_embeds": [text(count, WIDTH, seed=count)] for kind, count in kinds}


KREA2 = tiny.built("krea2")[1]  # two prompts of different lengths
ONE = {"krea2": first_of_both(KREA2) | {"guidance_scale": 0.0}, "z-image": {"guidance_scale": 0.0}}
EQUAL = {  # pipeline, arguments, and whether blocks run their attention by hand
    **{name: (name, {}, {True}) for name in ("flux", "wan", "wan-i2v-clip", "wan22-5b-i2v", "hunyuan", "hunyuan-i2v")},
    **{name: (name, {}, {True}) for name in ("qwen-image", "qwen-image-edit", "flux2", "ltx2", "minimax-h3")},
    "image-prompt": ("flux-ip-adapter", {}, {True, False}),
    "qwen-unequal": ("qwen-image", {"prompt": TWO_PROMPTS, "true_cfg_scale": 1.0}, {False}),
    "krea2": ("krea2", ONE["krea2"], {True}),
    "krea2-guidance": ("krea2", first_of_both(KREA2), {True}),
    "krea2-unequal": ("krea2", {}, {False}),
    "z-image": ("z-image", ONE["z-image"], {True}),
    "z-image-guidance": ("z-image", z_prompts(6, 4), {True}),
    "z-image-unequal": ("z-image", z_prompts(40, 4), {False}),
    "ltx2-no-guidance": ("ltx2", {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}, {True}),
    "ltx2-perturbed": ("ltx2", {"stg_scale": 1.0, "audio_stg_scale": 1.0}, {True, False}),
    "ltx2-one-stream": ("ltx2", {"modality_scale": 3.0, "audio_modality_scale": 3.0}, {True}),
    "ltx2-prompts": ("ltx2", sound_prompts(2), {True}),
    "ltx2-unequal": ("ltx2", sound_prompts(2, padded=2), {True}),
}


@pytest.mark.parametrize(("name", "arguments", "attends"), EQUAL.values(), ids=EQUAL)
def test_fused_blocks_compute_what_diffusers_does(name, arguments, attends, as_on_a_gpu, by_hand):
    """Prompts of unequal length keep a mask, and attention its own processor, as guidance that changes attention."""
    plain = tiny.output(name, 2, **arguments)
    fused, report = tiny.accelerated_output(name, "exact", 2, **arguments)
    assert distance(fused, plain) < 1e-5 and set(by_hand) == attends
    assert report.computed_fraction == 1.0 and report.fallbacks == []
    assert torch.equal(tiny.output(name, 2, **arguments), plain), "restored"


HOOKED = {  # by pipeline: a block, norms without which it is left to diffusers, and other parts
    "flux": ("transformer_blocks.0", ["norm1"], ["attn"]),
    "flux2": ("transformer_blocks.0", [], ["ff", "ff.act_fn", "ff.act_fn.gate_fn"]),
    "z-image": ("layers.1", ["attention_norm1", "ffn_norm2"], ["feed_forward", "attention.norm_k"]),
    "krea2": ("transformer_blocks.1", ["norm1"], ["attn", "attn.norm_k", "ff"]),
    "minimax-h3": ("transformer_blocks.1", ["norm2"], ["attn", "attn.norm_k", "ff", "ff.net.0"]),
    "ltx2": (
        "transformer_blocks.1",
        ["audio_norm2", "audio_to_video_norm"],
        ["attn1", "audio_attn2", "video_to_audio_attn", "attn1.norm_k", "ff", "audio_ff.net.0"],
    ),
}
HOOKED_PARTS = [
    *((name, block, item, [f"its {item} carries hooks"]) for name, (block, of, _) in HOOKED.items() for item in of),
    *((name, block, part, []) for name, (block, _, parts) in HOOKED.items() for part in parts),
    *(("flux2", "single_transformer_blocks.0.attn", part, []) for part in ("mlp_act_fn", "mlp_act_fn.gate_fn")),
]


@pytest.mark.parametrize(("name", "block", "part", "reasons"), HOOKED_PARTS)
def test_parts_that_carry_hooks_are_called(name, block, part, reasons, as_on_a_gpu):
    """A norm's hook leaves the block to diffusers; a hook of the MLP, or in the attention, leaves that part to it."""
    pipe, calls = tiny.copy_of(name), []
    pipe.transformer.get_submodule(f"{block}.{part}").register_forward_hook(lambda *_: calls.append(1))
    plain, count = tiny.output(name, 2, pipe), len(calls)
    fused, report = tiny.accelerated_output(name, "exact", 2, pipe)
    assert distance(fused, plain) < 1e-5 and len(calls) == 2 * count > 0
    assert [item["reason"] for item in report.fallbacks] == reasons


class OtherGate(nn.Module):
    def forward(self, x):
        gate, value = x.chunk(2, dim=-1)
        return gate.sigmoid() * value


def layer_norm(norm):
    return nn.LayerNorm(norm.normalized_shape, eps=0.1, elementwise_affine=False)


def free_norm(norm):
    return nn.RMSNorm(getattr(norm, "dim", None) or norm.weight.shape, elementwise_affine=False)


REPLACED = {  # pipeline, modules, what takes their place, and the reason in the report
    "z-image-norm": (
        "z-image",
        r"layers\.1\.attention_norm2",
        lambda _: nn.LayerNorm(64),
        "a norm is no plain RMSNorm",
    ),
    "z-image-mlp-norm": ("z-image", r"layers\.1\.ffn_norm1", lambda _: nn.LayerNorm(64), "a norm is no plain RMSNorm"),
    "krea2-norm": ("krea2", r".*_blocks\.1\.norm2", free_norm, "a norm is no plain Krea2RMSNorm"),
    "krea2-norm-of-heads": ("krea2", r"transformer_blocks\.1\.attn\.norm_q", free_norm, None),
    "minimax-h3-norm": ("minimax-h3", r"transformer_blocks\.1\.norm1", free_norm, "a norm is no plain RMSNorm"),
    "minimax-h3-norm-of-heads": ("minimax-h3", r"transformer_blocks\.1\.attn\.norm_q", free_norm, None),
    "flux2-norms": ("flux2", r"(single_)?transformer_blocks\.0\.norm.*", layer_norm, None),
    "flux2-gate": ("flux2", r".*\.attn\.mlp_act_fn", lambda _: OtherGate(), None),
    "flux2-gate-of-an-mlp": ("flux2", r".*\.ff\.act_fn", lambda _: OtherGate(), None),
    "flux2-mlp": ("flux2", r"transformer_blocks\.0\.ff", lambda _: nn.Linear(64, 64), None),
}


@pytest.mark.parametrize(("name", "modules", "make", "reason"), REPLACED.values(), ids=REPLACED)
def test_parts_of_another_kind_are_called(name, modules, make, reason, as_on_a_gpu):
    """The report names a norm whose block runs as before, but no part of a block or attention that is called."""
    pipe, before = tiny.copy_of(name), tiny.output(name, 2)
    for path in [path for path, _ in pipe.transformer.named_modules() if re.fullmatch(modules, path)]:
        owner, _, last = path.rpartition(".")
        owner = pipe.transformer.get_submodule(owner)
        setattr(owner, last, make(getattr(owner, last)))
    plain = tiny.output(name, 2, pipe)
    fused, report = tiny.accelerated_output(name, "exact", 2, pipe)
    assert distance(plain, before) > 1e-4 and distance(fused, plain) < 1e-5
    assert [item["reason"] for item in report.fallbacks] == ([] if reason is None else [reason])


def own_class(block):
    block.__class__ = type("Own", (type(block),), {"__module__": __name__})


def own_forward(block):
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("change", [own_class, own_forward])
@pytest.mark.parametrize(("name", "blocks"), [("flux", "transformer_blocks"), ("wan", "blocks"), ("z-image", "layers")])
def test_blocks_that_are_not_diffusers_own_run_themselves(name, blocks, change, as_on_a_gpu):
    """A class derived from diffusers', or a forward that was put in its place, may do anything."""
    pipe = tiny.copy_of(name)
    change(getattr(pipe.transformer, blocks)[0])
    fused, report = tiny.accelerated_output(name, "exact", 2, pipe)
    assert distance(fused, tiny.output(name, 2)) < 1e-5
    assert [item["reason"] for item in report.fallbacks] == ["its forward is not diffusers' own"]


ADAPTED = {  # layers that get a LoRA
    "flux": ["to_q", "to_add_out", "proj_mlp", "proj_out"],
    "ltx2": ["attn1.to_q", "audio_to_video_attn.to_k", "ff.net.0.proj", "audio_attn2.to_out.0"],
    "minimax-h3": ["attn.to_q", "attn.to_out.0", "ff.net.0.proj", "adaln_proj.linear"],
}


@pytest.mark.parametrize("name, layer", [(name, layer) for name, layers in ADAPTED.items() for layer in layers])
def test_lora_keeps_its_effect(name, layer, as_on_a_gpu):
    peft, pipe, plain = pytest.importorskip("peft"), tiny.copy_of(name), tiny.output(name, 2)
    torch.manual_seed(0)
    pipe.transformer.add_adapter(peft.LoraConfig(r=4, target_modules=[layer], init_lora_weights=False))
    adapted = tiny.output(name, 2, pipe)
    assert distance(adapted, plain) > 1e-4
    assert distance(tiny.accelerated_output(name, "exact", 2, pipe)[0], adapted) < 1e-5


def with_their_own_blocks(name, patch):
    """Let diffusers' blocks run, or blocks without fused kernels if level layer needs hand-written ones."""
    if require_family(tiny.pipeline(name).transformer).parts:
        patch.setattr(drive, "_hand_written", lambda family: None)
    else:
        patch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: False)


@pytest.mark.parametrize("name", ["flux", "hunyuan", "wan", "ltx2", "minimax-h3"])
def test_layers_in_8_bits(name, as_on_a_gpu, by_hand, monkeypatch):
    """Fused blocks run the same rounded layers; they apply GELU, and join attention and MLP, while rounding rows."""
    preset, plain = load_preset("exact", linear={"dtype": "int8"}), tiny.output(name, 3)
    fused, report = tiny.accelerated_output(name, preset, 3)
    assert report.fallbacks == [] and by_hand
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    expected, _ = tiny.accelerated_output(name, preset, 3)
    assert distance(expected, plain) > 1e-3 and distance(fused, expected) < 0.01


FORECAST = {"flux": EQUAL["flux"], **{case: row for case, row in EQUAL.items() if row[0] in ("ltx2", "minimax-h3")}}
FORECAST |= {case: EQUAL[case] for case in ("krea2-unequal", "z-image-guidance")}


@pytest.mark.parametrize(("name", "arguments", "_"), FORECAST.values(), ids=FORECAST)
def test_whole_features_are_forecast(name, arguments, _, as_on_a_gpu, by_hand, monkeypatch):
    """Level layer gives what it gives where each part is remembered by itself, or without fused kernels."""
    family = require_family(tiny.pipeline(name).transformer).name
    preset = load_preset("exact", model=family, forecast={"level": "layer"}, schedule=SCHEDULE)
    result, report = tiny.accelerated_output(name, preset, 7, **arguments)
    assert report.fallbacks == [] and report.steps_by_mode["dispatch"] > 1 and by_hand
    with_their_own_blocks(name, monkeypatch)
    assert distance(result, tiny.accelerated_output(name, preset, 7, **arguments)[0]) < 1e-5


@pytest.mark.parametrize("name", ["z-image", "ltx2", "minimax-h3"])
def test_autocast_at_level_layer(name):
    """Outputs of parts have another dtype than the tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        result, report = tiny.accelerated_output(name, load_preset("exact", forecast={"level": "layer"}), 3)
    assert result.isfinite().all() and report.fallbacks == []


PLAIN = [
    *((name, {}) for name in ("flux-kontext", "flux-controlnet", "flux-img2img", "wan-i2v", "wan22-i2v", "wan22-5b")),
    *((name, {"prompt": prompt}) for name in ("hunyuan", "hunyuan-i2v") for prompt in (TWO_PROMPTS[0], TWO_PROMPTS)),
]


@pytest.mark.parametrize(("name", "arguments"), PLAIN)
def test_nothing_left_out_is_the_plain_result(name, arguments):
    preset = preset_of(name, "head", **NOTHING_LEFT_OUT, **{"skip.steps": "all"})
    result, report = tiny.accelerated_output(name, preset, 8, **arguments)
    assert distance(result, tiny.output(name, 8, **arguments)) < 1e-5
    assert report.steps_by_mode["dispatch"] > 0 and report.fallbacks == []
    assert report.computed_fraction == pytest.approx(1) or "flux" in name or "wan" in name


class EightBitLinear(nn.Linear):
    """A quantised layer in the manner of those libraries that keep nn.Linear's interface."""

    def forward(self, x):
        scale = self.weight.abs().amax(1, keepdim=True) / 127
        return nn.functional.linear(x, (self.weight / scale).round() * scale, self.bias)


def quantise(path):
    return lambda transformer: setattr(transformer.get_submodule(path), "__class__", EightBitLinear)


def watch(path):
    return lambda transformer: transformer.get_submodule(path).register_forward_hook(lambda *_: None)


def own_processor(transformer):
    attn = transformer.transformer_blocks[0].attn
    attn.set_processor(type("Mine", (type(attn.processor),), {})())


def adapt(transformer):
    config = pytest.importorskip("peft").LoraConfig
    transformer.add_adapter(config(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False))


def other_norm(transformer):
    transformer.transformer_blocks[1].norm2 = free_norm(transformer.transformer_blocks[1].norm2)


NO_LINEAR = "a projection is a {} of {}, not a plain linear layer"
BLOCKS = ["transformer.blocks.0", "transformer.blocks.1"]
FALLBACKS = {  # pipeline, change of its transformer, arguments, blocks that fall back and why
    **{
        f"quantised-{part}": (
            "wan",
            quantise(f"blocks.1.{part}"),
            {},
            BLOCKS[1:],
            NO_LINEAR.format("EightBitLinear", "tests"),
        )
        for part in ("attn1.to_q", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0")
    },
    "lora": ("wan", adapt, {}, BLOCKS, NO_LINEAR.format("Linear", "peft")),
    "image-prompt": ("flux-ip-adapter", None, {}, 2, "attention processor FluxIPAdapterAttnProcessor"),
    "hooked-attention": ("flux", watch("transformer_blocks.0.attn"), {}, 1, "its attn carries hooks"),
    "hooked-projection": (
        "hunyuan",
        watch("single_transformer_blocks.1.proj_out"),
        {},
        ["single_transformer_blocks.1"],
        "a projection can't be sliced: it carries hooks (offload, layerwise casting, …)",
    ),
    "processor": ("hunyuan", own_processor, {}, 1, "attention processor Mine"),
    "qwen-unequal": ("qwen-image", None, EQUAL["qwen-unequal"][1], 2, "a mask hides padding between text and image"),
    "krea2-unequal": ("krea2", None, {}, 2, "a mask hides padding behind shorter prompts"),
    "krea2-norm": ("krea2", other_norm, ONE["krea2"], 1, "a norm is no plain Krea2RMSNorm"),
    "z-image-batch": ("z-image", None, z_prompts(6, 4), 2, "tokens of each sample have positions of their own"),
}


@pytest.mark.parametrize(("name", "change", "arguments", "sites", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_blocks_that_can_not_be_sparse_compute_densely_and_say_why(name, change, arguments, sites, reason):
    """At level head GEMM-Q and GEMM-O need the weights themselves; the other blocks go on."""
    pipe = tiny.copy_of(name)
    if change is not None:
        change(pipe.transformer)
    plain = tiny.output(name, 6, pipe, **arguments)
    result, report = tiny.accelerated_output(name, preset_of(name, "head", **NOTHING_LEFT_OUT), 6, pipe, **arguments)
    assert distance(result, plain) < 1e-5
    found = [item["site"] for item in report.fallbacks]
    assert (found if isinstance(sites, list) else len(found)) == sites
    assert {item["reason"] for item in report.fallbacks} == {reason}


def test_a_lora_that_goes_brings_the_sparse_path_back():
    """Loaded and unloaded while the pipeline is accelerated; with its scale, and fused into the weights."""
    pipe, preset = tiny.copy_of("flux"), preset_of("flux", "head", **NOTHING_LEFT_OUT)
    half = {"joint_attention_kwargs": {"scale": 0.5}}
    before, _ = tiny.accelerated_output("flux", preset, 6, pipe)
    accelerate_pipeline(pipe, preset)
    pipe.load_lora_weights(tiny_flux_lora(pipe))
    found = tiny.output("flux", 6, pipe), tiny.output("flux", 6, pipe, **half)
    assert {item["reason"] for item in pipe.dit_accel.report().fallbacks} == {NO_LINEAR.format("Linear", "peft")}
    pipe.dit_accel.restore()
    for result, arguments in zip(found, ({}, half), strict=True):
        assert distance(result, tiny.output("flux", 6, pipe, **arguments)) < 1e-5 < 1e-3 < distance(result, before)
    accelerate_pipeline(pipe, preset)
    pipe.unload_lora_weights()
    assert distance(tiny.output("flux", 6, pipe), before) < 1e-5 and pipe.dit_accel.report().fallbacks == []


def test_autocast_runs_densely_at_level_head():
    """Autocast casts the modules' inputs, and sites call no modules: every block runs its own forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = tiny.output("flux", 4)
        accelerated, report = tiny.accelerated_output("flux", preset_of("flux", "head"), 4)
    assert {entry["reason"] for entry in report.fallbacks} == {"autocast"} and torch.equal(accelerated, plain)


@pytest.mark.parametrize(
    ("name", "preset"),
    [*((name, preset_of(name, "head")) for name in ("flux", "wan", "wan-i2v-clip")), ("minimax-h3", "exact")],
)
def test_fused_projections_change_nothing(name, preset, as_on_a_gpu):
    pipe = tiny.copy_of(name)
    apart, _ = tiny.accelerated_output(name, preset, 6, pipe)
    pipe.transformer.fuse_qkv_projections()
    fused, report = tiny.accelerated_output(name, preset, 6, pipe)
    assert report.fallbacks == [] and distance(fused, apart) < 1e-5


GUIDED = {
    "flux": ("true_cfg_scale", 4.0, {}),
    "hunyuan": ("true_cfg_scale", 4.0, {}),
    "wan": ("guidance_scale", 5.0, {"guidance_scale": 1.0}),
}


@pytest.mark.parametrize("name", GUIDED)
def test_branches_keep_apart(name):
    """Each branch reuses its own past: with the same prompt on both sides guidance changes nothing."""
    scale, value, single = GUIDED[name]
    preset = preset_of(name, "head")
    guided, report = tiny.accelerated_output(name, preset, 8, prompt="a fox", negative_prompt="a fox", **{scale: value})
    alone, _ = tiny.accelerated_output(name, preset, 8, prompt="a fox", **single)
    assert distance(guided, alone) < 1e-4 and len(report.steps) == 8


@pytest.mark.parametrize(
    ("name", "level", "changes"),
    [
        *((name, "head", {}) for name in ("flux", "wan")),
        *(("hunyuan", level, {}) for level in ("layer", "output")),
        # Without rows reused: padded queries of the shorter prompt take part in the scores of rows.
        ("hunyuan", "head", {"reuse.tau_q": 0.0, "skip.steps": "all"}),
    ],
)
def test_batch_equals_single_prompts(name, level, changes):
    preset = preset_of(name, level, **changes)

    def run(prompts, seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return tiny.accelerated_output(name, preset, 8, prompt=prompts, generator=generators)[0]

    both = run(TWO_PROMPTS, [3, 4])
    for place, prompt in enumerate(TWO_PROMPTS):
        assert distance(both[place : place + 1], run([prompt], [3 + place])) < 1e-4


def test_hooks_of_shared_layers_fuse_nothing(as_on_a_gpu, by_hand, monkeypatch):
    """Under diffusers' tensor parallelism a device has some heads of each layer, and part of each product."""
    transformer = tiny.pipeline("flux").transformer
    shared = type("Shared", (), {"tensor_parallel_config": object(), "context_parallel_config": None})
    monkeypatch.setattr(transformer, "_parallel_config", shared, raising=False)
    tiny.accelerated_output("flux", "exact", 2)
    assert not by_hand and find_hook(transformer) is None
