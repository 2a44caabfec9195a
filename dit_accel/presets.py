"""Presets: every threshold of every method, as one frozen, strict YAML schema.

A preset is a YAML file in ``configs/`` (or the user's own) that fills the sections below; what it leaves out keeps its
default, ``base:`` starts from another preset, and unknown keys or values out of range are errors that say what is
valid.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dit_accel.errors import PresetError

# Sections that only scope head reads (but for reuse also `skip.steps: all`), and keys that each control leaves to the
# other.
_HEAD_SECTIONS = ("reuse", "skip", "blocks", "kernels")
_VIDEO_MODELS = ("hunyuan_video", "wan")
_FOREIGN_KEYS = {"fixed": ("target_error", "error_in", "max_interval"), "error": ("interval",)}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Schedule(_Section):
    """When to compute."""

    control: Literal["fixed", "error"] = "error"
    """fixed: an UPDATE every `interval` steps (the papers). error: the closed loop, which measures at every UPDATE how
    wrong the forecast would have been and sets the next gap by it."""
    warmup: int = Field(default=4, ge=0)
    """Steps at the start that compute everything."""
    target_error: float | None = Field(default=None, gt=0.0, lt=1.0)
    """control error: relative L2 error of the forecast output, ‖F − F̂‖/‖F‖, that a forecast step may reach."""
    error_in: Literal["output", "latents"] = "output"
    """control error: what target_error bounds. output: the error of the farthest forecast. latents: the errors of all
    forecasts up to it together, each times how far its step moves in sigma, over the mean of all steps, for by so much
    it moves the latents; better where sigma falls unevenly."""
    max_interval: int = Field(default=16, ge=1)
    """control error: most steps from one UPDATE to the next."""
    interval: int | None = Field(default=None, ge=1)
    """control fixed: one UPDATE and interval − 1 DISPATCH steps; 1 computes every step in full."""
    final_full: int = Field(default=1, ge=0)
    """Steps at the end that compute everything."""

    @model_validator(mode="after")
    def _complete(self) -> Schedule:
        if self.control == "error" and self.target_error is None:
            raise ValueError("control 'error' needs target_error, e.g. 0.05")
        if self.control == "fixed" and self.interval is None:
            raise ValueError("control 'fixed' needs interval, e.g. 5")
        for key in _FOREIGN_KEYS[self.control]:
            if key in self.model_fields_set and getattr(self, key) is not None:
                other = "error" if self.control == "fixed" else "fixed"
                raise ValueError(f"{key} belongs to control '{other}', and control is '{self.control}': remove it")
        return self


class Forecast(_Section):
    """What a DISPATCH step fills in, and how."""

    scope: Literal["stack", "layer", "head"] = "stack"
    """stack: the transformer's output, for any model. layer: attention and MLP outputs of each block (TaylorSeer,
    FORA). head: rows of each head, chosen by the symbols (FlashOmni)."""
    method: Literal["newton", "taylor", "reuse"] = "newton"
    """newton: polynomial through the recorded values, exact on any spacing. taylor: TaylorSeer's finite differences.
    reuse: the last value."""
    order: int = Field(default=1, ge=0, le=4)
    """Degree D of the polynomial; order + 1 values are remembered. With control error the highest degree: every
    computed step goes on with the one that would have reached farthest. reuse wants 0."""
    coordinate: Literal["step", "sigma", "auto"] = "step"
    """What the polynomial runs over: the step's index; the scheduler's noise level; or auto, the index where the noise
    level falls evenly and the noise level where it does not."""

    @model_validator(mode="after")
    def _complete(self) -> Forecast:
        if self.method == "reuse" and self.order != 0:
            raise ValueError("method 'reuse' repeats the last value: set order to 0")
        return self


class Reuse(_Section):
    """Scope head: which rows a DISPATCH step takes from the cache."""

    policy: Literal["flashomni"] = "flashomni"
    """How row-blocks are scored: FlashOmni, equation 1; without joint text (Wan), by the attention they receive."""
    tau_q: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the cumulative score, lowest first, that is reused (FlashOmni's τ_q)."""
    ramp: float = Field(default=2.0, gt=0.0)
    """τ_q and τ_kv start at 0 and grow as (step / steps) ** ramp; 2.0 for images, 1.7 for video."""
    degrade_below: float = Field(default=0.0, ge=0.0, le=1.0)
    """A layer whose computed fraction falls below this is forecast whole until the next UPDATE (FlashOmni's S_q)."""


