"""Presets checked against model families: whether the family of a preset exists and can run it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dit_accel import presets
from dit_accel.errors import PresetError, shown
from dit_accel.models.families import FAMILIES
from dit_accel.presets import Preset, preset_names
from dit_accel.presets.complaints import did_you_mean


def load_preset(preset: str | Path | Preset, **overrides: Any) -> Preset:
    """Load a preset, apply overrides, and check it against the model families.

    Args:
        preset: a name in ``configs/``, the path of a YAML file, or a :class:`Preset`.
        overrides: keys of any section, e.g. ``target_error=0.1, order=2``; whole sections, whose keys are merged, e.g.
            ``schedule={"warmup": 8}``; or dotted keys, e.g. ``**{"forecast.order": 2}``.

    Raises:
        PresetError: unknown preset, keyword, key, value or family; the message lists valid ones.
    """
    loaded = presets.load_preset(preset, **overrides)
    if (reason := _why_not_valid(loaded)) is not None:
        raise PresetError(f"preset {shown(loaded.name)} is not valid: {reason}")
    return loaded


def decided_apart(preset: Preset) -> Preset:
    """Return the preset with which each prompt of a batch computes its own steps; raise ``PresetError`` if it can't."""
    if not preset.schedule.measures or "per_prompt" in preset.schedule.model_fields_set:
        return preset
    return load_preset(preset, per_prompt=True)


def preset_schema() -> dict[str, Any]:
    """JSON schema of a preset file, with the names of the families."""
    schema = presets.preset_schema()
    schema["properties"]["model"]["enum"] = ["any", *(family.name for family in FAMILIES)]
    return schema


def fitting_presets(family: str, levels: Collection[str]) -> list[str]:
    """Names of the presets that a model family can run; a plain name includes its video form."""
    named = {name: presets.load_preset(name) for name in preset_names() if not name.startswith("video-")}
    return [n for n, preset in named.items() if preset.model in ("any", family) and preset.forecast.level in levels]


def _why_not_valid(preset: Preset) -> str | None:
    """Return why no family, or not the preset's own, can run a preset, or None."""
    family = next((family for family in FAMILIES if family.name == preset.model), None)
    if family is None and preset.model != "any":
        names = ["any", *(family.name for family in FAMILIES)]
        *others, last = map(repr, names)
        meant = did_you_mean(preset.model, names)
        return f"model: Input should be {', '.join(others)} or {last}, got {shown(preset.model)}{meant}"
    if preset.forecast.level == "head" and not (family and family.fused == "head"):
        *names, last = sorted(family.name for family in FAMILIES if family.fused == "head")
        needs = "level 'head' needs hand-written blocks"
        return f"{needs}, and model is '{preset.model}': set model to {', '.join(names)} or {last}"
    if preset.blocks.token_order != "raster" and not (family and family.order):
        fix = f"model is '{preset.model}': set it to raster"
        return f"blocks.token_order '{preset.blocks.token_order}' orders the tokens of videos, and {fix}"
    return None
