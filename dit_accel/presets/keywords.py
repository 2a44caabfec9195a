"""Assign overrides to sections: plain keywords, dotted keys and whole sections."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from dit_accel.errors import PresetError, shown
from dit_accel.presets.complaints import did_you_mean
from dit_accel.presets.preset import Preset
from dit_accel.presets.reading import MOST_LEVELS
from dit_accel.presets.section import Formed, section_in


@cache
def keywords() -> dict[str, tuple[str, ...]]:
    """Return the dotted keys that each key of a section may mean: ``order`` means ``forecast.order``."""
    meanings: dict[str, tuple[str, ...]] = {}
    for name, field in Preset.model_fields.items():
        section = section_in(field)
        forms = section.forms.values() if section is not None and issubclass(section, Formed) else (section,)
        for key in dict.fromkeys(key for form in forms if form is not None for key in form.model_fields):
            meanings[key] = (*meanings.get(key, ()), f"{name}.{key}")
    return meanings


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides as the sections of a preset; unknown and ambiguous keywords are a PresetError."""
    changes: dict[str, Any] = {}
    wrong = []
    for keyword, value in overrides.items():
        dotted = keyword
        if "." not in keyword and keyword not in Preset.model_fields:
            meanings = keywords().get(keyword, ())
            if len(meanings) != 1:
                wrong.append(_complaint(keyword, meanings))
                continue
            (dotted,) = meanings
        *sections, key = dotted.split(".")
        if len(sections) > MOST_LEVELS:
            wrong.append(f"keyword {shown(keyword)} has {len(sections):,} dots: write section.key=value")
            continue
        change = {key: value}
        for section in reversed(sections):
            change = {section: change}
        merge(changes, change)
    if wrong:
        raise PresetError("; ".join(wrong))
    return changes


def merge(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge changes into nested dictionaries, key by key; the values are copies."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = deepcopy(value)


def _complaint(keyword: str, meanings: tuple[str, ...]) -> str:
    if meanings:
        section, key = meanings[-1].split(".")
        return f"keyword {shown(keyword)} may mean {' or '.join(meanings)}: write e.g. {section}={{{key!r}: …}}"
    sections = [name for name in Preset.model_fields if name != "name"]
    meant = did_you_mean(keyword, [*keywords(), *sections])
    valid = f"{', '.join(sections)}, and the keys of these sections (docs/reference/presets.md, Keys)"
    return f"unknown keyword {shown(keyword)}{meant}; valid are {valid}"
