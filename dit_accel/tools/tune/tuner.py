"""One tuning: plain runs, thresholds of single layers, searches, and confirmations of what they find.

Plain runs are made once. Thresholds of single layers are chosen by what they do to queries, keys and values recorded
from these (:mod:`~dit_accel.tools.tune.calibration`), those of the whole run by accelerated runs
(:mod:`~dit_accel.tools.tune.search`). What is found is confirmed on prompts that the search never saw; where it misses
its target there, the search is tightened by as much and goes on.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dit_accel import __version__
from dit_accel.errors import TuningError
from dit_accel.models import denoisers
from dit_accel.models.presets import load_preset
from dit_accel.pipeline import accelerate_pipeline, accelerated, makes_video, restore_pipeline
from dit_accel.presets import Preset, default_preset
from dit_accel.tools.origin import describe_run
from dit_accel.tools.tune import calibration
from dit_accel.tools.tune.axes import BOUND, BOUND_RATIO, LINEAR_BOUND, Axis, Setting, axes_of, overrides_of
from dit_accel.tools.tune.linears import Kind, LinearTap, excluded, work_left
from dit_accel.tools.tune.result import Evaluation, Target, TuneResult, computed_fraction
from dit_accel.tools.tune.runs import Figures, Runs, Store
from dit_accel.tools.tune.search import Score, Search

TUNING_PROMPTS = 4
HELD_OUT_PROMPTS = 4
EVALUATIONS = 24
CONFIRMATIONS = 4

Progress = Callable[[str, int, int], None]  # what is going on, runs made, runs expected


def split_prompts(
    prompts: Sequence[str], tuning: int = TUNING_PROMPTS, held_out: int = HELD_OUT_PROMPTS
) -> tuple[list[str], list[str]]:
    """The first ``tuning`` prompts, and the ``held_out`` ones behind them; of a short list half are held out.

    Raises:
        TuningError: fewer than two prompts, or one that occurs twice.
    """
    if len(prompts) < 2 or len(set(prompts)) < len(prompts):
        raise TuningError(f"prompts must be at least 2, all different, some of them held out; got {len(prompts)}")
    count = min(tuning, len(prompts) // 2)
    return list(prompts[:count]), list(prompts[count : count + held_out])


def tune(
    pipe: Any,
    preset: str | Path | Preset,
    *,
    prompts: Sequence[str],
    target_psnr: float | None = None,
    target_error: float | None = None,
    tuning_prompts: int = TUNING_PROMPTS,
    held_out_prompts: int = HELD_OUT_PROMPTS,
    arguments: dict[str, Any] | None = None,
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    state: str | Path | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> TuneResult:
    """Searches the thresholds that a preset has.

    Args:
        pipe: a diffusers pipeline; accelerated or not, it is afterwards as it was.
        preset: where to begin; which thresholds there are is what it says.
        prompts: for tuning and, behind these, held out, as :func:`split_prompts` divides them.
        target_psnr: dB, the mean over prompts of the PSNR against plain runs that must be reached.
        target_error: instead, the mean relative L2 error of the last latents that must not be passed.
        tuning_prompts, held_out_prompts: how many of each there are at most.
        arguments: of the pipeline's call, without prompt and generator.
        seed: of the first prompt's noise; each further prompt has the next.
        evaluations: most settings of run-level thresholds that are tried between two confirmations.
        state: folder where all that was found is kept, so that an interrupted tuning goes on; None = nowhere.
        progress: called before each run and after each layer; what it raises ends the tuning.
        overrides: preset keys to change first; that of the closed loop's target is ``schedule={"target_error": …}``.

    Returns:
        The preset with what was measured. Where the target could not be met, ``met`` is False and the preset is the one
        that came closest.

    Raises:
        PresetError: unknown preset, key or value.
        TuningError: no target or two, too few prompts, a preset without thresholds, or a state of another request.
        UnsupportedError: the preset does not fit the pipeline.
    """
    target = Target.of(target_psnr, target_error)
    preset = default_preset(preset, is_video=makes_video(pipe))
    base = None if isinstance(preset, Preset) else preset
    preset = load_preset(preset, **overrides)
    parameter = inspect.signature(pipe.__call__).parameters.get("num_inference_steps")
    arguments = {"num_inference_steps": parameter and parameter.default, **(arguments or {})}
    by_layer = "skip" in preset.effective() and preset.skip.skips
    axes = axes_of(preset, by_layer=by_layer)
    split = split_prompts(prompts, tuning_prompts, held_out_prompts)
    tuner = _Tuner(pipe, preset, base, overrides, target, arguments, *split, seed, by_layer)
    earlier = vars(pipe).get("dit_accel")
    with accelerated(pipe, preset):
        pass  # raises now, and not after plain runs of minutes, if the preset does not fit the pipeline
    restore_pipeline(pipe)
    try:
        return tuner.run(axes, evaluations, state and Path(state), progress)
    finally:
        if earlier is not None:
            accelerate_pipeline(pipe, earlier.preset)


@dataclass
class _Tuner:
    """One tuning."""

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
    linears: list[Kind] = field(default_factory=list)  # layers in 8 bits, those that err most first

    def run(self, axes: Sequence[Axis], evaluations: int, folder: Path | None, progress: Progress | None) -> TuneResult:
        """Plain runs, layers, then searches and confirmations until one of these meets the target."""
        prompts, count = [*self.tuning, *self.held_out], len(self.tuning)
        store = Store(folder, self._request())
        told = _Told(progress, 2 * len(prompts) + evaluations * count)
        runs = Runs(self.pipe, self.arguments, prompts, self.seed, store, told.begin_run)
        if self.by_layer:
            self._calibrate(runs, store, told)
        if self.preset.linear.dtype is not None:
            self._measure_linears(runs, store)
        for index in range(len(prompts)):
            runs.plain(index)

        tried: dict[str, Evaluation] = {}
        caution = 0.0
        scores: list[Score] = []  # of the confirmations
        while len(scores) < CONFIRMATIONS:
            told.phase = "search"

            def evaluate(setting: Setting, caution: float = caution) -> Score:
                evaluation = Evaluation(setting, runs.figures(self._preset_of(setting), range(count)))
                tried[str(setting)] = evaluation
                slack = self.target.slack(evaluation.figures, cautious=True)
                return Score(slack - caution, self._cost(evaluation.figures, setting))

            search = Search(axes, evaluate, evaluations)
            found = search.run()
            setting = search.setting(found.places)
            told.phase = "confirmation"
            confirmed = runs.figures(self._preset_of(setting), range(count, len(prompts)))
            scores.append(Score(self.target.slack(confirmed), self._cost(confirmed, setting)))
            if scores[-1].meets or not found.score.meets:
                break
            caution += self.target.least - scores[-1].slack
        name = self.preset.name if self.base is not None else "custom"
        changes = {**self.overrides, **self._changes(setting), "description": f"{name}, tuned for {self.target}"}
        return TuneResult(
            preset=load_preset(self.preset, **changes),
            base=self.base,
            changes=changes,
            target=self.target,
            met=scores[-1].meets,
            setting=setting,
            held_out=confirmed,
            evaluations=list(tried.values()),
            curves=self.curves,
            chosen=self._chosen(setting) if self.by_layer else {},
            circumstances={
                "confirmations": str(len(scores)) + (", tightened in between" if len(scores) > 1 else ""),
                **self._circumstances(runs.plain(0)["frames"].shape),
            },
        )

    def _calibrate(self, runs: Runs, store: Store, told: _Told) -> None:
        """What single layers bear, from the plain runs of the tuning prompts."""
        if (stored := store.get("layers")) is None:
            recorder = calibration.Recorder(self.preset, self.arguments["num_inference_steps"], len(self.tuning))
            for index in range(len(self.tuning)):
                runs.plain(index, recorder.tap(self.pipe, index))
            recorder.require_every_block()
            stored = {}
            for block, candidates in calibration.measure(recorder, self.preset, self.pipe._execution_device):
                stored[block] = [asdict(each) for each in candidates]
                told.tell(f"layer {len(stored)} of {len(recorder.samples)}")
            store.put("layers", stored)
        self.curves = {block: [calibration.Candidate(**each) for each in values] for block, values in stored.items()}

    def _measure_linears(self, runs: Runs, store: Store) -> None:
        """What linear layers lose in 8 bits, on one plain run."""
        if (stored := store.get("linears")) is None:
            tap = LinearTap(self.pipe, self.preset.linear)
            runs.plain(0, tap)
            stored = [asdict(each) for each in tap.kinds()]
            store.put("linears", stored)
        self.linears = [Kind(**each) for each in stored]

    def _cost(self, figures: list[Figures], setting: Setting) -> float:
        """The computed fraction, of which layers in 8 bits take half."""
        return computed_fraction(figures) * work_left(self.linears, setting.get(LINEAR_BOUND, 0.0))

    def _preset_of(self, setting: Setting) -> Preset:
        return load_preset(self.preset, **self._changes(setting))

    def _changes(self, setting: Setting) -> dict[str, Any]:
        """What a setting says, as keys of the preset."""
        changes = overrides_of(setting)
        if self.by_layer:
            changes["skip.layers"] = calibration.layers_of(self._chosen(setting))
        if LINEAR_BOUND in setting:
            kept = excluded(self.linears, setting[LINEAR_BOUND])
            if len(kept) == len(self.linears):
                changes |= {"linear.dtype": None, "linear.exclude": []}
            else:
                changes["linear.exclude"] = [*self.preset.linear.exclude, *kept]
        return changes

    def _chosen(self, setting: Setting) -> dict[str, calibration.Candidate | None]:
        return calibration.choose(self.curves, setting[BOUND], setting.get(BOUND_RATIO, 1.0))

    def _circumstances(self, shape: torch.Size) -> dict[str, str]:
        """What was measured on, for the header of the preset; ``shape`` is ``[frames, 3, height, width]``."""
        origin = describe_run(self.pipe._execution_device)
        frames, _, height, width = shape
        return {
            "pipeline": self._name,
            "size": f"{width} x {height} pixels" + (f", {frames} frames" if frames > 1 else ""),
            "steps": str(self.arguments["num_inference_steps"]),
            "first seed": str(self.seed),
            "dtype": self._dtype,
            "device": origin["device"],
            "torch": origin["torch"],
        }

    @property
    def _name(self) -> str:
        """Class of the pipeline, and what it was loaded from."""
        origin = self.pipe.name_or_path
        return type(self.pipe).__name__ + (f" of {Path(origin).name}" if origin else "")

    @property
    def _dtype(self) -> str:
        transformer = next(iter(denoisers(self.pipe).values()))
        return str(transformer.dtype).removeprefix("torch.")

    def _request(self) -> dict[str, Any]:
        """All that figures depend on."""
        return {
            "version": __version__,
            "pipeline": self._name,
            "model": str(self.pipe.name_or_path),
            "preset": self.preset.model_dump(mode="json"),
            "target": str(self.target),
            "arguments": {key: _as_json(value) for key, value in self.arguments.items()},
            "prompts": self.tuning,
            "held-out prompts": self.held_out,
            "seed": self.seed,
            "dtype": self._dtype,
            "device": torch.device(self.pipe._execution_device).type,
        }


@dataclass
class _Told:
    """Tells a callback how far a tuning is."""

    progress: Progress | None
    expected: int  # runs that there will be at most, unless the search has to be tightened
    phase: str = "plain runs"
    made: int = 0

    def begin_run(self) -> None:
        self.tell(self.phase)
        self.made += 1

    def tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self.made, max(self.expected, self.made + 1))


def _as_json(value: Any) -> Any:
    """An argument of a pipeline's call as a JSON value; of pictures and tensors a digest."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    data = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:16]
