#!/usr/bin/env python3
"""Compare loops that compute the branch without the prompt less often than the branch with it.

Guidance adds a multiple of the branches' difference to the branch with the prompt. The variants forecast that
difference instead of the second branch, so that a computed step can leave the second branch out: in the last part of
the steps, where the difference stays as it was, or as long as the expected errors of the difference stay within a
share of the target. Variants are compared with the loop at equal work. Writes a JSON file after every part, and at the
end a Markdown table.

    python -m scripts.research.guidance_difference --output /tmp/guidance --processes 12
    python -m scripts.research.guidance_difference --output /tmp/guidance --models demo-wan --steps 20 --prompts 4
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from dit_accel.kernels import weighted_sum
from dit_accel.loop import growth
from dit_accel.loop.closed_loop import ClosedLoop, Output, missed_weights
from dit_accel.loop.tracker import StepMode
from dit_accel.tools.compare.methods import Subject
from dit_accel.tools.demo import DEMOS
from scripts.research.conditions import measure
from scripts.research.conditions_study.cells import Cell
from scripts.research.conditions_study.report import Row, at, by_cell
from scripts.research.few_steps import put_on
from scripts.research.few_steps_study.report import FRACTIONS, MANY, gain
from scripts.research.few_steps_study.variants import LOOP, Variant
from scripts.tables import write_table

TARGETS = (0.1, 0.2, 0.4, 0.8, 1.6)
SCALE = 3.0  # guidance scale of all cells
PARTS = 4


class PairLoop(ClosedLoop):
    """Loop of one branch of two. The first forecasts its output, the second the difference between the outputs.

    Attributes:
        share: share of the target that the difference's expected errors may reach before it is computed again.
        tail: last share of the steps, in which the second branch never computes.
    """

    share = 0.0
    tail = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.leader: PairLoop = vars(self.gap).setdefault("leader", self)
        self.raw: Output = ()  # newest computed output
        self.latest: Output = ()  # output of this step, with which the pipeline continues
        self._until = 0  # next step in which the difference may be computed

    def mode(self, step: int, blocks_ready: bool = True) -> StepMode:
        if self.leader is self:
            return super().mode(step, blocks_ready)
        mode = self.gap.mode(step)
        if not len(self.outputs):
            return StepMode.UPDATE if mode is StepMode.DISPATCH else mode
        return StepMode.DISPATCH if step < self._until or self._in_tail(step) else mode

    def _in_tail(self, step: int) -> bool:
        return step >= (1 - self.tail) * len(self.course.coordinates)

    def forecast(self, step: int) -> Output:
        if self.leader is not self and self._in_tail(step):
            self.order = 0  # a polynomial fails far from its records
        self.latest = super().forecast(step)
        if self.leader is not self:
            self.latest = minus(self.leader.latest, self.latest)
        return self.latest

    def observe(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        self.raw = output
        if self.leader is self:
            self.latest = super().observe(step, output, used)
            return self.latest
        # The shift of the latents moves both outputs alike, so that the difference needs no response.
        difference = minus(self.leader.raw, output)
        self.latest = minus(self.leader.latest, super().observe(step, difference, used))
        size = (SCALE - 1) * used(difference[0]).float().norm() / used(output[0]).float().norm()
        self.measured = [*self.measured, size]
        return self.latest

    def correct(self, step: int, output: Output) -> tuple[Output, Output]:
        if self.leader is self:
            return super().correct(step, output)
        steps, self.forecast_steps = self.forecast_steps, []
        course, moves, coordinates = self.course, self.course.moves, self.course.coordinates
        if not steps or moves is None:
            return output, output
        method = self.gap.preset.forecast.method
        shares = [(coordinates[each], moves[-1][each] / moves[-1][step]) for each in steps]
        weights = missed_weights(
            method, self.outputs.coordinates, self.order, coordinates[step], shares, course.places()
        )
        parts = zip(output, *self.outputs.values, strict=True)
        return tuple(weighted_sum(each, [1.0 + weights[0], *weights[1:]]) for each in parts), output

    def decide(self, step: int, measured: Sequence[float]) -> float | None:
        if self.leader is self:
            return super().decide(step, measured)
        *measured, size = measured
        nodes, orders, damps = self._tested
        errors = {order: size * error for order, error in zip(orders, measured, strict=False)}
        order: float = self.gap.best_order(errors) if errors else 0
        if errors:
            self.go_on_with(order)
        if damps:
            self.refit(measured[-1])
        self._until = self._reach(step, nodes, order, errors.get(order, math.inf))
        return errors.get(order)

    def _reach(self, step: int, nodes: Sequence[float], order: float, error: float) -> int:
        """Return the first later step at which the expected errors exceed the share of the target."""
        later, counted = step + 1, 0.0
        while later < len(self.course.coordinates):
            expected = self.gap.expected_error(step, later, nodes, order, error, self.course)
            counted += self.course.weights[later] * expected
            if not counted <= self.share * self.gap.target_error:
                break
            later += 1
        return later


def minus(values: Output, others: Output) -> Output:
    """Return the differences of two outputs."""
    return tuple(value - other for value, other in zip(values, others, strict=True))


def _pair(**limits: float) -> Variant:
    return Variant(loop=type("LimitedPairLoop", (PairLoop,), limits))


VARIANTS = {
    LOOP: Variant(),
    "difference": _pair(),
    **{f"share {share:g}": _pair(share=share) for share in (0.25, 0.5, 1.0)},
    **{f"tail {tail:.2f}": _pair(tail=tail) for tail in (1 / 4, 1 / 3, 1 / 2)},
}


def settings(subject: Subject, options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield series, name, and a function that applies the setting to the pipeline."""
    for target in options.targets:
        for name, variant in VARIANTS.items():
            yield name, f"{name}, target {target:g}", partial(put_on, subject.pipe, variant, target, [])


def table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown: gains over the loop at equal work in dB, of the mean prompt / of the worst."""
    names = [name for name in VARIANTS if name != LOOP]
    lines = [_line("cell", "fraction", LOOP, *names), _line(*["---"] * (len(names) + 3))]
    for cell, own in by_cell(rows).items():
        for share in FRACTIONS.get(own[0]["cell"]["steps"], MANY):
            loop, found = at(own, share, mean, LOOP), [gain(own, name, share) for name in names]
            if loop is not None:
                entries = ["" if each is None else f"{each[0]:+.1f} / {each[1]:+.1f}" for each in found]
                lines.append(_line(cell, share, f"{loop:.1f}", *entries))
    return "\n".join(lines) + "\n"


def _line(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="stem of the files")
    parser.add_argument("--models", nargs="+", choices=DEMOS, default=list(DEMOS))
    parser.add_argument("--steps", type=int, nargs="+", default=(20, 50))
    parser.add_argument("--size", type=int, help="side in pixels; without it, the model's own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--split", choices=["reporting", "tuning"], default="tuning")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS)
    parser.add_argument("--processes", type=int, default=1, help="number of parallel parts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no part starts later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(growth=growth.GROWTH, set=[])
    options = parser.parse_args()
    cells = [
        Cell(
            model, steps=steps, size=options.size, dtype=options.dtype, guidance=SCALE if model == "demo-flux" else None
        )
        for steps in options.steps
        for model in options.models
    ]
    found = measure(options, cells, settings, PARTS)
    options.output.with_suffix(".json").write_text(json.dumps(found) + "\n")
    write_table(options.output.with_suffix(".md"), table(found["rows"]))
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
