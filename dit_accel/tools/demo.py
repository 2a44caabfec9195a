"""The trained demo models that ship inside the package, found by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "demo-flux"
_NOT_ARGUMENTS = ("fps", "preset", "words")  # of a demo.json, beside the arguments of the pipeline's call
_ASSETS = Path(__file__).parent / "assets"


def demo_names() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.parent.name for path in _ASSETS.glob("*/model_index.json"))


def demo_path(name: str) -> Path | None:
    """The diffusers folder of a shipped model, or None if there is none of that name."""
    return _ASSETS / name if name in demo_names() else None


def demo_arguments(folder: Path) -> dict[str, Any]:
    """Arguments that the pipeline in ``folder`` was trained for, from its ``demo.json``; empty if it has none."""
    return {name: value for name, value in _facts(folder).items() if name not in _NOT_ARGUMENTS}


def model_fps(name: str) -> float | None:
    """Frames a second of the clips that a shipped model was trained on; None if there is none, or it does not say."""
    return _facts(demo_path(name)).get("fps")


def model_preset(name: str) -> str | None:
    """The preset that a shipped model is meant to run with; None if there is none, or it does not say."""
    return _facts(demo_path(name)).get("preset")


def unknown_words(name: str, prompt: str) -> tuple[list[str], list[str]]:
    """Words of a prompt that a shipped model was not trained on, in their order, and all that it was, sorted.

    Both are empty for any other model.
    """
    known = _facts(demo_path(name)).get("words", [])
    words = re.findall(r"[^\W_]+", prompt.lower()) if known else []
    return [word for word in dict.fromkeys(words) if word not in known], known


def tuning_prompts(name: str) -> list[str]:
    """Prompts to tune on and to confirm with: a shipped model's own, which it was not trained on, else of all kinds."""
    folder = demo_path(name) or _ASSETS
    return (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()


def _facts(folder: Path | None) -> dict[str, Any]:
    file = folder and folder / "demo.json"
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
