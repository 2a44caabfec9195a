"""Families that are known by facts alone, against naive versions of attention."""

import pkgutil
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models import fused
from dit_accel.models.block_costs import BlockCosts
from dit_accel.models.families import FAMILIES, require_family
from dit_accel.models.families.family import Tokens, part_of
from dit_accel.models.hooks import ATTENTION_HOOK, parameter_names, register_hook
from dit_accel.models.interceptor import MISSED, OTHER_KEYS, OWN_TILES, WEIGHED, AttentionHook, Catching
from dit_accel.models.kernel_limits import why_no_kernels
from dit_accel.sla.swap import restore_attention, swap_attention
from dit_accel.tools.measure.capture import AttentionTap
from tests.models import tiny
from tests.models.naive import Schedule, Sequence, overwriting, parts_of_blocks
from tests.models.test_transformer import recorded_calls
from tests.rounding import distance
from tests.tiny import TINY_PIPELINES

STEPS = 7
UNEQUAL = ["a fox", "a red fox in the winter snow"]
JOINT = r"transformer_blocks\.\d+\.attn"
SEQUENCES = {  # by tiny pipeline
    "sd3": Sequence(JOINT, 132, text_first=False),
    "sd35": Sequence(rf"{JOINT}2?", 132, text_first=False),
    "qwen-image": Sequence(JOINT, 132),
    "qwen-image-edit": Sequence(JOINT, 144 + 64),
    "flux2": Sequence(rf"(single_)?{JOINT}", 144),
    "z-image": Sequence(r"layers\.\d+\.attention", 160, text_first=False, pads_end=True),
    "hunyuan15": Sequence(JOINT, 144, text_first=False, pads_end=True),
    "ltx": Sequence(rf"{JOINT}1", 144),
    "ltx2": Sequence(rf"{JOINT}1", 144),
    "cogvideox-dpm": Sequence(rf"{JOINT}1", 168),
    "wan-vace": Sequence(r"(vace_)?blocks\.\d+\.attn1", 144),
    "wan-animate": Sequence(r"blocks\.\d+\.attn1", 192),
    "skyreels-v2": Sequence(r"blocks\.\d+\.attn1", 144),
    "hidream": Sequence(r".*_blocks\.\d+\.block\.attn1", 144, text_first=False),
    "lumina2": Sequence(r"layers\.\d+\.attn", 144, pads_end=True),
    "prx": Sequence(r"blocks\.\d+\.attention", 144),
    "chroma": Sequence(rf"(single_)?{JOINT}", 144),
    "longcat-image": Sequence(rf"(single_)?{JOINT}", 144),
    "hunyuan-image": Sequence(rf"(single_)?{JOINT}", 144, text_first=False, pads_end=True),
    "krea2": Sequence(JOINT, 144),
    "qwen-image-21": Sequence(JOINT, 144),
    "ernie-image": Sequence(r"layers\.\d+\.self_attention", 144, text_first=False, pads_end=True),
    "flux3": Sequence(rf"single_{JOINT}", 144),
    "helios": Sequence(r"blocks\.\d+\.attn1", 72 + 72 + 9 + 4),
    "glm-image": Sequence(rf"{JOINT}1", 144),
    "minimax-h3": Sequence(JOINT, 148 + 414),
    "mochi": Sequence(rf"{JOINT}1", 126, text_first=False),
    "kandinsky5": Sequence(r"visual_transformer_blocks\.\d+\.self_attention", 144),
}
TOLERANCE = {"kandinsky5": 5e-3}  # which rotates in bfloat16; else 1e-5
INEXACT = {"sd3": 0.5, "sd35": 0.35, "prx": 0.1}  # memory where blocks differ: a second attention, parts, queries
INEXACT |= {"ltx2": 0.02, "mochi": 0.06, "wan-vace": 0.1, "qwen-image-21": 0.1, "helios": 0.25}
PADDED = {  # arguments with the padding
    "qwen-image": "encoder_hidden_states_mask",
    "mochi": "encoder_attention_mask",
    "prx": "attention_mask",
    "chroma": "attention_mask",
}

pipeline = tiny.pipeline


