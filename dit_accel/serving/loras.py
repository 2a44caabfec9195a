"""``--lora``: what commands load into a pipeline beside the model, each with a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit_accel.errors import OptionError, shortened, shown
from dit_accel.serving.failures import explained_loading
from dit_accel.tools.demo import demo_path
from dit_accel.tools.extras import require_extra

KEYS = {  # of a preset, by what a fine-tuning was given
    "critical": "skip.critical",
    "negligible": "skip.negligible",
    "feature_map": "skip.feature_map",
    "block": "blocks.size",
}


def parse_loras(given: list[str] | None) -> dict[str, float]:
    """``["style.safetensors:0.8", …]`` as weights by where each LoRA lies: a folder, a file or an id on the hub.

    Files and folders are looked for, and those of demo models (``demo-wan/sla``) found.
    """
    loras: dict[str, float] = {}
    for each in given or []:
        source, colon, last = each.rpartition(":")
        weight = _number(last) if colon else None
        source = _resolved(each if weight is None else source)
        if source in loras:
            raise OptionError("--lora", f"{shortened(source)} was given twice; give it once")
        loras[source] = 1.0 if weight is None else weight
    if loras:
        require_extra("peft", "--lora")
    return loras


def load_loras(pipe: Any, loras: Mapping[str, float]) -> None:
    """Adds LoRAs to a pipeline's weights; beside quantised ones, which nothing can be added to, they stay layers.

    Raises:
        OptionError: the pipeline takes none, or one is not of its kind.
    """
    from dit_accel.models import denoisers

    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise OptionError("--lora", f"{type(pipe).__name__} takes no LoRA")
    names = [f"lora-{index}" for index in range(len(loras))]
    for name, source in zip(names, loras, strict=True):
        place, file = _repository(source)
        with explained_loading("--lora", source):
            pipe.load_lora_weights(place, adapter_name=name, weight_name=file)
    pipe.set_adapters(names, list(loras.values()))
    for transformer in denoisers(pipe).values():
        if hasattr(transformer, "peft_config") and getattr(transformer, "hf_quantizer", None) is None:
            transformer.fuse_lora()
            transformer.unload_lora()


def with_projections(preset: str | None, overrides: dict[str, Any], loras: Mapping[str, float]) -> dict[str, Any]:
    """The overrides, and where the preset runs SLA what its fine-tuning wrote beside a LoRA: projections and shares."""
    from dit_accel.models.presets import load_preset
    from dit_accel.presets import default_preset
    from dit_accel.sparse.projections import PROJECTIONS, trained_with

    files = [file for file in (Path(source) / PROJECTIONS for source in loras) if file.is_file()]
    if not files:
        return overrides
    skip = load_preset(default_preset(preset, is_video=False), **overrides).skip
    if skip.policy != "sla" or skip.projection is not None:
        return overrides
    trained = {KEYS[name]: value for name, value in trained_with(files[0]).items()}
    return {"skip.projection": str(files[0]), **trained, **overrides}


def _number(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    if not math.isfinite(weight):
        raise OptionError("--lora", f"a weight must be a finite number, got {text}")
    return weight


def _resolved(source: str) -> str:
    """The path of what lies here, with the names of demo models and ``~`` resolved; an id on the hub as it is."""
    model, _, rest = source.partition("/")
    folder = demo_path(model)
    path = folder / rest if folder else Path(source).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if there:
        return str(path)
    if folder or source.startswith((".", "/", "~")) or source.count("/") < 1:
        raise OptionError("--lora", f"{shown(source)} is neither a folder, nor a file, nor a hub id (OWNER/NAME)")
    return source


def _repository(source: str) -> tuple[str, str | None]:
    """Where a LoRA is, and the file in it where that is a hub's repository (``OWNER/NAME/FILE``)."""
    if Path(source).exists():
        return source, None
    owner, name, *file = source.split("/", 2)
    return f"{owner}/{name}", file[0] if file else None
