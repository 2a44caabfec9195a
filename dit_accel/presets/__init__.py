"""Presets: every threshold of every method, as one frozen, strict YAML schema.

A preset is a YAML file in ``configs/`` (or the user's own) that fills the sections below; what it leaves out keeps its
default, ``base:`` starts from another preset, and unknown keys or values out of range are errors that say what is
valid.
"""

from dit_accel.presets.loading import load_preset, preset_names, preset_path, preset_schema
from dit_accel.presets.measured import Run, measured
from dit_accel.presets.names import default_preset
from dit_accel.presets.preset import Preset
from dit_accel.presets.sections import Blocks, Forecast, Kernels, Linear, Memory, Reuse, Schedule, Stages
from dit_accel.presets.skip import Skip

__all__ = [
    "Blocks",
    "Forecast",
    "Kernels",
    "Linear",
    "Memory",
    "Preset",
    "Reuse",
    "Run",
    "Schedule",
    "Skip",
    "Stages",
    "default_preset",
    "load_preset",
    "measured",
    "preset_names",
    "preset_path",
    "preset_schema",
]
