"""The script that measures the cost of skipped tiles: its presets, one run, its interpolation and its tables."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.research.tile_sparsity import (
    ALL_TILES,
    MODELS,
    SCHEDULES,
    Study,
    earlier,
    place_of,
    plot,
    preset,
    psnr_at,
    settings,
    tables,
)
from tests.tiny import tiny_pipeline

ROOT = Path(__file__).parents[2]

RESULT = {"psnr_db_each": [30.0, 34.0], "error": 0.02, "worst_error": 0.1, "computed_fraction": 0.9}


def results():
    """Two settings of a series on each schedule."""
    listed = [each for each in settings("demo-wan") if each.series == "top_k"]
    return [
        {"schedule": schedule, "series": each.series, "label": each.label, "left_out": left, "psnr_db": db, **RESULT}
        for schedule in SCHEDULES
        for each, left, db in zip(listed, (0.2, 0.6), (40.0, 20.0), strict=False)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_is_a_preset_of_its_own(model):
    """All load, on both schedules, measure with a probe, and have distinct names."""
    listed = list(settings(model))
    assert len({(each.series, each.label) for each in listed}) == len(listed)
    for each in listed:
        every, loop = (preset(model, schedule, each.keys, 0.2) for schedule in SCHEDULES)
        assert every.schedule.interval == 1 and loop.schedule.target_error == 0.2
        assert every.skip == loop.skip
        assert each.series == ALL_TILES or (every.skip.probe_blocks > 0 and every.skip.steps == "all")


def test_a_setting_is_measured_against_the_plain_run():
    """With all tiles the video equals the plain one; with fewer it differs, and skipped tiles are counted."""
    pipe = tiny_pipeline("wan")
    arguments = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 5, "guidance_scale": 1.0}
    study = Study(pipe, arguments, [SimpleNamespace(prompt="a red fox", seed=1)])
    keys = next(each.keys for each in settings("demo-wan") if each.series == "top_k")
    whole, half = (study.measure(preset("demo-wan", "every", keys | {"skip.top_k": share})) for share in (1.0, 0.5))
    assert whole["left_out"] == 0.0 < half["left_out"] <= 0.5
    assert half["psnr_db"] < 80.0 < whole["psnr_db"]
    assert whole["worst_error"] < 1e-5 < half["error"] <= half["worst_error"]


def test_decibels_lie_between_settings():
    of_schedule = results()[:2]
    assert psnr_at(0.5, of_schedule) == pytest.approx(25.0)
    assert psnr_at(0.7, of_schedule) is None and psnr_at(0.1, []) is None


def test_tables_and_plot_show_every_run(tmp_path):
    text = tables(results())
    assert "| top_k | 35.0 | 30.0 | 25.0 |" in text
    assert text.count("| top_k | 0.85 | 20.0% | 40.0 | 30.0 | 0.0200 | 0.100 | 0.900 |") == 2
    plot(results(), "demo-wan", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_results_stand_in_the_order_of_their_settings():
    listed = results()
    backwards = listed[::-1]
    assert sorted(backwards, key=lambda r: place_of("demo-wan", r)) == listed


def test_an_earlier_run_must_have_the_same_settings(tmp_path):
    file = tmp_path / "tiles.json"
    assert earlier(file, {"steps": 5}) == {"settings": {"steps": 5}, "results": []}
    file.write_text('{"settings": {"steps": 9}, "results": []}', encoding="utf-8")
    with pytest.raises(SystemExit, match="was measured with"):
        earlier(file, {"steps": 5})


@pytest.mark.parametrize("model", MODELS)
def test_stored_results_are_read_under_the_names_of_today(model):
    """Series of the stored results are among the settings."""
    file = ROOT / "docs" / "results" / f"tile-sparsity-{model}.json"
    stored = earlier(file, json.loads(file.read_text(encoding="utf-8"))["settings"])["results"]
    assert stored == sorted(stored, key=lambda r: place_of(model, r))
    assert any("probe" in r["series"] for r in stored)
