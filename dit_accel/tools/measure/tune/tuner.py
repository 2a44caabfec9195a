"""Run one tuning: plain runs, thresholds of single layers, searches, and confirmations of their results.

Plain runs are made once. Thresholds of single layers are chosen by their error on queries, keys and values recorded in
the plain runs (``calibration``), thresholds of the whole run by accelerated runs (``search``). The result is confirmed
on held-out prompts. If it misses the target there, the search goes on with one that is tighter by the difference.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dit_accel import __version__
from dit_accel.errors import TuningError
from dit_accel.models import denoisers
from dit_accel.models.presets import load_preset
from dit_accel.pipeline import accelerate_pipeline, accelerated, makes_video, restore_pipeline
from dit_accel.presets import Preset, default_preset
from dit_accel.presets.keywords import nested
from dit_accel.tools.measure.origin import describe_run
from dit_accel.tools.measure.tune import calibration
from dit_accel.tools.measure.tune.axes import BOUND, BOUND_RATIO, LINEAR_BOUND, NO_KEYS, Axis, Setting, axes_of
from dit_accel.tools.measure.tune.linears import Kind, LinearTap, excluded, work_left
from dit_accel.tools.measure.tune.result import Target, TuneResult, computed_fraction
from dit_accel.tools.measure.tune.runs import Figures, FigureStore, MeasuredRuns
from dit_accel.tools.measure.tune.search import Score, Search

TUNING_PROMPTS = 4
HELD_OUT_PROMPTS = 4
EVALUATIONS = 24
CONFIRMATIONS = 4

Progress = Callable[[str, int, int], None]  # name of the activity, finished runs, expected runs


def split_prompts(
    prompts: Sequence[str], tuning: int = TUNING_PROMPTS, held_out: int = HELD_OUT_PROMPTS
) -> tuple[list[str], list[str]]:
    """Split prompts: the first ``tuning`` ones, and the next ``held_out`` ones; half of a short list is held out."""
    if len(prompts) < 2 or len(set(prompts)) < len(prompts):
        raise TuningError(f"at least 2 different prompts without duplicates are needed, got {len(prompts)}")
    count = min(tuning, len(prompts) // 2)
    return list(prompts[:count]), list(prompts[count : count + held_out])


def tune(
    pipe: Any,
    preset: str | Path | Preset,
    *,
    prompts: Sequence[str],
    target_psnr: float | None = None,
    target_error: float | None = None,
    coverage: float | None = None,
    tuning_prompts: int = TUNING_PROMPTS,
    held_out_prompts: int = HELD_OUT_PROMPTS,
    arguments: dict[str, Any] | None = None,
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    state: str | Path | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> TuneResult:
    """Search the thresholds of a preset; if no setting meets the target, the result is the closest, ``met`` is False.

    Args:
        pipe: a diffusers pipeline, plain or accelerated; its state is restored afterwards.
        preset: start of the search; it also determines the thresholds to tune.
        prompts: prompts for tuning, then held-out prompts; see :func:`split_prompts`.
        target_psnr, target_error: least mean PSNR against plain runs, in dB; or most mean error of the final latents.
        coverage: share of unseen prompts that must reach the target instead of the mean; it needs coverage /
            (1 − coverage) prompts for tuning and as many held out. From 0.9 the preset gets a ``calibration``.
        arguments, seed: of the pipeline's call; the first prompt's noise is of this seed, the next one's of the next.
        evaluations: maximum number of settings of run-level thresholds between two confirmations.
        state: folder for all results, from which an interrupted tuning resumes; None = none.
        progress: called before each run and after each layer; an exception from it ends the tuning.
        overrides: preset keys to change first; the closed loop's target is ``schedule={"target_error": …}``.

    Raises:
        PresetError: unknown preset, key or value.
        TuningError: no target or two, too few prompts, a preset without thresholds, or the state of another request.
        UnsupportedError: the preset does not fit the pipeline.
    """
    target = Target.of(target_psnr, target_error, coverage)
    preset = default_preset(preset, is_video=makes_video(pipe))
    base = None if isinstance(preset, Preset) else preset
    overrides = nested(overrides)
    preset = load_preset(preset, **overrides)
    overrides.get("schedule", {}).pop("target_psnr", None)  # the search chooses target_error
    parameter = inspect.signature(pipe.__call__).parameters.get("num_inference_steps")
    arguments = {"num_inference_steps": parameter and parameter.default, **(arguments or {})}
    by_layer = "skip" in preset.effective() and preset.skip.skips
    axes = axes_of(preset, by_layer=by_layer)
    split = split_prompts(prompts, tuning_prompts, held_out_prompts)
    target.require_prompts(*map(len, split))
    tuner = _Tuner(pipe, preset, base, overrides, target, arguments, *split, seed, by_layer)
    with accelerated(pipe, preset):
        pass  # raises now, before plain runs of minutes, if the preset does not fit the pipeline
    earlier = vars(pipe).get("dit_accel")
    restore_pipeline(pipe)
    try:
        return tuner.run(axes, evaluations, state and Path(state), progress)
    finally:
        if earlier is not None:
            accelerate_pipeline(pipe, earlier.preset)


@dataclass
class _Tuner:
    pipe: Any
    preset: Preset
    base: str | Path | None
    overrides: dict[str, Any]
    target: Target
    arguments: dict[str, Any]
    tuning: list[str]
    held_out: list[str]
    seed: int
    by_layer: bool
    curves: calibration.Curves = field(default_factory=dict)
    linears: list[Kind] = field(default_factory=list)  # layers in 8 bits, by descending error

    def run(self, axes: Sequence[Axis], evaluations: int, folder: Path | None, progress: Progress | None) -> TuneResult:
        """Run plain runs and layers, then searches and confirmations until a confirmation meets the target."""
        prompts, count = [*self.tuning, *self.held_out], len(self.tuning)
        store = FigureStore(folder, self._request())
        phase = _Phase(progress, 2 * len(prompts) + evaluations * count)
        runs = MeasuredRuns(self.pipe, self.arguments, prompts, self.seed, store, phase.begin_run)
        if self.by_layer:
            rows_of = store.once("layers", partial(self._calibrate, runs, phase))
            self.curves = {block: [calibration.Candidate(**row) for row in rows] for block, rows in rows_of.items()}
        if self.preset.linear.dtype is not None:
            self.linears = [Kind(**row) for row in store.once("linears", partial(self._measure_linears, runs))]
        for index in range(len(prompts)):
            runs.plain(index)
        tried: dict[str, tuple[Setting, list[Figures]]] = {}
        caution, confirmations = 0.0, 0
        while confirmations < CONFIRMATIONS:
            confirmations += 1
            phase.name = "search"

            def evaluate(setting: Setting, caution: float = caution) -> Score:
                figures = runs.figures(self._preset_of(setting), range(count))
                tried[str(setting)] = setting, figures
                return Score(self.target.slack(figures, cautious=True) - caution, self._cost(figures, setting))

            search = Search(axes, evaluate, evaluations)
            found = search.run()
            setting = search.setting(found.places)
            phase.name = "confirmation"
            confirmed = runs.figures(self._preset_of(setting), range(count, len(prompts)))
            score = Score(self.target.slack(confirmed), self._cost(confirmed, setting))
            if score.meets or not found.score.meets:
                break
            caution += self.target.least - score.slack
        changes = self._all_changes(setting, confirmed)
        tightened = f"{confirmations}, tightened in between" if confirmations > 1 else "1"
        return TuneResult(
            preset=load_preset(self.preset, **changes),
            base=self.base,
            changes=changes,
            target=self.target,
            met=score.meets,
            setting=setting,
            held_out=confirmed,
            evaluations=list(tried.values()),
            curves=self.curves,
            chosen=self._chosen(setting) if self.by_layer else {},
            circumstances={"confirmations": tightened, **self._circumstances(runs.plain(0)["frames"].shape)},
        )

    def _calibrate(self, runs: MeasuredRuns, phase: _Phase) -> dict[str, list[dict[str, Any]]]:
        recorder = calibration.Recorder(self.preset, self.arguments["num_inference_steps"], len(self.tuning))
        for index in range(len(self.tuning)):
            runs.plain(index, recorder.tap(self.pipe, index))
        recorder.require_every_block()
        measured = {}
        for block, candidates in calibration.measure(recorder, self.preset, self.pipe._execution_device):
            measured[block] = [asdict(candidate) for candidate in candidates]
            phase.report(f"layer {len(measured)} of {len(recorder.samples)}")
        return measured

    def _measure_linears(self, runs: MeasuredRuns) -> list[dict[str, Any]]:
        tap = LinearTap(self.pipe, self.preset.linear)
        runs.plain(0, tap.measuring())
        return [asdict(kind) for kind in tap.kinds()]

    def _cost(self, figures: list[Figures], setting: Setting) -> float:
        """Return the computed fraction, with half the cost for layers in 8 bits."""
        return computed_fraction(figures) * work_left(self.linears, setting.get(LINEAR_BOUND, 0.0))

    def _preset_of(self, setting: Setting) -> Preset:
        return load_preset(self.preset, **self._changes(setting))

    def _changes(self, setting: Setting) -> dict[str, Any]:
        changes: dict[str, Any] = {key: value for key, value in setting.items() if key not in NO_KEYS}
        if self.by_layer:
            changes["skip.layers"] = calibration.layers_of(self._chosen(setting))
        if LINEAR_BOUND in setting:
            kept = excluded(self.linears, setting[LINEAR_BOUND])
            if len(kept) == len(self.linears):
                changes |= {"linear.dtype": None, "linear.exclude": [], "linear.weights": "device"}
            else:
                changes["linear.exclude"] = [*self.preset.linear.exclude, *kept]
        return changes

    def _all_changes(self, setting: Setting, confirmed: list[Figures]) -> dict[str, Any]:
        """Return the changes to the base, with a description and, if the target calibrates, a calibration."""
        name = self.preset.name if self.base is not None else "custom"
        changes = {**self.overrides, **self._changes(setting), "description": f"{name}, tuned for {self.target}"}
        if self.target.calibrates and (bound := self._preset_of(setting).schedule.bound):  # an interval has none
            changes["schedule.calibration"] = [[bound, round(self.target.level(confirmed), 2)]]
        return changes

    def _chosen(self, setting: Setting) -> dict[str, calibration.Candidate | None]:
        return calibration.choose(self.curves, setting[BOUND], setting.get(BOUND_RATIO, 1.0))

    def _circumstances(self, shape: torch.Size) -> dict[str, str]:
        """Return facts for the header of the preset; ``shape`` is ``[frames, 3, height, width]``."""
        origin = describe_run(self.pipe._execution_device)
        frames, _, height, width = shape
        size = f"{width} x {height} pixels" + (f", {frames} frames" if frames > 1 else "")
        call = {"steps": str(self.arguments["num_inference_steps"]), "first seed": str(self.seed)}
        versions = {"device": origin["device"], "torch": origin["torch"]}
        return {"pipeline": self._name, "size": size, **call, "dtype": self._dtype, **versions}

    @property
    def _name(self) -> str:
        origin = self.pipe.name_or_path
        return type(self.pipe).__name__ + (f" of {Path(origin).name}" if origin else "")

    @property
    def _dtype(self) -> str:
        return str(next(iter(denoisers(self.pipe).values())).dtype).removeprefix("torch.")

    def _request(self) -> dict[str, Any]:
        request = {"version": __version__, "pipeline": self._name, "model": str(self.pipe.name_or_path)}
        request |= {"preset": self.preset.model_dump(mode="json"), "target": str(self.target)}
        request["arguments"] = json.loads(json.dumps(self.arguments, default=_digest))
        request |= {"prompts": self.tuning, "held-out prompts": self.held_out, "seed": self.seed}
        return request | {"dtype": self._dtype, "device": torch.device(self.pipe._execution_device).type}


@dataclass
class _Phase:
    progress: Progress | None
    expected: int  # maximum number of runs, unless the search is tightened
    name: str = "plain runs"
    runs: int = 0

    def begin_run(self) -> None:
        self.report(self.name)
        self.runs += 1

    def report(self, activity: str) -> None:
        if self.progress is not None:
            self.progress(activity, self.runs, max(self.expected, self.runs + 1))


def _digest(value: Any) -> str:
    return hashlib.sha256(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()).hexdigest()[:16]
