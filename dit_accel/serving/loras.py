"""``--lora``: parse LoRAs with their weights and load them into a pipeline."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit_accel.errors import ArgumentError, shortened, shown
from dit_accel.serving.failures import explained_loading
from dit_accel.tools.demo import demo_path
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import repository_and_file


def parse_loras(texts: list[str] | None) -> dict[str, float]:
    """Parse ``["style.safetensors:0.8", …]`` into weights by LoRA: a folder, a file or an id on the Hub."""
    loras: dict[str, float] = {}
    for text in texts or []:
        source, colon, last = text.rpartition(":")
        weight = _number(last) if colon else None
        source = _resolved(text if weight is None else source)
        if source in loras:
            raise ArgumentError("lora", f"{shortened(source)} was given twice; give it once")
        loras[source] = 1.0 if weight is None else weight
    if loras:
        require_extra("peft", "--lora")
    return loras


def load_loras(pipe: Any, loras: Mapping[str, float]) -> None:
    """Fuse LoRAs into a pipeline's weights. With quantised weights, which can't be fused, they stay separate layers."""
    from dit_accel.models import denoisers

    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise ArgumentError("lora", f"{type(pipe).__name__} takes no LoRA")
    names = [f"lora-{index}" for index in range(len(loras))]
    for name, source in zip(names, loras, strict=True):
        place, file = repository_and_file(source)
        with explained_loading("lora", source):
            pipe.load_lora_weights(place, adapter_name=name, weight_name=file)
    pipe.set_adapters(names, list(loras.values()))
    for transformer in denoisers(pipe).values():
        if hasattr(transformer, "peft_config") and getattr(transformer, "hf_quantizer", None) is None:
            transformer.fuse_lora()
            transformer.unload_lora()


def _number(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    if not math.isfinite(weight):
        raise ArgumentError("lora", f"a weight must be a finite number, got {text}")
    return weight


def _resolved(source: str) -> str:
    """Return the path of a local LoRA, with demo models and ``~`` resolved, or an id on the Hub unchanged."""
    model, _, rest = source.partition("/")
    folder = demo_path(model)
    path = folder / rest if folder else Path(source).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):  # not a valid file name
        there = False
    if there:
        return str(path)
    if folder or source.startswith((".", "/", "~")) or source.count("/") < 1:
        raise ArgumentError("lora", f"{shown(source)} is not a folder, a file or a Hub id (OWNER/NAME)")
    return source
