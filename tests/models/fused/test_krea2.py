"""Krea 2's blocks: shared keys and values, the gate of attention, padding between a prompt's tokens, and fallbacks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dit_accel import load_preset
from dit_accel.models import drive
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families import krea2
from dit_accel.models.samples import TextMasks
from tests.models import naive_tiles, tiny
from tests.models.fused.test_flux_relatives import STEPS, accelerated, at_heads, distance
from tests.models.naive_flux import NaiveAttention, Schedule
from tests.models.naive_tiles import Sequence, overwritten_rows

PADDED = "a mask hides padding behind shorter prompts"
NOT_PLAIN = "a norm is no plain Krea2RMSNorm"
BLOCK = "transformer_blocks.1"


def prompts(*rows):
    """Both prompts of some samples of the tiny pipeline's batch, the second of which is padded between its tokens."""
    given = tiny.built("krea2")[1]
    return {name: value[list(rows)] for name, value in given.items() if isinstance(value, torch.Tensor)}


CASES = {
    "guidance": prompts(1),
    "no guidance": prompts(1) | {"guidance_scale": 0.0},
    "two of one length": prompts(1, 1),
    "unequal lengths": prompts(0, 1),
}


@pytest.fixture
def as_on_a_gpu(as_on_a_gpu, monkeypatch):
    """Padding is also taken out."""
    monkeypatch.setattr(FamilyDriver, "cuts_padding", lambda *_: True)


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_fused_blocks_compute_what_diffusers_does(given, as_on_a_gpu, by_hand):
    """Blocks get no padding; prompts of unequal length keep a mask, and attention its own processor."""
    plain = tiny.output("krea2", 3, **given)
    with accelerated("krea2", "exact") as pipe:
        fused = tiny.output("krea2", 3, **given)
        assert pipe.dit_accel.report().fallbacks == []
    assert distance(fused, plain) < 1e-5 and by_hand
    assert torch.equal(tiny.output("krea2", 3, **given), plain), "restored"


@pytest.mark.parametrize(("rows", "tokens", "keeps_mask"), [([1], 5, False), ([0, 1], 12, True), ([2], 1, True)])
def test_padding_is_taken_out(rows, tokens, keeps_mask):
    """Valid tokens come first; a mask stays if it hides something, as of a prompt without any token."""
    mask = torch.stack([torch.ones(12), torch.arange(12) % 3 == 1, torch.zeros(12)]).bool()[rows]
    mask[..., -1] |= rows == [1]
    text = torch.arange(12.0)[None, :, None, None].expand(len(rows), -1, 2, 3)
    given = {"encoder_hidden_states": text, krea2.MASK: mask, "position_ids": torch.arange(20)[:, None].expand(-1, 3)}
    found, lengths = krea2.cut(given, TextMasks().lengths(mask))
    for place, valid in enumerate(mask):
        kept = found["encoder_hidden_states"][place, : valid.sum(), 0, 0]
        assert torch.equal(kept, text[place, valid, 0, 0])
    assert found["encoder_hidden_states"].shape == (len(rows), tokens, 2, 3) and lengths.end == tokens
    assert (found[krea2.MASK] is not None) is keeps_mask
    assert torch.equal(found["position_ids"][tokens:, 0], torch.arange(12, 20))


def test_padding_stays_where_several_devices_share_the_tokens(monkeypatch):
    """The caller's own plan splits text and image as one sequence, whose length must divide evenly."""
    transformer = tiny.pipeline("krea2").transformer
    driver = FamilyDriver(transformer, load_preset("exact"), "transformer", lambda: transformer, krea2.FAMILY)
    assert driver.cuts_padding(torch.device("cuda"))
    monkeypatch.setattr(transformer, "_parallel_config", SimpleNamespace(context_parallel_config=object()))
    assert not driver.cuts_padding(torch.device("cuda"))


