"""The study of little work: figures, settings for a fraction, and a run at toy size."""

import json
import sys

import pytest
import torch

from scripts.demo_training import clips, prompts
from scripts.demo_training.judging import attributes, differences
from scripts.demo_training.textures import draw_texture_scene
from scripts.research import low_work
from scripts.research.low_work_study.report import tables
from scripts.research.low_work_study.runs import near


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 9, 3, 32, 32)], ids=["pictures", "clips"])
def test_equal_pictures_do_not_differ(shape):
    """Compared with themselves: the PSNR of equal images, ratios of 1, distances of 0, for each prompt."""
    made = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = differences(made, made)
    assert found["psnr"] == [100.0] * 2
    assert found["ssim"] == found["sharpness"] == found["contrast"] == [1.0] * 2
    assert found["colour"] == found["histogram"] == [0.0] * 2
    assert "lpips" not in found


def test_colours_sharpness_and_contrast_tell_what_changed():
    """Brighter by 0.1 is a shift of exactly 25.5 grey levels; a paler image has less contrast and sharpness."""
    plain = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) / 2
    brighter, paler = differences(plain + 0.1, plain), differences(0.25 + (plain - 0.25) / 2, plain)
    assert brighter["colour"] == brighter["histogram"] == [pytest.approx(25.5, abs=0.01)]
    assert brighter["sharpness"] == brighter["contrast"] == [pytest.approx(1.0, abs=1e-3)]
    assert paler["sharpness"] == paler["contrast"] == [pytest.approx(0.5, abs=1e-3)]
    assert paler["histogram"][0] > paler["colour"][0]


def test_pictures_are_moved_as_a_whole():
    """The histogram's distance knows nothing of where pixels are."""
    plain = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert differences(plain.flip(-1), plain)["histogram"] == [0.0]


def test_attributes_are_read_by_what_a_prompt_shows():
    """Images and videos have their own readers, and textures have none."""
    assert {"shape", "all"} <= attributes(torch.rand(1, 3, 64, 64), prompts.held_out_prompts(1)).keys()
    assert {"motion", "all"} <= attributes(torch.rand(1, 5, 3, 64, 64), clips.held_out_prompts(1)).keys()
    textures = prompts.held_out_prompts(1, draw=draw_texture_scene, write=lambda scene, rng: "")
    assert attributes(torch.rand(1, 3, 64, 64), textures) is None


@pytest.mark.parametrize("computed, wanted", [(0.1, 0.1), (0.104, 0.1), (0.125, 0.12), (0.14, None), (0.5, None)])
def test_a_setting_counts_for_a_fraction_that_it_is_near_to(computed, wanted):
    """Within a twentieth of it."""
    assert near(computed, (0.1, 0.12, 0.16)) == wanted


def test_tables_name_what_failed_and_what_was_left_out():
    """They follow the settings, in which every row has the share of correct prompts."""
    common = {"model": "m", "steps": 50, "prompts": 2, "right": {"all": 0.5}, "psnr": [30.0, 20.0], "ssim": [0.9, 0.8]}
    rows = [
        {**common, "series": "plain", "name": "plain", "computed": 1.0},
        {**common, "series": "mine", "name": "mine 1", "computed": 0.1, "at": 0.1},
        {"model": "m", "steps": 50, "series": "mine", "name": "mine 2", "error": "ValueError: no"},
        {"model": "m", "steps": 50, "series": "mine", "name": "mine 3", "computed": 0.5},
    ]
    told = tables(rows, {"LPIPS": "it is not here"})
    assert "| mine | 0.500 / 25.0 |" in told
    assert "| mine | mine 1 | 0.100 | 2 | 0.500 | 25.0 | 0.850 |" in told
    assert "Failed: m, 50 steps, mine 2: ValueError: no" in told
    assert "Left out: LPIPS, because it is not here." in told
    assert "mine 3" not in told


@pytest.mark.parametrize("mode", ["low", "few"])
def test_settings_are_measured_beside_the_plain_run(tmp_path, mode, monkeypatch):
    """Rows of the loop, brought to the fraction by its target, and of its rivals; tables, a figure and a sheet."""
    few = mode == "few"
    options = ["--smoke", "--models", "demo-flux", "--output", str(tmp_path / "found")]
    monkeypatch.setattr(
        sys, "argv", ["low_work.py", *options, *(["--few-steps", "8", "--set", "warmup=3"] if few else [])]
    )
    low_work.main()
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [row for row in found["rows"] if row["series"] != "plain"]
    assert not [row for row in rows if "error" in row]
    measured = [row for row in rows if "psnr" in row]
    assert {"dit-accel", "SeaCache", "TaylorSeer lite (diffusers)"} <= {row["series"] for row in measured}
    assert all(len(row["psnr"]) == len(row["sharpness"]) == row["prompts"] == 1 for row in measured)
    for row in rows:
        assert few or ("psnr" in row) == (near(row["computed"], (0.25,)) is not None)
    stem = "found-demo-flux-8-steps" if few else "found-demo-flux"
    assert all((tmp_path / name).is_file() for name in ("found.md", f"{stem}.png", f"{stem}-sheet.png"))
