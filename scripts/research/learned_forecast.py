#!/usr/bin/env python3
"""Compare forecasts that are fitted to a few plain runs with the closed loop's forecasts.

Plain runs of a demo model are recorded in memory. From their records, the output one to three steps later is forecast
by the loop and by each learned model, which is fitted to the first prompts and tested on the others. A model's error is
that of its forecasts over the loop's, both weighted as the loop counts them. Ridge strengths and the best model are
chosen on the other demo models. With `--closed`, loops that may choose the best learned forecast run too. Writes a JSON
file after every row, and at the end Markdown tables.

    python -m scripts.research.learned_forecast --output /tmp/learned --closed 8 20
    python -m scripts.research.learned_forecast --output /tmp/learned-wan --models demo-wan       # one process a model
    python -m scripts.research.learned_forecast --output /tmp/closed-wan --models demo-wan --closed 8 20 \
        --rows /tmp/learned-*.json
    python -m scripts.research.learned_forecast --output /tmp/all --rows /tmp/learned-*.json /tmp/closed-*.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import diffusers
import torch

from dit_accel import accelerated
from dit_accel.models import denoisers
from dit_accel.tools.compare.work import WorkCounter
from dit_accel.tools.demo import DEMOS, demo_path
from dit_accel.tools.metrics import IDENTICAL, psnr
from dit_accel.tools.origin import describe_run
from scripts.research.conditions import run_setting
from scripts.research.conditions_study.cells import Cell, Conditions
from scripts.research.conditions_study.report import at, by_cell
from scripts.research.few_steps_study.report import FRACTIONS, MANY, gain
from scripts.research.few_steps_study.variants import LOOP
from scripts.research.learned_study.closed_runs import Learned, learned_loop
from scripts.research.learned_study.coordinates import COORDINATES, DEGREES, Curve
from scripts.research.learned_study.fits import MODELS, RIDGES, train
from scripts.research.learned_study.runs import CORRECTED, Case, Run, cases, corrections, errors, record
from scripts.tables import write_table

STEPS = (4, 8, 12, 20, 28, 50)
FITTED = (3, 5)
TARGETS = (0.1, 0.2, 0.4, 0.8, 1.6)

Row = dict[str, Any]  # model, steps, group, gap, loop: error, learned: error ratios by "model, number of prompts"


def measure(conditions: Conditions, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a demo model."""
    for steps in options.steps:
        start = time.monotonic()
        with torch.no_grad():
            run = record(conditions, conditions.prompts, steps)
            tested = slice(max(FITTED) * run.branches, None)
            found = [*cases(run, tested, options.most), *corrections(run, tested, options.most)]
            measured = [errors_of(case, tested) for case in found]
        if options.rounds:
            fitted = slice(tested.start)
            network = train(found, fitted, options.rounds)
            with torch.no_grad():
                for case, own in zip(found, measured, strict=True):
                    made, _ = network(case, tested, fitted)
                    own[f"network, {max(FITTED)}"] = errors(made, run.outputs[case.target][tested].float())[None]
        yield from rows(conditions.cell.model, steps, found, measured)
        print(
            f"{conditions.cell.model}, {steps} steps: {len(found)} cases in {time.monotonic() - start:.0f} s",
            flush=True,
        )


def errors_of(case: Case, tested: slice) -> dict[str, torch.Tensor]:
    """Return the errors of all forecasts of a case, ``[strengths, tested samples]``."""
    run, right = case.run, case.run.outputs[case.target][tested].float()
    found = {"loop": errors(case.loop, right)[None]}
    known = run.features(case.at, case.target, tested)
    for count in FITTED:
        for name, model in MODELS.items():
            weights = model.fit(run, case.at, case.target, slice(count * run.branches), RIDGES)
            found[f"{name}, {count}"] = errors(model.forecast(known, weights), right)
    records = [run.outputs[step][tested].float() for step in case.at]
    for name in COORDINATES:
        for degree in DEGREES:
            weights = Curve(run.sigmas, name).weights(case.at, case.target, min(degree, len(case.at) - 1))
            made = sum(weight * value for weight, value in zip(weights, records, strict=True))
            found[f"{name}, degree {degree}"] = errors(made, right)[None]
    return found


