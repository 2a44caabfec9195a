#!/usr/bin/env python3
"""Reproduce the papers' quality tables on a trained demo model: every row of the papers, with the figures measured
here.

FlashOmni's tables 1 to 3 with the baselines that run on our engine, its figure 9 (quality over warm-up steps) and its
figure 7 (density over steps, with SpargeAttn's); SpargeAttn tuned by its own procedure on five samples, and with one
threshold for all layers; FG-Attn's figure 9 (stability of masks) and its presets. PSNR, SSIM and, if installed, LPIPS
compare with the plain image or video; sparsity is the share of query-key pairs that a whole run skips.

    python -m scripts.research.paper_tables --model demo-flux --dtype bfloat16 --output papers-demo-flux
    python -m scripts.research.paper_tables --model demo-wan --dtype bfloat16 --output papers-demo-wan
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from dit_accel.presets import Preset
from dit_accel.tools.capture import AttentionTap
from dit_accel.tools.demo import demo_arguments
from dit_accel.tools.metrics import IDENTICAL, clip_ssim, lpips_distance, psnr
from dit_accel.tools.origin import describe_run
from scripts.demo_training import clips, prompts
from scripts.demo_training.against_plain import AgainstPlain
from scripts.demo_training.loading import demo_folder, load_demo, run_prompts, study_parser
from scripts.research.paper_study import settings, tuned
from scripts.research.paper_study.flips import Flips
from scripts.research.paper_study.report import density_plot, tables
from scripts.tables import write_table

FLIPS = ("demo-flux", "demo-wan")  # models of FG-Attn's kind


class Study(AgainstPlain):
    """Measures presets on prompts and compares them with the plain run."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lpips = lpips_distance(self.pipe.device)

    def measure(self, preset: Preset) -> dict[str, Any]:
        """Means over prompts, PSNR of each, and the share of computed attention pairs in each step."""
        figures, reports = [], []
        for made, plain, report in self.runs(preset):
            reports.append(report)
            figures.append({"psnr": min(psnr(made, plain), IDENTICAL), "ssim": clip_ssim(made, plain)})
            if callable(self._lpips):
                figures[-1]["lpips"] = self._lpips(made, plain)
        row = {key: statistics.fmean(each[key] for each in figures) for key in figures[0]}
        attended = zip(*([step.attended for step in report.steps] for report in reports), strict=True)
        return row | {
            "psnr_each": [each["psnr"] for each in figures],
            "sparsity": statistics.fmean(report.attention_sparsity for report in reports),
            "computed_fraction": statistics.fmean(report.computed_fraction for report in reports),
            "attended": [statistics.fmean(shares) for shares in attended],
        }


def main() -> None:
    parser = study_parser(__doc__, list(settings.MODELS), model="demo-flux", prompts=8, writes=".json, .md and .png")
    parser.add_argument("--steps", type=int, help="steps of a run; default, as for --height and --width: the model's")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="only rows whose source or name contains one of these; SpargeAttn by source",
    )
    options = parser.parse_args()
    arguments = demo_arguments(demo_folder(options.model))
    given = {"num_inference_steps": options.steps, "height": options.height, "width": options.width}
    arguments |= {key: value for key, value in given.items() if value is not None}
    held_out = (prompts if options.model == "demo-flux" else clips).held_out_prompts

    pipe = load_demo(options.model, options.dtype, options.device)
    steps, started = arguments["num_inference_steps"], time.perf_counter()
    document: dict[str, Any] = {
        "settings": {"model": options.model, "prompts": options.prompts, "dtype": options.dtype, **arguments},
        **describe_run(pipe.device),
    }

    def is_wanted(source: str, name: str = "") -> bool:
        return not options.only or any(wanted in source or wanted in name for wanted in options.only)

    if options.model in FLIPS and is_wanted("FG-Attn, figure 9"):
        flips = Flips()
        with AttentionTap(pipe, flips.visit):
            run_prompts(pipe, held_out(1, "tuning"), arguments)
        document["flips"] = flips.results()
    study = Study(pipe, arguments, held_out(options.prompts, "reporting"))

    def run(prompt: Any) -> None:
        run_prompts(pipe, [prompt], arguments)

    found = [(row.source, row.name, row.load(options.model), row) for row in settings.rows(options.model)]
    found = [each for each in found if is_wanted(*each[:2])]
    if is_wanted(tuned.SOURCE):
        curves = tuned.curves(pipe, options.model, run, held_out(tuned.SAMPLES, "tuning"), steps)
        found += [(tuned.SOURCE, name, preset, None) for name, preset in tuned.presets(options.model, curves)]
    document["results"] = []
    for source, name, preset, row in found:
        claimed = {} if row is None else {"psnr": row.psnr, "ssim": row.ssim, "sparsity": row.sparsity}
        figures = study.measure(preset)
        document["results"].append({"source": source, "name": name, "claimed": claimed, **figures})
        took = time.perf_counter() - started
        print(f"{took:4.0f} s  {source}: {name}: {figures['sparsity']:.3f}, {figures['psnr']:.1f} dB", flush=True)
        options.output.with_suffix(".json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    write_table(options.output.with_suffix(".md"), tables(document))
    density_plot(document["results"], options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
