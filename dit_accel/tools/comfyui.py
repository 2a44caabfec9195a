"""Nodes for ComfyUI: the closed loop at level ``output`` around any model that one of its samplers calls.

ComfyUI's samplers follow ``dx / dσ = (x − D) / σ`` with D the denoised latents that the model gives. That slope F
is what the loop forecasts: the model's own output where it predicts a flow or noise, and smooth along the run where D
is not. A forecast step gives ``D̂ = x − σ · F̂`` of the latents x that it is called with.

The folder ``integrations/comfyui`` of the repository goes into ComfyUI's ``custom_nodes``; docs/guide/comfyui.md has
more. Nothing of ComfyUI is imported here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.controller import Controller
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.moves import Moves, sampler_moves
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import FLOW_SIGMA_MAX, SigmaClock
from dit_accel.models.conditions import leaves
from dit_accel.models.presets import load_preset
from dit_accel.presets import Preset, preset_names

MODEL = "model"  # what reports call it
KEY = "dit_accel"  # of what is attached to ComfyUI's model
OFF_SCHEDULE = "calls at a noise level where no step begins run plainly, and what came before them is dropped"
OLD_COMFYUI = "model must come from ComfyUI 0.3.8 or later, got {} without add_wrapper_with_key; update ComfyUI"
logger = logging.getLogger(__name__)

Apply = Callable[..., torch.Tensor]  # ComfyUI's apply_model: latents, sigma and conditions to denoised latents


class SampledModel:
    """The loop around the model of one ComfyUI ``MODEL``: one controller for each run of a sampler.

    Args:
        preset: at level ``output``.
        wrapped: the ``model_function_wrapper`` that the model had already, or None.
    """

    def __init__(self, preset: Preset, wrapped: Callable[[Apply, dict[str, Any]], torch.Tensor] | None = None) -> None:
        self._preset = preset
        self._wrapped = wrapped
        self._clock: SigmaClock | None = None  # of the run in progress
        self._controller: Controller | None = None  # of the latest run

    def report(self) -> RunReport | None:
        """What the latest run did; None before the first."""
        return None if self._controller is None else self._controller.read_report()

    def sample(self, executor: Any, guider: Any, sigmas: torch.Tensor, extra_args: Any, *others: Any) -> torch.Tensor:
        """One run of a sampler, as a wrapper of ComfyUI's kind ``sampler_sample``.

        Args:
            executor: goes on to the sampler, which is its ``class_obj``.
            guider: calls the model for the sampler.
            sigmas: noise levels before each step and after the last, float ``[steps + 1]``.
            extra_args: that the sampler hands to the guider with each call.
            others: of the sampler.
        """
        sampled = partial(executor, guider, sigmas, extra_args, *others)
        if len(sigmas) < 2 or self._clock is not None:  # nothing to do, or a run inside of a run
            return sampled()
        sampler = executor.class_obj
        is_flow = float(guider.inner_model.model_sampling.sigma_max) <= FLOW_SIGMA_MAX
        levels = sigmas.tolist()
        moves, plain = _outlook(sampler, guider, levels, extra_args)
        self._clock = SigmaClock(levels, is_flow, moves, plain)
        self._controller = Controller(self._preset, self._clock, type(guider.inner_model).__name__)
        self._controller.add_transformer(MODEL, [MODEL])
        self._step, self._called = -1, Counter[str]()
        try:
            return sampled()
        finally:
            self._clock = None
            self._controller.release()
            logger.info("%s", self.report())

    def call(self, apply_model: Apply, arguments: dict[str, Any]) -> torch.Tensor:
        """One call of the model, as ComfyUI's ``model_function_wrapper``.

        Args:
            arguments: ``input``, latents ``[B, C, …]``; ``timestep``, their noise level ``[B]``; ``c``, the conditions;
                and ``cond_or_uncond``, whose they are, one entry for each part of the batch.

        Returns:
            Denoised latents ``[B, C, …]``.
        """
        plainly = partial(self._apply, apply_model, arguments)
        if self._clock is None or self._controller is None:
            return plainly()
        latents, sigma = arguments["input"], arguments["timestep"]
        step = self._clock.step_at(float(sigma.max()))
        if step is None:
            if self._clock.plain is None:
                self._controller.stand_aside(None, OFF_SCHEDULE)
            return plainly()
        branch = self._branch(step, arguments)
        size = partial(ModelSize, output=latents.numel(), itemsize=latents.element_size(), batch=len(latents))
        told = partial(_conditions, apply_model, arguments["c"])
        with self._controller.calling(MODEL, branch, sigma, (latents.shape,), size, conditions=told) as call:
            noise = sigma.view(-1, *[1] * (latents.ndim - 1))
            if call.forecasts_output:
                denoised = latents - noise * self._controller.forecast_output(call)[0]
            else:
                denoised = plainly()
                output = ((latents - denoised) / noise,)
                going_on = self._controller.observe(call, output, lambda slope, rows: slope)
                self._controller.read(call)
                if going_on is not output:
                    denoised = latents - noise * going_on[0]
                call.work[MODEL] = call.branch.plain[MODEL] = 1.0, 0.0
        return denoised

    def _apply(self, apply_model: Apply, arguments: dict[str, Any]) -> torch.Tensor:
        if self._wrapped is not None:
            return self._wrapped(apply_model, arguments)
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    def _branch(self, step: int, arguments: dict[str, Any]) -> str:
        """Names the conditions of a call, and tells apart calls with the same, as for windows of a long video."""
        if step != self._step:
            self._step, self._called = step, Counter()
        options = arguments["c"].get("transformer_options", {})
        conditions = " ".join(map(str, options.get("uuids", arguments["cond_or_uncond"])))
        self._called[conditions] += 1
        return f"{conditions} {self._called[conditions]}"


def _conditions(apply_model: Apply, told: dict[str, Any]) -> dict[str, Any]:
    """What a call is conditioned on, by name: tensors and numbers, whether a ControlNet is at work, strengths of hooks.

    Args:
        apply_model: a method of ComfyUI's model, whose patcher has the hooks, such as LoRAs with keyframes.
        told: the call's ``c``.
    """
    items = dict(leaves(told, without=("transformer_options", "control")))
    items["control"] = told.get("control") is not None  # its residuals differ at every step
    patcher = getattr(getattr(apply_model, "__self__", None), "current_patcher", None)
    hooks = getattr(getattr(patcher, "current_hooks", None), "hooks", ())
    items["hooks"] = tuple((id(hook), hook.strength) for hook in hooks)
    return items


def _outlook(
    sampler: Any, guider: Any, sigmas: list[float], extra_args: dict[str, Any]
) -> tuple[Moves | None, str | None]:
    """How far a sampler's run moves the latents, if that is known, and why nothing of it may be forecast, or None."""
    function = getattr(sampler, "sampler_function", None)
    name = getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")

    def sample(model: Callable[[torch.Tensor, float], torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
        levels = torch.tensor(sigmas)
        options = {"extra_args": dict(extra_args), "callback": None, "disable": True, **sampler.extra_options}
        return function(_TriedModel(guider, model), latents, levels, **options)

    try:
        return sampler_moves(sample, sigmas), None
    except UnsupportedError as error:
        return None, f"sampler {name}: {error}"
    except Exception:  # whatever somebody's own sampler asks of its model that a trial has not: its calls will tell
        return None, None


class _TriedModel:
    """What a sampler calls in a trial, in the place of ComfyUI's model.

    Args:
        inner_model: the run's guider, which samplers ask what kind of model it is.
        model: of the trial.
    """

    def __init__(self, inner_model: Any, model: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        self.inner_model = inner_model
        self._model = model

    def __call__(self, latents: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
        return self._model(latents, float(sigma.max()))


def accelerate_model(model: Any, preset: str | Preset = "balanced", **overrides: Any) -> Any:
    """A copy of a ComfyUI ``MODEL`` whose sampling runs under the closed loop.

    Args:
        model: ComfyUI's ``ModelPatcher``; it stays as it is.
        preset: name of a shipped preset or a :class:`Preset`, at level ``output`` and for any model.
        overrides: preset keys to change, e.g. ``target_error=0.1``.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: a preset that looks into the model's blocks, or a ComfyUI without wrappers of samplers.
    """
    settings = load_preset(preset, **overrides)
    if not _is_for_outputs(settings):
        raise UnsupportedError(
            f"preset must forecast the output of any model, and {settings.name!r} is for {settings.model} models at "
            f"level {settings.forecast.level!r}; use one of {', '.join(output_presets())}"
        )
    if not hasattr(model, "add_wrapper_with_key"):
        raise UnsupportedError(OLD_COMFYUI.format(type(model).__name__))
    patched = model.clone()
    loop = SampledModel(settings, patched.model_options.get("model_function_wrapper"))
    # ComfyUI copies what is set here with each copy of the model, a bound method with its object; a function it shares.
    patched.set_model_unet_function_wrapper(lambda apply_model, arguments: loop.call(apply_model, arguments))
    patched.remove_wrappers_with_key("sampler_sample", KEY)
    patched.add_wrapper_with_key("sampler_sample", KEY, loop.sample)
    patched.set_attachments(KEY, loop)
    return patched


def output_presets() -> list[str]:
    """Names of the shipped presets that need to know nothing of a model."""
    return [name for name in preset_names() if _is_for_outputs(load_preset(name))]


def _is_for_outputs(preset: Preset) -> bool:
    return preset.model == "any" and preset.forecast.level == "output"


class AccelerateNode:
    """``MODEL`` in, accelerated ``MODEL`` out."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "accelerate"
    CATEGORY = "dit-accel"
    DESCRIPTION = "Computes some steps of a run and forecasts the others, as often as the target error allows."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        target = {
            "default": 0.0,
            "min": 0.0,
            "max": 10.0,
            "step": 0.01,
            "tooltip": "lower = closer and slower; 0 = the preset's",
        }
        warmup = {"default": -1, "min": -1, "max": 1000, "tooltip": "steps computed at the start; -1 = the preset's"}
        return {
            "required": {
                "model": ("MODEL",),
                "preset": (output_presets(), {"default": "balanced", "tooltip": "for videos the video- form"}),
                "target_error": ("FLOAT", target),
                "warmup": ("INT", warmup),
            }
        }

    def accelerate(self, model: Any, preset: str, target_error: float, warmup: int) -> tuple[Any]:
        changed = {"target_error": target_error or None, "warmup": warmup if warmup >= 0 else None}
        return (accelerate_model(model, preset, **{key: value for key, value in changed.items() if value is not None}),)


class ReportNode:
    """What the latest run of an accelerated ``MODEL`` did, as text; latents pass through it, so that it runs after."""

    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("samples", "report")
    FUNCTION = "report"
    CATEGORY = "dit-accel"
    OUTPUT_NODE = True
    DESCRIPTION = "Report of the run that made the latents: steps by mode, forecast error, time and memory."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "samples": ("LATENT",)}}

    def report(self, model: Any, samples: Any) -> dict[str, Any]:
        loop = model.get_attachment(KEY)
        if loop is None:
            raise UnsupportedError("model must come from the node that accelerates it, got one that is not accelerated")
        text = str(loop.report() or "no run yet")
        return {"ui": {"text": [text]}, "result": (samples, text)}


NODE_CLASS_MAPPINGS = {"DitAccel": AccelerateNode, "DitAccelReport": ReportNode}
NODE_DISPLAY_NAME_MAPPINGS = {"DitAccel": "Accelerate (dit-accel)", "DitAccelReport": "Report (dit-accel)"}
