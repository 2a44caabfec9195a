"""Hooks that the worker processes of SGLang-Diffusion and vLLM-Omni load, for the pipelines of their diffusers backend.

:func:`register_in_sglang` is an entry point of the group ``sglang.multimodal_gen.plugins``, and :class:`VllmOmniWorker`
a ``worker_extension_cls``. The environment variable ``DIT_ACCEL_PRESET`` names the preset.
"""

import logging
import os
from typing import Any

from dit_accel.errors import UnsupportedError
from dit_accel.pipeline import accelerate_pipeline

PRESET = "DIT_ACCEL_PRESET"
SGLANG = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline"  # its module of the diffusers backend
logger = logging.getLogger(__name__)


def register_in_sglang() -> None:
    """Register hooks, in each process of SGLang, that accelerate its diffusers pipelines if the variable is set."""
    if not os.environ.get(PRESET):
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    HookRegistry.register(f"{SGLANG}.DiffusersPipeline.__init__", _after_loading, HookType.AFTER)
    HookRegistry.register(f"{SGLANG}.DiffusersExecutionStage.forward", _after_request, HookType.AFTER)


def _after_loading(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    accelerate_pipeline(backend.diffusers_pipe, os.environ.get(PRESET))


def _after_request(_result: Any, stage: Any, *_args: Any, **_kwargs: Any) -> None:
    logger.info("%s", stage.diffusers_pipe.dit_accel.report())


class VllmOmniWorker:
    """Extension of vLLM-Omni's worker, which accelerates its diffusers pipeline, by default with `balanced`."""

    model_runner: Any  # of vLLM-Omni's worker

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        accelerate_pipeline(self._diffusers_pipeline(), os.environ.get(PRESET) or None)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        logger.info("%s", self._diffusers_pipeline().dit_accel.report())
        return output

    def _diffusers_pipeline(self) -> Any:
        adapter = self.model_runner.pipeline
        if (pipe := getattr(adapter, "_pipeline", None)) is None:
            fix = "add --diffusion-load-format diffusers"
            raise UnsupportedError(f"vLLM-Omni must run a pipeline of diffusers, got {type(adapter).__name__}; {fix}")
        return pipe
