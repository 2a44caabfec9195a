"""Accelerate and restore pipelines: the only file that changes a pipeline."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.budget import Deadline
from dit_accel.loop.controller import Controller
from dit_accel.loop.report import RunReport
from dit_accel.loop.tracker import Clock, PlaceClock, SchedulerClock, TimestepClock, keeps_timesteps
from dit_accel.models import denoisers
from dit_accel.models.beside.control_net import control_net, watch_net
from dit_accel.models.beside.other_caches import set_cache_config
from dit_accel.models.caller import calling_pipeline, clock_of, held_module
from dit_accel.models.component_times import autoencoder_remark, release_at_end, stop_watching_calls, time_components
from dit_accel.models.drive import drive, left_plain, transformers_of
from dit_accel.models.families import known_family, pipeline_family
from dit_accel.models.hooks import find_hook
from dit_accel.models.presets import load_preset
from dit_accel.models.runs import Runs, between_calls
from dit_accel.models.session import Session, TransformerHook
from dit_accel.models.transformer import TransformerDriver
from dit_accel.models.wrappers import entry, unwrapped, why_not_wrapped
from dit_accel.presets import Preset, default_preset
from dit_accel.stages import prompts
from dit_accel.stages.decode import FUSED, Decoding
from dit_accel.stages.images import convert_on_gpu


class Acceleration:
    """State of an accelerated pipeline, at ``pipe.dit_accel``: it has the report of the last run, and restores.

    :func:`accelerate_pipeline` and :func:`accelerate_transformer` create it. Pipelines that share transformers share
    one object. The last run is then the latest run of any of them; if this thread has made a run, its own latest.

    Attributes:
        preset: the preset in use, with all changes to its keys.
        family: name of the model family in presets and reports; ``any`` if the family is not known.
        config: the config with which diffusers' ``enable_cache`` created it, or None.
    """

    def __init__(
        self, preset: Preset, family: str, runs: Runs, drivers: Sequence[TransformerDriver], plain: Sequence[Any]
    ) -> None:
        self.preset = preset
        self.family = family
        self._runs = runs
        self._plain = [weakref.ref(transformer) for transformer in plain]
        # Weak, so that a transformer which the pipeline drops is freed: its hook holds the driver.
        self._driven = [weakref.ref(driver.transformer) for driver in drivers]
        self._all_drivers = [weakref.ref(driver) for driver in drivers]
        self._owners: list[weakref.ref[Any]] = []
        self._decoding: list[Decoding] = []
        self._prompts: list[prompts.KeptPrompts] = []
        self._stages = ExitStack()
        self._undo = weakref.finalize(self, self._stages.close)  # other pipelines may keep the components
        self._undo.atexit = False
        self.is_restored = False
        self.config: object = None

    def attach(self, owners: Sequence[Any], net: torch.nn.Module | None) -> None:
        """Hook the transformers and stages of the pipelines that get this object, and their ControlNet."""
        self._owners = [weakref.ref(owner) for owner in owners]
        undo = self._stages
        if net is not None:  # at other levels every step runs blocks, which read the net's output
            undo.callback(watch_net(net, defers=self.preset.forecast.level == "output"))
        for owner in owners:
            parts, stages = self._runs.of(owner).parts, self.preset.stages
            undo.enter_context(time_components(owner, parts))
            undo.callback(release_at_end(owner))
            self._decoding.append(Decoding(owner, parts, wanted=stages.decode, shared=stages.share))
            undo.callback(self._decoding[-1].close)
            if stages.decode:
                convert_on_gpu(owner, undo)
            if stages.prompts:
                self._prompts.append(prompts.KeptPrompts(owner, parts, int(stages.prompts_mib * 2**20)))
                undo.callback(self._prompts[-1].close)
        for driver in self._drivers:
            driver.net = None if net is None else weakref.ref(net)  # which the pipeline may drop
            session = Session(driver, self._runs)
            driver.attach(session, TransformerHook(session, self))
        for owner in owners:
            owner.dit_accel = self

    @property
    def _drivers(self) -> list[TransformerDriver]:
        return _alive(self._all_drivers)

    @property
    def layout(self) -> TokenLayout | None:
        """Token layout of the last run's latest symbols; None = attention was dense."""
        return self._runs.latest.last_layout

    @property
    def token_order(self) -> torch.Tensor | None:
        """Order of the last run's vision tokens (:mod:`dit_accel.sparse.token_order`); None = raster order."""
        return next((driver.token_order for driver in self._drivers), None)

    def report(self, pipe: Any = None) -> RunReport:
        """Return the report of the last run, or of the current run while it is in progress.

        If a later run was not accelerated, the report notes it and a warning is given.

        Args:
            pipe: one of several pipelines that share the transformers; None = the last run of any of them.
        """
        controller = self._runs.latest if pipe is None else self._runs.of(pipe)
        if not self.is_restored and (reason := self.why_not_in_effect()) is not None:
            controller.report.warn(f"not in effect: {reason}")
        report, parts = controller.read_report(), controller.parts
        report.decoding = next((stage.remark for stage in self._decoding if stage.parts is parts), None)
        encodings = (stage.remark for stage in self._prompts if stage.parts is parts)
        report.encoding = next(encodings, None) if self.preset.stages.prompts else prompts.OFF
        is_fused = (report.decoding or "").startswith(FUSED)
        if parts.device.type == "cuda" and not is_fused and (remark := autoencoder_remark(report.parts)) is not None:
            report.note(remark)
        return report

    def end_next_run(self, pipe: Any, started: float, seconds: float, after: float) -> None:
        """Let a pipeline's next run with ``max_seconds`` have a :class:`Deadline` of its own."""
        self._runs.of(pipe).deadline = Deadline(seconds, started, after)

    def symbols(self) -> dict[str, SparseSymbols]:
        """Return the latest symbols of the last run's first branch, by block; empty if attention was dense."""
        return dict(self._runs.latest.last_symbols)

    def reset(self) -> None:
        """Drop caches, kept embeddings of prompts, 8-bit copies and reports; the next call starts a new run."""
        self._runs.reset()
        kept: list[Any] = [*self._prompts, *filter(None, (driver.linears for driver in self._drivers))]
        for item in kept:
            item.forget()

    @property
    def owners(self) -> list[Any]:
        """The pipelines that have this object."""
        return _alive(self._owners)

    def restore(self, successors: Sequence[TransformerDriver] = ()) -> None:
        """Remove the acceleration without a trace; a second call does nothing.

        If a transformer's call is in progress, at its end. ``successors`` are drivers of one that replaces this one.

        Raises:
            torch.OutOfMemoryError: weights that wait on the host don't fit on the device; nothing else is left undone.
        """
        if self.is_restored:
            return
        self.is_restored = True
        if self.config is not None:
            for driver in self._drivers:
                set_cache_config(driver.transformer, None)
        between_calls(lambda: [self._runs], lambda: self._restore(successors))

    def _restore(self, successors: Sequence[TransformerDriver]) -> None:
        self._undo()
        for driver in self._drivers:
            for successor in successors:
                successor.inherit(driver)
            driver.detach()
        self._runs.reset()
        for owner in self.owners:
            self.leave(owner)
        for linears in filter(None, (driver.linears for driver in self._drivers)):
            linears.on_host.give_all_back()

    def leave(self, pipe: Any) -> None:
        """Remove this object from a pipeline, which may be a shallow copy of an accelerated one."""
        if vars(pipe).get("dit_accel") is self:
            stop_watching_calls(pipe)
            del pipe.dit_accel

    def why_not_in_effect(self) -> str | None:
        """Return why the pipeline is no longer accelerated, or None."""
        driven = _alive(self._driven)
        for owner in self.owners:
            for name, transformer in denoisers(owner).items():
                if not any(transformer is other for other in (*driven, *_alive(self._plain))):
                    return f"pipe.{name} was replaced; call accelerate_pipeline(pipe) again"
        if not driven:
            return "the pipeline has dropped its transformer; load one, and call accelerate_pipeline(pipe)"
        if len(self._drivers) < len(driven) or not all(driver.is_attached for driver in self._drivers):
            return "its hook on the transformer was removed; call accelerate_pipeline(pipe) again"
        if self._runs.latest.missed_run:
            return "the scheduler has begun a later run, in which the transformer's hook was not called"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Acceleration:
        """Return this object, which the states of modular pipelines hold: a call that continues from one copies it."""
        return self

    def __repr__(self) -> str:
        return f"Acceleration(preset={self.preset.name!r}, family={self.family!r})"


