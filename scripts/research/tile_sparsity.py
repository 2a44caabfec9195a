#!/usr/bin/env python3
"""Measure how close a demo video stays to the plain run, by the share of tiles that computed steps skip.

Settings: SpargeAttn's share (top_k) and mass (tau_kv) of tiles, the same for all layers and steps; the same with a
probe, where each layer and step finds its own density for one target error; skipped tiles that count by their means;
masks that are kept, alone and with the residual of the skipped tiles; a longer warm-up; and FG-Attn's single keys. Each
runs with every step computed, so that only tiles matter, and with the closed loop's steps. Held-out prompts, PSNR
against the plain run. Writes a JSON file after each setting, which a run with the same options extends; then tables
and a plot.

    # minutes
    python -m scripts.research.tile_sparsity --output docs/results/tile-sparsity-demo-hunyuan --schedules every
    python -m scripts.research.tile_sparsity --output docs/results/tile-sparsity-demo-hunyuan --schedules loop
    python -m scripts.research.tile_sparsity --output docs/results/tile-sparsity-demo-wan-long --model demo-wan \
        --frames 49 \
        --height 512 --width 512 --dtype bfloat16 --schedules every
    python -m scripts.research.tile_sparsity --output docs/results/tile-sparsity-demo-wan-long-loop --model demo-wan \
        --frames 49 --height 512 --width 512 --dtype bfloat16 --split tuning --prompts 3 --schedules loop \
        --targets 0.07 0.15 0.3 0.6 --only "all tiles" "residual, means"
    python -m scripts.research.tile_sparsity --output /tmp/tiles --steps 20 --prompts 1 --only residual \
        --schedules every
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dit_accel import load_preset
from dit_accel.presets import Preset
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.figures import SERIES_COLOURS, SERIES_MARKERS, best_settings, new_figure, tidy_axes
from dit_accel.tools.metrics import psnr
from dit_accel.tools.origin import describe_run
from scripts.demo_training import clips
from scripts.demo_training.against_plain import AgainstPlain
from scripts.demo_training.loading import demo_folder, load_demo, study_parser
from scripts.tables import write_table

MODELS = {"demo-hunyuan": "hunyuan_video", "demo-wan": "wan"}
SCHEDULES = {"every": "every step computed", "loop": "the closed loop's steps"}
WARMUP = 3  # dense steps, as in the video presets
ALL_TILES = "all tiles"
SHARES = (0.3, 0.4, 0.5, 0.7)  # of the tiles; the table interpolates between settings
PROBE_BLOCKS = 4
ERRORS = {"demo-hunyuan": (0.02, 0.04, 0.06, 0.1), "demo-wan": (0.03, 0.06, 0.1, 0.16)}  # the probe's targets


class Setting(NamedTuple):
    """One way to skip tiles: its series, the varied value, and the preset's keys."""

    series: str
    label: str
    keys: dict[str, Any]


def settings(model: str) -> Iterator[Setting]:
    """All settings to compare on a demo model; blocks have 64 tokens unless the series says otherwise."""
    yield Setting(ALL_TILES, "", {})
    for share in (0.85, 0.7, 0.6, 0.5, 0.4):
        yield Setting("top_k, blocks of 128", f"{share}", _keys(128, top_k=share))
        yield Setting("top_k", f"{share}", _keys(64, top_k=share))
    for mass in (0.01, 0.03, 0.1, 0.2, 0.3) if model == "demo-wan" else (0.003, 0.01, 0.03, 0.1):
        yield Setting("tau_kv", f"{mass}", _keys(64, tau_kv=mass))
    for error in ERRORS[model]:
        yield Setting("top_k, probe", f"e = {error}", _keys(64, top_k=0.3, probe_error=error))
        yield Setting("tau_kv, probe", f"e = {error}", _keys(64, tau_kv=0.5, probe_error=error))
    for share in (0.6, 0.45):
        yield Setting("top_k, warm-up of 10 steps", f"{share}", _keys(64, top_k=share) | {"schedule.warmup": 10})
        yield Setting("top_k, masks kept 4 steps", f"{share}", _keys(64, top_k=share, refresh=4))
    for refresh, share in ((3, 0.3), (4, 0.3), (6, 0.3), (8, 0.2), (16, 0.3), (16, 0.2)):
        keys = _keys(64, top_k=share, refresh=refresh, residual=True)
        yield Setting("residual", f"{share}, {refresh} steps", keys)
    for error in ERRORS[model]:
        keys = _keys(64, top_k=0.2, refresh=16, residual=True, probe_error=error)
        yield Setting("residual, probe", f"e = {error}", keys)
    for order in ("raster", "tiles"):
        series = "means" if order == "raster" else "means, tokens in tiles"
        for share in (0.7, 0.5, 0.3):
            keys = _keys(64, top_k=share, means=True) | {"blocks.token_order": order}
            yield Setting(f"top_k, {series}", f"{share}", keys)
        for mass in (0.1, 0.2, 0.35, 0.5):
            keys = _keys(64, tau_kv=mass, means=True) | {"blocks.token_order": order}
            yield Setting(f"tau_kv, {series}", f"{mass}", keys)
    for order in ("raster", "tiles"):
        series = "means" if order == "raster" else "means, tokens in tiles"
        kept = ((4, 0.3), (8, 0.3), (8, 0.2), (8, 0.1), (16, 0.5), (16, 0.3), (16, 0.2), (16, 0.1), (32, 0.2))
        for refresh, share in kept:
            section = {"top_k": share, "refresh": refresh, "residual": True, "means": True}
            keys = _keys(64, **section) | {"blocks.token_order": order}
            yield Setting(f"residual, {series}", f"{share}, {refresh} steps", keys)
    for level in (0.2, 0.4, 0.7, 1.0):
        yield Setting("single keys (FG-Attn)", f"{level} / N", _keys(64, policy="fg_attn", key_threshold=level))


