"""Nodes for ComfyUI: the closed loop at level ``output`` around any model that a sampler calls.

ComfyUI's samplers solve ``dx / dσ = (x − D) / σ``; D are the denoised latents that the model returns. The loop
forecasts the slope F = (x − D) / σ: it is the output of flow and noise models, and smooth over the run where D is not.
A forecast step returns ``D̂ = x − σ · F̂`` for its latents x.

To install, put ``integrations/comfyui`` into ComfyUI's ``custom_nodes`` (docs/guide/comfyui.md). It imports no ComfyUI.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.branch import Description
from dit_accel.loop.controller import Controller
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.moves import Moves, sampler_moves
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import FLOW_SIGMA_MAX, SigmaClock
from dit_accel.models.conditions import leaves
from dit_accel.models.presets import load_preset
from dit_accel.presets import Preset, preset_names

MODEL = "model"  # its name in reports
KEY = "dit_accel"  # of attachments to ComfyUI's model
OFF_SCHEDULE = "calls at a noise level between steps run plainly, and the records before them are discarded"
OLD_COMFYUI = "model must come from ComfyUI 0.3.8 or later, got {} without add_wrapper_with_key; update ComfyUI"
logger = logging.getLogger(__name__)

Apply = Callable[..., torch.Tensor]  # ComfyUI's apply_model: latents, sigma and conditions to denoised latents


class SampledModel:
    """Closed loop around one ComfyUI ``MODEL``, with a new controller for each sampler run."""

    def __init__(self, preset: Preset, wrapped: Callable[[Apply, dict[str, Any]], torch.Tensor] | None = None) -> None:
        self._preset = preset  # at level output
        self._wrapped = wrapped  # the model's previous model_function_wrapper
        self._clock: SigmaClock | None = None  # of the run in progress
        self._controller: Controller | None = None  # of the latest run

    def report(self) -> RunReport | None:
        return None if self._controller is None else self._controller.read_report()

    def sample(self, executor: Any, guider: Any, sigmas: torch.Tensor, extra_args: Any, *others: Any) -> torch.Tensor:
        """Run a sampler, ``executor.class_obj``; a wrapper of ComfyUI's type ``sampler_sample``.

        ``sigmas``, float ``[steps + 1]``, are the noise levels before each step and after the last.
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
        """Call the model, as ComfyUI's ``model_function_wrapper``; return denoised latents ``[B, C, …]``.

        ``arguments`` has ``input``, latents ``[B, C, …]``; ``timestep``, their noise level ``[B]``; ``c``, the
        conditions; and ``cond_or_uncond``, the branch of each part of the batch.
        """
        plainly = partial(self._apply, apply_model, arguments)
        if self._clock is None or self._controller is None:
            return plainly()
        latents, sigma = arguments["input"], arguments["timestep"]
        if (step := self._clock.step_at(float(sigma.max()))) is None:
            if self._clock.plain is None:
                self._controller.stand_aside(None, OFF_SCHEDULE)
            return plainly()
        branch = self._branch(step, arguments)
        described = _Described(MODEL, branch, sigma, (latents.shape,), apply_model=apply_model, arguments=arguments)
        with self._controller.calling(described) as call:
            noise = sigma.view(-1, *[1] * (latents.ndim - 1))
            if call.forecasts_output:
                denoised = latents - noise * torch.cat(self._controller.forecast_output(call), dim=-1)
            else:
                denoised = plainly()
                output = _streams((latents - denoised) / noise, arguments["c"].get("latent_shapes"))
                going_on = self._controller.observe(call, output, lambda slope, rows: slope)
                self._controller.read(call)
                if going_on is not output:
                    denoised = latents - noise * torch.cat(going_on, dim=-1)
                call.work[MODEL] = call.branch.plain[MODEL] = 1.0, 0.0
        return denoised

    def _apply(self, apply_model: Apply, arguments: dict[str, Any]) -> torch.Tensor:
        if self._wrapped is not None:
            return self._wrapped(apply_model, arguments)
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    def _branch(self, step: int, arguments: dict[str, Any]) -> str:
        """Name the conditions of a call; calls with the same conditions (windows of a long video) get numbers."""
        if step != self._step:
            self._step, self._called = step, Counter()
        options = arguments["c"].get("transformer_options", {})
        conditions = " ".join(map(str, options.get("uuids", arguments["cond_or_uncond"])))
        self._called[conditions] += 1
        return f"{conditions} {self._called[conditions]}"


@dataclass(kw_only=True)
class _Described(Description):
    apply_model: Apply
    arguments: dict[str, Any]

    def size(self) -> ModelSize:
        latents = self.arguments["input"]
        return ModelSize(output=latents.numel(), itemsize=latents.element_size(), batch=len(latents))

    def conditions(self) -> dict[str, Any]:
        conditions = self.arguments["c"]
        items = leaves(conditions, without=("transformer_options", "control"))
        items["control"] = conditions.get("control") is not None  # its residuals differ at every step
        # The patcher of the model, of which apply_model is a method, has hooks such as LoRAs with keyframes.
        patcher = getattr(getattr(self.apply_model, "__self__", None), "current_patcher", None)
        hooks = getattr(getattr(patcher, "current_hooks", None), "hooks", ())
        items["hooks"] = tuple((id(hook), hook.strength) for hook in hooks)
        return items


