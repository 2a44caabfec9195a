"""Attention in a run's report: the skipped share of all pairs of queries and keys."""

from types import SimpleNamespace

import pytest

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.loop.branch import BlockCall
from dit_accel.loop.tracker import StepMode
from dit_accel.models.block_costs import BlockCosts
from dit_accel.models.families.family import Attention, BlockWork
from dit_accel.sparse.site_state import EVERYTHING, HeadState, SiteState, TileState
from tests.tiny import tiny_output, tiny_pipeline

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
    shares = {(item.step, item.layer): item.density for item in report.attentions}
    for step in report.steps:
        original = [density for (index, _), density in shares.items() if index == step.index]
        assert step.attended == pytest.approx(sum(original) / len(original) if original else 1.0)
    assert report.attention_sparsity > 0


def test_samples_that_attend_apart_count_each():
    """Mochi attends to one prompt of a batch after the other: the share is the mean over prompts."""
    skip = {"policy": "sparge", "steps": "all", "top_k": 0.5}
    preset = load_preset("exact", model="mochi", schedule={"warmup": 2}, skip=skip, blocks=SMALL)
    pipe = accelerate_pipeline(tiny_pipeline("mochi"), preset)
    tiny_output(pipe, "mochi", steps=4, prompt=["a fox", "two whales"], height=96, width=96)
    report = pipe.dit_accel.report()
    assert not report.fallbacks
    for step in report.steps[2:]:
        original = [item.density for item in report.attentions if item.step == step.index]
        assert step.attended == pytest.approx(sum(original) / len(original), rel=0.02) and step.attended < 0.9


def test_rows_that_are_reused_count_too():
    """FlashOmni: pairs of reused rows, and of left-out tiles in the others, in DISPATCH steps alone."""
    report = report_of(
        "flux", "flux-flashomni-paper", steps=12, size=256, skip={"policy": "none"}, reuse={"tau_q": 0.9}, blocks=SMALL
    )
    modes = [(step.mode, step.attended) for step in report.steps]
    assert all(attended == 1 for mode, attended in modes if mode != "dispatch")
    assert any(attended < 1 for mode, attended in modes if mode == "dispatch")
    assert f"attention sparsity {report.attention_sparsity:.3f}" in str(report)


def test_models_whose_attentions_are_not_known_have_none():
    report = report_of("framepack", "balanced")
    assert report.attention_sparsity is None and "attention sparsity" not in str(report)


WORK = BlockWork(tiles={"attn": 60.0, "attn2": 40.0}, rest=200.0, rows=30.0, row_blocks=20.0, bias=8.0)


def state(measured_step=-1, probed=0.0, degraded=False, bias_coordinates=(), **densities):
    """A site of the block, as its latest call has left it."""
    tiles = TileState(densities=EVERYTHING._replace(**densities), measured_step=measured_step, probed=probed)
    return SiteState(tiles=tiles, heads=HeadState(degraded=degraded, bias_coordinates=bias_coordinates))


def costs_of(mode, level, sites, dense=()):
    """Costs of a block: pairs of queries and keys, and all else."""
    names = {"blocks.0": "attn", "blocks.0.attn2": "attn2"}
    attentions = [Attention(site, "blocks.0", name, None, name == "attn") for site, name in names.items()]
    call = SimpleNamespace(
        mode=mode,
        blocks=BlockCall(dense=set(dense)),
        tick=SimpleNamespace(step=4),
        branch=SimpleNamespace(sites=sites),
        site=lambda name, kind: sites[name],
    )
    return BlockCosts(SimpleNamespace(), {}, {"blocks.0": attentions}).computed(call, "blocks.0", WORK, level)


@pytest.mark.parametrize(
    ("level", "facts", "dense", "expected"),
    [
        ("layer", {}, (), (0.0, 0.0)),
        ("layer", {}, ("blocks.0",), (100.0, 250.0)),
        ("head", {"degraded": True}, (), (0.0, 0.0)),
        ("head", {"rows": 0.5, "row_blocks": 0.75, "tiles": 0.25}, (), (25.0, 30 * 0.5 + 20 * 0.75 + 200)),
        ("head", {"rows": 0.5}, ("blocks.0",), (100.0, 250.0)),
    ],
    ids=["layer", "layer-dense", "degraded", "head", "head-dense"],
)
def test_a_forecast_step_costs_what_its_level_computes(level, facts, dense, expected):
    """Nothing, all of a block that fell back, or at level head the rows and tiles that are not reused."""
    assert costs_of(StepMode.DISPATCH, level, {"blocks.0": state(**facts)}, dense) == pytest.approx(expected)


@pytest.mark.parametrize("mode", [StepMode.FULL, StepMode.UPDATE])
def test_a_computed_step_costs_all_but_the_tiles_that_it_leaves_out(mode):
    """Each attention skips its own tiles, samples count equally, and tiles computed by a probe are not skipped."""
    first = state(measured_step=4, attended=0.5, probed=0.1)
    second = state(measured_step=4, attended=0.25)
    older = state(measured_step=3, attended=0.1)
    assert costs_of(mode, "output", {}) == (100.0, 250.0)
    assert costs_of(mode, "output", {"blocks.0": first})[0] == pytest.approx(100 - 60 * 0.4)
    assert costs_of(mode, "output", {"blocks.0.attn2": second})[0] == pytest.approx(100 - 40 * 0.75)
    assert costs_of(mode, "output", {"blocks.0": older}) == (100.0, 250.0), "another step's"
    apart = {"blocks.0": first, "blocks.0, sample 2": second}
    assert costs_of(mode, "output", apart)[0] == pytest.approx(100 - 60 * (0.4 + 0.75) / 2)


@pytest.mark.parametrize(("remembered", "more"), [(0, 0), (1, 0), (3, 2)], ids=["none", "its own", "two older"])
def test_an_update_projects_once_more_for_each_older_step(remembered, more):
    site = state(measured_step=4, projected=0.5, bias_coordinates=(0.9, 0.8, 0.7)[:remembered])
    assert costs_of(StepMode.UPDATE, "head", {"blocks.0": site}) == pytest.approx((100.0, 250 + 8 * 0.5 * more))