def _keys(block: int, policy: str = "sparge", **skip: Any) -> dict[str, Any]:
    """Keys of a preset; every run has a probe, which only measures if it has no target."""
    section = {"policy": policy, "steps": "all", "probe_blocks": PROBE_BLOCKS, **skip}
    return {"skip": section, "blocks.size": block, "schedule.warmup": WARMUP}


def preset(model: str, schedule: str, keys: dict[str, Any], target: float | None = None) -> Preset:
    """Preset of a setting on one of the schedules; `target` is the loop's, default: its preset's."""
    if schedule == "loop":
        keys = keys if target is None else keys | {"schedule.target_error": target}
        return load_preset(load_preset("video-balanced", model=MODELS[model]), **keys)
    return load_preset("exact", model=MODELS[model], **keys)


class Study(AgainstPlain):
    """Measures settings on prompts and compares them with the plain run."""

    def measure(self, wanted: Preset) -> dict[str, Any]:
        """PSNR of each prompt in dB, and means over prompts: share of tiles skipped in computed steps, FLOPs, and the
        probe's error, with its maximum.
        """
        decibels, reports = [], []
        for made, plain, report in self.runs(wanted):
            decibels.append(psnr(made, plain))
            reports.append(report)
        errors = [each.error for report in reports for each in report.attentions if each.error is not None]
        return {
            "psnr_db": statistics.fmean(decibels),
            "psnr_db_each": decibels,
            "left_out": statistics.fmean(report.left_out for report in reports),
            "computed_fraction": statistics.fmean(report.computed_fraction for report in reports),
            "error": statistics.fmean(errors) if errors else 0.0,
            "worst_error": max(errors, default=0.0),
        }