def rows(model: str, steps: int, found: Sequence[Case], measured: Sequence[dict[str, torch.Tensor]]) -> Iterator[Row]:
    """Add up the errors of the cases by group and gap."""
    for group, gap in sorted({(case.group, case.gap) for case in found}):
        own = [number for number, case in enumerate(found) if (case.group, case.gap) == (group, gap)]
        sums = {
            name: sum(found[number].weight * measured[number][name].mean(dim=1) for number in own)
            for name in measured[0]
        }
        loop = sums.pop("loop")
        learned = {name: [round(ratio, 3) for ratio in (each / loop).tolist()] for name, each in sums.items()}
        error = round(loop.item() / sum(found[number].weight for number in own), 5)
        yield {"model": model, "steps": steps, "group": group, "gap": gap, "loop": error, "learned": learned}


def choice(rows: Sequence[Row], model: str, steps: int, names: Collection[str]) -> tuple[str, int]:
    """Return the learned model of these and the place of its strength that are best on the other demo models."""
    own = [row for row in rows if row["steps"] == steps]
    scores: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in [row for row in own if row["model"] != model] or own:
        for each, ratios in row["learned"].items():
            for place, ratio in enumerate(ratios):
                if each in names:
                    scores[each, place].append(ratio)
    return min(scores, key=lambda key: geometric_mean(scores[key]))


def left_out(rows: Sequence[Row], names: Collection[str]) -> dict[tuple[str, int, str, int], float]:
    """Return the error ratio of each row, with the settings that are best on the other demo models."""
    found = {}
    for row in rows:
        best, place = choice(rows, row["model"], row["steps"], names)
        found[row["model"], row["steps"], row["group"], row["gap"]] = row["learned"][best][place]
    return found


