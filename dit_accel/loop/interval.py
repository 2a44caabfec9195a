"""Compute on a fixed interval, as the papers do, without measuring forecast errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_accel.loop.closed_loop import ClosedLoop, Gap, Output
from dit_accel.loop.tracker import StepMode


class IntervalGap(Gap):
    """Schedule of a warm-up, then an UPDATE every ``interval`` steps (FlashOmni, section 3.2; TaylorSeer; FORA)."""

    def decide_mode(self, step: int) -> StepMode:
        schedule, steps = self.preset.schedule, len(self.course.coordinates)
        if step < schedule.warmup or step >= steps - schedule.cooldown or schedule.interval == 1:
            return StepMode.FULL
        return StepMode.DISPATCH if (step - schedule.warmup) % (schedule.interval or 1) else StepMode.UPDATE

    def observe(self, step: int, *measured: Any, **of: Any) -> int:
        """Return the next computed step, which does not depend on errors."""
        steps = range(step + 1, len(self.course.coordinates))
        return next((later for later in steps if self.decide_mode(later) is not StepMode.DISPATCH), steps.stop)


class IntervalLoop(ClosedLoop):
    """Forecast, and correct if the preset asks for it, between the steps of the interval."""

    @property
    def records_outputs(self) -> bool:
        return self.gap.preset.forecast.level == "output"

    def judge(self, step: int, output: Output, used: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        return ()