class Skip(_Section):
    """Which attention tiles are left out of rows that compute."""

    policy: Literal["none", "sparge"] = "none"
    """sparge: per row, tiles are dropped, lowest probability first, while the dropped mass stays within tau_kv."""
    steps: Literal["dispatch", "all"] = "dispatch"
    """dispatch: tiles are left out of DISPATCH steps only, which attend at scope head alone. all: of every step after
    the warm-up, at any scope; a computed step then chooses its tiles by its own queries and keys."""
    tau_kv: float = Field(default=0.15, ge=0.0, le=1.0)
    """Probability mass of the pooled map that a row may lose (FlashOmni's τ_kv; SpargeAttn's τ is 1 − tau_kv). At scope
    head it grows as reuse.ramp says."""

    @model_validator(mode="after")
    def _complete(self) -> Skip:
        if self.steps == "all" and self.policy == "none":
            raise ValueError("steps 'all' has no effect with policy 'none': set policy to sparge, or remove steps")
        return self


class Blocks(_Section):
    """How the sequence is cut."""

    size: Literal[64, 128] = 128
    """Tokens in a block."""
    token_order: Literal["raster", "hilbert", "tiles"] = "raster"
    """How a clip's tokens run through the blocks, so that neighbours share one. raster: frame by frame, row by row.
    hilbert: along a Hilbert curve (SpargeAttn, section 3.7). tiles: box by box, each of about `size` tokens."""


class Kernels(_Section):
    """Which implementation runs each op; auto picks by device, anything else must be able to run."""

    attention: Literal["auto", "reference", "triton", "cuda", "cute"] = "auto"
    """Sparse attention."""
    gemm: Literal["auto", "reference", "triton", "cuda"] = "auto"
    """GEMM-Q and GEMM-O."""


class Memory(_Section):
    """How much the caches of a run may hold, and how they are kept."""

    budget_gib: float | None = Field(default=None, gt=0.0)
    """Most GiB on the device for histories, symbols and cached biases of all branches together; null = no limit. What
    it takes is done, in this order and no more than needed: attention outputs of text blocks left out, float8, host
    memory, lower orders. A run that does not fit then is refused."""
    history_dtype: Literal["float8"] | None = None
    """float8: what blocks remember is kept as e4m3 with a scale per 128 values; null = as computed."""
    offload: bool = False
    """Scope head: attention outputs, which only UPDATE steps read, wait in pinned host memory."""


class Preset(_Section):
    """One method with all its thresholds. Frozen; make changed copies with :func:`load_preset`."""

    name: str = Field(default="custom", exclude=True)
    description: str = ""
    """One line for `dit-accel presets list`."""
    model: Literal["any", "flux", "hunyuan_video", "wan"] = "any"
    """Model family that the preset is made for; `any` needs scope stack."""
    schedule: Schedule
    forecast: Forecast = Forecast()
    reuse: Reuse = Reuse()
    skip: Skip = Skip()
    blocks: Blocks = Blocks()
    kernels: Kernels = Kernels()
    memory: Memory = Memory()

    def effective(self) -> dict[str, Any]:
        """All values that have an effect, defaults included, as plain values: a preset file's content."""
        values = self.model_dump(mode="json")
        for key in _FOREIGN_KEYS[self.schedule.control]:
            del values["schedule"][key]
        for section in self._unread_sections():
            del values[section]
        for key in self._idle_memory_keys():
            del values["memory"][key]
        if "blocks" in values and self.model not in _VIDEO_MODELS:
            del values["blocks"]["token_order"]
        return values

    def _unread_sections(self) -> tuple[str, ...]:
        """Sections that have no effect at this scope."""
        if self.forecast.scope == "head":
            return ()
        return ("reuse",) if self.skip.steps == "all" else _HEAD_SECTIONS

    def _idle_memory_keys(self) -> dict[str, str]:
        """Keys of section memory that have no effect, with the reason."""
        idle = {}
        if self.forecast.scope == "stack":
            idle["history_dtype"] = "at scope 'stack' blocks remember nothing"
        if self.forecast.scope != "head":
            idle["offload"] = "attention outputs are remembered at scope 'head' only"
        elif self.forecast.order == 0:
            idle["offload"] = "with order 0 no attention outputs are remembered"
        return idle

    @model_validator(mode="after")
    def _consistent(self) -> Preset:
        if self.model == "any" and self.forecast.scope != "stack":
            raise ValueError(
                f"scope '{self.forecast.scope}' needs a model family with an adapter: set model, e.g. flux"
            )
        if self.model == "any" and self.skip.steps == "all":
            raise ValueError("skip.steps 'all' needs a model family with an adapter: set model, e.g. flux")
        touched = [name for name in self._unread_sections() if getattr(self, name).model_fields_set]
        if touched:
            skips = "" if touched[0] == "reuse" else ", or skip.steps to all"
            raise ValueError(
                f"section '{touched[0]}' has no effect at scope '{self.forecast.scope}', where a DISPATCH step "
                f"runs no attention: remove it, or set forecast.scope to head{skips}"
            )
        if self.blocks.token_order != "raster" and self.model not in _VIDEO_MODELS:
            raise ValueError(
                f"blocks.token_order '{self.blocks.token_order}' orders the tokens of clips, and model is "
                f"'{self.model}': set it to raster"
            )
        for key, reason in self._idle_memory_keys().items():
            if getattr(self.memory, key):
                raise ValueError(f"memory.{key} has no effect, because {reason}: remove it")
        return self