def sparse(name, **overrides):
    """Preset that computes every step and skips tiles after the warm-up."""
    sections = {
        "schedule": {"control": "interval", "warmup": 2, "interval": 1, "cooldown": 1},
        "skip": {"policy": "sparge", "steps": "all", "tau_kv": 0.3},
        "blocks": {"size": 64},
    }
    family = require_family(pipeline(name).transformer).name
    return load_preset(load_preset("exact", model=family, **sections), **overrides)


def run(name, preset=None, **arguments):
    """Latents, and the report where a preset is given."""
    if preset is None:
        return tiny.output(name, STEPS, **arguments)
    return tiny.accelerated_output(name, preset, STEPS, **arguments)


def test_every_family_of_facts_has_a_sequence_here():
    """Every family must be compared with a naive version."""
    held = {require_family(pipeline(name).transformer).name for name in SEQUENCES}
    assert held >= {family.name for family in FAMILIES} - {family.name for family in FAMILIES if family.fused}


def test_fused_families_have_a_page_of_blocks():
    """Every fused family has a page of its own name, and no other family has one."""
    pages = {page.name for page in pkgutil.iter_modules(fused.__path__)}
    assert {family.name for family in FAMILIES if family.fused} == pages & {family.name for family in FAMILIES}


@pytest.mark.parametrize(
    "name, arguments",
    [
        *((name, {}) for name in SEQUENCES),
        ("sd3", {"prompt": UNEQUAL}),
        ("qwen-image", {"prompt": UNEQUAL}),
        ("mochi", {"prompt": UNEQUAL}),
        ("hidream", {"height": 80, "width": 120}),
    ],
    ids=[*SEQUENCES, "sd3-batch", "qwen-padded", "mochi-padded", "hidream-not-square"],
)
def test_sparse_tiles_are_what_a_naive_attention_computes(name, arguments):
    """Computed steps after the warm-up are compared, in each attention of a block, with forecast steps between."""
    forecast = {"level": "output", "method": "newton", "order": 1}
    preset = sparse(name, **{"schedule.interval": 2, "skip.tau_kv": 0.5}, forecast=forecast)
    plain = run(name, **arguments)
    result, report = run(name, preset, **arguments)
    transformer, sequence = pipeline(name).transformer, SEQUENCES[name]
    if "height" in arguments:  # its positions are filled up
        sequence = sequence._replace(vision=256)
    with overwriting(pipeline(name), preset, STEPS, sequence) as naive:
        expected = run(name, **arguments)
    assert distance(result, expected) < TOLERANCE.get(name, 1e-5)
    assert distance(result, plain) > 1e-3 and report.left_out > 0.02
    assert report.left_out == pytest.approx(1 - sum(naive.kept) / len(naive.kept), abs=TOLERANCE.get(name, 1e-6))
    assert report.fallbacks == report.notes == [] and report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 2}
    assert len({item.layer for item in report.attentions}) == len(sequence.modules(transformer))


@pytest.mark.parametrize("name", ["sd3", "sd35", *PADDED])
def test_nothing_left_out_is_the_plain_result(name):
    plain = run(name)
    modules = SEQUENCES[name].modules(pipeline(name).transformer).values()
    before = [type(module.processor) for module in modules]
    result, report = run(name, sparse(name, **{"skip.tau_kv": 0.0}))
    assert distance(result, plain) < 1e-5 and report.computed_fraction == pytest.approx(1.0)
    assert [type(module.processor) for module in modules] == before and torch.equal(run(name), plain)


@pytest.mark.parametrize("name, mask", PADDED.items())
def test_padding_is_never_read(name, mask):
    """Padding after a prompt changes nothing where tiles are skipped, and a probe does not read it."""
    padding, seen = {}, []

    def fill(_, args, arguments):
        if arguments[mask] is None:  # there is none
            return args, arguments
        text = arguments["encoder_hidden_states"]
        is_padding = ~arguments[mask][:, : text.shape[1]].bool()
        seen.append(bool(is_padding.any()))
        return args, {**arguments, "encoder_hidden_states": text.masked_fill(is_padding[..., None], padding["at"])}

    inputs = {"prompt": UNEQUAL} if name in TINY_PIPELINES else {}
    handle = pipeline(name).transformer.register_forward_pre_hook(fill, with_kwargs=True)
    try:
        preset, results = sparse(name, **{"skip.probe_blocks": 2, "skip.probe_error": 0.1}), []
        for padding["at"] in (0.0, 3.0):
            results.append(run(name, preset, **inputs)[0])
        assert any(seen) and distance(*results) < 1e-6
    finally:
        handle.remove()


