"""Compare a plain and an accelerated run for an interactive page, whose states :meth:`Playground.compare` yields."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, Literal

import torch
from PIL import Image

from dit_accel.errors import ArgumentError
from dit_accel.loop.report import RunReport
from dit_accel.pipeline import preset_for
from dit_accel.presets import Preset
from dit_accel.serving.engine import Cancelled
from dit_accel.serving.media import Medium
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import model_preset
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.timing import Output

Side = Literal["plain", "accelerated"]

LIMITS = {"steps": (1, 200), "height": (16, 2048), "width": (16, 2048), "num_frames": (1, 257)}  # of each number
LIMITS["seed"] = 0, 2**53 - 1  # exact in a page's numbers
LONGEST_PROMPT = 2000
KEPT = 4  # plain outputs
WARM_UP_STEPS = 2
REFRESH = 0.2  # seconds between states, which are few enough not to slow down the steps


@dataclass(frozen=True)
class Wish:
    prompt: str
    model: str
    preset: str | None = None
    target_error: float | None = None  # None = the preset's
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None

    def require_bounds(self) -> None:
        for name, (least, most) in LIMITS.items():
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ArgumentError(name, f"must be {least:,} to {most:,} here, got {value:,}")
            if value is not None and value != int(value):
                raise ArgumentError(name, f"must be a whole number, got {value}")
        if not 0 < (length := len(self.prompt.strip())) <= LONGEST_PROMPT:
            raise ArgumentError("prompt", f"must have 1 to {LONGEST_PROMPT:,} characters here, got {length:,}")

    @property
    def size(self) -> dict[str, int | None]:
        return {"width": self.width, "height": self.height, "num-frames": self.num_frames}

    def job(self, steps: int | None = None) -> Job:
        settings = {"prompt": self.prompt, "seed": self.seed, "steps": steps or self.steps, **self.size}
        return Job(0, {name: value for name, value in settings.items() if value is not None})


@dataclass(frozen=True)
class Comparison:
    preset: Preset
    psnr: float  # dB, infinite for equal outputs
    speedup: float  # of the denoising loop
    report: RunReport


@dataclass(eq=False)
class ComparisonRun:
    wish: Wish
    activity: str = ""
    steps: dict[Side, list[tuple[str, float | None]]] = field(default_factory=dict)  # mode and forecast error
    total: int = 0  # steps of a side
    outputs: dict[Side, Output] = field(default_factory=dict)  # of the sides that are done
    is_kept: bool = False  # True: the plain output is that of an earlier run
    preview: Image.Image | None = None  # of the plain side: a coarse image, then its output or middle frame
    medium: Medium | None = None
    comparison: Comparison | None = None  # None = the run has not ended
    _stop: Event = field(default_factory=Event)

    def change(self, **values: Any) -> None:
        if self._stop.is_set():
            raise Cancelled
        vars(self).update(values)

    def stop(self) -> None:
        self._stop.set()


class Playground:
    """Runs comparisons one at a time, with one model in memory; ``open_worker`` loads it, with a plain pipeline."""

    def __init__(self, open_worker: Callable[[str], Worker]) -> None:
        self._open, self._lock = open_worker, Lock()
        self._runs: list[ComparisonRun] = []  # unfinished
        self._model: str | None = None
        self._worker: Worker | None = None
        self._plain: dict[tuple[Any, ...], Output] = {}
        self._warm: set[tuple[Any, ...]] = set()  # forms of earlier calls

    def load(self, model: str) -> Worker:
        if self._worker is None or model != self._model:
            self._model = self._worker = None
            self._warm.clear()
            gc.collect()  # a pipeline's hooks refer to it in a cycle
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._worker, self._model = self._open(model), model
        return self._worker

    def pipe(self, model: str) -> Any:
        worker = self._worker  # another run may replace it
        return worker.pipe if worker is not None and model == self._model else None

    def compare(self, wish: Wish) -> Iterator[ComparisonRun]:
        """Yield the state several times a second, in the end with the comparison; closing the iterator ends the run."""
        wish.require_bounds()
        run = ComparisonRun(wish)
        self._runs.append(run)
        with ThreadPoolExecutor(1, "playground") as thread:
            work = thread.submit(self._compare, run)
            try:
                while not wait([work], REFRESH).done:
                    yield run
                with suppress(Cancelled):
                    run.comparison = work.result()  # now: the worker has put everything back
            finally:
                self._runs.remove(run)
                run.stop()
        yield run

    def close(self) -> None:
        for run in list(self._runs):
            run.stop()

    def _compare(self, run: ComparisonRun) -> Comparison:
        with self._lock:
            wish = run.wish
            run.change()  # it may have been stopped while it waited
            if self.pipe(wish.model) is None:
                run.change(activity=f"loading {wish.model}")
            worker = self.load(wish.model)
            run.change(medium=worker.medium)
            overrides = {} if wish.target_error is None else {"target_error": wish.target_error}
            preset = preset_for(worker.pipe, wish.preset or model_preset(wish.model), **overrides)
            try:
                worker.use(preset)  # raises now, before a plain run of minutes, if the preset does not fit the pipeline
                self._warm_up(worker, run, preset)
                plain = self._plain_side(worker, run)
                worker.use(preset)
                fast = self._side("accelerated", worker, run)
                speedup = plain.denoising_seconds / fast.denoising_seconds
                report = worker.pipe.dit_accel.report()
                return Comparison(preset, psnr(plain.results[0], fast.results[0]), speedup, report)
            finally:
                worker.use(None)

    def _plain_side(self, worker: Worker, run: ComparisonRun) -> Output:
        key = run.wish.model, *run.wish.job().settings.items()
        if key in self._plain:
            run.change(outputs={"plain": self._plain[key]}, is_kept=True)
            return self._plain[key]
        worker.use(None)
        previewer = worker.previews.previewer(run.wish.job())
        watch = previewer and previewer.watch(lambda image: run.change(preview=image))
        plain = self._plain[key] = self._side("plain", worker, run, watch)
        run.change(preview=worker.medium.still(plain.results[0]))
        if previewer is not None:
            previewer.learn(plain.results[0])
        for oldest in list(self._plain)[:-KEPT]:
            del self._plain[oldest]
        return plain

    def _side(
        self, side: Side, worker: Worker, run: ComparisonRun, at_step_end: Callable[..., dict[str, Any]] | None = None
    ) -> Output:
        def tell(done: int, total: int) -> None:
            records = worker.pipe.dit_accel.report().steps[:done] if side == "accelerated" else []
            steps = run.steps.get(side, [])[: done - len(records)]  # of chunks of a video that are done
            steps += [(record.mode, record.error) for record in records]
            steps += [("full", None)] * (done - len(steps))
            activity = f"{side}: step {done} of {total}" if done else side
            run.change(activity=activity, steps={**run.steps, side: steps}, total=total)

        run.change(activity=side)
        output = worker.call([run.wish.job()], tell, at_step_end)
        run.change(outputs={**run.outputs, side: output})
        return output

    def _warm_up(self, worker: Worker, run: ComparisonRun, preset: Preset) -> None:
        """Run two plain steps and, if kernels are compiled, the whole accelerated run, which uses every kernel."""
        wish, compiles = run.wish, worker.pipe._execution_device.type == "cuda"
        form = (*wish.size.values(), preset.name if compiles else None)
        if form in self._warm:
            return
        run.change(activity="warm-up")
        if compiles:
            worker.call([wish.job()], lambda *_: run.change())
        worker.use(None)
        previewer = worker.previews.previewer(wish.job())
        few = worker.call([wish.job(WARM_UP_STEPS)], lambda *_: run.change(), previewer and previewer.watch())
        if previewer is not None:
            previewer.learn(few.results[0])
        self._warm.add(form)
