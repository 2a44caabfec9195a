"""Tune a preset's thresholds for a model: the fastest preset that reaches a target quality.

    result = tune(pipe, "balanced", target_psnr=40, prompts=prompts)
    result.write("mine.yaml")

Read :mod:`~dit_accel.tools.measure.tune.tuner` first: it runs one tuning from the plain runs to the confirmation.
"""

from dit_accel.tools.measure.tune.result import Target, TuneResult
from dit_accel.tools.measure.tune.tuner import split_prompts, tune

__all__ = ["Target", "TuneResult", "split_prompts", "tune"]
