"""The whole preset: its sections, and the checks of sections against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from dit_accel.presets.section import Formed, Section
from dit_accel.presets.sections import (
    AnyForecast,
    AnySchedule,
    Blocks,
    Forecast,
    Kernels,
    Linear,
    Memory,
    OutputForecast,
    Reuse,
    Schedule,
    Stages,
)
from dit_accel.presets.skip import AnySkip, NoSkip, Skip

# Sections that only level head reads; with `skip.steps: all` other levels read all but reuse.
_HEAD_SECTIONS = ("reuse", "skip", "blocks")
LOOP_KEYS = ("beyond", "damping")  # keys of section forecast that only control adaptive reads
_ASK_FOR_NOTHING: tuple[Any, ...] = (None, False, 0.0, [], "device")  # values that may be given anywhere
FORMED: dict[str, type[Formed]] = {"schedule": Schedule, "forecast": Forecast, "skip": Skip}  # sections with forms


class Preset(Section):
    """One method with all its settings. Frozen; :func:`load_preset` makes changed copies."""

    name: str = Field(default="custom", exclude=True)
    description: str = ""
    """One line for `dit-accel presets list`."""
    model: str = "any"
    """Model family that the preset is made for; level head needs a family with fused blocks."""
    schedule: AnySchedule
    forecast: AnyForecast = OutputForecast()
    reuse: Reuse = Reuse()
    skip: AnySkip = NoSkip()
    blocks: Blocks = Blocks()
    kernels: Kernels = Kernels()
    linear: Linear = Linear()
    memory: Memory = Memory()
    stages: Stages = Stages()

    @property
    def works_inside(self) -> bool:
        """Return True if the preset changes the transformer's blocks: by forecasts inside or sparse attention."""
        return self.forecast.level != "output" or self.skip.steps == "all"

    def effective(self) -> dict[str, Any]:
        """Return all values that have an effect, defaults included, as the plain values of a preset file."""
        values = self.model_dump(mode="json", exclude=set(self._unread_sections()))
        for section, key in (*self._idle_keys(), *(("skip", key) for key in self.skip.idle_keys())):
            values.get(section, {}).pop(key, None)
        if "blocks" in values and self.blocks.token_order == "raster":
            del values["blocks"]["token_order"]
        return {key: value for key, value in values.items() if value != {}}

    def _unread_sections(self) -> tuple[str, ...]:
        """Return the sections that have no effect at this level."""
        if self.forecast.level == "head":
            return ()
        return ("reuse",) if self.skip.steps == "all" else _HEAD_SECTIONS

    def _idle_keys(self) -> dict[tuple[str, str], str]:
        """Return the sections and keys that have no effect, each with the reason and the remedy."""
        level, measures = self.forecast.level, self.schedule.measures
        runs_no_attention = level != "head" and self.skip.steps != "all"
        records_nothing = level == "output" and not self.skip.keeps_residuals
        repeats = level == "head" and self.forecast.order == 0
        kernels, linear = ("attention", "gemm", "qk_dtype"), ("dtype", "exclude", "weights")
        here, unrecorded = f"at level '{level}'", "at level 'output', where blocks record nothing"
        unmeasured = f"with control '{self.schedule.control}', which measures no errors"
        of_heads = "as attention outputs are recorded at level 'head' only"
        table = (
            (runs_no_attention, "kernels", kernels, here, "forecast.level to head, or skip.steps to all"),
            (level != "output", "kernels", ["graphs"], here, "forecast.level to output"),
            (level == "output" and not measures, "forecast", LOOP_KEYS, unmeasured, "schedule.control to adaptive"),
            (records_nothing, "memory", ["history_dtype"], unrecorded, "forecast.level to layer"),
            (level != "head", "memory", ["offload"], of_heads, "forecast.level to head"),
            (repeats, "memory", ["offload"], "with order 0", "forecast.order to 1"),
            (self.linear.dtype is None, "linear", linear, "without a dtype", "linear.dtype to auto"),
            (not self.stages.prompts, "stages", ["prompts_mib"], "without prompts", "stages.prompts to true"),
            (not self.stages.decode, "stages", ["share"], "without decode", "stages.decode to true"),
        )
        return {
            (section, key): f"{where}: remove it, or set {change}"
            for holds, section, keys, where, change in table
            if holds
            for key in keys
        }

    def _conflicts(self) -> Iterator[str]:
        """Yield errors of settings that conflict with others, and of given keys without effect."""
        level, kernels, variants = self.forecast.level, self.kernels, self.skip.variants
        unread = {name: getattr(self, name) for name in self._unread_sections()}
        if touched := [name for name, section in unread.items() if section.model_fields_set and section != NoSkip()]:
            skips = "" if touched[0] == "reuse" else ", or skip.steps to all"
            why = f"has no effect at level '{level}', where a forecast step runs no attention"
            yield f"section '{touched[0]}' {why}: remove it, or set forecast.level to head{skips}"
        if level == "head" and self.linear.dtype is not None:
            why = "rounds whole layers, and level 'head' multiplies parts of them"
            yield f"linear.dtype '{self.linear.dtype}' {why}: remove one of them"
        if kernels.qk_dtype is not None and kernels.attention == "cuda":
            yield f"kernels.qk_dtype '{kernels.qk_dtype}' runs on triton: set kernels.attention to auto"
        policies = {variant.policy for variant in variants}
        if kernels.qk_dtype not in (None, "auto") and (masked := policies & {"static", "vsa"}):
            why = f"multiplies whole tiles, and skip.policy {min(masked)!r} has masks inside of tiles"
            yield f"kernels.qk_dtype '{kernels.qk_dtype}' {why}: remove one of them"
        if "vsa" in policies and (level == "head" or self.blocks != Blocks(size=64)):
            yield "skip.policy 'vsa' cuts cubes of 64 tokens below level head: set blocks.size to 64, in raster order"
        if self.schedule.per_prompt and level != "output":
            yield f"schedule.per_prompt needs forecast.level 'output', got '{level}': remove schedule.per_prompt"
        if self.schedule.per_prompt and any(variant.refresh > 1 for variant in variants):
            yield "schedule.per_prompt changes the batch between steps, so masks can't be kept: set skip.refresh to 1"
        for (name, key), why in self._idle_keys().items():
            section = getattr(self, name)
            if key in section.model_fields_set and getattr(section, key) not in _ASK_FOR_NOTHING:
                yield f"{name}.{key} has no effect {why}"

    @model_validator(mode="after")
    def _consistent(self) -> Preset:
        if (conflict := next(self._conflicts(), None)) is not None:
            raise ValueError(conflict)
        return self
