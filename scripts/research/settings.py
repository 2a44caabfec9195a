#!/usr/bin/env python3
"""Measure many settings of presets on a demo model, against its plain runs of the same held-out prompts.

    python -m scripts.research.settings papers --dtype bfloat16 --output docs/results/papers-demo-flux
    python -m scripts.research.settings papers --only Presets --prompts 4 --dtype bfloat16 \
        --output docs/results/flashomni-presets-demo-flux
    python -m scripts.research.settings tiles --model demo-wan --frames 49 --height 512 --width 512 --prompts 3 \
        --split tuning --dtype bfloat16 --only loop --output docs/results/tile-sparsity-demo-wan-long-loop

`papers`: the rows of FlashOmni's and FG-Attn's tables, and the presets with FlashOmni's method. `tiles`: tiles of
attention that computed steps skip. Writes a JSON file after each setting, and at the end a table. Sparsity is the share
of query-key pairs that a whole run skips.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from dit_accel.presets import Preset
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.measure.metrics import IDENTICAL, clip_ssim, psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.demo_training.loading import AgainstPlain, demo_folder, held_out, load_demo
from scripts.research.setting_lists import FAMILIES, papers, tiles
from scripts.tables import as_json, write_table

STUDIES = {"papers": papers.settings, "tiles": tiles.settings}
COLUMNS = ("series", "setting", "computed", "sparsity", "claimed", "PSNR dB", "claimed", "worst", "SSIM")
Row = dict[str, Any]


def measured(study: AgainstPlain, preset: Preset) -> Row:
    """Means over prompts, and the PSNR of each in dB."""
    decibels, likeness, reports = [], [], []
    for output, plain, report in study.runs(preset):
        decibels.append(min(psnr(output, plain), IDENTICAL))
        likeness.append(clip_ssim(output, plain))
        reports.append(report)
    return {
        "psnr_db": statistics.fmean(decibels),
        "psnr_db_each": decibels,
        "ssim": statistics.fmean(likeness),
        "sparsity": statistics.fmean(report.attention_sparsity for report in reports),
        "left_out": statistics.fmean(report.left_out for report in reports),
        "computed_fraction": statistics.fmean(report.computed_fraction for report in reports),
    }


def table(rows: list[Row]) -> str:
    """Format the rows, one line per setting; figures that a file lacks are left empty."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        figures = (
            (row["computed_fraction"], ".3f"),
            (row.get("sparsity", row.get("left_out")), ".1%"),
            (row.get("claimed_sparsity"), ".0%"),
            (row["psnr_db"], ".1f"),
            (row.get("claimed_db"), ".1f"),
            (min(row["psnr_db_each"]), ".1f"),
            (row.get("ssim"), ".3f"),
        )
        cells = ["" if value is None else format(value, form) for value, form in figures]
        lines.append(f"| {row['series']} | {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--output", type=Path, required=True, help="stem of the .json and .md files")
    parser.add_argument("--model", choices=list(FAMILIES), default="demo-flux")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    for name in ("steps", "frames", "height", "width"):
        parser.add_argument(f"--{name}", type=int, help="default: the model's")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose series or name contains one of these")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    listed = [
        item
        for item in STUDIES[options.study](options.model)
        if any(part in item.series or part in item.name for part in options.only)
    ]
    values = {"num_inference_steps": options.steps, "num_frames": options.frames}
    values |= {"height": options.height, "width": options.width}
    changes = {key: value for key, value in values.items() if value is not None}
    arguments = demo_arguments(demo_folder(options.model)) | changes
    pipe, started = load_demo(options.model, options.dtype, options.device), time.perf_counter()
    study = AgainstPlain(pipe, arguments, held_out(options.model, options.prompts, options.split))
    settings = {key: getattr(options, key) for key in ("model", "prompts", "split", "dtype")} | arguments
    document: Row = {"settings": settings, **describe_run(pipe.device), "results": []}
    for setting in listed:
        row = setting._asdict()
        figures = measured(study, row.pop("preset"))
        document["results"].append({key: value for key, value in row.items() if value is not None} | figures)
        options.output.with_suffix(".json").write_text(as_json(document), encoding="utf-8")
        found = f"{figures['computed_fraction']:.3f}, {figures['psnr_db']:.1f} dB"
        print(f"{time.perf_counter() - started:4.0f} s  {setting.series}: {setting.name}: {found}", flush=True)
    write_table(options.output.with_suffix(".md"), table(document["results"]))


if __name__ == "__main__":
    main()
