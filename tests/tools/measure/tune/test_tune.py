"""Whole tunings of tiny pipelines, and of the demo model in a few steps: results, files and recovery."""

import functools
import statistics
from dataclasses import replace

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from PIL import Image

from dit_accel import accelerate_pipeline, accelerated, load_preset, restore_pipeline
from dit_accel.errors import TuningError
from dit_accel.tools.demo import demo_names, demo_path, tuning_prompts
from dit_accel.tools.measure.metrics import latent_error, psnr
from dit_accel.tools.measure.tune import split_prompts, tune
from dit_accel.tools.measure.tune.axes import axes_of
from dit_accel.tools.measure.tune.result import Target, computed_fraction, conformal
from dit_accel.tools.measure.tune.runs import Figures, MeasuredRuns
from tests.models.tiny import pipeline
from tests.tiny import tiny_inputs

PROMPTS = ["a red fox", "two blue whales asleep", "a green heart", "snow"]
FORECASTS = {"schedule.target_error": 0.3, "schedule.warmup": 2}  # random weights forecast badly; this lets them


def arguments(name: str, **changes) -> dict:
    call = tiny_inputs(name, **{"steps": 6, "height": 32, "width": 32, **changes})
    return {key: value for key, value in call.items() if key not in ("prompt", "generator", "output_type")}


def tuned(name: str = "flux", preset: str = "balanced", **changes):
    settings = {"prompts": PROMPTS, "arguments": arguments(name), "evaluations": 3, **FORECASTS, **changes}
    if not {"target_psnr", "target_error"} & settings.keys():
        settings["target_psnr"] = 30
    return tune(pipeline(name), preset, **settings)


@functools.cache
def usual_result():
    return tuned()


class Interrupt(Exception):
    pass


def counting(after: int | None = None):
    """A progress callback that records the phases, and raises at one call."""
    phases = []

    def progress(phase, runs, expected):
        phases.append(phase)
        assert runs < expected
        if len(phases) - 1 == after:
            raise Interrupt

    return progress, phases


def measured_anew(name: str, preset, index: int) -> tuple[float, float, float]:
    """PSNR, latent error and computed fraction of one prompt's run, by plain calls of the pipeline."""
    results = []
    for choice in (None, preset):
        latents = []

        def keep(pipe, step, timestep, tensors, latents=latents):
            latents[:] = [tensors["latents"]]
            return tensors

        call = {"prompt": PROMPTS[index], "generator": torch.Generator().manual_seed(index), "output_type": "np"}
        with accelerated(pipeline(name), choice or "exact") as pipe:
            frames = pipe(**arguments(name), **call, callback_on_step_end=keep)[0]
            fraction = pipe.dit_accel.report().computed_fraction
            results.append(((frames * 255).round().astype("uint8"), latents[0], fraction))
    (plain, plain_latents, _), (fast, fast_latents, fraction) = results
    return psnr(fast, plain), latent_error(fast_latents, plain_latents), fraction


def test_figures_are_those_of_the_pipelines_own_runs():
    """The target is met on the held-out prompts, and the result's figures equal those of plain calls."""
    result = usual_result()
    assert result.met
    assert len(result.held_out) == 2
    for index, figures in zip((2, 3), result.held_out, strict=True):
        expected_psnr, error, fraction = measured_anew("flux", result.preset, index)
        assert figures.psnr == pytest.approx(expected_psnr, abs=0.05)  # frames are rounded once by torch, once by NumPy
        assert figures.latent_error == pytest.approx(error, rel=1e-5)
        assert figures.computed_fraction == fraction < 1
    assert statistics.fmean(run.psnr for run in result.held_out) >= 30


def test_a_closer_target_costs_more():
    close = tuned(target_error=0.02)
    assert close.met and statistics.fmean(run.latent_error for run in close.held_out) <= 0.02
    assert computed_fraction(usual_result().held_out) < computed_fraction(close.held_out)


