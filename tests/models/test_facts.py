"""Families that are known by facts alone, Stable Diffusion 3 and Qwen-Image, against naive versions of attention."""

import functools

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch.nn import functional

from dit_accel import accelerate_pipeline, accelerate_transformer, load_preset, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.models.families import require_family
from dit_accel.sparse.policies import sparge
from dit_accel.tools.testing import tiny_inputs, tiny_pipeline
from tests.models.naive_flux import Remembered, Schedule

STEPS = 7
PIPELINES = {"sd3": "sd3", "sd35": "sd3", "qwen-image": "qwen_image"}
every_pipeline = pytest.mark.parametrize("name", PIPELINES)
UNEQUAL = ["a fox", "a red fox in the winter snow"]

pipeline = functools.cache(tiny_pipeline)


def sparse(name, **overrides):
    """Every step computed, tiles left out behind the warm-up."""
    sections = {
        "schedule": {"control": "interval", "warmup": 2, "interval": 1, "cooldown": 1},
        "skip": {"policy": "sparge", "steps": "all", "tau_kv": 0.3},
        "blocks": {"size": 64},
    }
    return load_preset(load_preset("exact", model=PIPELINES[name], **sections), **overrides)


def run(name, preset=None, **arguments):
    """Latents, and the report where a preset is given; the pipeline is plain again afterwards."""
    pipe = pipeline(name)
    if preset is None:
        return pipe(**tiny_inputs(name, steps=STEPS, **arguments))[0]
    accelerate_pipeline(pipe, preset)
    try:
        return pipe(**tiny_inputs(name, steps=STEPS, **arguments))[0], pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


def distance(a, b):
    return float((a - b).norm() / b.norm())


class NaiveSparge:
    """Dense attention with the tiles that SpargeAttn leaves out masked, image first; notes what is kept."""

    def __init__(self, schedule):
        self.schedule, self.kept = schedule, []

    def attend(self, q, k, v, text, lengths=None):
        """q, k, v ``[B, S, H, D]`` with ``text`` tokens last, of which ``lengths`` count."""
        vision, block, mask = q.shape[1] - text, self.schedule.preset.blocks.size, None
        kv_len = None if lengths is None else (lengths + vision).to(torch.int32)
        if kv_len is not None:
            mask = (torch.arange(q.shape[1]) < kv_len[:, None])[:, None, None]
        if self.schedule.step >= self.schedule.preset.schedule.warmup:
            layout = TokenLayout(text, vision, block, text_first=False)
            probabilities = pooled_map(q, k, block, kv_len=kv_len, backend="reference").probabilities
            by_token = self.choose(probabilities, layout)
            mask = by_token if mask is None else by_token & mask
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def choose(self, probabilities, layout):
        """Pairs of tokens that attend, bool ``[B, H, S, S]``."""
        tau = self.schedule.preset.skip.tau_kv
        tiles = unpack_bits(sparge.tile_bits(probabilities, layout, tau), layout.blocks)
        self.kept.append(tiles.float().mean().item())
        by_token = tiles.repeat_interleave(layout.block, 2).repeat_interleave(layout.block, 3)
        return by_token[..., : layout.tokens, : layout.tokens]


class NaiveSd3(NaiveSparge):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        def heads(x, norm):
            x = x.unflatten(-1, (attn.heads, -1))
            return x if norm is None else norm(x)

        x, context = hidden_states, encoder_hidden_states
        q, k = heads(attn.to_q(x), attn.norm_q), heads(attn.to_k(x), attn.norm_k)
        v, text = heads(attn.to_v(x), None), 0
        if context is not None:
            text = context.shape[1]
            q = torch.cat([q, heads(attn.add_q_proj(context), attn.norm_added_q)], 1)
            k = torch.cat([k, heads(attn.add_k_proj(context), attn.norm_added_k)], 1)
            v = torch.cat([v, heads(attn.add_v_proj(context), None)], 1)
        o = self.attend(q, k, v, text).flatten(2)
        out = attn.to_out[0](o[:, : x.shape[1]])
        if context is None:
            return out
        of_text = o[:, x.shape[1] :]
        return out, of_text if attn.context_pre_only else attn.to_add_out(of_text)


