"""What is wrong with a preset, in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

RENAMED = {  # keys, and values of keys, that were called otherwise once
    "schedule.control: error": "adaptive",
    "schedule.control: fixed": "interval",
    "schedule.final_full": "schedule.cooldown",
    "forecast.scope": "forecast.level",
    "forecast.level: stack": "output",
    "skip.guard_rows": "skip.probe_blocks",
    "skip.guard_error": "skip.probe_error",
}


def explain(error: Mapping[str, Any], model: type[BaseModel], within: str = "") -> str:
    """One validation error of ``model`` in words: the dotted key, what came, what is valid.

    Args:
        within: where the model stands in the preset: empty, or its section with a dot, ``"skip."``.
    """
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if (renamed := RENAMED.get(f"{within}{key}")) is not None:
            return f"unknown key {key!r}: it is called {renamed.removeprefix(within)!r} now"
        section: Any = model
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        valid = [field for field in section.model_fields if field != "name"]
        return f"unknown key {key!r}{did_you_mean(str(error['loc'][-1]), valid)}; valid keys here: {', '.join(valid)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key} is required"
    if (renamed := RENAMED.get(f"{within}{key}: {error['input']}")) is not None:
        return f"{key}: {error['input']!r} is called {renamed!r} now"
    return f"{key}: {error['msg']}, got {error['input']!r}"


def did_you_mean(word: str, valid: Iterable[str], former: Mapping[str, str] | None = None) -> str:
    """The nearest of what is valid, in parentheses, or nothing; ``former`` names are told as those of today."""
    former = former or {}
    close = difflib.get_close_matches(word, [*valid, *former], n=1)
    return f" (did you mean {former.get(close[0], close[0])!r}?)" if close else ""