def _alive(references: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [item for item in (reference() for reference in references) if item is not None]


def makes_video(pipe: Any) -> bool:
    """Return True if a pipeline makes videos: its family does, or its call or blocks name frames or videos."""
    if getattr(pipeline_family(pipe), "makes", None) == "videos":
        return True
    named = set(inspect.signature(pipe).parameters if callable(pipe) else ())
    if (blocks := getattr(pipe, "blocks", None)) is not None:
        named |= {*blocks.input_names, *blocks.output_names}
    return not named.isdisjoint(("num_frames", "video", "videos"))


def preset_for(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Preset:
    """Return the preset that :func:`accelerate_pipeline` uses for this pipeline, with overrides.

    Raises:
        PresetError: unknown preset, key or value.
    """
    return load_preset(default_preset(preset, is_video=makes_video(pipe)), **overrides)


def accelerate_pipeline(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Any:
    """Make a diffusers pipeline faster, in place.

    If the pipeline is already accelerated, the new preset replaces the old one, also for pipelines that share its
    transformers. If this raises, nothing is changed. If a transformer's call is in progress, in another thread or this
    one, the change takes effect at the end of that call; the rest of the run is then a run of the new preset.

    Args:
        pipe: a diffusers pipeline with a transformer.
        preset: name of a shipped preset, path of a YAML file, or a :class:`Preset`; None = `balanced`. For a pipeline
            that makes videos, `quality`, `balanced` and `turbo` are `video-quality` and so on.
        overrides: preset keys to change, e.g. ``target_error=0.1``, ``schedule={"warmup": 3}`` or
            ``**{"skip.policy": "none"}``; see :func:`~dit_accel.models.presets.load_preset`.

    Returns:
        The same pipeline, with an :class:`Acceleration` at ``pipe.dit_accel``.

    Raises:
        PresetError: unknown preset, key or value, or `skip.layers` names a block that the pipeline lacks.
        UnsupportedError: the pipeline has no transformer, the preset is for another model family, or a transformer has
            another cache (of diffusers or cache-dit), or is accelerated by ``enable_cache`` or together with further
            transformers of another pipeline. Where other transformers can be accelerated, one of an unknown class is
            left plain instead, and a warning and the report give the reason.
    """
    transformers = transformers_of(pipe)
    settings, owner = preset_for(pipe, preset, **overrides), weakref.ref(pipe)  # a shared transformer may outlive it

    def clock(pipeline: Any) -> SchedulerClock:
        return clock_of(owner if pipeline is None else weakref.ref(pipeline))

    called = {name: lambda module=module: held_module(owner(), module) for name, module in transformers.items()}
    _attach(transformers, called, settings, clock, control_net(pipe), owner=pipe)
    return pipe


def restore_pipeline(pipe: Any) -> Any:
    """Undo :func:`accelerate_pipeline`: results are bit for bit as before, and nothing is left on any object.

    Pipelines that share a transformer with this one, for example through ``from_pipe``, are restored too. If the
    pipeline is not accelerated, nothing happens. If a transformer's call is in progress, in another thread or this one,
    the pipeline is restored at the end of that call, and the rest of the run is plain.

    Returns:
        The same pipeline.
    """

    def restore() -> None:
        for acceleration in _accelerations(denoisers(pipe), pipe):
            acceleration.restore()
            acceleration.leave(pipe)

    between_calls(lambda: [acceleration._runs for acceleration in _accelerations(denoisers(pipe), pipe)], restore)
    return pipe


def report(accelerated: Any) -> RunReport:
    """Return the report of the last run of a pipeline or transformer, by whichever way it was accelerated.

    A pipeline may also share its transformer with the pipeline that was accelerated; the report is of its own last run.

    Args:
        accelerated: a pipeline, or a transformer that ``enable_cache`` or :func:`accelerate_transformer` accelerated.

    Raises:
        UnsupportedError: it is not accelerated, or its transformers have reports of their own.
    """
    is_module = isinstance(accelerated, torch.nn.Module)
    transformers = {"": unwrapped(accelerated)} if is_module else denoisers(accelerated)
    if not (found := _accelerations(transformers, accelerated)):
        fix = "call accelerate_pipeline(pipe), or enable_cache on its transformer, before its run"
        raise UnsupportedError(f"{type(accelerated).__name__} is not accelerated: {fix}")
    if len(found) > 1:
        parts = " and ".join(f"report(pipe.{name})" for name in transformers)
        raise UnsupportedError(f"the pipeline's transformers have reports of their own: read {parts}")
    return found[0].report(None if is_module else accelerated)


@contextmanager
def accelerated(pipe: Any, preset: str | Path | Preset | None = None, **overrides: Any) -> Iterator[Any]:
    """Accelerate a pipeline within a ``with`` block, and restore it afterwards, also after an exception.

    A pipeline that was accelerated before gets its earlier preset back. Read its report inside, at ``pipe.dit_accel``.
    """
    before = getattr(pipe, "dit_accel", None)
    accelerate_pipeline(pipe, preset, **overrides)
    try:
        yield pipe
    finally:
        if before is None:
            restore_pipeline(pipe)
        else:
            accelerate_pipeline(pipe, before.preset)


def accelerate_transformer(
    transformer: torch.nn.Module,
    preset: str | Path | Preset | None = None,
    timesteps: Sequence[float] | torch.Tensor | None = None,
    control_net: torch.nn.Module | None = None,
    **overrides: Any,
) -> Acceleration:
    """Make a diffusers transformer faster in a denoising loop of your own (``examples/own_loop.py``).

    Forecast errors are not corrected, because the loop's scheduler is not known. If a pipeline of diffusers calls the
    transformer and ``timesteps`` is None, its scheduler is known, and runs are those of :func:`accelerate_pipeline`.

    Args:
        transformer: called once per step and branch. Several branches in one step keep their order, or are named by
            ``transformer.cache_context(name)``. It may be wrapped, for example by ``torch.compile`` or peft.
        preset: see :func:`accelerate_pipeline`. `quality`, `balanced` and `turbo` mean the video forms for families
            that are known to make videos (HunyuanVideo, Wan, LTX, CogVideoX, SkyReels-V2). For any other video model
            name `video-balanced` yourself.
        timesteps: the values that the loop passes as ``timestep``, in order. A loop over other values needs a new
            ``accelerate_transformer``. A loop that starts again after its second step needs nothing; a loop that was
            left earlier needs ``reset()``. None = the loop calls the transformer inside of diffusers' (0.42)
            ``transformer.cache_context(name, step_index=…, num_inference_steps=…)``, or a pipeline calls it.
        control_net: ControlNet that the loop calls before the transformer, or None; at level ``output`` it then runs
            only in steps whose transformer reads its output.
        overrides: preset keys to change; see :func:`accelerate_pipeline`.

    Returns:
        The :class:`Acceleration`, with ``report()`` and ``restore()``.

    Raises:
        PresetError: unknown preset, key or value.
        UnsupportedError: the transformer is no module or has another cache, or preset or timesteps don't fit it.
    """
    inner = unwrapped(transformer)
    if (reason := why_not_wrapped(transformer)) is not None:
        raise UnsupportedError(reason)
    if not isinstance(inner, torch.nn.Module):
        fix = "a pipeline goes to accelerate_pipeline"
        raise UnsupportedError(f"transformer must be a module, got {type(transformer).__name__}; {fix}")
    is_video = getattr(known_family(inner), "makes", None) == "videos"
    settings = load_preset(default_preset(preset, is_video=is_video), **overrides)
    if timesteps is not None:
        TimestepClock(timesteps)  # raises if they are not valid

    def clock(pipeline: Any) -> Clock:
        if timesteps is not None:
            return TimestepClock(timesteps)
        is_known = keeps_timesteps(getattr(pipeline, "scheduler", None))
        return clock_of(weakref.ref(pipeline)) if is_known else PlaceClock()

    def called() -> torch.nn.Module | None:
        return held_module(calling_pipeline(inner), inner) or entry(transformer, inner)

    return _attach({"transformer": inner}, {"transformer": called}, settings, clock, control_net)


def _attach(
    transformers: dict[str, torch.nn.Module],
    called: Mapping[str, Callable[[], Any]],
    preset: Preset,
    clock: Callable[[Any], Clock],
    net: torch.nn.Module | None,
    owner: Any = None,
) -> Acceleration:
    drivers, refusals = drive(transformers, preset, called)
    for driver in drivers:
        driver.prepare()
    family = next((item.name for item in map(known_family, transformers.values()) if item is not None), "any")
    plain = {name: str(error) for name, error in refusals.items()}
    plain |= {} if owner is None else left_plain(owner)
    layers = {driver.name: driver.layers() for driver in drivers}

    def controller(pipeline: Any) -> Controller:
        run = Controller(preset, clock(pipeline), family)
        for name, blocks in layers.items():
            run.add_transformer(name, blocks)
        for name, reason in plain.items():
            run.warn_of_all_runs(f"pipe.{name} is not accelerated: {reason}")
        return run

    runs = Runs(controller, owner)
    acceleration = Acceleration(preset, family, runs, drivers, [transformers[name] for name in refusals])
    _owners(transformers, owner)  # raises now if it does later

    def attach() -> None:
        if acceleration.is_restored:
            return
        owners = _owners(transformers, owner)
        try:
            for earlier in _accelerations(transformers, owner):
                if owner is not None and preset.schedule.max_seconds is not None:
                    runs.of(owner).parts.take_previous(earlier._runs.of(owner).parts)
                earlier.restore(drivers)
                if owner is not None:
                    earlier.leave(owner)
            acceleration.attach(owners, net)
        except BaseException:
            acceleration.restore()
            raise

    between_calls(lambda: [*(acceleration._runs for acceleration in _accelerations(transformers, owner)), runs], attach)
    return acceleration


def _owners(transformers: Mapping[str, torch.nn.Module], owner: Any) -> list[Any]:
    """Return ``owner``, unless None, and the pipelines of replaced accelerations, without other transformers."""
    owners = [] if owner is None else [owner]
    for pipe in (pipe for earlier in _accelerations(transformers, owner) for pipe in earlier.owners):
        held = denoisers(pipe)
        others = [name for name, module in held.items() if not any(module is other for other in transformers.values())]
        if pipe is owner or len(others) == len(held):
            continue
        if others:
            where = f"by a {type(pipe).__name__} that shares it and also has {', '.join(others)}"
            fix = "keep that, accelerate that pipeline anew, or call restore_pipeline on either first"
            raise UnsupportedError(f"a transformer is accelerated already, {where}: {fix}")
        owners.append(pipe)
    return owners


def _accelerations(transformers: Mapping[str, torch.nn.Module], pipe: Any) -> list[Acceleration]:
    hooks = [hook for hook in map(find_hook, transformers.values()) if hook is not None]
    found = [getattr(pipe, "dit_accel", None), *(hook.acceleration for hook in hooks)]
    return [*dict.fromkeys(acceleration for acceleration in found if acceleration is not None)]
