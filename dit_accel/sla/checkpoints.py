"""Presets for checkpoints whose attention was trained to be sparse."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dit_accel.errors import UnsupportedError
from dit_accel.models.presets import load_preset
from dit_accel.presets import Preset
from dit_accel.sparse.projections import PROJECTIONS, method_of, trained_with

PRESETS = {PROJECTIONS: "wan21-sla", "proj_l": "wan21-turbowan", "to_gate_compress": "wan21-fastwan"}


def trained_preset(checkpoint: str | Path, **overrides: Any) -> Preset:
    """Return the preset that runs a Wan's attention as its checkpoint was trained, with SLA or VSA.

    ``checkpoint`` is a safetensors file, or the folder of a transformer or a pipeline. If it has no keys of either, it
    is an :class:`UnsupportedError`. ``overrides`` change the preset.
    """
    if (preset := checkpoint_preset(checkpoint)) is None:
        raise UnsupportedError(f"{checkpoint} must hold keys proj_l (SLA) or to_gate_compress (VSA), and has none")
    return load_preset(preset, **{**trained_overrides(checkpoint), **overrides})


def checkpoint_preset(checkpoint: str | Path) -> str | None:
    """Return the name of the preset for a checkpoint, by its keys; None = no preset, or no such path."""
    with suppress(UnsupportedError):  # a file of another kind, which diffusers may not read either
        return PRESETS.get(str(method_of(checkpoint))) if os.path.exists(checkpoint) else None
    return None


def trained_overrides(checkpoint: str | Path) -> dict[str, Any]:
    """Return the changes of a preset of the method that name the checkpoint, and what its fine-tuning wrote into it."""
    names = {"block": "blocks.size"}
    trained = {names.get(key, f"skip.{key}"): value for key, value in trained_with(checkpoint).items()}
    return {"skip.projection": str(checkpoint), **trained}
