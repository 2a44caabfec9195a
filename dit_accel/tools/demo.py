"""The trained demo models, found by name: those of a checkout, or of the distribution ``dit-accel-demos``."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dit_accel.errors import UnsupportedError

DEFAULT_MODEL = "demo-flux"
DEMOS = (DEFAULT_MODEL, "demo-hunyuan", "demo-wan")
_NOT_ARGUMENTS = ("fps", "preset", "words")  # of a demo.json, beside the arguments of the pipeline's call
_ASSETS = Path(__file__).parent / "assets"


def demo_names() -> list[str]:
    """Names of the demo models that are there, sorted."""
    return sorted(_demos())


def demo_path(name: str) -> Path | None:
    """The diffusers folder of a demo model, or None if there is none of that name.

    Raises:
        UnsupportedError: there is one, but it is not installed.
    """
    folder = _demos().get(name)
    if folder is None and name in DEMOS:
        raise UnsupportedError(f"demo model {name} is not installed: pip install 'dit-accel[demos]'")
    return folder


def demo_arguments(folder: Path) -> dict[str, Any]:
    """Arguments that the pipeline in ``folder`` was trained for, from its ``demo.json``; empty if it has none."""
    return {name: value for name, value in _facts(folder).items() if name not in _NOT_ARGUMENTS}


def model_fps(name: str) -> float | None:
    """Frames a second of the clips that a demo model was trained on; None if there is none, or it does not say."""
    return _facts(demo_path(name)).get("fps")


def model_preset(name: str) -> str | None:
    """The preset that a demo model is meant to run with; None if there is none, or it does not say."""
    return _facts(demo_path(name)).get("preset")


def unknown_words(name: str, prompt: str) -> tuple[list[str], list[str]]:
    """Words of a prompt that a demo model was not trained on, in their order, and all that it was, sorted.

    Both are empty for any other model.
    """
    known = _facts(demo_path(name)).get("words", [])
    words = re.findall(r"[^\W_]+", prompt.lower()) if known else []
    return [word for word in dict.fromkeys(words) if word not in known], known


def tuning_prompts(name: str) -> list[str]:
    """Prompts to tune on and to confirm with: a demo model's own, which it was not trained on, else of all kinds."""
    folder = demo_path(name) or _ASSETS
    return (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()


def _demos() -> dict[str, Path]:
    """The folders of demo models by name; those of a checkout before those that are installed."""
    spec = find_spec("dit_accel_demos")
    installed = map(Path, spec.submodule_search_locations or ()) if spec is not None else ()
    return {
        path.parent.name: path.parent for folder in (*installed, _ASSETS) for path in folder.glob("*/model_index.json")
    }


def _facts(folder: Path | None) -> dict[str, Any]:
    file = folder and folder / "demo.json"
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
