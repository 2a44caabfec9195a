"""Attention layers of all families: time and lifetime of masks, block sizes, kernel options."""

import functools
import math

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated, load_preset, restore_pipeline
from dit_accel.errors import PresetError
from dit_accel.kernels import lower
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.packing import pack_bits
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.closed_loop import Gap
from dit_accel.loop.memory import MemoryPlan, ModelSize
from dit_accel.loop.storage import StoredHistory
from dit_accel.sparse import tile_site
from dit_accel.sparse.policies import POLICIES
from dit_accel.sparse.probe import adjusted
from dit_accel.sparse.site_state import SiteState, TileState
from tests.models.tiny import pipeline
from tests.tiny import tiny_output

STEPS = 8
PIPELINES = {"flux": "flux", "hunyuan": "hunyuan_video", "wan": "wan"}  # name: family
every_pipeline = pytest.mark.parametrize("name", PIPELINES)
every_level = pytest.mark.parametrize("level", ("output", "layer", "head"))
CASES = [("flux", "head"), ("hunyuan", "head"), ("wan", "head"), ("hunyuan", "output"), ("wan", "layer")]
every_case = pytest.mark.parametrize(("name", "level"), CASES)


def preset(name, level, *, every_step=False, **overrides):
    """FULL, then UPDATE and DISPATCH by turns, with half of the tiles on all steps that compute; or UPDATEs alone."""
    schedule = {"control": "interval", "warmup": 1, "interval": 1 if every_step else 2, "cooldown": 1}
    sections = {
        "schedule": schedule,
        "forecast": {"level": level, "method": "taylor", "order": 1},
        "skip": {"policy": "sparge", "steps": "all", "top_k": 0.5},
        "blocks": {"size": 64},
    }
    if level == "head":
        sections["reuse"] = {"tau_q": 0.6, "ramp": 0.01}
    return load_preset(load_preset("exact", model=PIPELINES[name], **sections), **overrides)


def call(name, **arguments):
    unguided = {"guidance_scale": 1.0} if name == "wan" else {}  # one branch in each
    return tiny_output(pipeline(name), name, steps=STEPS, **unguided, **arguments)


class Spy:
    """Records the masks that sites compute, and every plan and its options in their attention."""

    def __init__(self, monkeypatch):
        self.drawn, self.attended = [], []

        def attention(q, k, v, plan, **options):
            self.attended.append((plan, options))
            return original_attention(q, k, v, plan, **options)

        def noted(draw, inputs, config):
            self.drawn.append(config)
            return draw(inputs, config)

        original_attention = tile_site.attention
        for policy in POLICIES.values():
            monkeypatch.setattr(policy, "draw", functools.partial(noted, policy.draw))
        monkeypatch.setattr(tile_site, "attention", attention)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


def run(name, wanted, **arguments):
    """The result and the report of one accelerated call."""
    with accelerated(pipeline(name), wanted) as pipe:
        result, report = call(name, **arguments), pipe.dit_accel.report()
    assert report.fallbacks == []
    return result, report


@every_case
def test_masks_stay_until_they_are_due(name, level, spy):
    """Each block computes masks `refresh` steps after the last time, and not in between."""
    _, report = run(name, preset(name, level, **{"skip.refresh": 4}))
    blocks, drawn_at = len(report.layers), []
    for step in report.steps[1:]:
        if step.mode != "dispatch" and (not drawn_at or step.index - drawn_at[-1] >= 4):
            drawn_at.append(step.index)
    assert len(drawn_at) == 2 and len(spy.drawn) == blocks * len(drawn_at)


@every_level
@pytest.mark.parametrize("policy", ["sparge", "sla", "fg_attn"])
def test_memory_of_every_plane_is_expected_to_the_byte(policy, level):
    """Tiles, tiles for linear attention and single keys use exactly the memory expected before the first block runs."""
    skip = load_preset("video-balanced", model="wan", skip={"policy": policy, "steps": "all"}).skip
    _, report = run("wan", preset("wan", level).model_copy(update={"skip": skip}))
    assert report.cache_bytes == report.estimated_bytes > 0