def earlier(file: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Read the document of an earlier run, or return an empty one; accept the old name of the probe's figures, "guard".

    Raises:
        SystemExit: the earlier run had other settings.
    """
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"settings": common, "results": []}
    if document["settings"] != common:
        raise SystemExit(f"{file} was measured with {document['settings']}; give the same settings or another --output")
    for result in document["results"]:
        result["series"] = result["series"].replace(", guard", ", probe")
    return document


def place_of(model: str, result: dict[str, Any]) -> tuple[int, int, float]:
    """Sort key of a result: schedule, then order of the settings, then the loop's target.

    Per-head densities, which presets no longer have, sort with their series.
    """
    order = [(each.series, each.label) for each in settings(model)]
    place = order.index((result["series"].removesuffix(", adaptive"), result["label"]))
    return list(SCHEDULES).index(result["schedule"]), place, result.get("target_error") or 0.0


def psnr_at(share: float, results: list[dict[str, Any]]) -> float | None:
    """PSNR of a series at a skipped share of tiles, interpolated between settings; None outside of them."""
    kept = best_settings([(1 - r["left_out"], r["psnr_db"]) for r in results])  # drops dominated ones
    points = sorted((1 - work, decibels) for work, decibels in kept)
    if not points or not points[0][0] <= share <= points[-1][0]:
        return None
    return float(np.interp(share, *zip(*points, strict=True)))


def tables(results: list[dict[str, Any]]) -> str:
    """Tables of PSNR by series at some shares, and of every run."""
    lines = []
    for schedule, title in SCHEDULES.items():
        of_schedule = [r for r in results if r["schedule"] == schedule]
        if not of_schedule:
            continue
        lines += [f"PSNR (dB) by skipped share of tiles, {title}:", ""]
        lines += [f"| | {' | '.join(f'{share:.0%}' for share in SHARES)} |", "|---|" + "---|" * len(SHARES)]
        for series in dict.fromkeys(r["series"] for r in of_schedule):
            figures = [psnr_at(share, [r for r in of_schedule if r["series"] == series]) for share in SHARES]
            lines.append(f"| {series} | {' | '.join('–' if f is None else f'{f:.1f}' for f in figures)} |")
        lines.append("")
    lines += ["| schedule | target | series | setting | skipped | PSNR dB | worst | error | worst error | computed |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        setting = f"{r['schedule']} | {r.get('target_error') or ''} | {r['series']} | {r['label']}"
        lines.append(
            f"| {setting} | {r['left_out']:.1%} | {r['psnr_db']:.1f} | {min(r['psnr_db_each']):.1f} "
            f"| {r['error']:.4f} | {r['worst_error']:.3f} | {r['computed_fraction']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], model: str, path: Path) -> None:
    """Plot PSNR against the skipped share, one panel per schedule; a line joins a series' best settings."""
    schedules = [schedule for schedule in SCHEDULES if any(r["schedule"] == schedule for r in results)]
    figure = new_figure(7.8 * len(schedules) + 1.0, 4.8)
    names = list(dict.fromkeys(r["series"] for r in results))
    for axes, schedule in zip(np.atleast_1d(figure.subplots(1, len(schedules), sharey=True)), schedules, strict=True):
        for number, series in enumerate(names):
            points = [
                (1 - r["left_out"], r["psnr_db"]) for r in results if (r["schedule"], r["series"]) == (schedule, series)
            ]
            if not points:
                continue
            kept, decibels = zip(*best_settings(points), strict=True)
            axes.plot(
                [100 * (1 - share) for share in kept],
                decibels,
                color=SERIES_COLOURS[number % len(SERIES_COLOURS)],
                marker=SERIES_MARKERS[number % len(SERIES_MARKERS)],
                linestyle="-" if number < len(SERIES_COLOURS) else "--",
                label=series,
                markersize=5,
            )
        axes.set_title(f"{model}: {SCHEDULES[schedule]}", loc="left")
        axes.set_xlabel("skipped tiles of computed steps (%)")
        tidy_axes(axes, grid="both")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.axes[0].set_ylabel("PSNR against the plain run (dB)")
    figure.savefig(path)


def main() -> None:
    parser = study_parser(__doc__, list(MODELS), model="demo-hunyuan", prompts=2, writes=".json, .md and .png")
    parser.add_argument("--split", choices=["reporting", "tuning"], default="reporting")
    parser.add_argument("--steps", type=int, help="steps of a run; default: the model's")
    for side in ("frames", "height", "width"):
        parser.add_argument(f"--{side}", type=int, help="of the video; default: the model's")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument(
        "--targets", nargs="+", type=float, default=[None], help="targets of the loop; default: its preset's"
    )
    parser.add_argument("--only", nargs="+", help="only series whose name contains one of these")
    options = parser.parse_args()

    wanted = options.only or [""]
    listed = [each for each in settings(options.model) if any(part in each.series for part in wanted)]
    if not listed:
        names = ", ".join(dict.fromkeys(each.series for each in settings(options.model)))
        parser.error(f"--only names no series; there are: {names}")
    arguments = demo_arguments(demo_folder(options.model))
    options.steps = arguments["num_inference_steps"] = options.steps or arguments["num_inference_steps"]
    shape = {"num_frames": options.frames, "height": options.height, "width": options.width}
    arguments |= {key: value for key, value in shape.items() if value is not None}
    pipe = load_demo(options.model, options.dtype, options.device)
    started = time.perf_counter()
    study = Study(pipe, arguments, clips.held_out_prompts(options.prompts, options.split))
    common = {key: getattr(options, key) for key in ("model", "prompts", "split", "steps", "dtype")}
    common |= {key: value for key, value in shape.items() if value is not None}
    document = earlier(options.output.with_suffix(".json"), common) | describe_run(pipe.device)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    targets = {"every": [None], "loop": options.targets}
    listed = list(product(options.schedules, listed))
    for schedule, each, target in ((*pair, target) for pair in listed for target in targets[pair[0]]):
        figures = study.measure(preset(options.model, schedule, each.keys, target))
        place = {"schedule": schedule, "series": each.series, "label": each.label}
        place |= {} if target is None else {"target_error": target}
        others = [r for r in document["results"] if not place.items() <= r.items()]
        document["results"] = sorted([*others, place | figures], key=lambda r: place_of(options.model, r))
        options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        setting = f"{schedule:5s} {target or '':4} {each.series:26s} {each.label:12s}"
        print(
            f"{time.perf_counter() - started:6.0f} s  {setting} {figures['left_out']:.1%}  {figures['psnr_db']:.1f} dB",
            flush=True,
        )
    write_table(options.output.with_suffix(".md"), tables(document["results"]))
    plot(document["results"], options.model, options.output.with_suffix(".png"))
    print(tables(document["results"]))


if __name__ == "__main__":
    main()
