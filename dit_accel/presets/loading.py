"""Load presets from files, names and overrides."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dit_accel.constants import TARGETS
from dit_accel.errors import PresetError, shortened, shown
from dit_accel.presets.complaints import did_you_mean, explained
from dit_accel.presets.keywords import merge, nested
from dit_accel.presets.preset import FORMED, LOOP_KEYS, Preset
from dit_accel.presets.reading import read_text, read_yaml
from dit_accel.presets.section import section_in
from dit_accel.presets.sections import Schedule, clashing
from dit_accel.presets.skip import drop_foreign_keys

DEFAULT = "balanced"
LEVELS = ("quality", "balanced", "turbo")  # names for any pipeline; video pipelines get the video form
LONGEST_CHAIN = 20  # presets in a chain of bases
DECISIVE = ("forecast", "skip", "reuse", "blocks", "linear", "kernels")  # sections that change a target error's PSNR
EQUIVALENT = {"kernels": {"attention", "gemm", "graphs"}}  # keys of them that do not


def _config_directory() -> Path:
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package, sorted."""
    return sorted(path.stem for path in _config_directory().glob("*.yaml"))


def preset_path(name: str) -> Path:
    """Return the YAML file of a shipped preset; another name is a PresetError that lists all presets."""
    known = preset_names()
    if name not in known:
        family, _, word = name.partition("-")
        has_forms = family == "video" or "-" in word  # `flux-balanced` means `balanced`, as no family has its own
        meant = (not has_forms and did_you_mean(word, LEVELS)) or did_you_mean(name, known)
        raise PresetError(f"unknown preset {shown(name)}{meant}; available: {', '.join(known)}")
    return _config_directory() / f"{name}.yaml"


def measured(name: str) -> list[dict[str, Any]]:
    """Return the measured runs of a shipped preset, from ``configs/measured.json``, from most to fewest steps.

    A run has ``steps``; ``computed``, the smallest and the largest share of the plain run's FLOPs over ``models``;
    ``psnr``, the same of the mean PSNR in dB; ``dtype`` of the weights; and ``source``, a file in docs/results.
    """
    return json.loads(preset_path(name).with_name("measured.json").read_text(encoding="utf-8")).get(name, [])


def load_preset(preset: str | Path | Preset, **overrides: Any) -> Preset:
    """Load a preset, as :func:`dit_accel.models.presets.load_preset`, without checking it against the families."""
    if isinstance(preset, Preset):
        name, values = preset.name, preset.model_dump(exclude_unset=True, exclude={"name"})
    elif isinstance(preset, (str, Path)):
        path = Path(preset)
        is_file = isinstance(preset, Path) or path.suffix in (".yaml", ".yml")
        path = path if is_file else preset_path(str(preset))
        name, values = path.stem, _read(path, seen=())
    else:
        raise PresetError(f"preset must be a name, a path or a Preset, got {type(preset).__name__}")
    if clash := clashing(*(key for key in TARGETS if key in {name.rpartition(".")[2] for name in overrides})):
        raise PresetError(f"{clash}: give one of them, not both")
    _apply(values, nested(overrides))
    if "name" in values:
        raise PresetError(f"preset {shown(name)} is not valid: unknown key 'name'; the file name is the preset's name")
    try:
        return Preset.model_validate({**values, "name": name})
    except ValidationError as failure:
        raise PresetError(f"preset {shown(name)} is not valid: {explained(failure, Preset)}") from None


def default_preset(preset: str | Path | Preset | None, *, is_video: bool) -> str | Path | Preset:
    """Return the argument of :func:`load_preset` for a pipeline that makes images or videos; None = `balanced`."""
    name = DEFAULT if preset is None else preset
    return f"video-{name}" if is_video and name in (*LEVELS, "balanced-8bit", "turbo-8bit") else name


def preset_schema() -> dict[str, Any]:
    """Return the JSON schema of a preset file, for editors (``# yaml-language-server: $schema=…``)."""
    schema = Preset.model_json_schema()
    schema["properties"].pop("name")
    schema["properties"]["base"] = {"type": "string", "description": "Preset (name or path) that this one starts from."}
    _ask_for_nothing(schema)
    schema["required"] = []
    return schema