@pytest.mark.parametrize("name", SEQUENCES)
def test_level_layer_forecasts_the_parts(name):
    """Attention and MLP outputs before their gates are forecast, and gates, norms and modulation stay fresh.

    What is left of a block in a DISPATCH step multiplies no token with a matrix, and memory is what was expected.
    """
    pipe, handles, multiplied = pipeline(name), [], []
    family = require_family(pipe.transformer)
    preset = load_preset(
        "exact",
        model=family.name,
        schedule={"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1},
        forecast={"level": "layer", "method": "newton", "order": 1},
    )
    schedule = Schedule(pipe, preset, STEPS)

    def note(linear, arguments):
        if schedule.mode == "dispatch" and arguments[0].ndim > 2 and arguments[0].shape[1] > 1:
            multiplied.append(linear)

    for block, parts in parts_of_blocks(pipe.transformer):
        feeding = (part_of(block, item) for names in family.feeds.values() for item in names)
        left_out = {*parts, *feeding}
        others = (item for item in block.modules() if isinstance(item, torch.nn.Linear) and item not in left_out)
        handles += [linear.register_forward_pre_hook(note) for linear in others]
    with schedule.followed():
        result, report = run(name, preset)
    for handle in handles:
        handle.remove()
    assert not multiplied
    with overwriting(pipe, preset, STEPS, SEQUENCES[name]):
        expected = run(name)
    assert distance(result, expected) < TOLERANCE.get(name, 1e-5)
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 2}
    assert 0.5 < report.computed_fraction < 0.9
    assert report.estimated_bytes == pytest.approx(report.cache_bytes, rel=INEXACT.get(name, 0), abs=0)


@pytest.mark.parametrize("name", ["ltx2", "minimax-h3", "cosmos3"])
def test_memory_of_outputs_is_what_was_expected(name):
    """The audio is an output of its own, in a tensor or a list."""
    _, report = run(name, load_preset("exact", schedule={"control": "interval", "interval": 3}, forecast={"order": 1}))
    assert report.estimated_bytes == report.cache_bytes > 0


@pytest.mark.parametrize(  # families that differ in where text, padding and samples are
    "name",
    ["sd35", "qwen-image", "z-image", "wan-animate", "hidream", "prx", "chroma", "glm-image", "mochi", "kandinsky5"],
)
def test_recording_and_training_attend_over_the_same_tokens(name):
    """SLA with all tiles gives the plain result; after restoring, `tune` records every site and changes nothing."""
    plain, sites, pipe = tiny.output(name, 2), set(), pipeline(name)
    swap_attention(pipe, block=64, critical=1.0, negligible=0.0)
    try:
        assert distance(tiny.output(name, 2), plain) < TOLERANCE.get(name, 1e-5)
    finally:
        restore_attention(pipe)
    with AttentionTap(pipe, lambda site, *_: sites.add(site.block)):
        assert torch.equal(tiny.output(name, 2), plain), "restored, and recorded without a change"
    assert len(sites) == len(SEQUENCES[name].modules(pipe.transformer))


def test_what_pipelines_drop_is_not_judged():
    """References behind the latents, and frames that are given: errors of forecasts there reach no result."""
    ids = torch.tensor([[[0, 1], [0, 2], [10, 1]]])
    channels = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1, 1).expand(1, 2, 1, 3, 1)  # a mask of two frames
    for name, output, arguments, expected in (
        ("flux2", torch.ones(1, 3, 2), {"img_ids": ids}, [[[1, 1], [1, 1], [0, 0]]]),
        ("flux2", torch.ones(1, 2, 1), {"img_ids": ids}, [[[1], [1]]]),  # a call that fills a cache
        ("longcat-image", torch.ones(1, 2, 1), {"img_ids": torch.tensor([[1, 0], [2, 0]])}, [[[1], [0]]]),
        ("ltx", torch.ones(1, 3, 1), {"timestep": torch.tensor([[0.0, 0.0, 9.0]])}, [[[0], [0], [1]]]),
        ("ltx", torch.ones(2, 1, 1), {"timestep": torch.tensor([9.0, 9.0])}, [[[1]], [[1]]]),
        (
            "wan-vace",
            torch.ones(1, 1, 2, 2, 2),
            {"hidden_states": torch.ones(1, 1, 2, 2, 2), "timestep": torch.tensor([[0.0, 9.0]])},
            [[[[[0, 0], [0, 0]], [[1, 1], [1, 1]]]]],
        ),
        ("kandinsky5", torch.ones(1, 2, 1, 3, 1), {"hidden_states": channels}, [[[[[0]] * 3], [[[1]] * 3]]]),
    ):
        transformer = pipeline(name).transformer
        assert require_family(transformer).used(transformer, output, arguments).tolist() == expected