def closed_runs(rows: Sequence[Row], model: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the work and the PSNR of closed loops with and without learned forecasts."""
    conditions = conditions_of(model, options)
    known, conditions.prompts = conditions.prompts[: max(FITTED)], conditions.prompts[max(FITTED) :]
    counter = WorkCounter(denoisers(conditions.pipe))
    for steps in options.closed:
        start = time.monotonic()
        run = record(conditions, known, steps)
        with counter.calibrating():
            plain = conditions.run(conditions.prompts)
        for series, put_on in series_of(rows, conditions, run):
            for target in options.targets if options.series is None or series in options.series else ():
                made, computed = run_setting(
                    conditions, counter, partial(put_on, target_error=target), one_by_one=False
                )
                quality = [round(min(psnr(*pair), IDENTICAL), 2) for pair in zip(made, plain, strict=True)]
                found = {"cell": asdict(conditions.cell) | {"steps": steps}, "series": series, "target": target}
                yield found | {"computed": round(computed, 4), "psnr": quality}
        print(f"{model}, {steps} steps: closed runs in {time.monotonic() - start:.0f} s", flush=True)


def series_of(
    rows: Sequence[Row], conditions: Conditions, run: Run
) -> Iterator[tuple[str, Callable[..., AbstractContextManager[Any]]]]:
    """Yield the loop, and loops with the learned forecasts and corrections that are best on the other demo models."""
    yield LOOP, partial(accelerated, conditions.pipe, "balanced", per_prompt=True)
    names = [f"{name}, {max(FITTED)}" for name in MODELS]
    learned = []
    for own in kinds(rows):
        name, place = choice(own, conditions.cell.model, len(run.outputs), names)
        learned.append(Learned(run, MODELS[name.rpartition(", ")[0]], RIDGES[place]))
    forecasts, corrections = learned
    yield "forecasts", partial(learned_loop, conditions.pipe, forecasts, None)
    yield "corrections", partial(learned_loop, conditions.pipe, None, corrections)
    yield "both", partial(learned_loop, conditions.pipe, forecasts, corrections)
    for name in COORDINATES:
        yield f"{name}, corrections", partial(learned_loop, conditions.pipe, None, Curve(run.sigmas, name))


def kinds(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of forecasts, and those of corrections."""
    return [[row for row in rows if (row["group"] in CORRECTED) == corrected] for corrected in (False, True)]


def conditions_of(model: str, options: argparse.Namespace) -> Conditions:
    """Return a demo model's pipeline, with prompts for the fits and for the test."""
    cell = Cell(model, size=options.size, dtype=options.dtype)
    return Conditions(cell, str(demo_path(model)), max(FITTED) + options.tested, "tuning", options.device)


def gains(rows: Sequence[Row]) -> str:
    """Return a table in Markdown: gains over the loop at equal work in dB, of the mean prompt / of the worst."""
    series = list(dict.fromkeys(row["series"] for row in rows if row["series"] != LOOP))
    lines = [_line("model and steps", "fraction", "loop", *series), _line(*["---"] * (len(series) + 3))]
    for cell, own in by_cell(rows).items():
        for share in FRACTIONS.get(own[0]["cell"]["steps"], MANY):
            loop = at(own, share, fmean, LOOP)
            found = [gain(own, each, share) for each in series]
            if loop is not None and any(found):
                entries = ["" if each is None else f"{each[0]:+.1f} / {each[1]:+.1f}" for each in found]
                lines.append(_line(cell, share, f"{loop:.1f}", *entries))
    return "\n".join(lines) + "\n"


def tables(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown: change of the error in percent, mean of the demo models / the least gain."""
    counts = sorted({row["steps"] for row in rows})
    names = list(rows[0]["learned"])
    lines = [_line("learned, prompts", *(f"{steps} steps" for steps in counts)), _line(*["---"] * (len(counts) + 1))]
    for name in [*names, None]:
        ratios = left_out(rows, [name] if name else names)
        entries = [_change({key: ratio for key, ratio in ratios.items() if key[1] == steps}) for steps in counts]
        lines.append(_line(name or "**best of the others**", *entries))
    lines += ["", _line("records", "gap", "loop's error", *(f"{steps} steps" for steps in counts))]
    lines.append(_line(*["---"] * (len(counts) + 3)))
    best = left_out(rows, names)
    for place in sorted({(row["group"], row["gap"]) for row in rows}):
        own = [row["loop"] for row in rows if (row["group"], row["gap"]) == place]
        entries = [
            _change({key: ratio for key, ratio in best.items() if key[1] == steps and key[2:] == place})
            for steps in counts
        ]
        lines.append(_line(*place, f"{fmean(own):.3f}", *entries))
    return "\n".join(lines) + "\n"


def _change(ratios: dict[tuple[str, int, str, int], float]) -> str:
    """Mean change over the demo models and the largest, in percent."""
    by_model = defaultdict(list)
    for key, ratio in ratios.items():
        by_model[key[0]].append(ratio)
    means = [100 * (geometric_mean(each) - 1) for each in by_model.values()]
    return f"{fmean(means):+.0f} / {max(means):+.0f}" if means else ""


def _line(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"


def write(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the JSON file; a file of closed runs leaves out the rows of other files."""
    written = found | {"rows": []} if options.rows and options.closed else found
    options.output.with_suffix(".json").write_text(json.dumps(written, separators=(",", ":")) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the files")
    parser.add_argument("--models", nargs="+", choices=DEMOS, default=list(DEMOS))
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--tested", type=int, default=8, help="number of prompts, after those of the fits")
    parser.add_argument("--size", type=int, help="side in pixels; without it, the model's own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most", type=int, default=8, help="maximum number of steps of a run from which to forecast")
    parser.add_argument("--rounds", type=int, default=400, help="training steps of the network; 0 = none")
    parser.add_argument("--closed", type=int, nargs="*", default=(), help="numbers of steps of closed runs")
    parser.add_argument("--series", nargs="+", help="only these series of closed runs")
    parser.add_argument("--rows", type=Path, nargs="*", default=(), help="JSON files whose forecasts are taken over")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="target errors of closed runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    diffusers.utils.logging.set_verbosity_error()
    parts = [json.loads(file.read_text()) for file in options.rows]
    found: dict[str, Any] = {"run": describe_run(options.device), "strengths": RIDGES}
    found |= {kind: [row for part in parts for row in part[kind]] for kind in ("rows", "closed")}
    for model in options.models if not options.rows else ():
        for row in measure(conditions_of(model, options), options):
            found["rows"].append(row)
            write(found, options)
    text = "\n".join(map(tables, kinds(found["rows"])))
    for model in options.models if options.closed else ():
        for row in closed_runs(found["rows"], model, options):
            found["closed"].append(row)
            write(found, options)
    text += "\n" + gains(found["closed"]) if found["closed"] else ""
    write(found, options)
    write_table(options.output.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main()