@every_pipeline
def test_dense_blocks_run_as_plain_ones(name):
    """If every block has policy none, computed steps equal the plain pipeline's bit for bit."""
    plain = call(name)
    with accelerated(pipeline(name), preset(name, "output", every_step=True)) as pipe:
        sparse, names = call(name), pipe.dit_accel.report().layers
    assert not torch.equal(sparse, plain)
    layers = {block: {"policy": "none"} for block in names[1:]}
    one, report = run(name, preset(name, "output", every_step=True, **{"skip.layers": layers}))
    assert not torch.equal(one, plain)
    assert [min(row) < 1 for row in report.density] == [True] + [False] * (len(names) - 1)
    restored = {**layers, names[0]: {"top_k": 1.0}}
    every_tile, _ = run(name, preset(name, "output", every_step=True, **{"skip.layers": restored}))
    assert (every_tile - plain).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize(
    "overrides, options",
    [
        ({"skip.pv_threshold": -3.0}, {"pv_threshold": -3.0, "qk_dtype": None}),
        ({"kernels.qk_dtype": "int8"}, {"pv_threshold": None, "qk_dtype": "int8"}),
        ({"skip.pv_threshold": -3.0, "kernels.qk_dtype": "int8"}, {"pv_threshold": -3.0, "qk_dtype": "int8"}),
        ({"skip.means": True}, {"tile_means": True}),
    ],
    ids=["lambda", "int8", "both", "means"],
)
@every_pipeline
def test_kernel_options_reach_every_step(name, overrides, options, spy):
    """Computed steps and DISPATCH steps use them, and the result changes by what they skip or round."""
    exact, _ = run(name, preset(name, "head"))
    plain_options = len(spy.attended)
    result, report = run(name, preset(name, "head", **overrides))
    assert report.steps_by_mode["dispatch"] == 3 and report.steps_by_mode["update"] == 3
    with_options = spy.attended[plain_options:]
    assert len(with_options) == (STEPS - 1) * len(report.layers)
    assert all(options.items() <= used.items() for _, used in with_options)
    assert 0 < (result - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("level", ["layer", "head"])
def test_blocks_forecast_by_the_degree_that_the_loop_chose(level, monkeypatch):
    """A loop that stays at degree 1 gives the same with two records as with three; a higher degree differs."""
    adaptive = {"control": "adaptive", "warmup": 3, "target_error": 10.0, "max_interval": 2}

    def result_of(order, chosen):
        monkeypatch.setattr(Gap, "best_order", lambda gap, errors: min(max(errors), chosen))
        wanted = preset("flux", level, **{"schedule": adaptive, "forecast.order": order})
        result, report = run("flux", wanted)
        assert report.steps_by_mode["dispatch"] >= 2
        return result

    line = result_of(2, 1)
    torch.testing.assert_close(line, result_of(1, 1), rtol=1e-5, atol=1e-5)
    assert (line - result_of(2, 2)).norm() > 1e-3 * line.norm()


# The residual


@every_case
def test_residual_stands_for_what_kept_masks_leave_out(name, level):
    """Steps that compute masks are dense, in addition to sparse attention; the others are nearer to a plain run."""
    plain, kept = call(name), {"skip.refresh": 3}
    without, _ = run(name, preset(name, level, every_step=True, **kept))
    result, report = run(name, preset(name, level, every_step=True, **kept, **{"skip.residual": True}))
    assert 0 < (result - plain).norm() < 0.5 * (without - plain).norm()
    densities = {step: density for density, step in ((item.density, item.step) for item in report.attentions)}
    assert all(densities[step] == pytest.approx(1 + densities[step + 1]) for step in (1, 4))
    assert 0 < report.cache_bytes <= report.estimated_bytes


def test_single_keys_attend_in_full_where_they_are_drawn_from_all_scores():
    """FG-Attn's cached masks come from all scores, which that step then attends to; a mean query's know only some."""
    section = {"policy": "fg_attn", "steps": "all", "key_threshold": 2.0, "refresh": 3}
    for mask, drawn in (("exact", {1.0}), ("average_query", None)):
        skip = load_preset("video-balanced", model="wan", skip={**section, "mask": mask}).skip
        _, report = run("wan", preset("wan", "output", every_step=True).model_copy(update={"skip": skip}))
        densities = {step: {item.density for item in report.attentions if item.step == step} for step in range(1, 7)}
        assert all(max(densities[step]) < 1 for step in (2, 3, 5, 6))
        assert (densities[1] == densities[4] == {1.0}) == (drawn is not None)


def test_single_keys_of_a_ragged_sequence_come_to_less_than_all():
    """A ragged tile counts as a whole one, and so do single keys: 130 of 132 keys are not more than all."""
    tokens, block = 132, 64
    keys = torch.ones(1, 1, 3, 3 * block, dtype=torch.bool)
    keys[..., 0] = keys[..., block] = keys[..., tokens:] = False  # one key of each whole tile is left out
    tiles = torch.tensor([False, False, True]).expand(1, 1, 3, 3)
    keys[..., 2 * block :] = False  # the ragged tile attends as one
    rows = torch.ones(1, 3, 1, dtype=torch.bool)
    plan = lower(SparseSymbols(pack_bits(rows), pack_bits(tiles), 1, tokens, block, slice_bits=pack_bits(keys)))
    assert tile_site._density(plan).item() == pytest.approx((64 + 2 * 63) / 192)


def test_residuals_are_kept_as_float8():
    """The expected memory is correct."""
    sections = {"skip.refresh": 3, "skip.residual": True, "memory.history_dtype": "float8"}
    _, report = run("wan", preset("wan", "output", every_step=True, **sections))
    _, whole = run("wan", preset("wan", "output", every_step=True, **sections | {"memory.history_dtype": None}))
    assert report.cache_bytes == report.estimated_bytes < 0.6 * whole.cache_bytes


# The probe

PROBE_POLICIES = {
    "sparge": {"top_k": 0.4},
    "sla": {"critical": 0.3},
    "fg_attn": {"key_threshold": 1.0},
    "static": {"window": 96},
}


def probed(level, policy="sparge", **skip):
    """Wan, whose sequence has no text: with enough probe blocks the probe sees all tokens."""
    section = {"policy": policy, "steps": "all", "probe_blocks": 100, **PROBE_POLICIES[policy], **skip}
    wanted = preset("wan", level, every_step=level == "output")
    return wanted.model_copy(update={"skip": load_preset("video-balanced", model="wan", skip=section).skip})


def errors_of(report):
    return [item.error for item in report.attentions]


@pytest.fixture
def true_errors(monkeypatch):
    errors, original = [], tile_site.attention

    def attention(q, k, v, plan, **options):
        o = original(q, k, v, plan, **options)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
        dense = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
        errors.append(((o - dense).norm() / dense.norm()).item())
        return o

    monkeypatch.setattr(tile_site, "attention", attention)
    return errors


@pytest.mark.parametrize("policy", PROBE_POLICIES)
def test_probe_measures_against_dense_attention(policy, true_errors):
    """Over all rows the probe's error equals every computed call's error in float64; the result does not change."""
    plain, without = run("wan", probed("output", policy, probe_blocks=0), height=96, width=96)
    count = len(true_errors)
    result, report = run("wan", probed("output", policy), height=96, width=96)
    assert torch.equal(result, plain) and errors_of(without) == [None] * count
    assert errors_of(report) == pytest.approx(true_errors[count:], rel=1e-3, abs=1e-5)
    densities, expected = ([(at.layer, at.density) for at in each.attentions] for each in (report, without))
    assert densities == expected
    assert max(errors_of(report)) > 0.001


@pytest.mark.parametrize("level", ["output", "head"])
def test_probe_tightens_until_the_target_is_met(level):
    """Sites begin above their target, and come back under it; tiles are few here, so they swing about it."""
    target = 0.1
    with accelerated(pipeline("wan"), probed(level, probe_error=target)) as pipe:
        first, report = call("wan", height=96, width=96), pipe.dit_accel.report()
        assert torch.equal(call("wan", height=96, width=96), first)  # the next run starts afresh
        assert pipe.dit_accel.report().attentions == report.attentions
    errors, blocks = errors_of(report), len(report.layers)
    assert min(errors[:blocks]) > target > sum(errors[-blocks:]) / blocks


@pytest.mark.parametrize("count", [1, 2])
def test_every_row_has_its_turn_at_the_probe(count, monkeypatch):
    """From step to step the probe moves on, until it has measured every token of each site."""
    measured, original = [], tile_site.attention_error

    def attention_error(o, q, k, v, rows, **options):
        measured.append({token for row in rows for token in range(row.start, row.stop)})
        return original(o, q, k, v, rows, **options)

    monkeypatch.setattr(tile_site, "attention_error", attention_error)
    _, report = run("wan", probed("output", probe_blocks=count), height=96, width=96)
    sites, tokens = len(report.layers), max(token for seen in measured for token in seen) + 1
    turns = math.ceil(math.ceil(tokens / 64) / count)
    assert len(measured) // sites >= turns > 2
    for site in range(sites):
        seen = measured[site::sites][:turns]
        assert set().union(*seen) == set(range(tokens)) and seen[0] != seen[1]


@pytest.mark.parametrize(
    "error, kept", [(0.01, True), (0.04, True), (0.05, False), (math.nan, False), (math.inf, False)]
)
def test_masks_stay_only_where_their_error_is_known_to_be_small(error, kept):
    """An error that is no number is none that the target allows. It belongs to the growth that its masks had."""
    state = TileState(kept=(masks := object()), growth=0.9, drawn_growth=0.4)
    state.tighten(error, 0.04)
    assert (state.kept is masks) == kept
    assert state.growth == adjusted(0.4, error, 0.04) and state.drawn_growth == 0.4


@pytest.mark.parametrize("left", [0, 1, 2])
def test_what_a_site_keeps_has_its_coordinates(left):
    """After a smaller plan each value that stays is still found at the step that it was recorded at."""
    size, state = ModelSize(layout=TokenLayout(text=0, vision=128)), SiteState()
    coordinates = (6.0, 4.0, 2.0)
    values = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 128, 16)
    history, heads = state.history("mlp", MemoryPlan(2)), state.heads
    heads.attention = StoredHistory(2)
    for coordinate, value in zip(reversed(coordinates), values.flip(0), strict=True):
        history.record(coordinate, (value,))
        heads.attention.record(coordinate, (value,))
    heads.bias_stack, heads.bias_coordinates = MemoryPlan(2).biases.keep(values.clone()), coordinates
    state.adopt(MemoryPlan(left), size)
    for kept, own, count in (
        ([value for (value,) in history.values], history.coordinates, left + 1),
        ([value for (value,) in heads.attention.values], heads.attention.coordinates, left),
        (heads.bias_stack.read(), heads.bias_coordinates, left + 1),
    ):
        assert own == coordinates[:count] and len(kept) == count
        assert all(torch.equal(value, values[place]) for place, value in enumerate(kept))


