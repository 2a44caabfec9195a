"""Acceleration as a block of diffusers' modular pipelines."""

from pathlib import Path
from typing import Any

from diffusers import ModularPipelineBlocks
from diffusers.modular_pipelines import InputParam, OutputParam

from dit_accel.constants import TARGETS
from dit_accel.errors import PresetError
from dit_accel.models.presets import load_preset
from dit_accel.pipeline import Acceleration, accelerate_pipeline, preset_for, restore_pipeline
from dit_accel.presets import Preset, default_preset


class AccelerateBlock(ModularPipelineBlocks):
    """Block with which a modular pipeline accelerates itself; it goes before the other blocks.

    >>> from dit_accel import AccelerateBlock
    >>> blocks.sub_blocks.insert("accelerate", AccelerateBlock("turbo"), 0)  # doctest: +SKIP
    >>> pipe = blocks.init_pipeline("Tongyi-MAI/Z-Image-Turbo")  # doctest: +SKIP
    >>> pipe.load_components()  # doctest: +SKIP
    >>> images = pipe(prompt="a red fox in the snow", target_error=0.2).images  # doctest: +SKIP
    >>> print(pipe.dit_accel.report())  # doctest: +SKIP

    The result is that of :func:`~dit_accel.accelerate_pipeline`. A call may name another preset with ``preset``, which
    replaces this block's preset and keys, or change the quality with ``target_error``, ``target_psnr``,
    ``computed_steps`` or ``max_seconds``. The pipeline is accelerated anew only where the preset differs from that of
    the call before, or a transformer was chosen. A call with ``preset="none"`` restores the pipeline and runs plain.

    The state has the :class:`~dit_accel.Acceleration` as ``dit_accel``, with the last run's report; None if plain.

    Args:
        preset: name, path or :class:`Preset`; None = `balanced`, for videos in its video form.
        overrides: preset keys to change; see :func:`~dit_accel.accelerate_pipeline`.

    Raises:
        PresetError: unknown preset, key or value. A call raises it too.
        UnsupportedError: a call raises it if the pipeline can't be accelerated; see
            :func:`~dit_accel.accelerate_pipeline`.
    """

    def __init__(self, preset: str | Path | Preset | None = None, **overrides: Any) -> None:
        load_preset(default_preset(preset, is_video=False), **overrides)
        super().__init__()
        self.preset = preset
        self.overrides = overrides

    @property
    def description(self) -> str:
        return "Accelerates the denoising transformers with dit-accel, also in later calls of the pipeline"

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("preset", str | Path | Preset, description="Replaces the block's preset; 'none' runs plain"),
            InputParam("target_error", float, description="The preset's target error"),
            InputParam("target_psnr", float, description="PSNR in dB that chooses the target error, by calibration"),
            InputParam("computed_steps", int, description="Number of steps that compute, instead of a target"),
            InputParam("max_seconds", float, description="Seconds of the whole call, instead of a target"),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("dit_accel", Acceleration, "The acceleration, whose report() is of the last run")]

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        if (preset := self._preset_of_call(components, state)) is None:
            restore_pipeline(components)
        elif not _runs_with(components, preset):
            accelerate_pipeline(components, preset)
        state.set("dit_accel", getattr(components, "dit_accel", None))
        return components, state

    def _preset_of_call(self, components: Any, state: Any) -> Preset | None:
        preset, targets = state.get("preset"), {key: state.get(key) for key in TARGETS if state.get(key) is not None}
        if preset == "none":
            if targets:
                raise PresetError(f"{next(iter(targets))} needs a preset, but 'none' runs the plain pipeline")
            return None
        chosen = {"preset": self.preset, **self.overrides} if preset is None else {"preset": preset}
        return load_preset(preset_for(components, **chosen), **targets)


def _runs_with(pipe: Any, preset: Preset) -> bool:
    acceleration = getattr(pipe, "dit_accel", None)
    return acceleration is not None and acceleration.preset == preset and acceleration.why_not_in_effect() is None
