"""Blocks of Qwen-Image, FLUX.2 and Z-Image: level head against naive overwriting, and their special features."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models.families import require_family
from dit_accel.models.fused import flux2
from tests.models import tiny
from tests.models.naive_flux import Schedule
from tests.models.naive_tiles import Sequence, overwritten_rows

STEPS = 8
ATTENTIONS = r"(single_)?transformer_blocks\.\d+\.attn"
SEQUENCES = {
    "qwen-image": Sequence(ATTENTIONS, 132),
    "flux2": Sequence(ATTENTIONS, 144),
    "z-image": Sequence(r"layers\.\d+\.attention", 160, text_first=False),
}
ONE_BRANCH = {"qwen-image": {"true_cfg_scale": 1.0}, "flux2": {}, "z-image": {"guidance_scale": 0.0}}


def at_heads(name, **overrides):
    sections = {
        "model": require_family(tiny.pipeline(name).transformer).name,
        "schedule": {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1},
        "forecast": {"level": "head", "method": "taylor"},
        "blocks": {"size": 64},
        "reuse": {"tau_q": 0.9, "ramp": 0.3},
        "skip": {"policy": "sparge", "tau_kv": 0.4},
    }
    return load_preset(load_preset("exact", **sections), **overrides)


@contextmanager
def accelerated(name, preset):
    pipe = tiny.pipeline(name)
    accelerate_pipeline(pipe, preset)
    try:
        yield pipe
    finally:
        restore_pipeline(pipe)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_heads_equal_naive_overwriting(name, backend):
    """GEMM-Q, sparse attention and the cached bias equal overwriting attention before its projection."""
    pipe, preset = tiny.pipeline(name), at_heads(name, kernels={"attention": backend, "gemm": backend})
    plain = tiny.output(name, STEPS, **ONE_BRANCH[name])
    with overwritten_rows(pipe.transformer, Schedule(pipe, preset, STEPS), SEQUENCES[name]):
        expected = tiny.output(name, STEPS, **ONE_BRANCH[name])
    with accelerated(name, preset):
        result, report = tiny.output(name, STEPS, **ONE_BRANCH[name]), pipe.dit_accel.report()
    assert distance(result, expected) < 2e-5
    assert distance(expected, plain) > 1e-3, "the case must differ from a plain run to prove anything"
    assert report.fallbacks == [] and report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 3}
    assert report.computed_fraction < 1
    assert torch.equal(tiny.output(name, STEPS, **ONE_BRANCH[name]), plain), "restored"


def test_pictures_to_edit_may_have_a_timestep_of_their_own(as_on_a_gpu, monkeypatch):
    """Like Qwen-Image-Edit-2511: tokens of the given image have their own modulation."""
    transformer = tiny.pipeline("qwen-image-edit").transformer
    alike = tiny.output("qwen-image-edit", steps=2)
    for module in (transformer, *transformer.transformer_blocks):
        monkeypatch.setattr(module, "zero_cond_t", True)
    apart = tiny.output("qwen-image-edit", steps=2)
    assert distance(apart, alike) > 1e-3
    with accelerated("qwen-image-edit", "exact"):
        assert distance(tiny.output("qwen-image-edit", steps=2), apart) < 1e-5


def test_prompts_of_unequal_length_keep_their_mask(as_on_a_gpu):
    """Their attention runs by its own processor, the rest of a block fused; at level head the report says so."""
    prompts = {"prompt": ["a fox", "a red fox in the winter snow"], **ONE_BRANCH["qwen-image"]}
    plain = tiny.output("qwen-image", steps=2, **prompts)
    with accelerated("qwen-image", "exact"):
        assert distance(tiny.output("qwen-image", steps=2, **prompts), plain) < 1e-5
    with accelerated("qwen-image", at_heads("qwen-image")) as pipe:
        tiny.output("qwen-image", STEPS, **prompts)
        reasons = {fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks}
    assert reasons == {"a mask hides padding between text and image"}


@pytest.mark.parametrize(
    "part",
    [
        *("transformer_blocks.0.ff", "transformer_blocks.0.ff.act_fn", "transformer_blocks.0.ff.act_fn.gate_fn"),
        *("single_transformer_blocks.0.attn.mlp_act_fn", "single_transformer_blocks.0.attn.mlp_act_fn.gate_fn"),
    ],
)
def test_gates_that_somebody_watches_are_called(part, as_on_a_gpu):
    plain, calls = tiny.output("flux2", steps=2), []
    handle = tiny.pipeline("flux2").transformer.get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    try:
        with accelerated("flux2", "exact"):
            assert distance(tiny.output("flux2", steps=2), plain) < 1e-5
    finally:
        handle.remove()
    assert calls == [1, 1]


CHANGED = {
    "norms": lambda double, single: [setattr(norm, "eps", 0.1) for norm in norms_of(double, single)],
    "gate": lambda double, single: setattr(single.attn, "mlp_act_fn", OtherGate()),
    "gate-of-an-mlp": lambda double, single: setattr(double.ff, "act_fn", OtherGate()),
    "mlp": lambda double, single: setattr(double, "ff", torch.nn.Linear(64, 64)),
}


class OtherGate(torch.nn.Module):
    def forward(self, x):
        gate, value = x.chunk(2, dim=-1)
        return gate.sigmoid() * value


def norms_of(*blocks):
    return [module for block in blocks for module in block.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_parts_that_are_others_are_taken_as_they_are(change, as_on_a_gpu, monkeypatch):
    pipe, arguments = copy.deepcopy(tiny.built("flux2")[0]), tiny.built("flux2")[1]
    monkeypatch.setattr(tiny, "built", lambda _: (pipe, arguments))
    before = tiny.output("flux2", steps=2)
    change(pipe.transformer.transformer_blocks[0], pipe.transformer.single_transformer_blocks[0])
    plain = tiny.output("flux2", steps=2)
    assert distance(plain, before) > 1e-4
    accelerate_pipeline(pipe, "exact")
    assert distance(tiny.output("flux2", steps=2), plain) < 1e-5


def test_versions_of_diffusers_that_pass_other_arguments_run_their_own_blocks():
    """diffusers 0.36 gave FLUX.2's blocks their modulations in another form."""
    hook = flux2.Flux2DoubleBlockHook("transformer_blocks.0", SimpleNamespace(preset=None))
    hook.initialize_hook(type("Older", (torch.nn.Module,), {"forward": lambda self, hidden_states, temb: None})())
    assert hook._why_other == "in this version of diffusers the block takes no temb_mod_img"


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "joint"])
def test_a_single_block_takes_both_streams_too(apart):
    """The transformer gives it the joint sequence; a caller may give it both, and have them back."""
    hook = flux2.Flux2SingleBlockHook("single_transformer_blocks.0", SimpleNamespace(preset=None))
    hook.initialize_hook(tiny.pipeline("flux2").transformer.single_transformer_blocks[0])
    image, text = torch.randn(1, 5, 64), torch.randn(1, 3, 64)
    given = hook._bind((image, text), {"split_hidden_states": apart})
    joint = hook.joined(given)
    assert torch.equal(joint, torch.cat([text, image], dim=1))
    parts = hook.parted(joint, given)
    assert all(map(torch.equal, parts, (text, image))) if apart else parts is joint
