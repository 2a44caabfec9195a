"""dit-accel makes diffusers' DiT pipelines several times faster at nearly the same picture.

>>> from dit_accel import accelerate_pipeline, restore_pipeline
>>> pipe = accelerate_pipeline(pipe, "flux-balanced")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives; imported at first use, so that `import dit_accel` is quick and touches no GPU.
_HOMES = {
    "accelerate_pipeline": "pipeline",
    "accelerate_transformer": "pipeline",
    "accelerated": "pipeline",
    "restore_pipeline": "pipeline",
    "Acceleration": "pipeline",
    "Preset": "presets",
    "load_preset": "presets",
    "preset_names": "presets",
    "RunReport": "loop.report",
    "SparseLinearAttention": "sla",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dit_accel' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"dit_accel.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