def test_layers_get_thresholds_of_their_own(tmp_path):
    """Tiles are skipped in layers that tolerate it, and the file lists the thresholds layer by layer.

    An interrupted tuning keeps its layer measurements and plain runs; the next one repeats neither.
    """
    call = {"arguments": arguments("wan", height=64, width=64), "target_psnr": 20, "state": tmp_path / "state"}
    call |= {"blocks.size": 64, "skip.tau_kv": 0.1}
    interrupted, before = counting(6)
    with pytest.raises(Interrupt):
        tuned("wan", "wan21-sparge-balanced", progress=interrupted, **call)
    assert before == [*["plain runs"] * 2, "layer 1 of 2", "layer 2 of 2", *["plain runs"] * 2, "search"]
    progress, phases = counting()
    result = tuned("wan", "wan21-sparge-balanced", progress=progress, **call)
    assert set(phases) == {"search", "confirmation"}
    layers = result.preset.skip.layers
    assert list(layers) == list(result.curves) == ["transformer.blocks.0", "transformer.blocks.1"]
    sparsities = [taken.sparsity if taken else 0.0 for taken in result.chosen.values()]
    held_out = statistics.fmean(run.tile_sparsity for run in result.held_out)
    assert held_out == pytest.approx(statistics.fmean(sparsities), abs=0.1)
    for name, taken in result.chosen.items():
        assert layers[name] == (taken.changes if taken else {"policy": "none"})
        assert taken is None or taken.error <= result.setting["l1"]
    result.write(tmp_path / "mine.yaml")
    assert load_preset(tmp_path / "mine.yaml").skip == result.preset.skip
    sizes = []
    for number, shown in enumerate((result, usual_result())):
        shown.plot(tmp_path / f"{number}.png")
        sizes.append(Image.open(tmp_path / f"{number}.png").size)
    assert sizes[0][0] > 1.5 * sizes[1][0], "layers have a panel"


def test_level_head_tunes_rows_and_intervals():
    axes = axes_of(load_preset("flux-flashomni-paper"), by_layer=True)
    assert [axis.key for axis in axes] == [
        *("schedule.interval", "l1", "reuse.tau_q", "reuse.degrade_below", "forecast.order", "schedule.warmup")
    ]


