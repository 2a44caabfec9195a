"""Run methods and compare them with plain runs; check after each method that the pipeline is unchanged."""

import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.tools.measure import metrics
from dit_accel.tools.measure.audio_metrics import audio_quality
from dit_accel.tools.measure.compare.methods import Method, Subject
from dit_accel.tools.measure.compare.snapshot import Snapshot
from dit_accel.tools.measure.compare.work import WorkCounter
from dit_accel.tools.measure.repeats import PLAIN_STEPS, REPEATS
from dit_accel.tools.measure.text_metrics import text_kept
from dit_accel.tools.measure.timing import denoise, run_pipeline, transformer_clock


@dataclass(frozen=True)
class Prompt:
    """Text prompt, and the seed of its noise."""

    prompt: str
    seed: int


@dataclass
class _Trace:
    """Times of one method's runs, each followed by plain steps, and changes that the method left on the pipeline."""

    share: float  # share of the setting that one run is
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)  # estimated for a whole plain run
    left_behind: dict[str, int] = field(default_factory=dict)
    distance: float = 0.0  # largest difference of plain steps

    def times(self) -> dict[str, Any]:
        lists = {"seconds_each": self.seconds, "plain_seconds_each": self.plain_seconds}
        return {"seconds": statistics.median(self.seconds), **lists}


