"""Methods to compare: each can be applied to a pipeline and removed again. Our methods are presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dit_accel.pipeline import accelerated, preset_for
from dit_accel.presets import Preset, load_preset

OURS = "dit-accel"  # series of all presets with our closed loop
TARGETS = (0.1, 0.14, 0.2, 0.3, 0.45, 0.65, 1.0, 1.6, 2.5, 4.0, 6.0)  # times target_error, for fractions of 0.2 to 0.6


@dataclass
class Subject:
    """Pipeline that methods run on."""

    pipe: Any  # plain; replaced after a reload
    steps: int  # of a plain run
    branches: int  # transformer calls per step; 2 if guidance calls it with and without the prompt
    tuning_run: Callable[[], Any]  # run on a prompt outside the comparison, for methods that need calibration
    calibrations: dict[str, Any] = field(default_factory=dict)  # results of the calibrations, by method


@dataclass(frozen=True)
class Method:
    """One setting of a compared method.

    Args:
        series: method of the setting; a line in plots.
        name: unique name of the setting.
        put_on: context in which a subject's pipeline runs with the method; yields changes to the call's arguments.
        reports_work: whether the computed fraction comes from the run's own report. True for our presets that skip
            rows or tiles or multiply in 8 bits, because their kernels replace the layers whose FLOPs are counted.
        digest: hash of the preset's values, which detects an edited preset; empty for other methods, whose names hold
            all values.
    """

    series: str
    name: str
    put_on: Callable[[Subject], AbstractContextManager[dict[str, Any]]]
    reports_work: bool = False
    digest: str = ""

    @property
    def ours(self) -> bool:
        """Return True for our closed loop; fixed schedules on our engine count as other methods."""
        return self.series == OURS


class Peer(NamedTuple):
    """An acceleration method that is not ours."""

    methods: Callable[[int], list[Method]]  # its settings for a number of steps
    why_not: Callable[[Any], str | None]  # reason why it can't run on a pipeline, or None
    of: Callable[..., Method] | None = None  # makes another setting from its values; None = no other settings


def our_methods(pipe: Any, presets: Sequence[str | Preset], target_of: str | Preset | None = None) -> list[Method]:
    """Make methods from presets, and from a sweep of one closed-loop preset's target.

    Args:
        target_of: closed-loop preset whose ``target_error`` is swept; None = none.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: a preset does not fit the pipeline.
    """
    loaded = [preset_for(pipe, preset) for preset in presets]
    methods = [of_preset(_series(preset), preset.name, preset) for preset in loaded]
    if target_of is not None:
        base = preset_for(pipe, target_of)
        for factor in TARGETS:
            target = round(factor * base.schedule.bound, 5)
            if factor != 1.0 and target < 1.0:
                swept = load_preset(base, **{"schedule.target_error": target})
                methods.append(of_preset(OURS, f"{base.name} target_error={target:g}", swept))
    for preset in loaded:
        with accelerated(pipe, preset):
            pass  # raises now, before runs of minutes
    return methods


def _series(preset: Preset) -> str:
    if preset.schedule.control == "adaptive":
        return OURS
    whole = "sparse tiles, our engine" if preset.skip.steps == "all" else "fixed interval, whole stack"
    return {"layer": "TaylorSeer, our engine", "head": "FlashOmni, our engine"}.get(preset.forecast.level, whole)


def of_preset(series: str, name: str, preset: Preset) -> Method:
    """Make a method from a preset."""

    @contextmanager
    def put_on(subject: Subject) -> Iterator[dict[str, Any]]:
        with accelerated(subject.pipe, preset):
            yield {}

    leaves_tiles_out = preset.skip.steps == "all" and preset.skip.skips
    reports_work = preset.forecast.level != "output" or leaves_tiles_out or preset.linear.dtype is not None
    return Method(series, name, put_on, reports_work, _digest(preset))


def _digest(preset: Preset) -> str:
    """Hash of all values that affect the output; the description does not."""
    values = preset.effective() | {"description": ""}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