@contextmanager
def gated(monkeypatch):
    """Naive attention multiplies by the gate before it records and overwrites, and undoes that for the processor."""
    latest, hooks = [], []

    class Gated(NaiveAttention):
        def attend(self, q, k, v, layout):
            return super().attend(q, k, v, layout) / latest[-1]

        def _attention(self, q, k, v, kept):
            return super()._attention(q, k, v, kept) * latest[-1]

    monkeypatch.setattr(naive_tiles, "NaiveAttention", Gated)
    for block in tiny.pipeline("krea2").transformer.transformer_blocks:
        keep = lambda attn, _, gate: latest.append(gate.sigmoid().unflatten(2, (2, -1)))  # noqa: E731
        hooks.append(block.attn.to_gate.register_forward_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_heads_equal_naive_overwriting(backend, monkeypatch):
    """GEMM-Q, sparse attention and the cached bias equal overwriting gated attention before its projection."""
    given = prompts(0) | {"guidance_scale": 0.0}
    pipe, preset = tiny.pipeline("krea2"), at_heads("krea2", kernels={"attention": backend, "gemm": backend})
    plain = tiny.output("krea2", STEPS, **given)
    sequence = Sequence(r"transformer_blocks\.\d+\.attn", 144)
    with gated(monkeypatch), overwritten_rows(pipe.transformer, Schedule(pipe, preset, STEPS), sequence):
        expected = tiny.output("krea2", STEPS, **given)
    with accelerated("krea2", preset):
        result, report = tiny.output("krea2", STEPS, **given), pipe.dit_accel.report()
    assert distance(result, expected) < 2e-5
    assert distance(expected, plain) > 1e-3, "the case must differ from a plain run to prove anything"
    assert report.fallbacks == [] and report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 3}
    assert report.estimated_bytes == report.cache_bytes


def test_a_mask_at_level_head_says_why_not():
    with accelerated("krea2", at_heads("krea2")) as pipe:
        tiny.output("krea2", STEPS, **prompts(0, 1))
        reasons = {fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks}
    assert reasons == {PADDED}


@pytest.mark.parametrize(
    ("part", "reasons"),
    [("norm1", {"its norm1 carries hooks"}), ("attn", set()), ("attn.norm_k", set()), ("ff", set())],
    ids=lambda part: str(part),
)
def test_parts_that_carry_hooks_are_called(part, reasons, as_on_a_gpu):
    """A norm's hook leaves the block to diffusers; a hook of the MLP, or in the attention, leaves that part to it."""
    plain, calls = tiny.output("krea2", 2, **CASES["no guidance"]), []
    module = tiny.pipeline("krea2").transformer.get_submodule(f"{BLOCK}.{part}")
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        with accelerated("krea2", "exact") as pipe:
            assert distance(tiny.output("krea2", 2, **CASES["no guidance"]), plain) < 1e-5
            assert {fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks} == reasons
    finally:
        handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["norm2", "attn.norm_q"])
def test_a_norm_of_another_kind_is_called(name, as_on_a_gpu, monkeypatch):
    """The report names it, except in an attention that diffusers runs all the same."""
    owner, _, last = f"{BLOCK}.{name}".rpartition(".")
    owner = tiny.pipeline("krea2").transformer.get_submodule(owner)
    monkeypatch.setitem(owner._modules, last, torch.nn.RMSNorm(owner._modules[last].dim))
    plain = tiny.output("krea2", 2, **CASES["no guidance"])
    with accelerated("krea2", "exact") as pipe:
        assert distance(tiny.output("krea2", 2, **CASES["no guidance"]), plain) < 1e-5
        reasons = [fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks]
    assert reasons == ([NOT_PLAIN] if name == "norm2" else [])
    with accelerated("krea2", at_heads("krea2")) as pipe:
        tiny.output("krea2", STEPS, **CASES["no guidance"])
        assert {fallback["reason"] for fallback in pipe.dit_accel.report().fallbacks} == {NOT_PLAIN}


def test_whole_features_are_forecast(monkeypatch, by_hand):
    """Level layer gives what it gives where each part is remembered by itself."""
    schedule = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 1}
    preset = load_preset("exact", forecast={"level": "layer"}, schedule=schedule)
    with accelerated("krea2", preset) as pipe:
        made, report = tiny.output("krea2", STEPS), pipe.dit_accel.report()
    assert report.fallbacks == [] and report.steps_by_mode["dispatch"] > 1 and by_hand
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    with accelerated("krea2", preset):
        assert distance(made, tiny.output("krea2", STEPS)) < 1e-5
