"""What is wrong with a preset, in words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def explain(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One validation error of ``model`` in words: the dotted key, what came, what is valid."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = model
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        valid = [field for field in section.model_fields if field != "name"]
        return f"unknown key {key!r}{did_you_mean(str(error['loc'][-1]), valid)}; valid keys here: {', '.join(valid)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key} is required"
    return f"{key}: {error['msg']}, got {error['input']!r}"


def did_you_mean(word: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
