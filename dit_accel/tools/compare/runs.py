"""Runs of methods beside plain runs, and the proof after each that nothing of it is left."""

from __future__ import annotations

import gc
import inspect
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.tools.compare.methods import Method, Subject
from dit_accel.tools.compare.snapshot import Snapshot
from dit_accel.tools.compare.work import WorkCounter
from dit_accel.tools.metrics import IDENTICAL, clip_ssim, latent_error, lpips_distance, psnr
from dit_accel.tools.repeats import PLAIN_STEPS, REPEATS
from dit_accel.tools.timing import denoise, run_pipeline, transformer_clock


@dataclass(frozen=True)
class Prompt:
    """What is drawn, and the seed of its noise."""

    prompt: str
    seed: int


@dataclass
class _Trace:
    """What the runs of one method took and left, each with plain steps behind it."""

    share: float  # of the setting that one run is
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)  # that a whole plain run would have taken
    left_behind: dict[str, int] = field(default_factory=dict)
    distance: float = 0.0  # most that plain steps were off

    def times(self) -> dict[str, Any]:
        """As they stand in a row."""
        each = {"seconds_each": self.seconds, "plain_seconds_each": self.plain_seconds}
        return {"seconds": statistics.median(self.seconds), **each}


class Bench:
    """A pipeline with its plain runs, on which methods are measured.

    Args:
        load: gives the pipeline, plain and in place; called again if a method leaves something on it.
        arguments: of its call, without prompt and generator.
        prompts: of the runs that are compared.
        tuning_prompt: for methods that need calibration; none of ``prompts``.
        begin: called before each run with what it is of, and its share of all runs of a setting.
        repeats: how often each method is timed at least; runs that are made for quality count.

    Raises:
        UnsupportedError: the pipeline takes no ``callback_on_step_end``, or has no transformer.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        arguments: dict[str, Any],
        prompts: Sequence[Prompt],
        tuning_prompt: Prompt,
        begin: Callable[[str, float], None] = lambda what, share: None,
        repeats: int = REPEATS,
    ) -> None:
        self._load = load
        self._prompts = prompts
        self._begin = begin
        self._repeats = repeats
        pipe = load()
        parameters = inspect.signature(pipe.__call__).parameters
        if not denoisers(pipe) or "callback_on_step_end" not in parameters:
            raise UnsupportedError(
                f"{type(pipe).__name__} can't be compared: it needs a transformer, and a call that takes "
                "callback_on_step_end"
            )
        steps = arguments.get("num_inference_steps") or parameters["num_inference_steps"].default
        self._arguments = {**arguments, "num_inference_steps": steps}
        self._tuning_prompt = tuning_prompt
        self._warm: set[str] = set()
        self.subject = Subject(pipe, steps, 1, self._tuning_run)
        self._counter = WorkCounter(denoisers(pipe))
        with self._counter.calibrating(), transformer_clock(pipe) as clock:
            self._plain = [self._run(prompts[0], "plain")]
        self._calls = clock.calls
        self.subject.branches = max(1, clock.calls // steps)
        self._plain += [self._run(prompt, "plain") for prompt in prompts[1:]]
        self._first_steps, _ = self._run_first_steps()
        self._tolerance = self._distance_to_plain()[0]  # 0 but on devices that don't repeat themselves
        self._snapshot = Snapshot(pipe)
        self._lpips = lpips_distance(pipe.device)

    @property
    def pipe(self) -> Any:
        return self.subject.pipe

    @property
    def repeatable(self) -> bool:
        """Whether plain runs give the same, bit for bit."""
        return self._tolerance == 0.0

    @property
    def lpips(self) -> str | None:
        """Why there is no LPIPS, or None."""
        return None if callable(self._lpips) else self._lpips

    def measure(self, method: Method) -> dict[str, Any]:
        """The method's figures, each the mean over prompts; where it fails, ``error`` in their stead.

        Beside them lie ``psnr_db_each`` and ``computed_fraction_each`` by prompt, ``fraction_from`` (``leaves``, or the
        ``report`` of our own kernels), ``left_behind`` (attributes that the method left on the transformers, which are
        taken off) and ``reloaded`` (whether the pipeline had to be loaded anew for plain runs to be as before).
        Of times ``seconds`` is the median, ``seconds_each`` holds every run that was timed, and ``plain_seconds_each``
        a plain run's by the steps of it behind each of these.
        """
        row: dict[str, Any] = {key: getattr(method, key) for key in ("series", "name", "ours", "digest")}
        trace = _Trace(1 / max(len(self._prompts), self._repeats + self._is_cold(method)))
        try:
            with method.put_on(self.subject):
                pass  # what needs calibration does it now, and not where runs are counted
            pairs = zip(self._prompts, self._plain, strict=True)
            figures = [self._compared(method, trace, *pair) for pair in pairs]
            self._time(method, trace)
            row |= {key: statistics.fmean(each[key] for each in figures) for key in figures[0]}
            row |= {f"{key}_each": [each[key] for each in figures] for key in ("psnr_db", "computed_fraction")}
            row |= {"fraction_from": "report" if method.reports_work else "leaves", **trace.times()}
        except Exception as error:  # whatever one method raises, the others go on
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._plain_steps(trace)
        reloaded = trace.distance > self._tolerance
        if reloaded:
            self._reload()
        return row | {"left_behind": trace.left_behind, "reloaded": reloaded}

    def retime(self, method: Method) -> dict[str, Any]:
        """Its times alone, as :meth:`measure` has them; what the method left on the transformers is taken off."""
        trace = _Trace(1 / (self._repeats + self._is_cold(method)))
        try:
            self._time(method, trace)
        finally:
            self._snapshot.restore()
        return trace.times()

    def time_plain(self) -> float:
        """Seconds inside the transformers of a plain run, the median over repeats of its first steps."""
        return statistics.median(self._run_first_steps()[1] for _ in range(self._repeats))

    def _time(self, method: Method, trace: _Trace) -> None:
        """Runs the method, prompt after prompt, until it was timed often enough."""
        while len(trace.seconds) < self._repeats:
            prompt = self._prompts[len(trace.seconds) % len(self._prompts)]
            with self._timed(method, trace) as (changes, _):
                self._begin(method.name, trace.share)
                denoise(self.pipe, {**self._arguments, **changes, "prompt": prompt.prompt}, prompt.seed)

    @contextmanager
    def _timed(
        self, method: Method, trace: _Trace, beneath: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """Within, the method is on for one run, which is timed beside plain steps.

        Args:
            beneath: what lies around the run, and around the plain steps; what it gives is yielded with the changes
                to the arguments of the call.
        """
        with beneath() as entered, method.put_on(self.subject) as changes, transformer_clock(self.pipe) as clock:
            yield changes, entered
        seconds, plain_seconds = clock.seconds, self._plain_steps(trace, beneath)
        if not self._is_cold(method):
            trace.seconds.append(seconds)
            trace.plain_seconds.append(plain_seconds)
        self._warm.add(method.name)

    def _is_cold(self, method: Method) -> bool:
        """Whether the method's next run may compile kernels, which are no part of its time."""
        return bool(self.pipe.device.type == "cuda" and method.name not in self._warm)

    def _compared(
        self, method: Method, trace: _Trace, prompt: Prompt, plain: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        counting = nullcontext if method.reports_work else self._counter.counting
        with self._timed(method, trace, counting) as (changes, counted):
            made = self._run(prompt, method.name, trace.share, **changes)
            fraction = self.pipe.dit_accel.report().computed_fraction if method.reports_work else counted()
        figures = {
            "computed_fraction": fraction,
            "psnr_db": min(psnr(made["frames"], plain["frames"]), IDENTICAL),
            "ssim": clip_ssim(made["frames"], plain["frames"]),
            "latent_error": latent_error(made["latents"], plain["latents"]),
        }
        if not math.isfinite(figures["psnr_db"]):
            raise ValueError("the picture holds values that are not finite")
        if callable(self._lpips):
            figures["lpips"] = self._lpips(made["frames"], plain["frames"])
        return figures

    def _plain_steps(self, trace: _Trace, beneath: Callable[[], AbstractContextManager[Any]] = nullcontext) -> float:
        """Takes off what was left and repeats the plain run's first steps, which shows whether they are as before.

        Returns seconds that the whole plain run would have taken.
        """
        trace.left_behind |= self._snapshot.restore()
        with beneath():
            distance, seconds = self._distance_to_plain()
        trace.distance = max(trace.distance, distance)
        return seconds

    def _reload(self) -> None:
        """Loads the pipeline anew, once the old one is gone: a device may not hold two."""
        del self.subject.pipe, self._snapshot
        self._counter.move_to({})
        gc.collect()  # modules and their hooks hold each other
        self.subject.pipe = self._load()
        self._counter.move_to(denoisers(self.pipe))
        self._snapshot = Snapshot(self.pipe)
        # Where a freshly loaded pipeline differs as well, that is the device's doing.
        self._tolerance = max(self._tolerance, self._distance_to_plain()[0])

    def _distance_to_plain(self) -> tuple[float, float]:
        """Largest difference of the latents after the first steps now from those at first, and seconds as below."""
        latents, seconds = self._run_first_steps()
        distance = float((latents - self._first_steps).abs().max())
        return (math.inf if math.isnan(distance) else distance), seconds

    def _run_first_steps(self) -> tuple[torch.Tensor, float]:
        """Latents after the plain run's first steps, and seconds of all its calls at the pace of these."""
        self._begin("plain", 0.0)
        prompt = self._prompts[0]
        with transformer_clock(self.pipe) as clock:
            latents = denoise(self.pipe, {**self._arguments, "prompt": prompt.prompt}, prompt.seed, PLAIN_STEPS)
        return latents.float().cpu(), clock.seconds * self._calls / clock.calls

    def _run(self, prompt: Prompt, what: str, share: float = 0.0, **changes: Any) -> dict[str, torch.Tensor]:
        self._begin(what, share)
        return run_pipeline(self.pipe, {**self._arguments, **changes}, prompt.prompt, prompt.seed)

    def _tuning_run(self) -> None:
        self._run(self._tuning_prompt, "calibration")
