"""What shipped presets measured, as the comments at the head of their files say it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dit_accel.presets.loading import preset_path

_NUMBERS = r"([\d.]+)(?: to ([\d.]+))?"
_RUN = re.compile(rf"#   of (\d+) steps {_NUMBERS} of the work, {_NUMBERS} dB")


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


def measured(name: str) -> tuple[Run, ...]:
    """Runs of a shipped preset, from most to fewest steps; none where nothing was measured.

    Raises:
        PresetError: no such preset.
    """
    text = preset_path(name).read_text(encoding="utf-8")
    return tuple(
        Run(int(steps), (float(least), float(most or least)), (float(worst), float(best or worst)))
        for steps, least, most, worst, best in _RUN.findall(text)
    )