class Bench:
    """A pipeline with its plain runs, on which methods are measured.

    ``load`` loads the plain pipeline, again if a method changes it permanently. ``tuning_prompt`` is for calibration.
    ``begin`` is called before each run with its name, and its share of all runs of a setting; ``show`` with ``plain``
    or a method's name, a prompt's index and the frames ``[frames, 3, height, width]``. ``repeats`` is the minimum
    number of timed runs per method, runs for quality included; ``plain_steps`` plain steps follow each, None = all.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        arguments: dict[str, Any],
        prompts: Sequence[Prompt],
        tuning_prompt: Prompt,
        begin: Callable[[str, float], None] = lambda what, share: None,
        repeats: int = REPEATS,
        plain_steps: int | None = PLAIN_STEPS,
        show: Callable[[str, int, torch.Tensor], None] = lambda name, prompt, frames: None,
    ) -> None:
        self._load, self._prompts, self._begin, self._show = load, prompts, begin, show
        self._repeats, self._plain_steps = repeats, plain_steps
        pipe = load()
        self.device = pipe._execution_device  # with offload its weights wait elsewhere
        parameters = inspect.signature(pipe.__call__).parameters
        if not denoisers(pipe) or "callback_on_step_end" not in parameters:
            needs = "its call must take callback_on_step_end, and it must have a transformer"
            raise UnsupportedError(f"{type(pipe).__name__} can't be compared: {needs}")
        steps = arguments.get("num_inference_steps") or parameters["num_inference_steps"].default
        self._arguments = {**arguments, "num_inference_steps": steps}
        self._warm: set[str] = set()
        self.subject = Subject(pipe, steps, 1, lambda: self._run(tuning_prompt, "calibration"))
        self._counter = WorkCounter(denoisers(pipe))
        with self._counter.calibrating(), transformer_clock(pipe) as clock:
            self._plain = [self._run(prompts[0], "plain")]
        self._calls = clock.calls
        self.subject.branches = max(1, clock.calls // steps)
        started = time.perf_counter()
        self._plain += [self._run(prompt, "plain") for prompt in prompts[1:]]
        self.call_seconds = (time.perf_counter() - started) / (len(prompts) - 1) if len(prompts) > 1 else None
        for index, plain in enumerate(self._plain if self.makes_images else ()):
            show("plain", index, plain["frames"])
        self._first_steps, _ = self._run_first_steps()
        self._tolerance = self._distance_to_plain()[0]  # 0 except on devices with nondeterministic results
        self._snapshot = Snapshot(pipe)
        self._optional = {}
        if self.makes_images:
            self._optional = {"flip": metrics.flip_error(), "lpips": metrics.lpips_distance(self.device)}
            self._optional["text_kept"] = text_kept()

    @property
    def pipe(self) -> Any:
        return self.subject.pipe

    @property
    def repeatable(self) -> bool:
        """Return True if plain runs are equal bit for bit."""
        return self._tolerance == 0.0

    @property
    def makes_images(self) -> bool:
        """Return True if the pipeline makes images or videos, False if it makes sound alone."""
        return "frames" in self._plain[0]

    @property
    def frames(self) -> int:
        """Number of frames of an output; an image has one, sound alone none."""
        return len(self._plain[0]["frames"]) if self.makes_images else 0

    @property
    def unavailable(self) -> dict[str, str | None]:
        """Reason why a metric is unavailable, or None, for each metric that needs a package."""
        return {name: None if callable(metric) else metric for name, metric in self._optional.items()}

    def measure(self, method: Method) -> dict[str, Any]:
        """Measure a method; return its metrics as means over prompts, or ``error`` if it fails.

        Further keys: ``psnr_db_each``, ``computed_fraction_each`` and ``call_seconds_each`` (whole calls) by prompt;
        ``peak_gib`` of a GPU's memory; ``fraction_from`` (``leaves``, or the ``report`` of our own kernels);
        ``left_behind`` (attributes that the method left on the transformers, removed here); ``reloaded`` (True if the
        pipeline was reloaded to restore plain runs). ``seconds`` is the median of ``seconds_each``, and
        ``plain_seconds_each`` the time of a plain run, estimated from its first steps after each of these runs.
        """
        row: dict[str, Any] = {key: getattr(method, key) for key in ("series", "name", "ours", "digest")}
        trace = _Trace(1 / max(len(self._prompts), self._repeats + self._is_cold(method)))
        if on_gpu := self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with method.put_on(self.subject):
                pass  # calibrate now, outside the counted runs
            figures = [self._compared(method, trace, index) for index in range(len(self._prompts))]
            self._time(method, trace)
            keys = dict.fromkeys(chain.from_iterable(figures))  # a prompt without text has no text_kept
            row |= {key: statistics.fmean(values[key] for values in figures if key in values) for key in keys}
            by_prompt = {"psnr_db", "computed_fraction", "call_seconds"} & figures[0].keys()
            row |= {f"{key}_each": [values[key] for values in figures] for key in sorted(by_prompt)}
            row |= {"fraction_from": "report" if method.reports_work else "leaves", **trace.times()}
            row |= {"peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30} if on_gpu else {}
        except Exception as error:  # one failing method must not stop the others
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._check(trace)
        if reloaded := trace.distance > self._tolerance:
            self._reload()
        return row | {"left_behind": trace.left_behind, "reloaded": reloaded}

    def retime(self, method: Method) -> dict[str, Any]:
        """Measure only the times of :meth:`measure`; attributes that the method leaves are removed."""
        trace = _Trace(1 / (self._repeats + self._is_cold(method)))
        try:
            self._time(method, trace)
        finally:
            self._snapshot.restore()
        return trace.times()

    def _time(self, method: Method, trace: _Trace) -> None:
        """Run the method on one prompt after the other until it has enough times."""
        while len(trace.seconds) < self._repeats:
            prompt = self._prompts[len(trace.seconds) % len(self._prompts)]
            with self._timed(method, trace) as (changes, _):
                self._begin(method.name, trace.share)
                denoise(self.pipe, {**self._arguments, **changes, "prompt": prompt.prompt}, prompt.seed)

    @contextmanager
    def _timed(
        self, method: Method, trace: _Trace, beneath: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """Within the block, apply the method for one run; time it and the plain steps after it.

        Yields the changes to the call's arguments, and the value of ``beneath``, a context around all these steps.
        """
        with beneath() as entered, method.put_on(self.subject) as changes, transformer_clock(self.pipe) as clock:
            yield changes, entered
        seconds, plain_seconds = clock.seconds, self._check(trace, beneath)
        if not self._is_cold(method):
            trace.seconds.append(seconds)
            trace.plain_seconds.append(plain_seconds)
        self._warm.add(method.name)

    def _is_cold(self, method: Method) -> bool:
        """Return True if the method's next run may compile kernels, so that it is not timed."""
        return bool(self.device.type == "cuda" and method.name not in self._warm)

    def _compared(self, method: Method, trace: _Trace, index: int) -> dict[str, float]:
        prompt, plain = self._prompts[index], self._plain[index]
        counting = nullcontext if method.reports_work else self._counter.counting
        with self._timed(method, trace, counting) as (changes, counted):
            started = time.perf_counter()
            output = self._run(prompt, method.name, trace.share, **changes)
            seconds = time.perf_counter() - started
            fraction = self.pipe.dit_accel.report().computed_fraction if method.reports_work else counted()
        figures = {"computed_fraction": fraction, "call_seconds": seconds}
        figures["latent_error"] = metrics.latent_error(output["latents"], plain["latents"])
        if self.makes_images:
            self._show(method.name, index, output["frames"])
            figures |= self._image_quality(output["frames"], plain["frames"])
        if "sound" in plain:
            figures |= audio_quality(output["sound"], plain["sound"])
        if not math.isfinite(sum(figures.values())):
            raise ValueError("the output contains values that are not finite")
        return figures

    def _image_quality(self, frames: torch.Tensor, plain: torch.Tensor) -> dict[str, float]:
        level = min(metrics.psnr(frames, plain), metrics.IDENTICAL)
        figures = {"psnr_db": level, "ssim": metrics.clip_ssim(frames, plain)}
        if min(plain.shape[-2:]) >= metrics.MS_SSIM_SIDE:
            figures["ms_ssim"] = metrics.mean_over_frames(metrics.ms_ssim, frames, plain)
        found = {name: metric(frames, plain) for name, metric in self._optional.items() if callable(metric)}
        return figures | {name: value for name, value in found.items() if value is not None}

    def _check(self, trace: _Trace, beneath: Callable[[], AbstractContextManager[Any]] = nullcontext) -> float:
        """Remove attributes that the method left, compare the plain run's first steps; return a run's seconds."""
        trace.left_behind |= self._snapshot.restore()
        with beneath():
            distance, seconds = self._distance_to_plain()
        trace.distance = max(trace.distance, distance)
        return seconds

    def _reload(self) -> None:
        """Reload the pipeline after freeing the old one, since a device may not hold two."""
        del self.subject.pipe, self._snapshot
        self._counter.move_to({})
        gc.collect()  # modules and hooks form reference cycles
        self.subject.pipe = self._load()
        self._counter.move_to(denoisers(self.pipe))
        self._snapshot = Snapshot(self.pipe)
        # If a freshly loaded pipeline differs too, the device is nondeterministic.
        self._tolerance = max(self._tolerance, self._distance_to_plain()[0])

    def _distance_to_plain(self) -> tuple[float, float]:
        """Return the largest difference of the latents after the first steps from the initial ones, and the seconds."""
        latents, seconds = self._run_first_steps()
        distance = float((latents - self._first_steps).abs().max())
        return (math.inf if math.isnan(distance) else distance), seconds

    def _run_first_steps(self) -> tuple[torch.Tensor, float]:
        """Return the latents after the plain run's first steps, and the seconds of a whole run at the same pace."""
        self._begin("plain", 0.0)
        prompt = self._prompts[0]
        with transformer_clock(self.pipe) as clock:
            latents = denoise(self.pipe, {**self._arguments, "prompt": prompt.prompt}, prompt.seed, self._plain_steps)
        return latents.float().cpu(), clock.seconds * self._calls / clock.calls

    def _run(self, prompt: Prompt, activity: str, share: float = 0.0, **changes: Any) -> dict[str, torch.Tensor]:
        self._begin(activity, share)
        return run_pipeline(self.pipe, {**self._arguments, **changes}, prompt.prompt, prompt.seed)
