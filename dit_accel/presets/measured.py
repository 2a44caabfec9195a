"""What shipped presets measured, from ``configs/measured.json``."""

from __future__ import annotations

import json
from typing import NamedTuple

from dit_accel.presets.loading import preset_path


class Run(NamedTuple):
    """Runs of some number of steps, over the models and schedules that were measured.

    Args:
        steps: of the schedule.
        computed: least and most share of the plain run's FLOPs.
        psnr: least and most mean over prompts, in dB, against all steps computed.
        models: names of the demo models.
        dtype: of the models' weights.
        source: file in docs/results that the figures come from.
    """

    steps: int
    computed: tuple[float, float]
    psnr: tuple[float, float]
    models: tuple[str, ...]
    dtype: str
    source: str


def measured(name: str) -> tuple[Run, ...]:
    """Runs of a shipped preset, from most to fewest steps; none where nothing was measured.

    Raises:
        PresetError: no such preset.
    """
    runs = json.loads(preset_path(name).with_name("measured.json").read_text(encoding="utf-8")).get(name, [])
    ranges = ("computed", "psnr", "models")
    return tuple(Run(**{**run, **{key: tuple(run[key]) for key in ranges}}) for run in runs)
