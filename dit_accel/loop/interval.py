"""Computing on a fixed interval, as the papers do: the closed loop's plain sibling, which measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dit_accel.loop.closed_loop import ClosedLoop, Gap, Output
from dit_accel.loop.tracker import StepMode


class IntervalGap(Gap):
    """Warm-up, then an UPDATE every ``interval`` steps (FlashOmni, section 3.2; TaylorSeer; FORA)."""

    def decide_mode(self, step: int) -> StepMode:
        schedule, steps = self.preset.schedule, len(self.course.coordinates)
        if step < schedule.warmup or step >= steps - schedule.cooldown or schedule.interval == 1:
            return StepMode.FULL
        return StepMode.DISPATCH if (step - schedule.warmup) % (schedule.interval or 1) else StepMode.UPDATE

    def observe(self, step: int, nodes: Sequence[float], order: float, error: float) -> None:
        """An interval takes no notice of errors."""


class IntervalLoop(ClosedLoop):
    """Forecasts, and corrects if the preset says so, between steps that the interval chooses."""

    @property
    def records_outputs(self) -> bool:
        return self.gap.preset.forecast.level == "output"

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        return ()