def _config_directory() -> Path:
    """Where presets lie: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names() -> list[str]:
    """Names of the presets that ship with the package, sorted."""
    return sorted(path.stem for path in _config_directory().glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The YAML file of a shipped preset.

    Raises:
        PresetError: no such preset; the message lists those that exist.
    """
    path = _config_directory() / f"{name}.yaml"
    if not path.is_file():
        raise PresetError(
            f"unknown preset {name!r}{_did_you_mean(name, preset_names())}; available: {', '.join(preset_names())}"
        )
    return path


def load_preset(preset: str | Path | Preset, **overrides: Any) -> Preset:
    """Load a preset and apply overrides.

    Args:
        preset: a name in ``configs/``, the path of a YAML file, or a :class:`Preset`.
        overrides: dotted keys, e.g. ``**{"forecast.order": 2}``, or whole sections, e.g. ``schedule={"warmup": 8}``,
            whose keys are merged.

    Raises:
        PresetError: unknown preset, key or value; the message lists what is valid.
    """
    if isinstance(preset, Preset):
        name, values = preset.name, preset.model_dump(exclude_unset=True, exclude={"name"})
    elif isinstance(preset, (str, Path)):
        path = Path(preset)
        is_file = isinstance(preset, Path) or path.suffix in (".yaml", ".yml")
        path = path if is_file else preset_path(str(preset))
        name, values = path.stem, _read(path, seen=())
    else:
        raise PresetError(f"preset must be a name, a path or a Preset, got {type(preset).__name__}")
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        _merge(changes, _nested(key.split("."), value))
    _apply(values, changes)
    if "name" in values:
        raise PresetError(f"preset {name!r} is not valid: unknown key 'name'; a preset is called after its file")
    return _validated({**values, "name": name}, source=name)


def preset_schema() -> dict[str, Any]:
    """JSON schema of a preset file, for editors (``# yaml-language-server: $schema=…``)."""
    schema = Preset.model_json_schema()
    schema["properties"].pop("name")
    schema["properties"]["base"] = {"type": "string", "description": "Preset (name or path) that this one starts from."}
    schema["required"] = []
    return schema


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A preset file as plain values, with its ``base`` chain merged in."""
    if path.resolve() in seen:
        raise PresetError(
            f"base of preset {path} leads back to itself: {' -> '.join(p.name for p in (*seen, path.resolve()))}"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PresetError(f"preset file {path} does not exist") from None
    except OSError as error:
        raise PresetError(f"preset file {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PresetError(f"preset file {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise PresetError(f"preset file {path} must hold a mapping of sections, got {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    base_path = beside if beside.suffix in (".yaml", ".yml") else preset_path(str(base))
    merged = _read(base_path, (*seen, path.resolve()))
    _apply(merged, values)
    return merged


def _apply(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Merges changes into values; choosing a control drops what the values said for the other, which it excludes."""
    section, chosen = values.get("schedule"), changes.get("schedule")
    if isinstance(section, dict) and isinstance(chosen, dict):
        for control, foreign in _FOREIGN_KEYS.items():
            if chosen.get("control") == control:
                for key in foreign:
                    section.pop(key, None)
    _merge(values, changes)


def _merge(target: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = dict(value) if isinstance(value, dict) else value


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _validated(values: dict[str, Any], source: str) -> Preset:
    try:
        return Preset.model_validate(values)
    except ValidationError as failure:
        raise PresetError(
            f"preset {source!r} is not valid: " + "; ".join(_explain(e) for e in failure.errors())
        ) from None


def _explain(error: dict[str, Any]) -> str:
    """One validation error in words: the dotted key, what came, what is valid."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = Preset
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        valid = [field for field in section.model_fields if field != "name"]
        return f"unknown key {key!r}{_did_you_mean(str(error['loc'][-1]), valid)}; valid keys here: {', '.join(valid)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key} is required"
    return f"{key}: {error['msg']}, got {error['input']!r}"


def _did_you_mean(word: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
