"""Results of ``dit-accel generate``: the plain run, the accelerated run, or both timed alternately, and a summary."""

from __future__ import annotations

import inspect
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dit_accel.cli.progress import progress_bar
from dit_accel.serving.failures import explained_failures
from dit_accel.serving.media import Medium
from dit_accel.serving.pipelines import timed_call
from dit_accel.tools.measure.repeats import DISTURBED, PLAIN_STEPS, Spread, disturbed, speedup

if TYPE_CHECKING:
    from dit_accel.loop.report import RunReport
    from dit_accel.presets import Preset
    from dit_accel.tools.measure.timing import Output


@dataclass(frozen=True)
class Side:
    """Output of a plain or accelerated run, and seconds of the denoising loop of each repeat, its own first."""

    output: Output
    repeats: list[float]

    @classmethod
    def of(cls, output: Output) -> Side:
        return cls(output, [output.denoising_seconds])

    @property
    def seconds(self) -> float:
        return statistics.median(self.repeats)

    @property
    def stages(self) -> dict[str, float]:
        return self.output.stages | {"denoising": self.seconds}

    @property
    def call_seconds(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class Sides:
    plain: Side | None
    fast: Side | None
    report: RunReport | None

    @property
    def speedup(self) -> Spread | None:
        return speedup(self.plain.repeats, self.fast.repeats) if self.plain and self.fast else None

    def remarks(self) -> list[str]:
        found = self.speedup
        return [disturbed("Times", found.width)] if found and found.width > DISTURBED else []


def both_sides(
    pipe: Any, arguments: dict[str, Any], seed: int, preset: Preset, repeats: int, console: Console, *, whole: bool
) -> Sides:
    """Warm up a plain pipeline, then run and time both sides alternately; it is plain again afterwards.

    Plain repeats stop after a few steps, since all take the same time, unless they are to be ``whole``, because a
    run's start takes time too, e.g. with offloading.
    """
    from dit_accel import accelerated
    from dit_accel.tools.measure.timing import denoise, transformer_clock

    with accelerated(pipe, preset):
        pass  # raises now, before a plain run of minutes, if the preset does not fit the pipeline
    compiles = pipe._execution_device.type == "cuda"
    takes = inspect.signature(pipe.__call__).parameters.keys()
    few = dict.fromkeys({"num_inference_steps"} & takes, 2)  # the minimum that every schedule accepts
    steps = PLAIN_STEPS if "callback_on_step_end" in takes and not whole else None
    with progress_bar(console, "warm-up", "runs") as progress:
        progress.watch(pipe)

        def call(what: str, share: float = 1.0, **changes: Any) -> Output:
            progress.begin(what, share)
            return timed_call(pipe, {**arguments, **changes}, seed)

        def repeat(what: str, side: Side, steps: int | None = None) -> None:
            progress.begin(what, 1.0 if steps is None else 0.0)
            with explained_failures(type(pipe)), transformer_clock(pipe) as clock:
                denoise(pipe, arguments, seed, steps)
            side.repeats.append(clock.loop_seconds * side.output.calls / clock.calls)

        call("warm-up", share=0.0, **few)
        progress.expect(1 + compiles + repeats + (repeats - 1) * (steps is None), done=0)
        plain = Side.of(call("plain"))
        with accelerated(pipe, preset):
            if compiles:  # Triton compiles at first use, and only a whole run uses every kernel
                call("compiling kernels")
                pipe.dit_accel.reset()  # the next call encodes its prompt, as the plain call does
            fast, report = Side.of(call("accelerated")), pipe.dit_accel.report()
        for number in range(2, repeats + 1):
            repeat(f"plain ({number} of {repeats})", plain, steps)
            with accelerated(pipe, preset):
                repeat(f"accelerated ({number} of {repeats})", fast)
    return Sides(plain, fast, report)


def write_results(medium: Medium, sides: Sides, files: list[Path]) -> list[Path]:
    written = []
    plain, fast = sides.plain, sides.fast
    side = fast or plain
    for index, (result, file) in enumerate(zip(side.output.results, files, strict=True)):
        written += medium.write(result, file, side.output.sound(index))
        if plain and fast:
            labels = f"plain: call {plain.call_seconds:.1f} s", f"accelerated: call {fast.call_seconds:.1f} s"
            sounds = plain.output.sound(index), fast.output.sound(index)
            written += medium.write_comparison(plain.output.results[index], result, labels, file, sounds)
    return written


def summary_of(sides: Sides) -> dict[str, Any]:
    from dit_accel.tools.measure.metrics import quality

    plain, fast, report = sides.plain, sides.fast, sides.report
    figures: dict[str, Any] = {"psnr_db": None, "ssim": None, "identical": None}
    if plain and fast:
        figures = quality(plain.output.results, fast.output.results) | _sound_quality(plain.output, fast.output)
    for name, side in (("plain", plain), ("accelerated", fast)):
        figures[f"{name}_seconds"] = side and side.seconds
        figures[f"{name}_seconds_each"] = side and side.repeats
        figures[f"{name}_call_seconds"] = side and side.output.seconds
        figures[f"{name}_stages"] = side and side.output.stages
    return {
        **figures,
        "speedup": sides.speedup and sides.speedup.median,
        "speedup_spread": sides.speedup and [sides.speedup.least, sides.speedup.most],
        "computed_fraction": (report and report.computed_fraction) or 1.0,
        "report": report.to_json() if report else None,
    }


def _sound_quality(plain: Output, fast: Output) -> dict[str, float | None]:
    """Compute the metrics of the video's sound, None if it holds values that are not finite; empty without sound."""
    if not plain.sounds:
        return {}
    from dit_accel.tools.measure.audio_metrics import audio_quality

    found = audio_quality(fast.sounds[0], plain.sounds[0])
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def print_summary(console: Console, summary: dict[str, Any], preset: Preset | None, sides: Sides) -> None:
    from rich.table import Table

    titles = ("plain", preset.name if preset else "")
    shown = {title: side for title, side in zip(titles, (sides.plain, sides.fast), strict=True) if side}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for title in shown:
        table.add_column(title, justify="right")
    columns = [side.stages | {"whole call": side.call_seconds} for side in shown.values()]
    rows = {name: [f"{seconds[name]:.2f} s" for seconds in columns] for name in columns[0]}
    if preset:
        rows["computed fraction"] = [f"{summary['computed_fraction']:.3f}"]
    if sides.speedup is not None:
        rows["speed-up"] = [str(sides.speedup)]
        rows["speed-up of the call"] = [f"{sides.plain.call_seconds / sides.fast.call_seconds:.2f}×"]
        rows["PSNR"] = ["identical" if summary["identical"] else f"{summary['psnr_db']:.1f} dB"]
        rows["SSIM"] = [f"{summary['ssim']:.4f}"]
        for name, key in (("SI-SDR", "si_sdr_db"), ("RMS ratio", "rms_ratio_db")):
            if key in summary:
                rows[name] = ["not finite" if summary[key] is None else f"{summary[key]:.1f} dB"]
    for label, values in rows.items():
        table.add_row(label, *[""] * (len(shown) - len(values)), *values)
    console.print(table)
    report = summary["report"]
    if report and report.get("decoding"):
        console.out(f"decoded {report['decoding']}", highlight=False)
    notes = [*report["notes"]] if report else []
    # The run's own notes already explain this.
    if report and not notes and preset.schedule.measures and "dispatch" not in report["steps_by_mode"]:
        notes.append("every step was computed; with more --steps, more of them can be skipped")
    for note in [*notes, *sides.remarks()]:
        console.out(f"note: {note}", highlight=False)
