"""Find the trained demo models by name, in a checkout or in the distribution ``dit-accel-demos``."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dit_accel.errors import UnsupportedError

DEFAULT_MODEL = "demo-flux"
DEMOS = (DEFAULT_MODEL, "demo-hunyuan", "demo-wan")
_NOT_ARGUMENTS = ("fps", "preset", "words")  # keys of a demo.json that are not arguments of the pipeline's call
_ASSETS = Path(__file__).parent / "assets"


def demo_names() -> list[str]:
    return sorted(_demos())


def demo_path(name: str) -> Path | None:
    """Return the diffusers folder of a demo model, None for any other name; a missing demo is an UnsupportedError."""
    if (folder := _demos().get(name)) is None and name in DEMOS:
        raise UnsupportedError(f"demo model {name} is not installed: pip install -e . in a checkout")
    return folder


def demo_arguments(folder: Path) -> dict[str, Any]:
    """Return the call arguments that a demo model was trained for, from its ``demo.json``; empty without the file."""
    return {name: value for name, value in _facts(folder).items() if name not in _NOT_ARGUMENTS}


def model_fps(name: str) -> float | None:
    """Return the frames per second of a demo model's training videos; None for other models or image models."""
    return _facts(demo_path(name)).get("fps")


def model_preset(name: str) -> str | None:
    """Return the recommended preset of a demo model; None for other models or without a recommendation."""
    return _facts(demo_path(name)).get("preset")


def unknown_words(name: str, prompt: str) -> tuple[list[str], list[str]]:
    """Return a prompt's words that a demo model was not trained on, and its training words; empty for other models."""
    known = _facts(demo_path(name)).get("words", [])
    words = re.findall(r"[^\W_]+", prompt.lower()) if known else []
    return [word for word in dict.fromkeys(words) if word not in known], known


def tuning_prompts(name: str) -> list[str]:
    """Return prompts for tuning and confirmation: a demo model's own, unseen in training, or general ones."""
    return ((demo_path(name) or _ASSETS) / "prompts.txt").read_text(encoding="utf-8").splitlines()


def _demos() -> dict[str, Path]:
    """Return the folders of demo models by name; a checkout takes precedence over installed ones."""
    spec = find_spec("dit_accel_demos")
    installed = map(Path, spec.submodule_search_locations or ()) if spec is not None else ()
    files = (file for folder in (*installed, _ASSETS) for file in folder.glob("*/model_index.json"))
    return {file.parent.name: file.parent for file in files}


def _facts(folder: Path | None) -> dict[str, Any]:
    file = folder and folder / "demo.json"
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