class NaiveQwen(NaiveSparge):
    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        def heads(x, norm, angles):
            x = x.unflatten(-1, (attn.heads, -1))
            return x if norm is None else apply_rotary_emb_qwen(norm(x), angles, use_real=False)

        x, context, (of_image, of_text) = hidden_states, encoder_hidden_states, image_rotary_emb
        q = heads(attn.to_q(x), attn.norm_q, of_image), heads(attn.add_q_proj(context), attn.norm_added_q, of_text)
        k = heads(attn.to_k(x), attn.norm_k, of_image), heads(attn.add_k_proj(context), attn.norm_added_k, of_text)
        v = heads(attn.to_v(x), None, None), heads(attn.add_v_proj(context), None, None)
        mask = encoder_hidden_states_mask
        if mask is None:  # text leads, and blocks are cut from there
            joint = [torch.cat(parts[::-1], 1) for parts in (q, k, v)]
            o = self.attend_text_first(*joint, context.shape[1])
            of_text, of_image = o[:, : context.shape[1]], o[:, context.shape[1] :]
        else:
            joint = [torch.cat(parts, 1) for parts in (q, k, v)]
            o = self.attend(*joint, context.shape[1], mask.sum(1))
            of_image, of_text = o[:, : x.shape[1]], o[:, x.shape[1] :]
        return attn.to_out[0](of_image.flatten(2)), attn.to_add_out(of_text.flatten(2))

    def attend_text_first(self, q, k, v, text):
        if self.schedule.step < self.schedule.preset.schedule.warmup:
            return self.attend(q, k, v, text)
        block = self.schedule.preset.blocks.size
        layout = TokenLayout(text, q.shape[1] - text, block)
        probabilities = pooled_map(q, k, block, backend="reference").probabilities
        mask = self.choose(probabilities, layout)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def naive(name, preset, **arguments):
    """The same with naive processors, and the shares of tiles that they kept."""
    pipe = pipeline(name)
    schedule = Schedule(pipe, preset, STEPS)
    before = pipe.transformer.attn_processors
    processors = {each: (NaiveQwen if name == "qwen-image" else NaiveSd3)(schedule) for each in before}
    pipe.transformer.set_attn_processor(dict(processors))
    try:
        return run(name, **arguments), [share for each in processors.values() for share in each.kept]
    finally:
        pipe.transformer.set_attn_processor(before)


@pytest.mark.parametrize(
    "name, prompt",
    [("sd3", UNEQUAL[1]), ("sd3", UNEQUAL), ("sd35", UNEQUAL[1]), ("qwen-image", UNEQUAL[1]), ("qwen-image", UNEQUAL)],
    ids=["sd3", "sd3-batch", "sd35-two-attentions", "qwen", "qwen-padded"],
)
def test_sparse_tiles_are_what_a_naive_attention_computes(name, prompt):
    """On every computed step after the warm-up, in each attention of a block, with padding between text and image."""
    preset = sparse(name)
    result, report = run(name, preset, prompt=prompt)
    expected, kept = naive(name, preset, prompt=prompt)
    assert distance(result, expected) < 1e-5
    assert distance(result, run(name, prompt=prompt)) > 1e-3, "tiles must have been left out"
    assert report.left_out == pytest.approx(1 - sum(kept) / len(kept), abs=1e-6)
    assert report.fallbacks == []
    sites = {each.layer for each in report.attentions}
    second = {"transformer_blocks.0.attn2"} if name == "sd35" else set()
    assert sites == {"transformer_blocks.0", "transformer_blocks.1"} | second


@every_pipeline
def test_nothing_left_out_is_the_plain_result(name):
    """With all tiles kept the interceptor changes nothing but rounding; restored, the pipeline is what it was."""
    plain = run(name)
    before = {key: type(each) for key, each in pipeline(name).transformer.attn_processors.items()}
    result, report = run(name, sparse(name, **{"skip.tau_kv": 0.0}))
    assert distance(result, plain) < 1e-5
    assert report.computed_fraction == pytest.approx(1.0)
    assert {key: type(each) for key, each in pipeline(name).transformer.attn_processors.items()} == before
    assert torch.equal(run(name), plain)


@every_pipeline
def test_the_probe_measures(name):
    """The probe's error is that of attention with these tiles, and a target bounds it."""
    _, loose = run(name, sparse(name, **{"skip.probe_blocks": 2}))
    _, bounded = run(name, sparse(name, **{"skip.probe_blocks": 2, "skip.probe_error": 0.02}))
    errors = [[each.error for each in report.attentions] for report in (loose, bounded)]
    assert all(error is not None for error in errors[0])
    assert 0 < sum(errors[1]) < sum(errors[0])
    assert "attention error" in str(loose)