def test_all_images_of_the_layered_form_are_judged():
    """Qwen-Image-Layered makes several at once, and only the one behind them is given."""
    used = require_family(pipeline("qwen-image").transformer).used
    shapes = {"img_shapes": [[(1, 2, 2), (1, 2, 2), (1, 1, 3)]]}
    for is_layered, judged in ((False, 4), (True, 8)):
        transformer = SimpleNamespace(config=SimpleNamespace(use_layer3d_rope=is_layered))
        assert used(transformer, torch.ones(1, 11, 2), shapes).shape[1] == judged


NOT_COUNTED = ("cogvideox-dpm", "hidream")  # the same as cogvideox; MLPs rounded up by more than this small width
COUNTED = [
    *(name for name in SEQUENCES if name not in NOT_COUNTED),
    *("cogvideox", "wan", "wan-i2v", "wan-i2v-clip", "wan22-5b-i2v", "hunyuan", "hunyuan-i2v", "flux", "flux-kontext"),
]


@torch.no_grad()
@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_that_torch_counts(name):
    """FLOPs of each block except its modulation equal torch's count, also where blocks of a class differ in their
    parts. CogVideoX's modulation is 2% of such a block.
    """
    transformer, calls = pipeline(name).transformer, []
    handle = transformer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    tiny.output(name, 2)
    handle.remove()
    arguments = dict(zip(parameter_names(transformer), calls[-1][0], strict=False)) | calls[-1][1]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        transformer(**arguments)
    counted = {name.partition(".")[2]: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    family = require_family(transformer)
    blocks = family.blocks(transformer, "transformer")
    sites = {name: family.attentions_of(block, name) for name, block in blocks.items()}
    works = BlockCosts(family, blocks, sites).of(transformer, arguments, family.tokens(transformer, arguments))
    assert works.keys() == blocks.keys()
    for block, work in works.items():
        expected = counted[block.removeprefix("transformer.")]
        assert work.plain == pytest.approx(expected, rel=0.02 if name == "cogvideox" else 0.01), block


def test_a_part_that_runs_in_chunks_is_refused():
    """Its second output in a step would be taken for another step's."""
    pipe = tiny.copy_of("sd3")
    pipe.transformer.enable_forward_chunking(chunk_size=1, dim=1)
    with pytest.raises(UnsupportedError, match=r"ff of .*blocks\.0 runs in chunks.*disable_forward_chunking"):
        run("sd3", load_preset("exact", model="sd3", forecast={"level": "layer"}, schedule={"interval": 3}), pipe=pipe)


def test_a_processor_that_is_set_later_is_caught_too():
    """It replaces the previous processor, and stays when the acceleration is removed; no processor is ours."""
    pipe = tiny.copy_of("sd3")
    before = dict(pipe.transformer.attn_processors)
    accelerate_pipeline(pipe, sparse("sd3"))
    assert dict(pipe.transformer.attn_processors) == before

    class Own:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return JointAttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask)

    pipe.transformer.transformer_blocks[1].attn.set_processor(Own())
    tiny.output("sd3", STEPS, pipe)
    report = pipe.dit_accel.report()
    assert {item.layer for item in report.attentions} == {"transformer_blocks.0", "transformer_blocks.1"}
    assert report.fallbacks == []
    restore_pipeline(pipe)
    assert type(pipe.transformer.transformer_blocks[1].attn.processor) is Own


def test_fused_projections_are_caught_too():
    """diffusers makes new processors from the class of the old."""
    pipe = tiny.copy_of("sd3")
    accelerate_pipeline(pipe, sparse("sd3"))
    pipe.transformer.fuse_qkv_projections()
    tiny.output("sd3", STEPS, pipe)
    assert pipe.dit_accel.report().left_out > 0


