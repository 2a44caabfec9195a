"""Methods to compare: each can be applied to a pipeline and removed again. Our methods are presets."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

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
    """One setting of a compared method."""

    series: str  # method of the setting; a line in plots
    name: str  # of the setting, unique
    # Context in which a subject's pipeline runs with the method; yields changes to the call's arguments.
    put_on: Callable[[Subject], AbstractContextManager[dict[str, Any]]]
    # True = the computed fraction is that of the run's report: counters on layers keep off kernels that replace them.
    reports_work: bool = False
    digest: str = ""  # hash of a preset's values, which detects an edited preset; other methods' names hold all values

    @property
    def ours(self) -> bool:
        """Return True for our closed loop; fixed schedules on our engine count as other methods."""
        return self.series == OURS


@dataclass(frozen=True)
class Peer:
    series: str
    name: str  # of a setting: a format string for its values
    settings: Sequence[tuple] | Callable[[int], Sequence[tuple]]  # values of each setting, or by the number of steps
    put_on: Callable[..., AbstractContextManager[dict[str, Any]]]  # as of a method, from a subject and a setting
    why_not: Callable[[Any], str | None] = lambda pipe: None  # reason why it can't run on a pipeline, or None

    def methods(self, steps: int) -> list[Method]:
        settings = self.settings(steps) if callable(self.settings) else self.settings
        return [Method(self.series, self.name.format(*values), self._with(values)) for values in settings]

    def _with(self, values: tuple) -> Callable[[Subject], AbstractContextManager[dict[str, Any]]]:
        return lambda subject: self.put_on(subject, *values)


def our_methods(pipe: Any, presets: Sequence[str | Preset], target_of: str | Preset | None = None) -> list[Method]:
    """Make methods from presets, which must fit the pipeline, and from a sweep of the target of ``target_of``."""
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
    if preset.schedule.measures:
        return OURS
    whole = "sparse tiles, our engine" if preset.skip.steps == "all" else "fixed interval, whole stack"
    return {"layer": "TaylorSeer, our engine", "head": "FlashOmni, our engine"}.get(preset.forecast.level, whole)


def of_preset(series: str, name: str, preset: Preset) -> Method:
    @contextmanager
    def put_on(subject: Subject) -> Iterator[dict[str, Any]]:
        with accelerated(subject.pipe, preset):
            yield {}

    values = preset.effective() | {"description": ""}  # which has no effect on the output
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
    return Method(series, name, put_on, True, digest)