@every_pipeline
def test_level_layer_forecasts_the_parts(name):
    """Attention and MLP outputs before their gates are forecast, and gates, norms and modulation stay fresh."""
    arguments = {"negative_prompt": None} if name == "qwen-image" else {"guidance_scale": 1.0}  # one branch
    schedule = {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1}
    forecast = {"level": "layer", "method": "newton", "order": 1}
    preset = load_preset("exact", model=PIPELINES[name], schedule=schedule, forecast=forecast)
    pipe = pipeline(name)
    result, report = run(name, preset, **arguments)
    schedule, handles = Schedule(pipe, preset, STEPS), []
    family = require_family(pipe.transformer)
    for block in pipe.transformer.transformer_blocks:
        for part in family.parts:
            if getattr(block, part, None) is not None:
                handles.append(getattr(block, part).register_forward_hook(_overwriting(schedule)))
    expected = run(name, **arguments)
    for handle in handles:
        handle.remove()
    assert distance(result, expected) < 1e-5
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 2}
    assert 0.5 < report.computed_fraction < 0.9


def _overwriting(schedule):
    """A forward hook that records a part's output, and in DISPATCH steps overwrites it with its forecast."""
    remembered = {}

    def hook(module, arguments, output):
        parts = output if isinstance(output, tuple) else (output,)
        histories = remembered.setdefault(module, [Remembered(schedule) for _ in parts])
        if schedule.mode == "dispatch":
            parts = tuple(history.forecast() for history in histories)
            return parts if isinstance(output, tuple) else parts[0]
        if schedule.records:
            for history, part in zip(histories, parts, strict=True):
                history.record(part)
        return output

    return hook


def test_a_processor_that_is_set_later_is_caught_too():
    """It takes the place of the one before, and stays when the acceleration is taken off."""
    pipe = tiny_pipeline("sd3")
    accelerate_pipeline(pipe, sparse("sd3"))

    class Own:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return JointAttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask)

    pipe.transformer.transformer_blocks[1].attn.set_processor(Own())
    pipe(**tiny_inputs("sd3", steps=STEPS))
    report = pipe.dit_accel.report()
    assert {each.layer for each in report.attentions} == {"transformer_blocks.0", "transformer_blocks.1"}
    assert report.fallbacks == []
    restore_pipeline(pipe)
    assert type(pipe.transformer.transformer_blocks[1].attn.processor) is Own


def test_settings_of_a_block_hold_for_both_of_its_attentions():
    """`skip.layers` names blocks."""
    _, report = run("sd35", sparse("sd35", **{"skip.layers": {"transformer_blocks.0": {"policy": "none"}}}))
    assert {each.layer for each in report.attentions if each.density < 1} == {"transformer_blocks.1"}


@pytest.mark.parametrize("name, level", [("sd3", "head"), ("mochi", "layer")])
def test_what_facts_can_not_do_is_refused(name, level):
    """Level head needs hand-written blocks, and unknown models have no layers to forecast."""
    preset = load_preset("flux-flashomni" if level == "head" else "flux-taylorseer")
    with pytest.raises(UnsupportedError, match="is for flux models"):
        accelerate_pipeline(pipeline(name), preset)


@torch.no_grad()
def test_attention_under_a_mask_of_the_users_is_left_alone():
    """What a mask in `joint_attention_kwargs` excludes stays excluded, and the report says that the block is dense."""
    pipe = tiny_pipeline("flux")
    calls = []
    handle = pipe.transformer.register_forward_pre_hook(lambda *call: calls.append(call[2]), with_kwargs=True)
    pipe(**tiny_inputs("flux", steps=2))
    handle.remove()
    call = calls[-1]
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


def test_processors_are_left_where_they_are():
    """diffusers makes new processors from the class of the old, and users keep them: ours is never among these."""
    pipe = tiny_pipeline("sd3")
    before = dict(pipe.transformer.attn_processors)
    accelerate_pipeline(pipe, sparse("sd3"))
    assert dict(pipe.transformer.attn_processors) == before
    pipe.transformer.fuse_qkv_projections()
    pipe(**tiny_inputs("sd3", steps=STEPS))
    assert pipe.dit_accel.report().left_out > 0
    restore_pipeline(pipe)
    pipe.transformer.unfuse_qkv_projections()
    assert dict(pipe.transformer.attn_processors) == before


def test_a_failed_acceleration_leaves_nothing_behind(monkeypatch):
    """What was hooked before the failure is taken off again."""
    pipe = tiny_pipeline("sd3")
    plain = pipe(**tiny_inputs("sd3", steps=2))[0]

    def fail(*_):
        raise RuntimeError("no hook for you")

    monkeypatch.setattr("dit_accel.models.family_driver.interceptor.AttentionHook", fail)
    with pytest.raises(RuntimeError, match="no hook for you"):
        accelerate_pipeline(pipe, sparse("sd3"))
    assert not hasattr(pipe, "dit_accel") and not any(
        "_diffusers_hook" in vars(each) for each in pipe.transformer.modules()
    )
    assert torch.equal(pipe(**tiny_inputs("sd3", steps=2))[0], plain)
