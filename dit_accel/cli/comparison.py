"""``dit-accel generate --compare``: one picture or clip, plain and accelerated, timed in turn."""

from __future__ import annotations

import inspect
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dit_accel.cli.progress import progress_bar
from dit_accel.serving.failures import explained_failures
from dit_accel.serving.pipelines import timed_call
from dit_accel.tools.repeats import DISTURBED, PLAIN_STEPS, Spread, disturbed, speedup

if TYPE_CHECKING:
    from rich.console import Console

    from dit_accel.loop.report import RunReport
    from dit_accel.presets import Preset
    from dit_accel.tools.timing import Output


@dataclass(frozen=True)
class Side:
    """What was made plain or accelerated, and seconds of its denoising loop in every repeat, this one first."""

    output: Output
    repeats: list[float]

    @classmethod
    def of(cls, output: Output) -> Side:
        return cls(output, [output.denoising_seconds])

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.repeats)


@dataclass(frozen=True)
class Sides:
    """One side, or both, and the report of the accelerated run that made its output."""

    plain: Side | None
    fast: Side | None
    report: RunReport | None

    @property
    def speedup(self) -> Spread | None:
        """Of the denoising loop, where there are both."""
        return speedup(self.plain.repeats, self.fast.repeats) if self.plain and self.fast else None

    def remarks(self) -> list[str]:
        """That times were disturbed, where they were."""
        found = self.speedup
        return [disturbed("Times", found.width)] if found and found.width > DISTURBED else []


def both_sides(
    pipe: Any, arguments: dict[str, Any], seed: int, preset: Preset, repeats: int, console: Console, *, whole: bool
) -> Sides:
    """Both sides, warmed up first.

    Args:
        pipe: plain, as it is afterwards.
        repeats: how often each side is timed. Of the plain one all but the first are a few steps, which do the same
            work as all others.
        whole: whether plain repeats are whole runs, since a run's start takes time too, as with offloading.
    """
    from dit_accel import accelerated
    from dit_accel.tools.timing import denoise, transformer_clock

    with accelerated(pipe, preset):
        pass  # raises now, and not after a plain run of minutes, if the preset does not fit the pipeline
    compiles = pipe._execution_device.type == "cuda"
    stops = "callback_on_step_end" in inspect.signature(pipe.__call__).parameters
    steps = PLAIN_STEPS if stops and not whole else None
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

        call("warm-up", share=0.0, num_inference_steps=2)  # the fewest that every schedule takes
        progress.expect(1 + compiles + repeats + (repeats - 1) * (steps is None), done=0)
        plain = Side.of(call("plain"))
        with accelerated(pipe, preset):
            if compiles:  # Triton compiles at first use, and only a whole run is sure to reach every kernel
                call("compiling kernels")
            fast = Side.of(call("accelerated"))
            report = pipe.dit_accel.report()
        for number in range(2, repeats + 1):
            repeat(f"plain ({number} of {repeats})", plain, steps)
            with accelerated(pipe, preset):
                repeat(f"accelerated ({number} of {repeats})", fast)
    return Sides(plain, fast, report)
