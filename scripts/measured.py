#!/usr/bin/env python3
"""Write what docs/results says of presets: configs/measured.json, headers, calibrations, and the table of tuning.md.

    python -m scripts.measured
    python -m scripts.choosing  # afterwards: the tables of docs/guide/choosing.md

Presets of the closed loop have the range over all cells of docs/results/conditions.json, for each number of steps.
Others have the row of the file that measured.json names as their source.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from dit_accel.cli.presets import span
from dit_accel.presets import load_preset, preset_names, preset_path
from dit_accel.presets.loading import LEVELS
from scripts.research import psnr_calibration
from scripts.research.psnr_calibration import RESULTS, VIDEOS
from scripts.research.setting_lists.tiles import LOOP, TILED

FILE = preset_path("balanced").with_name("measured.json")
GUIDE = RESULTS.parents[1] / "guide" / "tuning.md"
CONDITIONS = RESULTS.name
BF16 = (CONDITIONS, "few-steps-demo-flux.json"), "closed loop", "bfloat16"  # files, series and dtype
INT8 = ("eight-bits.json",), "layers in int8", "bfloat16"
STEPS = (100, 50, 28, 20, 12, 8, 4)
UNTRAINED_GUIDANCE = 5.0  # of a cell that no range includes
PAIRS = re.compile(r"calibration: \[.*\]")
MOST = re.compile(r"[\d.]+( dB for images and )[\d.]+( for videos)")

Run = dict[str, Any]


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads(RESULTS.with_name(name).read_text(encoding="utf-8"))


def run_of(rows: Sequence[tuple[float, float]], models: set[str], steps: int, dtype: str, source: str) -> Run:
    """An entry of measured.json from computed fractions and PSNRs in dB."""
    computed, psnr = zip(*rows, strict=True)
    return {
        "steps": steps,
        "computed": [round(min(computed), 2), round(max(computed), 2)],
        "psnr": [float(f"{min(psnr):.0f}"), float(f"{max(psnr):.0f}")],
        "models": sorted(models),
        "dtype": dtype,
        "source": source,
    }


def loop_runs(level: str, kind: tuple[Sequence[str], str, str], *, video: bool) -> list[Run]:
    """Runs of a preset of the closed loop, by number of steps, each from the first of the files that has it."""
    sources, series, dtype = kind
    rows: dict[int, list[tuple[str, str, float, float]]] = {}
    for source in sources:
        known = set(rows)
        for row in document(source)["rows"]:
            cell = {"dtype": "bfloat16", "guidance": None, "steps": None} | row["cell"]
            is_counted = (cell["dtype"], row["series"]) == (dtype, series) and cell["guidance"] != UNTRAINED_GUIDANCE
            steps = cell["steps"] or 50
            if row["name"] == level and (cell["model"] in VIDEOS) == video and is_counted and steps not in known:
                rows.setdefault(steps, []).append((source, cell["model"], row["computed"], fmean(row["psnr"])))
    found = []
    for steps in STEPS:
        if steps in rows:
            ((source,), models) = ({row[place] for row in rows[steps]} for place in (0, 1))
            found.append(run_of([row[2:] for row in rows[steps]], models, steps, dtype, source))
    return found


def single_run(name: str, source: str) -> Run:
    """The run of another preset, which is one row of a file."""
    settings, results = document(source)["settings"], document(source)["results"]
    if source.startswith("tile-sparsity"):
        preset = load_preset(name)
        place = f"{preset.skip.top_k}, {preset.skip.refresh} steps, target {preset.schedule.target_error:g}"
        wanted = {"series": LOOP + TILED, "name": place}
    else:  # the FLUX presets with FlashOmni's method ran on all models
        wanted = {"name": name.replace("hunyuan", "flux") if source.startswith("flashomni-presets") else name}
    (row,) = (row for row in results if wanted.items() <= row.items())
    return run_of([(row["computed_fraction"], row["psnr_db"])], {settings["model"]}, 50, settings["dtype"], source)


def measurements() -> dict[str, list[Run]]:
    """Runs by preset; presets without figures are left out."""
    loops = {}
    for name in preset_names():
        plain = name.removesuffix("-8bit")
        if (level := plain.removeprefix("video-")) in LEVELS or name != plain:
            loops[name] = loop_runs(level, BF16 if name == plain else INT8, video=name.startswith("video-"))
    known = json.loads(FILE.read_text(encoding="utf-8"))
    others = {
        name: [single_run(name, run["source"]) for run in runs] for name, runs in known.items() if name not in loops
    }
    return dict(sorted((loops | others).items()))


def calibrated() -> dict[str, tuple[psnr_calibration.Pairs, list[str]]]:
    """Calibration of each preset that has one, and its rows of the guide's table."""
    found = psnr_calibration.runs(document(CONDITIONS)["rows"])
    kinds = {
        name: [run for run in found if (run.model in VIDEOS) == name.startswith("video")]
        for name in ("balanced", "video-balanced")
    }
    return {name: (psnr_calibration.calibration(some), psnr_calibration.left_out(some)) for name, some in kinds.items()}


def files() -> dict[Path, str]:
    """All files with figures, as docs/results has them."""
    runs, calibrations = measurements(), calibrated()
    lines = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(run)}" for run in some) + "\n ]"
        for name, some in runs.items()
    ]
    written = {FILE: "{\n" + ",\n".join(lines) + "\n}\n"}
    for name in preset_names():
        text = preset_path(name).read_text(encoding="utf-8")
        for run in runs.get(name, ()):
            figures = rf"({run['steps']} steps: )[\d. to]+( of the FLOPs, )[\d to]+( dB)"
            text = re.sub(figures, rf"\g<1>{span(run['computed'], 2)}\g<2>{span(run['psnr'], 0)}\3", text)
        if name in calibrations:
            text = PAIRS.sub(f"calibration: {[list(pair) for pair in calibrations[name][0]]}", text)
        written[preset_path(name)] = text
    guide = GUIDE.read_text(encoding="utf-8")
    for line in (line for _, lines in calibrations.values() for line in lines):
        guide = re.sub(rf"^\|{line.split('|')[1]}\|.*$", lambda _, row=line: row, guide, flags=re.MULTILINE)
    images, videos = (pairs[0][1] for pairs, _ in calibrations.values())
    return written | {GUIDE: MOST.sub(rf"{images}\g<1>{videos}\g<2>", guide)}


def main() -> None:
    for path, text in files().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
