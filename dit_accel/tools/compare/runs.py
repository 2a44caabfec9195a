"""Runs of methods beside plain runs, and the proof after each that nothing of it is left."""

from __future__ import annotations

import gc
import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.tools.compare.methods import Method, Subject
from dit_accel.tools.compare.snapshot import Snapshot
from dit_accel.tools.compare.work import WorkCounter
from dit_accel.tools.metrics import clip_ssim, latent_error, lpips_distance, psnr
from dit_accel.tools.timing import transformer_clock
from dit_accel.tools.tune.runs import IDENTICAL, run_pipeline

PROOF_STEPS = 3  # steps of the plain run that are repeated after each method


@dataclass(frozen=True)
class Prompt:
    """What is drawn, and the seed of its noise."""

    prompt: str
    seed: int


class Bench:
    """A pipeline with its plain runs, on which methods are measured.

    Args:
        load: gives the pipeline, plain and in place; called again if a method leaves something on it.
        arguments: of its call, without prompt and generator.
        prompts: of the runs that are compared.
        tuning_prompt: for methods that need calibration; none of ``prompts``.
        begin: called before each run with what it is of.

    Raises:
        UnsupportedError: the pipeline takes no ``callback_on_step_end``, or has no transformer.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        arguments: dict[str, Any],
        prompts: Sequence[Prompt],
        tuning_prompt: Prompt,
        begin: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._load = load
        self._prompts = prompts
        self._begin = begin
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
        self.subject.branches = max(1, clock.calls // steps)
        self._plain += [self._run(prompt, "plain") for prompt in prompts[1:]]
        self._first_steps = self._run_first_steps()
        self._tolerance = self._distance_to_plain()  # 0 but on devices that don't repeat themselves
        self._snapshot = Snapshot(pipe)
        self._lpips = lpips_distance(pipe.device)

    @property
    def pipe(self) -> Any:
        return self.subject.pipe

    @property
    def repeats(self) -> bool:
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
        """
        row: dict[str, Any] = {key: getattr(method, key) for key in ("series", "name", "ours", "digest")}
        try:
            with method.put_on(self.subject):
                pass  # what needs calibration does it now, and not where runs are counted
            figures = [self._compared(method, *pair) for pair in zip(self._prompts, self._plain, strict=True)]
            self._warm.add(method.name)
            row |= {key: statistics.fmean(each[key] for each in figures) for key in figures[0]}
            row |= {f"{key}_each": [each[key] for each in figures] for key in ("psnr_db", "computed_fraction")}
            row |= {"fraction_from": "report" if method.reports_work else "leaves", "seconds": self.time(method)}
        except Exception as error:  # whatever one method raises, the others go on
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | self._prove_plain()

    def time(self, method: Method) -> float:
        """Seconds inside the transformers of a run on the first prompt, with nothing beside it."""
        if method.name not in self._warm:
            self._warm.add(method.name)
            self._timed(method)  # kernels compile at first use
        return self._timed(method)

    def retime(self, method: Method) -> float:
        """The same alone, without :meth:`measure`; what the method left on the transformers is taken off."""
        try:
            return self.time(method)
        finally:
            self._snapshot.restore()

    def time_plain(self) -> float:
        """The same of the plain run."""
        return self._timed(Method("plain", "plain", lambda subject: nullcontext({})))

    def _timed(self, method: Method) -> float:
        with method.put_on(self.subject) as changes, transformer_clock(self.pipe) as clock:
            self._run(self._prompts[0], method.name, **changes)
        return clock.seconds

    def _compared(self, method: Method, prompt: Prompt, plain: dict[str, torch.Tensor]) -> dict[str, float]:
        with ExitStack() as stack:
            if not method.reports_work:
                counted = stack.enter_context(self._counter.counting())
            changes = stack.enter_context(method.put_on(self.subject))
            made = self._run(prompt, method.name, **changes)
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

    def _prove_plain(self) -> dict[str, Any]:
        """Takes off what was left and repeats the plain run's first steps; loads the pipeline anew if they differ."""
        left = self._snapshot.restore()
        unchanged = self._distance_to_plain() <= self._tolerance
        if not unchanged:
            self._reload()
            # Where a freshly loaded pipeline differs as well, that is the device's doing.
            self._tolerance = max(self._tolerance, self._distance_to_plain())
        return {"left_behind": left, "reloaded": not unchanged}

    def _reload(self) -> None:
        """Loads the pipeline anew, once the old one is gone: a device may not hold two."""
        del self.subject.pipe, self._snapshot
        self._counter.move_to({})
        gc.collect()  # modules and their hooks hold each other
        self.subject.pipe = self._load()
        self._counter.move_to(denoisers(self.pipe))
        self._snapshot = Snapshot(self.pipe)

    def _distance_to_plain(self) -> float:
        """Largest difference of the latents after the first steps now from those at first."""
        return float((self._run_first_steps() - self._first_steps).abs().max())

    def _run_first_steps(self) -> torch.Tensor:
        """Latents after the plain run's first steps."""
        latents: list[torch.Tensor] = []

        def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if step < PROOF_STEPS:
                latents[:] = [tensors["latents"]]
            pipe._interrupt = step >= PROOF_STEPS - 1
            return tensors

        prompt = self._prompts[0]
        own = {"prompt": prompt.prompt, "generator": torch.Generator("cpu").manual_seed(prompt.seed)}
        self._begin("proof")
        self.pipe(**self._arguments, **own, output_type="latent", callback_on_step_end=keep)
        return latents[0].float().cpu()

    def _run(self, prompt: Prompt, what: str, **changes: Any) -> dict[str, torch.Tensor]:
        self._begin(what)
        return run_pipeline(self.pipe, {**self._arguments, **changes}, prompt.prompt, prompt.seed)

    def _tuning_run(self) -> None:
        self._run(self._tuning_prompt, "calibration")
