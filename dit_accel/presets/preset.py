"""The whole preset: its sections, and the checks of sections against each other."""

from __future__ import annotations

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
        values = self.model_dump(mode="json")
        for key in self.skip.idle_keys():
            del values["skip"][key]
        for section in self._unread_sections():
            del values[section]
        for key in self._idle_forecast_keys():
            del values["forecast"][key]
        for key in self._idle_kernel_keys():
            del values["kernels"][key]
        if not values["kernels"]:
            del values["kernels"]
        for key in self._idle_memory_keys():
            del values["memory"][key]
        if self.linear.dtype is None:
            del values["linear"]
        if not self.stages.prompts:
            del values["stages"]["prompts_mib"]
        if not self.stages.decode:
            del values["stages"]["share"]
        if "blocks" in values and self.blocks.token_order == "raster":
            del values["blocks"]["token_order"]
        return values

    def _unread_sections(self) -> tuple[str, ...]:
        """Return the sections that have no effect at this level."""
        if self.forecast.level == "head":
            return ()
        return ("reuse",) if self.skip.steps == "all" else _HEAD_SECTIONS

    def _idle_forecast_keys(self) -> tuple[str, ...]:
        """Return the keys of section forecast that have no effect under the preset's control."""
        return LOOP_KEYS if self.forecast.level == "output" and self.schedule.control != "adaptive" else ()

    def _idle_kernel_keys(self) -> dict[str, str]:
        """Return the keys of section kernels that have no effect, each with the setting that would give it one."""
        level, idle = self.forecast.level, {}
        if level != "head" and self.skip.steps != "all":
            chosen = [key for key in Kernels.model_fields if key != "graphs"]
            idle = dict.fromkeys(chosen, "set forecast.level to head, or skip.steps to all")
        return idle if level == "output" else idle | {"graphs": "set forecast.level to output"}

    def _idle_memory_keys(self) -> dict[str, str]:
        """Return the keys of section memory that have no effect, with the reason."""
        idle = {}
        if self.forecast.level == "output" and not self.skip.keeps_residuals:
            idle["history_dtype"] = "at level 'output' blocks record nothing"
        if self.forecast.level != "head":
            idle["offload"] = "attention outputs are recorded at level 'head' only"
        elif self.forecast.order == 0:
            idle["offload"] = "with order 0 no attention outputs are recorded"
        return idle

    def _kernels_refuse(self) -> str | None:
        """Return why no kernel supports sections skip and kernels together, or None."""
        kernels = self.kernels
        if kernels.qk_dtype is None:
            return None
        if kernels.attention == "cuda":
            return f"kernels.qk_dtype '{kernels.qk_dtype}' runs on triton: set kernels.attention to auto"
        if any(variant.policy == "static" for variant in self.skip.variants):
            return (
                f"kernels.qk_dtype '{kernels.qk_dtype}' multiplies whole tiles, and skip.policy 'static' has masks "
                "inside of tiles: remove one of them"
            )
        return None

    def _outputs_refuse(self) -> str | None:
        """Return why the settings for whole outputs conflict with others, or None."""
        if self.schedule.per_prompt and self.forecast.level != "output":
            return (
                "schedule.per_prompt works on the transformer's output, which only level 'output' forecasts, and "
                f"forecast.level is '{self.forecast.level}': remove schedule.per_prompt"
            )
        for key in self._idle_forecast_keys():
            if getattr(self.forecast, key):
                return f"forecast.{key} needs the errors that control 'adaptive' measures, got 'interval': remove it"
        if self.schedule.per_prompt and any(variant.refresh > 1 for variant in self.skip.variants):
            return "schedule.per_prompt changes the batch between steps, so masks can't be kept: set skip.refresh to 1"
        return None

    @model_validator(mode="after")
    def _consistent(self) -> Preset:
        unread = {name: getattr(self, name) for name in self._unread_sections()}
        touched = [name for name, section in unread.items() if section.model_fields_set and section != NoSkip()]
        if touched:
            skips = "" if touched[0] == "reuse" else ", or skip.steps to all"
            raise ValueError(
                f"section '{touched[0]}' has no effect at level '{self.forecast.level}', where a DISPATCH step "
                f"runs no attention: remove it, or set forecast.level to head{skips}"
            )
        if self.forecast.level == "head" and self.linear.dtype is not None:
            raise ValueError(
                f"linear.dtype '{self.linear.dtype}' rounds whole layers, and level 'head' multiplies parts of them: "
                "remove one of them"
            )
        if (refused := self._kernels_refuse()) is not None:
            raise ValueError(refused)
        if (refused := self._outputs_refuse()) is not None:
            raise ValueError(refused)
        for key, remedy in self._idle_kernel_keys().items():
            if key in self.kernels.model_fields_set:
                level = self.forecast.level
                raise ValueError(f"kernels.{key} has no effect at level '{level}': remove it, or {remedy}")
        for key, reason in self._idle_memory_keys().items():
            if getattr(self.memory, key):
                raise ValueError(f"memory.{key} has no effect, because {reason}: remove it")
        return self
