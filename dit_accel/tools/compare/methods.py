"""What is compared: a method is something that can be put on a pipeline and taken off again, and ours are presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dit_accel.pipeline import accelerated, preset_for
from dit_accel.presets import Preset, load_preset

OURS = "dit-accel"  # series of our closed loop, with whatever else its presets do
TARGETS = (0.1, 0.14, 0.2, 0.3, 0.45, 0.65, 1.0, 1.6, 2.5, 4.0, 6.0)  # times target_error, for fractions of 0.2 to 0.6


@dataclass
class Subject:
    """A pipeline as methods get it."""

    pipe: Any  # plain; it is another one after a reload
    steps: int  # of a plain run
    branches: int  # transformer calls a step, 2 where guidance calls it once with and once without the prompt
    tuning_run: Callable[[], Any]  # on a prompt that no figure is taken from, for methods that need calibration
    calibrations: dict[str, Any] = field(default_factory=dict)  # what these found, by method


@dataclass(frozen=True)
class Method:
    """One setting of something that is compared.

    Args:
        series: what it is a setting of, a line in plots.
        name: told apart by it.
        put_on: within it a subject's pipeline runs this way; it yields changes to the arguments of the call.
        reports_work: whether its kernels do work beside the leaves, so that its own report says how much; this is for
            our presets that leave out rows or tiles.
        digest: of what its preset holds, so that an edited one is told from what was measured; empty for peers, whose
            names say all.
    """

    series: str
    name: str
    put_on: Callable[[Subject], AbstractContextManager[dict[str, Any]]]
    reports_work: bool = False
    digest: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is our closed loop; fixed schedules that run on our engine count as rivals."""
        return self.series == OURS


class Peer(NamedTuple):
    """One way to make a pipeline faster that is not ours."""

    methods: Callable[[int], list[Method]]  # its settings for runs of so many steps
    why_not: Callable[[Any], str | None]  # why it can't run on a pipeline here, or None
    of: Callable[..., Method] | None = None  # one more setting, by its values; None = there are no others


def our_methods(pipe: Any, presets: Sequence[str | Preset], target_of: str | Preset | None = None) -> list[Method]:
    """Presets as methods, and a sweep of one closed-loop preset's target.

    Args:
        pipe: what they must fit.
        presets: names, paths or presets.
        target_of: closed-loop preset whose ``target_error`` is swept; None = none.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: one does not fit the pipeline.
    """
    loaded = [preset_for(pipe, preset) for preset in presets]
    methods = [of_preset(_series(preset), preset.name, preset) for preset in loaded]
    if target_of is not None:
        base = preset_for(pipe, target_of)
        for factor in TARGETS:
            target = round(factor * base.schedule.target_error, 5)
            if factor != 1.0 and target < 1.0:
                swept = load_preset(base, **{"schedule.target_error": target})
                methods.append(of_preset(OURS, f"{base.name} target_error={target:g}", swept))
    for preset in loaded:
        with accelerated(pipe, preset):
            pass  # raises now, and not after runs of minutes
    return methods


def _series(preset: Preset) -> str:
    if preset.schedule.control == "adaptive":
        return OURS
    whole = "sparse tiles, our engine" if preset.skip.steps == "all" else "fixed interval, whole stack"
    return {"layer": "TaylorSeer, our engine", "head": "FlashOmni, our engine"}.get(preset.forecast.level, whole)


def of_preset(series: str, name: str, preset: Preset) -> Method:
    """A preset as a method."""

    @contextmanager
    def put_on(subject: Subject) -> Iterator[dict[str, Any]]:
        with accelerated(subject.pipe, preset):
            yield {}

    leaves_tiles_out = preset.skip.steps == "all" and preset.skip.skips
    reports_work = preset.forecast.level != "output" or leaves_tiles_out
    return Method(series, name, put_on, reports_work, _digest(preset))


def _digest(preset: Preset) -> str:
    """Of all values that have an effect, which its description has not."""
    values = preset.effective() | {"description": ""}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
