"""Write the error messages of invalid presets."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from dit_accel.errors import shortened, shown
from dit_accel.presets.section import Formed, formed, section_in

MOST_COMPLAINTS = 8  # in one message

Model = type[BaseModel] | None


def explained(failure: ValidationError, model: type[BaseModel]) -> str:
    """Return the validation errors of ``model`` as text, each with the dotted key, the given value and valid values."""
    errors = failure.errors()
    written = [_explain(error, model) for error in errors[:MOST_COMPLAINTS]]
    more = len(errors) - len(written)
    return "; ".join([*written, *([f"and {more:,} more"] if more else [])])


def _explain(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    path, place, inside = _find(error["loc"], model)
    key = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, place)
        case "value_error":
            return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
        case "missing":
            return _missing(path, place)
        case "union_tag_not_found":
            return f"{key}: must be a mapping of keys, got {shown(error['input'])}"
        case "union_tag_invalid":
            section = cast("type[Formed]", inside)
            *others, last = (repr(name) for name in section.forms)
            message, value = f"Input should be {', '.join(others)} or {last}", error["input"][section.chooser]
            return _wrong_value([*path, section.chooser], message, value)
    return _wrong_value(path, error["msg"], error["input"])


def _find(location: tuple[Any, ...], model: type[BaseModel]) -> tuple[list[str], Model, Model]:
    """Return a path without names of forms, the section or form of its last key, and the section in this key."""
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
    before = f"{'.'.join(path[:-1])}: " if path[:-1] else ""
    form = next(name for name, known in section.forms.items() if known is place)
    return f"{before}{section.chooser} '{form}' needs {path[-1]}" + (f", e.g. {example}" if example else "")


def _unknown(path: list[str], place: Model) -> str:
    valid = [field for field in (place.model_fields if place is not None else ()) if field != "name"]
    return f"unknown key {'.'.join(path)!r}{did_you_mean(path[-1], valid)}; valid keys here: {', '.join(valid)}"


def _wrong_value(path: list[str], message: str, value: Any) -> str:
    return f"{'.'.join(path)}: {message}, got {shown(value)}"


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return the nearest valid word, in parentheses, or an empty string."""
    close = difflib.get_close_matches(word, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
