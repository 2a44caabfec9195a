"""Measurements of shipped presets, from ``configs/measured.json``."""

from __future__ import annotations

import json
from typing import NamedTuple

from dit_accel.presets.loading import preset_path


class MeasuredRun(NamedTuple):
    """Measured runs of one number of steps, over models and schedules."""

    steps: int
    computed: tuple[float, float]  # smallest and largest share of the plain run's FLOPs
    psnr: tuple[float, float]  # smallest and largest mean over prompts, in dB, compared with the plain run
    models: tuple[str, ...]  # demo models
    dtype: str  # of the models' weights
    source: str  # file in docs/results


def measured(name: str) -> tuple[MeasuredRun, ...]:
    """Return the measured runs of a shipped preset, from most to fewest steps; empty if none was measured.

    Raises:
        PresetError: no such preset.
    """
    runs = json.loads(preset_path(name).with_name("measured.json").read_text(encoding="utf-8")).get(name, [])
    ranges = ("computed", "psnr", "models")
    return tuple(MeasuredRun(**{**run, **{key: tuple(run[key]) for key in ranges}}) for run in runs)
