"""What a run's report says of its attention: the share of all pairs of queries and keys that it left out."""

import pytest

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.tools.testing import tiny_output, tiny_pipeline

STEPS = 6
EVERY_OTHER = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 0}  # steps 3 and 5 are forecast
SMALL = {"size": 64}  # tokens


def report_of(name, preset, steps=STEPS, size=None, **overrides):
    pipe = accelerate_pipeline(tiny_pipeline(name), preset, **overrides)
    tiny_output(pipe, name, steps=steps, **({} if size is None else {"height": size, "width": size}))
    return pipe.dit_accel.report()


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_forecast_steps_leave_out_all_pairs(name):
    assert report_of(name, "exact").attention_sparsity == 0.0
    for level in ("output", "layer"):
        report = report_of(name, "balanced", schedule=EVERY_OTHER, forecast={"level": level})
        assert [step.attended for step in report.steps] == [1, 1, 1, 0, 1, 0]
        assert report.attention_sparsity == pytest.approx(2 / 6)


def test_tiles_count_in_the_steps_that_leave_them_out():
    """Half of the tiles of each row, which is one of two, in all steps but the warm-up."""
    skip = {"policy": "sparge", "steps": "all", "top_k": 0.5}
    report = report_of("wan", "exact", schedule={"warmup": 2}, skip=skip, blocks=SMALL)
    shares = {(each.step, each.layer): each.density for each in report.attentions}
    for step in report.steps:
        own = [density for (index, _), density in shares.items() if index == step.index]
        assert step.attended == pytest.approx(sum(own) / len(own) if own else 1.0)
    assert report.attention_sparsity > 0


def test_samples_that_attend_apart_count_each():
    """Mochi attends over one prompt of a batch after the other: the share is the mean of what each attended to."""
    skip = {"policy": "sparge", "steps": "all", "top_k": 0.5}
    preset = load_preset("exact", model="mochi", schedule={"warmup": 2}, skip=skip, blocks=SMALL)
    pipe = accelerate_pipeline(tiny_pipeline("mochi"), preset)
    tiny_output(pipe, "mochi", steps=4, prompt=["a fox", "two whales"], height=96, width=96)
    report = pipe.dit_accel.report()
    assert not report.fallbacks
    for step in report.steps[2:]:
        own = [each.density for each in report.attentions if each.step == step.index]
        assert step.attended == pytest.approx(sum(own) / len(own), rel=0.02) and step.attended < 0.9


def test_rows_that_are_reused_count_too():
    """FlashOmni: pairs of reused rows, and of left-out tiles in the others, in DISPATCH steps alone."""
    report = report_of(
        "flux", "flux-flashomni", steps=12, size=256, skip={"policy": "none"}, reuse={"tau_q": 0.9}, blocks=SMALL
    )
    modes = [(step.mode, step.attended) for step in report.steps]
    assert all(attended == 1 for mode, attended in modes if mode != "dispatch")
    assert any(attended < 1 for mode, attended in modes if mode == "dispatch")
    assert f"attention sparsity {report.attention_sparsity:.3f}" in str(report)


def test_models_whose_attentions_are_not_known_have_none():
    report = report_of("framepack", "balanced")
    assert report.attention_sparsity is None and "attention sparsity" not in str(report)
