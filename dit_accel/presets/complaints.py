"""What is wrong with a preset, in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from dit_accel.errors import shortened, shown
from dit_accel.presets.section import Formed, formed, section_in

RENAMED = {  # keys, and values of keys, that were called otherwise once
    "schedule.control: error": "adaptive",
    "schedule.control: fixed": "interval",
    "schedule.final_full": "schedule.cooldown",
    "forecast.scope": "forecast.level",
    "forecast.level: stack": "output",
    "skip.guard_rows": "skip.probe_blocks",
    "skip.guard_error": "skip.probe_error",
}

DROPPED = {"schedule.error_in": "errors always count by what they do to the result now; leave it out"}

MOST_COMPLAINTS = 8  # that one message makes

Model = type[BaseModel] | None


def explained(failure: ValidationError, model: type[BaseModel], within: str = "") -> str:
    """The validation errors of ``model`` in words: each with the dotted key, what came, what is valid.

    Args:
        within: where the model stands in the preset: empty, or its section with a dot, ``"skip."``.
    """
    errors = failure.errors()
    told = [_explain(error, model, within) for error in errors[:MOST_COMPLAINTS]]
    more = len(errors) - len(told)
    return "; ".join([*told, *([f"and {more:,} more"] if more else [])])


def _explain(error: Mapping[str, Any], model: type[BaseModel], within: str) -> str:
    path, place, inside = _find(error["loc"], model)
    key = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, place, within)
        case "value_error":
            return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
        case "missing":
            return _missing(path, place)
        case "union_tag_not_found":
            return f"{key}: must be a mapping of keys, got {shown(error['input'])}"
        case "union_tag_invalid":
            section = cast("type[Formed]", inside)
            *others, last = (repr(name) for name in section.forms)
            message, given = f"Input should be {', '.join(others)} or {last}", error["input"][section.chooser]
            return _wrong_value([*path, section.chooser], message, given, within)
    return _wrong_value(path, error["msg"], error["input"], within)


def _find(location: tuple[Any, ...], model: type[BaseModel]) -> tuple[list[str], Model, Model]:
    """A path without names of forms; the section or form that has its last key; what section that key holds."""
    path: list[str] = []
    place: Model = None
    inside: Model = model
    for part in location:
        if inside is not None and issubclass(inside, Formed) and inside.is_formed() and part in inside.forms:
            inside = inside.forms[part]
            continue
        path.append(shortened(str(part)))
        place = inside
        field = None if place is None else place.model_fields.get(part)
        inside = None if field is None else section_in(field)
    return path, place, inside


def _missing(path: list[str], place: Model) -> str:
    section = None if place is None else formed(place)
    if place is None or section is None:
        return f"{'.'.join(path)} is required"
    example = (place.model_fields[path[-1]].examples or [None])[0]
    return f"{_before(path)}{section.chooser} '{_name(place, section)}' needs {path[-1]}" + (
        f", e.g. {example}" if example else ""
    )


def _unknown(path: list[str], place: Model, within: str) -> str:
    key = ".".join(path)
    if (renamed := RENAMED.get(f"{within}{key}")) is not None:
        return f"unknown key {key!r}: it is called {renamed.removeprefix(within)!r} now"
    if (why := DROPPED.get(f"{within}{key}")) is not None:
        return f"unknown key {key!r}: {why}"
    valid = [field for field in (place.model_fields if place is not None else ()) if field != "name"]
    return f"unknown key {key!r}{did_you_mean(path[-1], valid)}; valid keys here: {', '.join(valid)}"


def _wrong_value(path: list[str], message: str, given: Any, within: str) -> str:
    key = ".".join(path)
    if isinstance(given, str) and (renamed := RENAMED.get(f"{within}{key}: {given}")) is not None:
        return f"{key}: {given!r} is called {renamed!r} now"
    return f"{key}: {message}, got {shown(given)}"


def _before(path: list[str]) -> str:
    """The sections around a key, as errors begin."""
    return f"{'.'.join(path[:-1])}: " if path[:-1] else ""


def _name(form: type[BaseModel], section: type[Formed]) -> str:
    return next(name for name, each in section.forms.items() if each is form)


def did_you_mean(word: str, valid: Iterable[str], former: Mapping[str, str] | None = None) -> str:
    """The nearest of what is valid, in parentheses, or nothing; ``former`` names are told as those of today."""
    former = former or {}
    close = difflib.get_close_matches(word, [*valid, *former], n=1)
    return f" (did you mean {former.get(close[0], close[0])!r}?)" if close else ""