def _streams(packed: torch.Tensor, shapes: Sequence[Sequence[int]] | None) -> tuple[torch.Tensor, ...]:
    """Return the streams of latents, such as video and audio, that ComfyUI packs into one tensor ``[B, 1, N]``."""
    sizes = [math.prod(shape[1:]) for shape in shapes or ()]
    return packed.split(sizes, dim=-1) if sum(sizes) == packed.shape[-1] else (packed,)


def _outlook(sampler: Any, guider: Any, sigmas: list[float], extra_args: dict) -> tuple[Moves | None, str | None]:
    """Return the sampler's moves of the latents, if known, and the reason why its steps can't be forecast, or None."""
    function = getattr(sampler, "sampler_function", None)
    name = getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")

    def sample(model: Callable[[torch.Tensor, float], torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
        levels = torch.tensor(sigmas)
        options = {"extra_args": dict(extra_args), "callback": None, "disable": True, **sampler.extra_options}

        def tried(latents: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
            return model(latents, float(sigma.max()))

        tried.inner_model = guider  # type: ignore[attr-defined]  # samplers read the type of the model from it
        return function(tried, latents, levels, **options)

    try:
        return sampler_moves(sample, sigmas), None
    except UnsupportedError as error:
        return None, f"sampler {name}: {error}"
    except Exception:  # a custom sampler may need more than the trial provides; its real calls decide
        return None, None


def accelerate_model(model: Any, preset: str | Preset = "balanced", **overrides: Any) -> Any:
    """Return a copy of a ComfyUI ``MODEL``, a ``ModelPatcher``, that samples with the closed loop.

    ``preset`` is at level ``output`` and for any model. ``overrides`` change its keys, such as ``target_error=0.1``.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: the preset works inside the model's blocks, or ComfyUI has no sampler wrappers.
    """
    settings = load_preset(preset, **overrides)
    if not _is_for_outputs(settings):
        needs = "preset must forecast the output of any model, with its layers unchanged"
        level = f"at level {settings.forecast.level!r}, with linear.dtype {settings.linear.dtype}"
        got = f"{settings.name!r} is for {settings.model} models {level}"
        raise UnsupportedError(f"{needs}, but {got}; use one of {', '.join(output_presets())}")
    if not hasattr(model, "add_wrapper_with_key"):
        raise UnsupportedError(OLD_COMFYUI.format(type(model).__name__))
    patched = model.clone()
    loop = SampledModel(settings, patched.model_options.get("model_function_wrapper"))
    # ComfyUI deep-copies bound methods with each copy of the model; it shares functions.
    patched.set_model_unet_function_wrapper(lambda apply_model, arguments: loop.call(apply_model, arguments))
    patched.remove_wrappers_with_key("sampler_sample", KEY)
    patched.add_wrapper_with_key("sampler_sample", KEY, loop.sample)
    patched.set_attachments(KEY, loop)
    return patched


def output_presets() -> list[str]:
    return [name for name in preset_names() if _is_for_outputs(load_preset(name))]


def _is_for_outputs(preset: Preset) -> bool:
    return preset.model == "any" and preset.forecast.level == "output" and preset.linear.dtype is None


class AccelerateNode:
    """Node from a ``MODEL`` to an accelerated ``MODEL``."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "accelerate"
    CATEGORY = "dit-accel"
    DESCRIPTION = "Computes some steps of a run and forecasts the others, within the target error."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        preset = {"default": "balanced", "tooltip": "for video models use a preset that starts with video-"}
        target = {"tooltip": "lower = closer to plain, slower; 0 = the preset's value"}
        warmup = {"tooltip": "steps computed at the start; -1 = the preset's value"}
        return {
            "required": {
                "model": ("MODEL",),
                "preset": (output_presets(), preset),
                "target_error": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 10.0, "step": 0.01, **target}),
                "warmup": ("INT", {"default": -1, "min": -1, "max": 1000, **warmup}),
            }
        }

    def accelerate(self, model: Any, preset: str, target_error: float, warmup: int) -> tuple[Any]:
        overrides = {"target_error": target_error} if target_error else {}
        overrides |= {"warmup": warmup} if warmup >= 0 else {}
        return (accelerate_model(model, preset, **overrides),)


class ReportNode:
    """Node that shows the report of an accelerated ``MODEL``; latents pass through it, so that it runs afterwards."""

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
        if (loop := model.get_attachment(KEY)) is None:
            raise UnsupportedError("model must come from the node Accelerate (dit-accel), got a plain model")
        text = str(loop.report() or "no run yet")
        return {"ui": {"text": [text]}, "result": (samples, text)}


NODE_CLASS_MAPPINGS = {"DitAccel": AccelerateNode, "DitAccelReport": ReportNode}
NODE_DISPLAY_NAME_MAPPINGS = {"DitAccel": "Accelerate (dit-accel)", "DitAccelReport": "Report (dit-accel)"}
