"""Make diffusers' diffusion transformers several times faster, at nearly the same image or video.

>>> from dit_accel import accelerate_pipeline, restore_pipeline
>>> pipe = accelerate_pipeline(pipe)  # doctest: +SKIP
>>> image = pipe("a red fox in the snow").images[0]  # doctest: +SKIP
>>> print(pipe.dit_accel.report())  # doctest: +SKIP
>>> pipe = restore_pipeline(pipe)  # doctest: +SKIP

A pipeline gets preset `balanced` by default. `accelerate_pipeline(pipe, "quality")` is closer to the plain result,
`"turbo"` is faster, and `target_error=0.1` sets any quality in between. `accelerated` accelerates within a ``with``
block, `accelerate_transformer` in a denoising loop of your own, and `parallelize_pipeline` runs on several GPUs.
`preset_names()` lists the presets.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, the names below
    from dit_accel.cache_config import ClosedLoopConfig as ClosedLoopConfig
    from dit_accel.loop.report import RunReport as RunReport
    from dit_accel.models.hooks import stateless as stateless
    from dit_accel.models.parallel.parallelize import parallelize_pipeline as parallelize_pipeline
    from dit_accel.models.presets import load_preset as load_preset
    from dit_accel.modular_block import AccelerateBlock as AccelerateBlock
    from dit_accel.pipeline import Acceleration as Acceleration
    from dit_accel.pipeline import accelerate_pipeline as accelerate_pipeline
    from dit_accel.pipeline import accelerate_transformer as accelerate_transformer
    from dit_accel.pipeline import accelerated as accelerated
    from dit_accel.pipeline import report as report
    from dit_accel.pipeline import restore_pipeline as restore_pipeline
    from dit_accel.presets import Preset as Preset
    from dit_accel.presets import preset_names as preset_names

__version__ = "0.1.0"

# Module of each public name; imported at first use, so that `import dit_accel` is quick and touches no GPU.
_HOMES = {
    "accelerate_pipeline": "pipeline",
    "accelerate_transformer": "pipeline",
    "accelerated": "pipeline",
    "restore_pipeline": "pipeline",
    "report": "pipeline",
    "AccelerateBlock": "modular_block",
    "ClosedLoopConfig": "cache_config",
    "stateless": "models.hooks",
    "parallelize_pipeline": "models.parallel.parallelize",
    "Acceleration": "pipeline",
    "Preset": "presets",
    "load_preset": "models.presets",
    "preset_names": "presets",
    "RunReport": "loop.report",
}

__all__ = [*_HOMES, "__version__"]


if not TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'dit_accel' has no attribute {name!r}; it offers {', '.join(__all__)}")
        return getattr(importlib.import_module(f"dit_accel.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