def _ask_for_nothing(schema: Any) -> None:
    """Make all keys optional, because a preset with a base may leave out any; then several forms may match."""
    if isinstance(schema, dict):
        schema.pop("required", None)
        if "oneOf" in schema:
            schema["anyOf"] = schema.pop("oneOf")
    if isinstance(schema, list | dict):
        for part in schema.values() if isinstance(schema, dict) else schema:
            _ask_for_nothing(part)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return a preset file as plain values, with its ``base`` chain merged in."""
    file = f"preset file {shortened(str(path))}"
    try:
        real = Path(os.path.realpath(path))
        values = read_yaml(read_text(path))
    except FileNotFoundError:
        raise PresetError(f"{file} does not exist") from None
    except OSError as error:
        raise PresetError(f"{file} can't be read: {error.strerror}") from None
    except PresetError as error:
        raise PresetError(f"{file} is {error}") from None
    except ValueError as error:
        raise PresetError(f"{file} can't be read: {error}") from None
    if real in seen:
        raise PresetError(f"base of preset {path} leads to itself: {' -> '.join(step.name for step in (*seen, real))}")
    if len(seen) == LONGEST_CHAIN:
        raise PresetError(f"{file} ends a chain of {LONGEST_CHAIN} bases: name an earlier preset of the chain as base")
    if not isinstance(values, dict):
        raise PresetError(f"{file} must hold a mapping of sections, got {type(values).__name__}")
    (skip,) = _sections("skip", values)
    if isinstance(projection := skip.get("projection"), str):
        skip["projection"] = str(path.parent / projection)
    if (base := values.pop("base", None)) is None:
        return values
    sibling = path.parent / str(base)
    merged = _read(sibling if sibling.suffix in (".yaml", ".yml") else preset_path(str(base)), (*seen, real))
    _apply(merged, values)
    return merged


def _apply(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Merge changes into values; choosing a form of a section drops the values of other forms."""
    before = _decisive(values)
    for name, formed in FORMED.items():
        section, chosen = _sections(name, values, changes)
        for key in formed.foreign_keys(chosen.get(formed.chooser)):
            section.pop(key, None)
    (schedule, chosen_schedule), (forecast, chosen_forecast), (skip, chosen_skip) = (
        _sections(name, values, changes) for name in FORMED
    )
    if any(chosen_schedule.get(key) is not None for key in TARGETS):
        for key in TARGETS[1:]:  # a target error stays, as the form needs one
            schedule.pop(key, None)
    if chosen_forecast.get("level") not in (None, "output"):
        schedule.pop("per_prompt", None)
    rule = Schedule.forms.get(str(chosen_schedule.get("control")))
    if rule is not None and not rule.measures:
        for key in LOOP_KEYS:
            forecast.pop(key, None)
    if chosen_skip.get("policy") not in (None, skip.get("policy")):
        for key in ("layers", "refresh", "residual", "projection"):  # keys of the previous policy
            skip.pop(key, None)
    drop_foreign_keys(skip, chosen_skip)
    layers, changed_layers = _sections("layers", skip, chosen_skip)
    for name in changed_layers:
        drop_foreign_keys(*_sections(name, layers, changed_layers))
    merge(values, changes)
    if "calibration" not in chosen_schedule and _decisive(values) != before:
        schedule.pop("calibration", None)


def _decisive(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values, defaults included, that change a target error's PSNR; None if they are not valid."""
    found = {}
    for name in DECISIVE:
        section = section_in(Preset.model_fields[name])
        assert section is not None
        try:
            found[name] = section.model_validate(values.get(name, {})).model_dump(exclude=EQUIVALENT.get(name))
        except (ValidationError, PresetError):
            return None
    return found


def _sections(name: str, *holders: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the section of each holder under a name; empty if it is no mapping, which validation rejects later."""
    return [section if isinstance(section := holder.get(name), dict) else {} for holder in holders]
