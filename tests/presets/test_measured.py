"""Headers of presets say what the JSON files of docs/results hold."""

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from dit_accel.presets import measured, preset_names, preset_path
from dit_accel.presets.measured import Run

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LOOP = ("quality", "balanced", "turbo")
VIDEO_MODELS = ("demo-wan", "demo-hunyuan")
UNTRAINED_GUIDANCE = 5.0
TILES = {"wan21-sparge-balanced": "demo-wan-long-loop", "hunyuan-sparge-balanced": "demo-hunyuan-means"}
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
def document(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def summary(steps: int, rows: list[tuple[float, float]]) -> Run:
    """Rows of computed fraction and PSNR, rounded as headers are."""
    computed, psnr = zip(*rows, strict=True)
    return Run(
        steps,
        (round(min(computed), 2), round(max(computed), 2)),
        (float(f"{min(psnr):.0f}"), float(f"{max(psnr):.0f}")),
    )


def loop_rows(name: str, steps: int, *, video: bool) -> list[tuple[float, float]]:
    """Of a closed-loop preset, as docs/results/conditions.json and the study of few steps have them."""
    cells = [row for row in document("conditions")["rows"] if row["name"] == name]
    rows = [
        row
        for row in cells
        if (row["cell"]["model"] in VIDEO_MODELS) == video
        and (row["cell"]["steps"] or 50) == steps
        and row["cell"]["dtype"] == "bfloat16"
        and row["cell"]["guidance"] != UNTRAINED_GUIDANCE
    ]
    if not video:
        rows += [row for row in document("few-steps-demo-flux")["rows"] if (row["name"], row["steps"]) == (name, steps)]
    return [(row["computed"], fmean(row["psnr"])) for row in rows if row["computed"] is not None]


@pytest.mark.parametrize("video", [False, True], ids=["images", "videos"])
@pytest.mark.parametrize("name", LOOP)
def test_closed_loop_headers_are_the_measured_cells(name, video):
    """Every number of steps that was measured has its line, with the range over models and schedules."""
    counts = (100, 50, 28, 20, 12, 8, 4)
    rows = {steps: loop_rows(name, steps, video=video) for steps in counts}
    expected = tuple(summary(steps, found) for steps, found in rows.items() if found)
    assert measured(f"video-{name}" if video else name) == expected


@pytest.mark.parametrize("name", [name for name in preset_names() if "/pareto-" in header(name)])
def test_other_headers_are_rows_of_the_sweep(name):
    """A preset that was measured on one demo model has the figures of its row."""
    model = "demo-wan" if name.startswith("wan21") else "demo-flux"
    (row,) = (each for each in document(f"pareto-{model}")["results"] if each["name"] == name)
    assert measured(name) == (summary(50, [(row["computed_fraction"], row["psnr_db"])]),)


@pytest.mark.parametrize("name", TILES)
def test_headers_of_tiles_are_rows_of_their_study(name):
    """The presets for long clips have a row of masks by tiles, residual and means, as they are."""
    rows = document(f"tile-sparsity-{TILES[name]}")["results"]
    rows = [row for row in rows if (row["schedule"], row["series"]) == ("loop", TILES_ROW)]
    found = [(summary(50, [(row["computed_fraction"], row["psnr_db"])]),) for row in rows]
    assert measured(name) in found


@pytest.mark.parametrize("name", [name for name in preset_names() if STEP.search(header(name))])
def test_step_times_are_those_of_the_speed_files(name):
    """Milliseconds of a step are rows of the files of whole steps, on the GPU that these name."""
    for what, gpu, plain, computed, tiles, forecast in STEP.findall(header(name)):
        timed = document(next(file for start, file in TIMES.items() if what.startswith(start)))
        ms = {row["run"]: row["ms"] for row in timed["rows"] if "ms" in row}
        assert timed["device"].endswith(gpu)
        assert int(plain) == round(ms["plain"])
        assert int(computed) == round(ms["50% of tiles left out" if tiles else "exact"])
        (dispatch,) = (row["ms_by_mode"]["dispatch"] for row in timed["rows"] if row["run"] == "DISPATCH, plain")
        assert forecast == ("" if tiles else str(round(dispatch)))