@pytest.mark.parametrize("base", ["name", "path", "object"])
def test_the_file_is_a_preset_on_its_base(tmp_path, monkeypatch, base):
    """It loads as the tuned preset, wherever its base is; plain keywords are keys of their sections."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "own.yaml").write_text("base: balanced\nforecast: {order: 2}\n")
    start, expected = {
        "name": ("balanced", "balanced"),
        "path": ("presets/own.yaml", "../presets/own.yaml"),
        "object": (load_preset("balanced"), None),
    }[base]
    result = usual_result() if base == "name" else tuned(preset=start, evaluations=1)
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "mine.yaml"
    result.write(path)
    text = path.read_text()
    assert load_preset(path).model_dump() == result.preset.model_dump()
    assert yaml.safe_load(text).get("base") == expected
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    figures = result.figures()
    assert all(figures[key] in header for key in ("computed fraction", "PSNR", "latent error"))
    assert "confirmed on prompts that the search did not use" in header
    assert all(f"{key}  " in header for key in ("size", "steps", "device", "torch"))
    if expected is not None:
        replace(result, changes={**result.changes, "order": 3}).write(path)
        assert load_preset(path).forecast.order == 3


def test_an_interrupted_tuning_goes_on(tmp_path):
    """After a stop at any run, the total number of runs and the result are the same as without a stop."""
    progress, phases = counting()
    expected = tuned(progress=progress, evaluations=1)
    for after in (2, 7):
        state = tmp_path / str(after)
        interrupted, before = counting(after)
        with pytest.raises(Interrupt):
            tuned(state=state, progress=interrupted, evaluations=1)
        going_on, behind = counting()
        result = tuned(state=state, progress=going_on, evaluations=1)
        assert len(before) - 1 + len(behind) == len(phases)
        assert (result.setting, result.held_out) == (expected.setting, expected.held_out)
        assert {path.suffix for path in state.iterdir()} == {".json", ".safetensors"}
    again, phases = counting()
    tuned(state=state, progress=again, evaluations=1)
    assert phases == [], "a finished tuning needs no run"


CHANGES = {
    "target": {"target_psnr": 31},
    "held-out prompts": {"prompts": [*PROMPTS[:3], "rain"]},
    "seed": {"seed": 1},
    "preset": {"forecast.order": 3},
    "arguments": {"arguments": {**arguments("flux"), "height": 80}},
}


def test_a_changed_request_is_refused(tmp_path):
    """A folder of another tuning stays unchanged, and the message names the differences and the solution."""
    interrupted, _ = counting(0)
    with pytest.raises(Interrupt):
        tuned(state=tmp_path, progress=interrupted)
    before = (tmp_path / "state.json").read_text()
    for name, changes in CHANGES.items():
        with pytest.raises(TuningError, match=rf"differs in {name} .*name another output, or remove the folder"):
            tuned(state=tmp_path, **changes)
        assert (tmp_path / "state.json").read_text() == before


def test_what_held_out_prompts_miss_tightens_the_search(monkeypatch):
    """If the confirmation misses the target the search continues closer to the plain run until it is met."""
    measured = MeasuredRuns.figures

    def pessimistic(self, preset, indices):
        indices = list(indices)
        worse = 6.0 if indices[0] > 0 else 0.0  # held-out prompts come out 6 dB lower
        return [replace(figures, psnr=figures.psnr - worse) for figures in measured(self, preset, indices)]

    assert usual_result().circumstances["confirmations"] == "1"
    monkeypatch.setattr(MeasuredRuns, "figures", pessimistic)
    hard = tuned(evaluations=6, target_psnr=34)
    assert hard.met and statistics.fmean(run.psnr for run in hard.held_out) >= 34
    assert "tightened in between" in hard.circumstances["confirmations"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_psnr": 30, "target_error": 0.1}, "one target"),
        ({"target_psnr": -1}, "must be positive and finite, got -1"),
        ({"prompts": ["a", "a"]}, "at least 2 different prompts"),
        ({"coverage": 0.9}, r"coverage=0\.9 needs 9 prompts for tuning and 9 held out, got 2 and 2"),
        ({"coverage": 1}, "coverage must be above 0 and below 1"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(TuningError, match=message):
        tuned(**wrong)


def test_a_preset_without_thresholds_is_refused():
    with pytest.raises(TuningError, match="'exact' computes everything"):
        tune(pipeline("flux"), "exact", prompts=PROMPTS, target_psnr=30)


def test_prompts_split_into_disjoint_lists():
    """Tuning prompts come first, held-out ones behind them, and both lists have some, of every model the usual four."""
    for count in (2, 3, 7, 8, 12):
        prompts = [str(number) for number in range(count)]
        tuning, held_out = split_prompts(prompts)
        assert [*tuning, *held_out] == prompts[: len(tuning) + len(held_out)]
        assert 1 <= len(tuning) <= len(held_out) <= 4
    for name in (*demo_names(), "owner/model"):
        assert [len(part) for part in split_prompts(tuning_prompts(name))] == [4, 4], name


def test_the_demo_model_meets_its_target_on_other_prompts():
    """Trained weights, few steps, small images: the tuned preset also meets the target on prompts of neither list."""
    pipe = DiffusionPipeline.from_pretrained(demo_path("demo-flux")).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call = {"height": 64, "width": 64, "num_inference_steps": 6, "max_sequence_length": 32}
    prompts = tuning_prompts("demo-flux")
    result = tune(*(pipe, "balanced"), prompts=prompts[:4], target_psnr=32, arguments=call, evaluations=3)
    assert result.met
    assert computed_fraction(result.held_out) < 0.8
    qualities = []
    for seed, prompt in enumerate(prompts[4:6]):
        images = []
        for preset in ("exact", result.preset):
            with accelerated(pipe, preset):
                generator = torch.Generator().manual_seed(100 + seed)
                images.append(pipe(prompt, generator=generator, output_type="np", **call).images)
        qualities.append(psnr(*images))
    assert statistics.fmean(qualities) >= 32


def test_what_nine_of_ten_prompts_reach_becomes_the_calibration():
    """A preset's calibration promises 90%, so half of the prompts make none."""
    assert not Target.of(30, None, 0.5).calibrates
    prompts = [f"{count} red foxes" for count in range(18)]
    more = {"prompts": prompts, "tuning_prompts": 9, "held_out_prompts": 9, "evaluations": 1}
    result = tuned(coverage=0.9, arguments=arguments("flux", steps=3), **more)
    assert result.preset.description.endswith("tuned for PSNR ≥ 30 dB for 90% of prompts")
    ((bound, reached),) = result.preset.schedule.calibration
    assert bound == result.preset.schedule.target_error
    assert reached == pytest.approx(min(run.psnr for run in result.held_out), abs=0.01)
    assert load_preset(result.preset, target_psnr=30).schedule.bound == bound