def test_probe_ends_masks_that_pass_its_target():
    """With a residual, masks and residual are computed again after the first step whose error is too large."""
    _, kept = run("wan", probed("output", refresh=100, residual=True), height=96, width=96)
    target = 0.2 * max(item.error for item in kept.attentions if item.error is not None)
    _, held = run("wan", probed("output", refresh=100, residual=True, probe_error=target), height=96, width=96)
    drawn = [[item.step for item in report.attentions if item.error is None] for report in (kept, held)]
    blocks = len(kept.layers)
    assert drawn[0] == [1] * blocks and len(drawn[1]) > blocks
    assert all(
        (block, step + 1) in {(item.layer, item.step) for item in held.attentions if item.error is None}
        for block, step in ((item.layer, item.step) for item in held.attentions if (item.error or 0.0) > target)
        if step + 1 < STEPS
    )


def test_unknown_block_is_an_error_before_anything_changes():
    """The message lists the pipeline's blocks, and an earlier acceleration stays."""
    wanted = preset("wan", "output", **{"skip.layers": {"blocks.99": {"policy": "none"}}})
    pipe = accelerate_pipeline(pipeline("wan"), preset("wan", "output"))
    before, block = pipe.dit_accel, pipe.dit_accel.report().layers[0]
    with pytest.raises(PresetError, match=f"skip.layers .* names blocks.99, and this pipeline's blocks are {block}"):
        accelerate_pipeline(pipe, wanted)
    assert pipe.dit_accel is before
    restore_pipeline(pipe)