def test_settings_of_a_block_hold_for_both_of_its_attentions():
    """`skip.layers` names blocks."""
    _, report = run("sd35", sparse("sd35", **{"skip.layers": {"transformer_blocks.0": {"policy": "none"}}}))
    assert {item.layer for item in report.attentions if item.density < 1} == {"transformer_blocks.1"}


@torch.no_grad()
def test_attention_under_a_mask_of_the_users_is_left_alone():
    """A mask in `joint_attention_kwargs` keeps its effect, and the report says that the block is dense."""
    pipe = tiny.copy_of("flux")
    call = recorded_calls(pipe, "flux")[-1]
    tokens = call["encoder_hidden_states"].shape[1] + call["hidden_states"].shape[1]
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    mask[..., : tokens // 2] = False
    masked = {"joint_attention_kwargs": {"attention_mask": mask}}
    plain = pipe.transformer(**{**call, **masked})[0]
    preset = load_preset(sparse("sd3"), model="flux", **{"skip.tau_kv": 0.0, "schedule.warmup": 0})
    acceleration = accelerate_transformer(pipe.transformer, preset, [float(call["timestep"].max())])
    assert distance(pipe.transformer(**{**call, **masked})[0], plain) < 1e-5
    assert {entry["reason"] for entry in acceleration.report().fallbacks} == {"attends under a mask"}
    acceleration.restore()


def test_masks_that_add_to_the_scores_are_left_alone():
    """Chroma's are such where a prompt's mask is no bool: padding is attended to, and every tile computes."""
    inputs = tiny.built("chroma")[1]
    weights = {name: mask.float() for name, mask in inputs.items() if name.endswith("attention_mask")}
    plain = run("chroma", **weights)
    assert distance(plain, run("chroma")) > 1e-3
    result, report = run("chroma", sparse("chroma"), **weights)
    assert torch.equal(result, plain) and {item["reason"] for item in report.fallbacks} == {WEIGHED}


def test_attention_that_guidance_leaves_out_is_no_fallback():
    """LTX-2's third branch has a block give values as they are, and the others leave tiles out there."""
    _, report = run("ltx2", sparse("ltx2"), stg_scale=1.0)
    assert report.fallbacks == [] and {item.layer for item in report.attentions} == set(report.layers)


@pytest.mark.parametrize("keys, missed", [(4, None), (6, OTHER_KEYS), (None, MISSED)], ids=["own", "cached", "none"])
def test_why_nothing_was_caught(keys, missed):
    """Attention over a cache has more keys than queries; none at all went elsewhere."""
    with Catching(Tokens(0, 4), lambda *_: None) as catching:
        if keys is not None:
            k = torch.ones(1, 1, keys, 8)
            torch.nn.functional.scaled_dot_product_attention(torch.ones(1, 1, 4, 8), k, k)
    assert catching.missed == missed


@pytest.mark.parametrize(
    "arguments, reasons",
    [({}, [MISSED]), ({"sparse_params": {"P": 0.9}}, [OWN_TILES]), ({"all_perturbed": True}, [])],
    ids=["backend", "nabla", "perturbed"],
)
def test_arguments_of_an_attention_say_why_nothing_was_caught(arguments, reasons):
    """Advice to change the backend is for those alone that could attend otherwise."""

    class Elsewhere(torch.nn.Module):
        def forward(self, x, **_):
            return x

    module, found = Elsewhere(), []
    register_hook(module, AttentionHook(lambda: Tokens(0, 4), lambda *_: None, found.append), ATTENTION_HOOK)
    module(torch.ones(1, 4, 8), **arguments)
    assert found == reasons


@pytest.mark.parametrize("is_cuda, runs", [(False, True), (True, False)], ids=["cpu", "gpu"])
def test_heads_that_kernels_do_not_take(is_cuda, runs):
    """Lumina's have 96 features: on a GPU its attention stays dense, and the report says why."""
    q = SimpleNamespace(dtype=torch.float16, is_cuda=is_cuda)
    assert why_no_kernels(q, 128) is why_no_kernels(q) is None and (why_no_kernels(q, 96) is None) == runs
