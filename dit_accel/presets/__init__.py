"""Define presets: all settings of a method as one frozen, strict YAML schema.

A preset is a YAML file in ``configs/``, or the user's own. Keys that it leaves out keep their defaults, ``base:``
starts from another preset, and unknown keys or values out of range are errors that list the valid ones.

Read ``sections.py`` first: it has every key with its default and its meaning, and ``skip.py`` has the keys of section
``skip``. ``preset.py`` puts the sections together, checks them against each other, and has the table of keys that have
no effect with others. ``loading.py`` reads presets by name or path and applies overrides, which ``keywords.py`` assigns
to sections. ``section.py`` is the base class of sections, ``reading.py`` the bounded YAML reader, ``complaints.py`` the
wording of errors.
"""

from dit_accel.presets.loading import default_preset, load_preset, measured, preset_names, preset_path, preset_schema
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
