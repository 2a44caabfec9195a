"""A family in a page: LTX by CONTRIBUTING's steps, with sparse attention, the probe, level layer and the report."""

import pytest
import torch

from dit_accel import accelerate_pipeline, restore_pipeline
from dit_accel.models import families
from dit_accel.models.family import BlockWork, Family, Stack, Tokens, width_of
from dit_accel.tools.testing import tiny_inputs, tiny_pipeline

# The page


def tokens(transformer, arguments):
    """The video's tokens; the prompt is attended to apart."""
    return Tokens(0, arguments["hidden_states"].shape[1])


def work(transformer, arguments, tokens, block):
    width, count, prompt = width_of(transformer), tokens.vision, arguments["encoder_hidden_states"].shape[1]
    batch = arguments["hidden_states"].shape[0]
    projection = 2 * batch * count * width * width
    across = 4 * batch * prompt * width * (width + count)  # cross-attention to the prompt
    return BlockWork(tiles={"attn1": 4 * batch * count**2 * width}, rest=14 * projection + across)


LTX = Family(
    name="ltx",
    model="LTXVideoTransformer3DModel",
    stacks=(Stack("transformer_blocks", features=3),),
    tokens=tokens,
    work=work,
    attentions={"attn1": False},
    parts=("attn1", "attn2", "ff"),
)

# What it gives

STEPS = 8
SPARSE = {"skip": {"policy": "sparge", "steps": "all", "tau_kv": 0.3, "probe_blocks": 1}, "blocks": {"size": 64}}


@pytest.fixture
def pipe(monkeypatch):
    """With its line in the table."""
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, LTX))
    return tiny_pipeline("ltx")


def run(pipe):
    return pipe(**tiny_inputs("ltx", steps=STEPS))[0]


def test_a_family_of_facts_attends_sparsely(pipe):
    """Tiles are left out, the probe tells what that costs, and with all of them kept nothing changes."""
    plain = run(pipe)
    accelerate_pipeline(pipe, "exact", **SPARSE)
    sparse, report = run(pipe), pipe.dit_accel.report()
    assert report.family == "ltx" and report.layers == ["transformer_blocks.0", "transformer_blocks.1"]
    assert report.left_out > 0.1 and report.fallbacks == []
    assert any(each.error > 0 for each in report.attentions)
    assert not torch.equal(sparse, plain)
    accelerate_pipeline(pipe, "exact", **SPARSE, tau_kv=0.0)
    torch.testing.assert_close(run(pipe), plain, rtol=1e-4, atol=1e-4)
    restore_pipeline(pipe)
    assert torch.equal(run(pipe), plain)


def test_a_family_of_facts_forecasts_layers(pipe):
    """At level layer steps between two computed ones run on forecasts of attention and MLP."""
    schedule = {"control": "interval", "warmup": 2, "interval": 3, "cooldown": 1}
    accelerate_pipeline(pipe, "exact", schedule=schedule, forecast={"level": "layer", "order": 1})
    run(pipe)
    report = pipe.dit_accel.report()
    assert report.steps_by_mode == {"full": 3, "update": 2, "dispatch": 3}
    assert report.computed_fraction == pytest.approx(5 / 8)