def test_a_tuning_starts_from_the_target_error_of_a_target_psnr(tmp_path):
    """The result has its own target error, also as read from its file; the pipeline keeps the preset that it had."""
    base = tmp_path / "base.yaml"
    base.write_text("base: balanced\nschedule: {target_psnr: 30, calibration: [[0.3, 30.0]], warmup: 2}\n")
    settings = {"prompts": PROMPTS, "arguments": arguments("flux"), "evaluations": 1, "target_psnr": 30}
    accelerate_pipeline(pipeline("flux"), "exact")
    try:
        result = tune(pipeline("flux"), base, **settings, schedule={"target_psnr": 25})
        assert pipeline("flux").dit_accel.preset.name == "exact"
    finally:
        restore_pipeline(pipeline("flux"))
    assert result.evaluations[0][0]["schedule.target_error"] == pytest.approx(0.3, rel=0.15)
    result.write(tmp_path / "tuned.yaml")
    for preset in (result.preset, load_preset(tmp_path / "tuned.yaml")):
        assert preset.schedule.target_psnr is None
        assert preset.schedule.bound == result.setting["schedule.target_error"]


def test_the_margin_of_a_mean_leaves_its_standard_error():
    """The more prompts, the smaller; in dB of PSNR, or as a share of the allowed error."""
    for count in (2, 8):
        values = (39.0, 43.0) * (count // 2)
        figures = [Figures(value, value / 1000, computed_fraction=0.5, tile_sparsity=0) for value in values]
        doubt = statistics.stdev(values) / count**0.5
        assert Target("psnr", 40).slack(figures) == pytest.approx(1)
        assert Target("psnr", 40).slack(figures, cautious=True) == pytest.approx(1 - doubt)
        assert Target("latent_error", 0.05).slack(figures, cautious=True) == pytest.approx(1 - (41 + doubt) / 50)
    assert Target("psnr", 40).slack(figures[:1], cautious=True) == pytest.approx(-1)


def test_the_bound_is_that_of_conformal_prediction():
    """With n values the ⌊(n + 1)(1 − coverage)⌋-th worst; for few values the worst."""
    bounds = {(9, 0.9): 1, (19, 0.9): 2, (18, 0.9): 1, (8, 0.9): 1, (99, 0.95): 5, (1, 0.5): 1}
    for (count, coverage), bound in bounds.items():
        values = list(range(1, count + 1))
        assert conformal(values[::-1], coverage) == bound
        assert conformal(values, coverage, is_lower=False) == count + 1 - bound
