"""What shipped presets measured, as the comments at the head of their files say it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dit_accel.presets.loading import preset_path

_NUMBERS = r"([\d.]+)(?: to ([\d.]+))?"
_RUN = re.compile(rf"#   of (\d+) steps {_NUMBERS} of the work, {_NUMBERS} dB")
_STEP = re.compile(
    r"#   a step of (.+) on an (\w+): diffusers (\d+) ms, computed (\d+) ms(?: with (.+)|, forecast (\d+) ms)"
)
_TITLE = re.compile(r"^# Measured ((?:.|\n# )+?):$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """Runs of some number of steps, over the models and schedules that were measured.

    Args:
        steps: of the schedule.
        computed: least and most share of the plain run's FLOPs.
        psnr: least and most mean over prompts, in dB, against all steps computed.
    """

    steps: int
    computed: tuple[float, float]
    psnr: tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step on one GPU, of a full-size model with random weights.

    Args:
        what: model and size.
        gpu: name of the GPU.
        plain: of diffusers.
        computed: of a computed step.
        tiles: what the computed step left out, empty = nothing.
        forecast: of a forecast step; None where it was not measured.
    """

    what: str
    gpu: str
    plain: int
    computed: int
    tiles: str
    forecast: int | None

    def speedup(self, computed: float) -> float | None:
        """How many times less time a run takes, reckoned from its steps; None where that can't be.

        Args:
            computed: share of the steps that are computed.
        """
        if self.forecast is None:
            return None
        return self.plain / (computed * self.computed + (1 - computed) * self.forecast)


@dataclass(frozen=True)
class Measured:
    """All that a preset's header holds.

    Args:
        on: models, dtype and prompts of the runs, and the pages that have their tables; empty = nothing was measured.
        runs: from most to fewest steps.
        steps: one a model and GPU.
    """

    on: str
    runs: tuple[Run, ...]
    steps: tuple[StepTime, ...]

    def nearest(self, steps: int) -> Run | None:
        """The runs whose number of steps is nearest, in proportion, to this one; None where nothing was measured."""
        return min(self.runs, key=lambda run: max(run.steps, steps) / min(run.steps, steps), default=None)


def measured(name: str) -> Measured:
    """What a shipped preset measured.

    Raises:
        PresetError: no such preset.
    """
    text = preset_path(name).read_text(encoding="utf-8")
    title = _TITLE.search(text)
    return Measured(
        on=title[1].replace("\n# ", " ") if title else "",
        runs=tuple(
            Run(int(steps), (float(least), float(most or least)), (float(worst), float(best or worst)))
            for steps, least, most, worst, best in _RUN.findall(text)
        ),
        steps=tuple(
            StepTime(what, gpu, int(plain), int(computed), tiles, int(forecast) if forecast else None)
            for what, gpu, plain, computed, tiles, forecast in _STEP.findall(text)
        ),
    )
