"""Accelerates pipelines and undoes it: the only place that mutates a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.controller import Controller
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import SchedulerClock, TimestepClock
from dit_accel.models import TRANSFORMER_NAMES, denoisers
from dit_accel.models.component_times import autoencoder_remark, time_components
from dit_accel.models.control_net import ControlNetHook, control_net, defer_calls, stop_deferring
from dit_accel.models.families import FAMILIES, drive, family_of, known_family, left_plain
from dit_accel.models.family_driver import FamilyDriver
from dit_accel.models.hooks import find_hook
from dit_accel.models.other_caches import refuse_other_cache
from dit_accel.models.transformer_hook import TransformerDriver
from dit_accel.presets import FUSED_FAMILIES, VIDEO_FAMILIES, Preset, default_preset, fitting_presets, load_preset

ONLY_KNOWN = f"only {', '.join(TRANSFORMER_NAMES)} are known to be called once a step and branch"


class Acceleration:
    """What lies at ``pipe.dit_accel`` while a pipeline is accelerated: the report of the last run, and the way back.

    :func:`accelerate_pipeline` and :func:`accelerate_transformer` make it; nobody else needs to.

    Args:
        controller: of this denoising loop.
        drivers: one a transformer.
        clock: that the controller reads.
        owner: the pipeline that carries this object, or None.
        deferral: control net whose calls are deferred, and the hook that does it, or None.
    """

    def __init__(
        self,
        controller: Controller,
        drivers: list[TransformerDriver],
        clock: SchedulerClock | TimestepClock,
        owner: Any = None,
        deferral: tuple[torch.nn.Module, ControlNetHook] | None = None,
    ) -> None:
        self._controller = controller
        self._drivers = drivers
        self._clock = clock
        self._owner = owner
        self._deferral = deferral
        self._timing = ExitStack() if owner is None else time_components(owner, controller.parts)
        self._restored = False

    @property
    def preset(self) -> Preset:
        """The preset in use, with all changes to its keys."""
        return self._controller.preset

    @property
    def family(self) -> str:
        """Name of the model family, as presets and reports have it; ``any`` where no facts are known."""
        return self._controller.family

    @property
    def layout(self) -> TokenLayout | None:
        """Token layout of the last run's latest symbols; None where blocks attend to everything."""
        return self._controller.last_layout

    @property
    def token_order(self) -> torch.Tensor | None:
        """Order of the last run's vision tokens (:mod:`dit_accel.sparse.token_order`); None = raster order."""
        return self._drivers[0].token_order

    def report(self) -> RunReport:
        """What the last run did; the current one if it is still going. A later one that was not accelerated is a note
        in it, and a warning.
        """
        reason = None if self._restored else self._why_not_in_effect()
        if reason is not None:
            self._controller.report.warn(f"not in effect: {reason}")
        report, parts = self._controller.read_report(), self._controller.parts
        if parts.device.type == "cuda" and (remark := autoencoder_remark(report.parts)) is not None:
            report.note(remark)
        return report

    def symbols(self) -> dict[str, SparseSymbols]:
        """Latest symbols of the last run's first branch, by block; empty where blocks attend to everything."""
        return dict(self._controller.last_symbols)

    def reset(self) -> None:
        """Forgets caches and report; the next call starts a new run."""
        self._controller.reset()

    def restore(self) -> None:
        """Takes the acceleration off, exactly; restoring twice does nothing."""
        if self._restored:
            return
        self._restored = True
        self._timing.close()
        for driver in self._drivers:
            driver.detach()
        if self._deferral is not None:
            stop_deferring(*self._deferral)
        self._controller.reset()
        if self._owner is not None and vars(self._owner).get("dit_accel") is self:
            del self._owner.dit_accel

    def _why_not_in_effect(self) -> str | None:
        """Why the pipeline runs plainly by now, or None."""
        driven = [driver.transformer for driver in self._drivers]
        for name, transformer in denoisers(self._owner).items():
            if not any(transformer is each for each in driven):
                return f"pipe.{name} was replaced; call accelerate_pipeline(pipe) again"
        if not all(driver.is_attached for driver in self._drivers):
            return "its hook on the transformer was taken off; call accelerate_pipeline(pipe) again"
        if self._clock.missed_run:
            return "the scheduler has begun another run since this one, in which the transformer's hook was not called"
        return None

    def __repr__(self) -> str:
        return f"Acceleration(preset={self.preset.name!r}, family={self.family!r})"


