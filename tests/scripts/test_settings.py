"""The script that measures settings of presets: its lists, its table, and small runs of it."""

import json
import sys

import pytest

from scripts.research import settings
from scripts.research.setting_lists import FAMILIES, papers, tiles


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("study", settings.STUDIES)
def test_every_setting_is_a_preset_of_its_own(study, model):
    listed = list(settings.STUDIES[study](model))
    assert listed and len({(item.series, item.name) for item in listed}) == len(listed)


def test_presets_have_the_values_of_the_papers_rows():
    """The thresholds, the interval, the order and the share of FlashOmni's rows are in their names."""
    rows = [item for model in FAMILIES for item in papers.settings(model) if item.name.startswith("FlashOmni (")]
    assert len(rows) > 10
    for row in rows:
        tau_q, tau_kv, interval, order, share = row.name.partition("(")[2].partition(")")[0].split(", ")
        assert f"{row.preset.reuse.tau_q:.0%}, {row.preset.skip.tau_kv:.0%}" == f"{tau_q}, {tau_kv}"
        assert [row.preset.schedule.interval, row.preset.forecast.order] == [int(interval), int(order)]
        assert f"{row.preset.reuse.degrade_below:.0%}" == share


def test_tiles_are_skipped_alone_and_with_the_loop():
    """Every step is computed, except in the series that have a target of the loop."""
    for item in tiles.settings("demo-wan"):
        if item.series.startswith(tiles.LOOP):
            assert item.name.endswith(f"target {item.preset.schedule.target_error:g}")
        else:
            assert item.preset.schedule.interval == 1 and item.preset.skip.steps == "all"


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs the script on one prompt and few steps of a small size; returns its rows."""

    def run(*options):
        small = ["--prompts", "1", "--steps", "5", "--height", "64", "--width", "64", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["settings", *options, *small, "--output", str(tmp_path / "found")])
        settings.main()
        rows = json.loads((tmp_path / "found.json").read_text())["results"]
        assert (tmp_path / "found.md").read_text().count("\n") == len(rows) + 2
        return rows

    return run


def test_skipped_pairs_are_counted(measure):
    rows = measure("tiles", "--model", "demo-wan", "--frames", "9", "--only", "all tiles", "1.0 / N")
    assert {row["series"] for row in rows} == {"loop: all tiles", "single keys (FG-Attn)"}
    assert all((row["left_out"] == 0.0) == (row["series"] == "loop: all tiles") for row in rows)


def test_claims_of_a_paper_stand_beside_the_figures(measure):
    """A row of a paper has its PSNR and its sparsity; the presets of ours have neither."""
    (row,) = measure("papers", "--model", "demo-flux", "--only", "(5%, 15%, 4, 0, 0%)")
    assert (row["claimed_db"], row["claimed_sparsity"]) == (24.563, 0.28) and "| 28% |" in settings.table([row])
