"""Figures of presets equal the JSON files of docs/results, and headers repeat the figures of 50 steps."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest

from dit_accel.cli.presets import span
from dit_accel.presets import measured, preset_names, preset_path
from scripts import choosing
from scripts import measured as generator

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TIMES = {
    "FLUX.1-dev at": "speed-flux",
    "Qwen-Image at": "speed-qwen-image",
    "FLUX.2-dev at": "speed-flux2",
    "HunyuanVideo at": "speed-hunyuan",
    "Wan 2.1 1.3B at": "speed-wan-1.3b",
}
STEP = re.compile(
    r"a step of (.+) on an (\w+): diffusers (\d+) ms, computed (\d+) ms(?: with (.+)|, forecast (\d+) ms)"
)


def header(name: str) -> str:
    return preset_path(name).read_text(encoding="utf-8")


@cache
def document(file: str) -> dict:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def test_every_preset_on_file_ships_and_every_source_exists():
    on_file = json.loads(preset_path("balanced").with_name("measured.json").read_text(encoding="utf-8"))
    assert set(on_file) <= set(preset_names()) and {"exact", "flux-fgattn"}.isdisjoint(on_file)
    sources = {run["source"] for runs in on_file.values() for run in runs}
    assert len(sources) > 4 and [source for source in sources if not (RESULTS / source).exists()] == []


def test_headers_repeat_the_figures_of_50_steps():
    """Each header names its models where needed; a preset without figures has none in its header."""
    for name in preset_names():
        text = re.sub(r"\n# *", " ", header(name))
        for run in (run for run in measured(name) if run["steps"] == 50):
            figures = f"{span(run['computed'], 2)} of the FLOPs, {span(run['psnr'], 0)} dB"
            assert f"{run['steps']} steps: {figures}" in text, name
            assert len(run["models"]) > 1 or f"Measured on {run['models'][0]}" in text, name
            assert run["dtype"].replace("bfloat", "bf") in text, name
        assert measured(name) or "Measured on" not in text, name


def test_figures_are_those_of_the_results():
    """`python -m scripts.measured` and `python -m scripts.choosing` would change nothing."""
    texts = {**generator.files(), choosing.PAGE: choosing.page()}
    assert [path.name for path, text in texts.items() if path.read_text(encoding="utf-8") != text] == []


def test_files_get_the_figures_of_other_results(monkeypatch):
    """Cells with other figures change the entries, the headers, the calibrations and the guide."""
    known = generator.document
    found = copy.deepcopy(known(generator.CONDITIONS))
    for row in found["rows"]:
        row |= {"computed": 0.13, "psnr": [40.0] * 8}
    changed = {generator.CONDITIONS: found}
    monkeypatch.setattr(generator, "document", lambda name: changed.get(name) or known(name))
    texts = generator.files()
    assert {path.stem for path, text in texts.items() if path.read_text(encoding="utf-8") != text} == {
        *("measured", "tuning", *(f"{kind}{level}" for kind in ("", "video-") for level in generator.LEVELS))
    }
    assert "50 steps: 0.13 of the FLOPs, 40 dB" in texts[preset_path("video-balanced")]
    assert "calibration: [[1.0, 40.0]]" in texts[preset_path("video-balanced")]
    assert "40.0 dB for images and 40.0 for videos" in texts[generator.GUIDE]


@pytest.mark.parametrize("name", [name for name in preset_names() if STEP.search(header(name))])
def test_step_times_are_those_of_the_speed_files(name):
    """Milliseconds of a step are rows of the files of whole steps, on the GPU that these name."""
    for what, gpu, plain, computed, tiles, forecast in STEP.findall(header(name)):
        timed = document(next(file for start, file in TIMES.items() if what.startswith(start)) + ".json")
        ms = {row["run"]: row["ms"] for row in timed["rows"] if "ms" in row}
        assert timed["device"].endswith(gpu) and int(plain) == round(ms["plain"])
        assert int(computed) == round(ms["50% of tiles left out" if tiles else "exact"])
        (dispatch,) = (row["ms_by_mode"]["dispatch"] for row in timed["rows"] if row["run"] == "DISPATCH, plain")
        assert forecast == ("" if tiles else str(round(dispatch)))