def makes_video(pipe: Any) -> bool:
    """Whether a pipeline makes videos: its family does, or its call takes a number of frames, or a video."""
    if family_of(pipe) in VIDEO_FAMILIES:
        return True
    named = inspect.signature(pipe).parameters if callable(pipe) else {}
    return "num_frames" in named or "video" in named


def preset_for(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Preset:
    """What :func:`accelerate_pipeline` makes of a preset and overrides for this pipeline.

    Raises:
        PresetError: unknown preset, key or value.
    """
    return load_preset(default_preset(preset, is_video=makes_video(pipe)), **overrides)


def accelerate_pipeline(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Any:
    """Makes a diffusers pipeline faster, in place.

    A pipeline that is accelerated already gets the new preset instead of the old. Nothing is changed if this raises.

    Args:
        pipe: a diffusers pipeline with a transformer.
        preset: name of a shipped preset, path of a YAML file, or a :class:`Preset`; None = `balanced`. Of a pipeline
            that makes videos `quality`, `balanced` and `turbo` are `video-quality`, `video-balanced` and `video-turbo`.
        overrides: preset keys to change, e.g. ``target_error=0.1``, ``schedule={"warmup": 3}`` or
            ``**{"skip.policy": "none"}``; see :func:`~dit_accel.presets.load_preset`.

    Returns:
        The same pipeline, with an :class:`Acceleration` at ``pipe.dit_accel``.

    Raises:
        PresetError: unknown preset, key or value, or `skip.layers` names a block that the pipeline has not.
        UnsupportedError: the pipeline has no transformer, the preset is for another model family, or a transformer has
            another cache on it, of diffusers or cache-dit.
    """
    transformers = denoisers(pipe)
    if not transformers or not hasattr(pipe, "scheduler"):
        raise UnsupportedError(
            "pipe must be a diffusers pipeline with a scheduler and a component named "
            f"{', '.join(TRANSFORMER_NAMES[:-1])} or {TRANSFORMER_NAMES[-1]}, got {type(pipe).__name__}; "
            "pipelines that denoise with a UNet are not supported"
        )
    settings = preset_for(pipe, preset, **overrides)
    clock = SchedulerClock(lambda: pipe.scheduler)
    called = {name: partial(getattr, pipe, name, None) for name in transformers}
    pipe.dit_accel = _attach(transformers, called, settings, clock, control_net(pipe), owner=pipe)
    return pipe


def restore_pipeline(pipe: Any) -> Any:
    """Undoes :func:`accelerate_pipeline`: results are bit for bit what they were, and nothing is left on any object.

    Nothing happens if the pipeline is not accelerated.

    Returns:
        The same pipeline.
    """
    acceleration = getattr(pipe, "dit_accel", None)
    if acceleration is not None:
        acceleration.restore()
    return pipe


@contextmanager
def accelerated(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Iterator[Any]:
    """Accelerates a pipeline within a ``with`` block, whatever happens in it.

    A pipeline that was accelerated before has its earlier preset again afterwards. The block's report stays readable
    through ``pipe.dit_accel`` only inside.
    """
    before = getattr(pipe, "dit_accel", None)
    accelerate_pipeline(pipe, preset, **overrides)
    try:
        yield pipe
    finally:
        restore_pipeline(pipe)
        if before is not None:
            accelerate_pipeline(pipe, before.preset)


def accelerate_transformer(
    transformer: torch.nn.Module,
    preset: str | Path | Preset,
    timesteps: Sequence[float] | torch.Tensor,
    control_net: torch.nn.Module | None = None,
    **overrides: Any,
) -> Acceleration:
    """Makes a diffusers transformer faster in a denoising loop of your own (``examples/own_loop.py``).

    What forecasts miss is not corrected, since the loop's scheduler is not known here.

    Args:
        transformer: called once per step and branch; several branches in one step keep their order, or are told
            apart by ``transformer.cache_context(name)``. May be what ``torch.compile(transformer)`` has returned.
        preset: as for :func:`accelerate_pipeline`; `quality`, `balanced` and `turbo` are the video forms for families
            that are known to make videos (HunyuanVideo, Wan, LTX, CogVideoX, SkyReels-V2). For any other model of
            videos name `video-balanced` yourself.
        timesteps: the values that the loop passes as ``timestep``, in order. A loop over other values needs a new
            ``accelerate_transformer``; a loop that starts again after its second step needs nothing, one that was left
            before needs ``reset()``.
        control_net: that the loop calls before the transformer, if there is one; at level ``output`` it then runs in
            those steps only whose transformer reads its output.
        overrides: preset keys to change, likewise.

    Returns:
        The :class:`Acceleration`, with ``report()`` and ``restore()``.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: the transformer is no module or has another cache on it, the preset is for another model
            family, or the timesteps can't be told apart.
    """
    called = {"transformer": lambda: transformer}
    transformers = {"transformer": getattr(transformer, "_orig_mod", transformer)}
    if not isinstance(transformers["transformer"], torch.nn.Module):
        raise UnsupportedError(
            f"transformer must be a module, got {type(transformer).__name__}; a pipeline goes to accelerate_pipeline"
        )
    family = known_family(transformers["transformer"])
    is_video = family is not None and family.name in VIDEO_FAMILIES
    settings = load_preset(default_preset(preset, is_video=is_video), **overrides)
    return _attach(transformers, called, settings, TimestepClock(timesteps), control_net)


def _attach(
    transformers: dict[str, torch.nn.Module],
    called: Mapping[str, Callable[[], Any]],
    preset: Preset,
    clock: SchedulerClock | TimestepClock,
    net: torch.nn.Module | None,
    owner: Any = None,
) -> Acceleration:
    family = known_family(next(iter(transformers.values())))
    controller = Controller(preset, clock, "any" if family is None else family.name)
    drivers = [drive(transformer, controller, name, called[name]) for name, transformer in transformers.items()]
    for driver in drivers:
        refuse_other_cache(driver.transformer, driver.name)
        _check_family(preset, driver)
    _check_layers(preset, [layer for driver in drivers for layer in driver.layers()])
    for driver in drivers:
        driver.prepare()
    hooks = [hook for hook in map(find_hook, transformers.values()) if hook is not None]
    for earlier in (getattr(owner, "dit_accel", None), *(hook.acceleration for hook in hooks)):
        if earlier is not None:
            earlier.restore()
    net = net if preset.forecast.level == "output" else None  # at others every step runs blocks, which read it
    deferral = None if net is None else (net, defer_calls(net))
    acceleration = Acceleration(controller, drivers, clock, owner, deferral)
    try:
        for driver in drivers:
            controller.add_transformer(driver.name, driver.layers())
            driver.attach(acceleration)
        for name in left_plain(owner) if owner is not None else ():
            controller.warn_of_all_runs(f"pipe.{name} runs plainly: {ONLY_KNOWN}")
    except BaseException:
        acceleration.restore()
        raise
    return acceleration


def _check_layers(preset: Preset, layers: list[str]) -> None:
    """What a preset says of single blocks must find its blocks."""
    unknown = [name for name in preset.skip.layers if name not in layers]
    if unknown:
        raise PresetError(
            f"skip.layers of preset {preset.name!r} names {', '.join(unknown)}, and this pipeline's blocks are "
            f"{', '.join(layers)}"
        )


def _check_family(preset: Preset, driver: TransformerDriver) -> None:
    model = type(driver.transformer).__name__
    if preset.model not in ("any", driver.family_name):
        raise UnsupportedError(
            f"preset {preset.name!r} is for {preset.model} models, and {model} is not one; presets that fit it: "
            f"{', '.join(fitting_presets(driver.family_name, driver.levels))}"
        )
    if preset.forecast.level not in driver.levels:
        raise UnsupportedError(
            f"level {preset.forecast.level!r} of preset {preset.name!r} can't run on {model}; "
            f"it takes {', '.join(driver.levels)}. Families that can: {_families_at(preset.forecast.level)}"
        )
    if preset.skip.steps == "all" and not isinstance(driver, FamilyDriver):
        raise UnsupportedError(
            f"skip.steps 'all' of preset {preset.name!r} can't run on {model}, whose blocks are not known; "
            f"families that can: {_families_at('layer')}"
        )


def _families_at(level: str) -> str:
    """Names of the families that a level runs on."""
    return ", ".join(family.name for family in FAMILIES if level != "head" or family.name in FUSED_FAMILIES)
