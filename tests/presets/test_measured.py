"""Figures of presets equal the JSON files of docs/results, and headers repeat the figures of 50 steps."""

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from dit_accel.cli.presets import span
from dit_accel.presets import measured, preset_names, preset_path

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LOOP = ("quality", "balanced", "turbo")
VIDEO_MODELS = ("demo-wan", "demo-hunyuan")
UNTRAINED_GUIDANCE = 5.0
TILES_ROW = "residual, means, tokens in tiles"
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


def figures(rows: list[tuple[float, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges of computed fraction and PSNR, rounded as the figures on file are."""
    computed, psnr = zip(*rows, strict=True)
    rounded = [round(min(computed), 2), round(max(computed), 2)]
    return tuple(rounded), (float(f"{min(psnr):.0f}"), float(f"{max(psnr):.0f}"))


def test_every_preset_on_file_ships_and_every_source_exists():
    on_file = json.loads(preset_path("balanced").with_name("measured.json").read_text(encoding="utf-8"))
    assert set(on_file) <= set(preset_names()) and {"exact", "flux-fgattn"}.isdisjoint(on_file)
    sources = {run["source"] for runs in on_file.values() for run in runs}
    assert len(sources) > 4 and [source for source in sources if not (RESULTS / source).exists()] == []


@pytest.mark.parametrize("name", [name for name in preset_names() if measured(name)])
def test_headers_repeat_the_figures_of_50_steps(name):
    """Each header names its models where needed; a preset without figures has none in its header."""
    (run,) = (run for run in measured(name) if run.steps == 50)
    text = re.sub(r"\n# *", " ", header(name))
    assert f"50 steps: {span(run.computed, 2)} of the FLOPs, {span(run.psnr, 0)} dB" in text
    if len(run.models) == 1:
        assert f"Measured on {run.models[0]}" in text
    assert run.dtype.replace("bfloat", "bf") in text


def test_presets_without_figures_claim_none():
    assert [name for name in preset_names() if not measured(name) and "Measured on" in header(name)] == []


def loop_rows(name: str, steps: int, *, video: bool) -> list[tuple[str, str, float, float]]:
    """Source, model, computed fraction and PSNR of a closed-loop preset, in the study of conditions or of few steps."""
    rows = [
        ("conditions.json", row["cell"]["model"], row["computed"], fmean(row["psnr"]))
        for row in document("conditions.json")["rows"]
        if row["name"] == name
        and (row["cell"]["model"] in VIDEO_MODELS) == video
        and (row["cell"]["steps"] or 50) == steps
        and row["cell"]["dtype"] == "bfloat16"
        and row["cell"]["guidance"] != UNTRAINED_GUIDANCE
        and row["computed"] is not None
    ]
    few = "few-steps-demo-flux.json"
    found = [row for row in document(few)["rows"] if (row["name"], row["steps"]) == (name, steps) and not video]
    return rows + [(few, row["model"], row["computed"], fmean(row["psnr"])) for row in found]


@pytest.mark.parametrize("video", [False, True], ids=["images", "videos"])
@pytest.mark.parametrize("name", LOOP)
def test_closed_loop_figures_are_the_measured_cells(name, video):
    """Every number of steps that was measured has its entry, with the range over models and schedules."""
    expected = []
    for steps in (100, 50, 28, 20, 12, 8, 4):
        if rows := loop_rows(name, steps, video=video):
            sources, models, computed, psnr = zip(*rows, strict=True)
            (source,) = set(sources)
            found = figures(list(zip(computed, psnr, strict=True)))
            expected.append((steps, *found, tuple(sorted(set(models))), "bfloat16", source))
    assert list(measured(f"video-{name}" if video else name)) == expected


@pytest.mark.parametrize("name", [name for name in preset_names() if name.removeprefix("video-") not in LOOP])
def test_other_figures_are_rows_of_their_source(name):
    """A preset that was measured on one demo model has the figures, the model and the dtype of its row."""
    for run in measured(name):
        settings, rows = document(run.source)["settings"], document(run.source)["results"]
        if run.source.startswith("tile-sparsity"):  # masks by tiles, residual and means, as they are
            rows = [row for row in rows if (row["schedule"], row["series"]) == ("loop", TILES_ROW)]
        else:
            named = name.replace("hunyuan", "flux") if run.source.startswith("flashomni-presets") else name
            rows = [row for row in rows if row["name"] == named]
        assert (run.models, run.dtype) == ((settings["model"],), settings["dtype"])
        psnr = "psnr" if run.source.startswith("flashomni-presets") else "psnr_db"
        assert (run.computed, run.psnr) in [figures([(row["computed_fraction"], row[psnr])]) for row in rows]


@pytest.mark.parametrize("name", [name for name in preset_names() if STEP.search(header(name))])
def test_step_times_are_those_of_the_speed_files(name):
    """Milliseconds of a step are rows of the files of whole steps, on the GPU that these name."""
    for what, gpu, plain, computed, tiles, forecast in STEP.findall(header(name)):
        timed = document(next(file for start, file in TIMES.items() if what.startswith(start)) + ".json")
        ms = {row["run"]: row["ms"] for row in timed["rows"] if "ms" in row}
        assert timed["device"].endswith(gpu)
        assert int(plain) == round(ms["plain"])
        assert int(computed) == round(ms["50% of tiles left out" if tiles else "exact"])
        (dispatch,) = (row["ms_by_mode"]["dispatch"] for row in timed["rows"] if row["run"] == "DISPATCH, plain")
        assert forecast == ("" if tiles else str(round(dispatch)))
