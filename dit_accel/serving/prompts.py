"""Read files of prompts into jobs, and group jobs that can share one call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.constants import TARGETS
from dit_accel.errors import ArgumentError, PresetError, shortened, shown

if TYPE_CHECKING:
    from dit_accel.presets import Preset

LONGEST_PROMPTS = 2**20  # bytes of a file
KEYS: dict[str, tuple[type, ...]] = {}  # keys of a JSON line; all but the seed are options of the command
KEYS |= dict.fromkeys(("prompt", "negative-prompt", "preset"), (str,))
KEYS |= dict.fromkeys(("seed", "steps", "height", "width", "num-frames"), (int,))
KEYS |= {"guidance": (int, float), "loras": (dict,), **dict.fromkeys(TARGETS, (int, float))}
CONTRACT = ("preset", *TARGETS)  # keys that are no arguments of a call
OWN = ("prompt", "negative-prompt", "seed")  # may differ within a batch; pipelines take lists of these
# Settings of a job that are no arguments: partial images, growing videos, seconds until its end and after its steps.
PARTIAL_IMAGES, STREAM, DEADLINE = "partial-images", "stream", "deadline"


@dataclass(frozen=True)
class Job:
    """A line's index and settings by the keys above, with a seed; a server's also ``image``, ``strength``, ``fps``."""

    index: int
    settings: dict[str, Any]

    @property
    def shared(self) -> dict[str, Any]:
        return {key: None if key in OWN else value for key, value in self.settings.items()}

    def name(self, suffix: str) -> str:
        return f"{self.index:04}{suffix}"


def read_prompts(path: Path, field: str = "prompts", what: str = "prompts") -> list[str]:
    """Read the lines of a file that are not blank, at least one; errors name the option ``field``."""
    from dit_accel.presets.reading import read_text

    name = shortened(str(path))
    try:
        text = read_text(path, LONGEST_PROMPTS)
    except (OSError, ValueError) as error:
        raise ArgumentError(field, f"{name} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if not (lines := [line.strip() for line in text.splitlines() if line.strip()]):
        raise ArgumentError(field, f"{name} holds no {what}; write one per line")
    return lines


def read_jobs(path: Path, common: dict[str, Any]) -> list[Job]:
    """Read the lines of a file: prompts, or JSON objects in a .jsonl file, with common settings unless None."""
    lines, is_json = read_prompts(path), path.suffix == ".jsonl"
    settings = [_settings(line, number) if is_json else {"prompt": line} for number, line in enumerate(lines, 1)]
    defaults = {key: value for key, value in common.items() if value is not None}
    return [Job(index, defaults | line) for index, line in enumerate(settings)]


def contracted(base: "Preset | None", settings: Mapping[str, Any], form: object) -> "Preset | None":
    """Return the preset that settings name, or ``base``, with their targets; None = plain. Videos have a ``form``."""
    from dit_accel.models.presets import load_preset, presets

    name, targets = settings.get("preset"), {key: settings[key] for key in TARGETS if settings.get(key) is not None}
    named = base if name is None else None if name == "none" else name
    if named is None and targets:
        raise PresetError(f"{next(iter(targets))} needs a preset, but none runs the plain pipeline")
    return named and load_preset(presets.default_preset(named, is_video=form is not None), **targets)


def batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Group neighbouring jobs that can share one call, at most ``size`` per group."""
    together: list[list[Job]] = []
    for job in jobs:
        if together and len(together[-1]) < size and together[-1][0].shared == job.shared:
            together[-1].append(job)
        else:
            together.append([job])
    return together


def _settings(line: str, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("prompts", f"line {number} is not JSON: {error}") from None
    if not isinstance(values, dict) or "prompt" not in values:
        raise ArgumentError("prompts", f"line {number} must be an object with a prompt, got {shown(line)}")
    for key, value in values.items():
        if (kinds := KEYS.get(key)) is None:
            raise ArgumentError("prompts", f"line {number}: unknown key {shown(key)}; keys are {', '.join(KEYS)}")
        if not isinstance(value, kinds) or isinstance(value, bool):
            kind = " or ".join(kind.__name__ for kind in kinds)
            raise ArgumentError("prompts", f"line {number}: {key} must be {kind}, got {shown(value)}")
    return values
