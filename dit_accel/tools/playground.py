"""Run plain and accelerated pipelines for an interactive page, one run at a time, with events and cancellation.

run = playground.start(Wish("a yellow ring", "demo-flux"))
for event in run:  # Waiting, Began, Step, Preview, Made, Compared or Cancelled
    ...
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.report import RunReport
from dit_accel.pipeline import accelerated, preset_for
from dit_accel.presets import Preset
from dit_accel.tools.demo import model_preset
from dit_accel.tools.metrics import psnr
from dit_accel.tools.preview import Previewer, takes_previews
from dit_accel.tools.steps import watched_steps
from dit_accel.tools.timing import Output

if TYPE_CHECKING:
    from PIL import Image

Side = Literal["plain", "accelerated"]

LIMITS = {  # smallest and largest value of each number
    "steps": (1, 200),
    "height": (16, 2048),
    "width": (16, 2048),
    "num_frames": (1, 257),
    "seed": (0, 2**53 - 1),  # exact in a page's numbers
}
LONGEST_PROMPT = 2000
KEPT = 4  # plain outputs
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Wish:
    """Request for one comparison.

    Args:
        prompt: text prompt.
        model: name that the playground can load.
        preset: name of a preset; None = the model's own preset, otherwise `balanced`.
        target_error: None = the preset's value.
        steps, height, width, num_frames: None = the model's default.
    """

    prompt: str
    model: str
    preset: str | None = None
    target_error: float | None = None
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None

    def require_bounds(self) -> None:
        """Check numbers and the prompt's length.

        Raises:
            UnsupportedError: a value is out of bounds.
        """
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UnsupportedError(f"{name} must be {least:,} to {most:,} here, got {value:,}")
            if value is not None and value != int(value):
                raise UnsupportedError(f"{name} must be a whole number, got {value}")
        if not 0 < len(self.prompt.strip()) <= LONGEST_PROMPT:
            length = len(self.prompt.strip())
            raise UnsupportedError(f"prompt must have 1 to {LONGEST_PROMPT:,} characters here, got {length:,}")

    @property
    def plain(self) -> Wish:
        """Key of the plain side, equal for all requests that share it."""
        return replace(self, preset=None, target_error=None)


@dataclass(frozen=True)
class Waiting:
    """Number of earlier runs to wait for."""

    ahead: int


@dataclass(frozen=True)
class Began:
    """Start of an activity, with its name."""

    what: str


@dataclass(frozen=True)
class Step:
    """A finished step: index from 0, number of steps, mode, and forecast error if it was measured."""

    side: Side
    index: int
    steps: int
    mode: str = "full"
    error: float | None = None


@dataclass(frozen=True)
class Preview:
    """A coarse image of the plain side's latest step; for a video, of its middle frame."""

    image: Image.Image


@dataclass(frozen=True)
class Made:
    """Output of one side. ``kept`` = reused from an earlier request."""

    side: Side
    output: Output
    kept: bool = False


@dataclass(frozen=True)
class Compared:
    """End of a run: PSNR in dB, infinite for equal outputs, and speed-up of the denoising loop."""

    preset: Preset
    psnr: float
    speedup: float
    report: RunReport


@dataclass(frozen=True)
class Cancelled:
    """End of a cancelled run."""


Event = Waiting | Began | Step | Preview | Made | Compared | Cancelled


class _Stopped(Exception):
    """Stops a pipeline's call between two steps."""


class Run:
    """Events of one request. Iteration waits for each event, ends after `Compared` or `Cancelled`, or raises."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._stop = Flag()
        self.future: Future[None]

    def __iter__(self) -> Iterator[Event]:
        while (event := self._events.get()) is not None:
            yield event
        if not self.future.cancelled():
            self.future.result()

    def cancel(self) -> None:
        """Stop the run after its current step, or before it begins; no effect on a finished run."""
        self._stop.set()
        if self.future.cancel():  # it has not begun
            self.tell(Cancelled())
            self.tell(None)

    def tell(self, event: Event | None) -> None:
        """Add an event; None = the last event."""
        self._events.put(event)

    def check(self, *_: Any) -> None:
        """Raise `_Stopped` if the run is cancelled."""
        if self._stop.is_set():
            raise _Stopped


class Playground:
    """Queue that runs requests in order. It keeps one model in memory, and the latest plain outputs.

    Args:
        load: loads the plain pipeline of a model onto its device.
        arguments: returns a call's arguments from the pipeline, its model and the options ``prompt``, ``steps``,
            ``height``, ``width`` and ``num-frames``, None = the model's default.
        make: calls a pipeline with its arguments and a seed, like :func:`~dit_accel.tools.timing.timed_output`.
    """

    def __init__(
        self,
        load: Callable[[str], Any],
        arguments: Callable[[Any, str, dict[str, Any]], dict[str, Any]],
        make: Callable[[Any, dict[str, Any], int], Output],
    ) -> None:
        self._load, self._arguments, self._call = load, arguments, make
        self._worker = ThreadPoolExecutor(1, "playground")
        self._lock = Lock()
        self._runs: list[Run] = []  # unfinished
        self._model: str | None = None
        self._pipe: Any = None
        self._plain: dict[Wish, Output] = {}
        self._warm: set[tuple[Any, ...]] = set()  # forms of earlier calls
        self._previewers: dict[tuple[int | None, ...], Previewer] = {}  # by size

    def start(self, wish: Wish) -> Run:
        """Start a run, or queue it after earlier runs.

        Raises:
            UnsupportedError: a value is out of bounds.
        """
        wish.require_bounds()
        run = Run()
        with self._lock:
            self._runs = [each for each in self._runs if not each.future.done()]
            if self._runs:
                run.tell(Waiting(len(self._runs)))
            run.future = self._worker.submit(self._make, wish, run)
            self._runs.append(run)
        return run

    def close(self) -> None:
        """Cancel all runs, and wait for the current step."""
        with self._lock:
            for run in self._runs:
                run.cancel()
        self._worker.shutdown()

    def load(self, model: str) -> Any:
        """Load the pipeline of a model, and keep it until another is requested. Don't call this during a run."""
        if model != self._model:
            self._model = self._pipe = None
            self._warm.clear()
            self._previewers.clear()
            gc.collect()  # a pipeline's hooks refer to it in a cycle
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._pipe, self._model = self._load(model), model
        return self._pipe

    def _make(self, wish: Wish, run: Run) -> None:
        try:
            self._make_both(wish, run)
        except _Stopped:
            run.tell(Cancelled())
        finally:
            run.tell(None)

    def _make_both(self, wish: Wish, run: Run) -> None:
        if wish.model != self._model:
            run.tell(Began(f"loading {wish.model}"))
        pipe = self.load(wish.model)
        overrides = {} if wish.target_error is None else {"target_error": wish.target_error}
        preset = preset_for(pipe, wish.preset or model_preset(wish.model), **overrides)
        with accelerated(pipe, preset):
            pass  # raises now, before a plain run of minutes, if the preset does not fit the pipeline
        options = {"prompt": wish.prompt, "steps": wish.steps, "height": wish.height, "width": wish.width}
        arguments = self._arguments(pipe, wish.model, {**options, "num-frames": wish.num_frames})
        self._warm_up(pipe, arguments, wish, preset, run)
        plain = self._plain.get(wish.plain)
        if plain is not None:
            run.tell(Made("plain", plain, kept=True))
        else:
            watched = self._watched(pipe, arguments, wish, lambda image: run.tell(Preview(image)))
            plain = self._make_side("plain", pipe, watched, wish.seed, run)
            self._previewer(wish).learn(plain.results[0])
            self._plain[wish.plain] = plain
            for oldest in list(self._plain)[:-KEPT]:
                del self._plain[oldest]
        with accelerated(pipe, preset):
            fast = self._make_side("accelerated", pipe, arguments, wish.seed, run)
            report = pipe.dit_accel.report()
        speedup = plain.denoising_seconds / fast.denoising_seconds
        run.tell(Compared(preset, psnr(plain.results[0], fast.results[0]), speedup, report))

    def _make_side(self, side: Side, pipe: Any, arguments: dict[str, Any], seed: int, run: Run) -> Output:
        told = 0

        def tell(done: int, steps: int) -> None:
            nonlocal told
            run.check()
            records = pipe.dit_accel.report().steps if side == "accelerated" else []
            for index in range(told, done):
                measured = [(each.mode, each.error) for each in records[index : index + 1]]
                run.tell(Step(side, index, steps, *(measured[0] if measured else ())))
            told = done

        run.tell(Began(side))
        output = self._called(pipe, arguments, seed, tell)
        run.tell(Made(side, output))
        return output

    def _warm_up(self, pipe: Any, arguments: dict[str, Any], wish: Wish, preset: Preset, run: Run) -> None:
        """Warm up before the first call of a form: two plain steps and, if kernels are compiled, a whole accelerated
        run, since only a whole run uses every kernel.
        """
        compiles = pipe._execution_device.type == "cuda"
        form = (wish.height, wish.width, wish.num_frames, preset.name if compiles else None)
        if form in self._warm:
            return
        run.tell(Began("warm-up"))
        few = self._watched(pipe, {**arguments, "num_inference_steps": WARM_UP_STEPS}, wish)
        self._previewer(wish).learn(self._called(pipe, few, wish.seed, run.check).results[0])
        if compiles:
            with accelerated(pipe, preset):
                self._called(pipe, arguments, wish.seed, run.check)
        self._warm.add(form)

    def _previewer(self, wish: Wish) -> Previewer:
        return self._previewers.setdefault((wish.height, wish.width, wish.num_frames), Previewer())

    def _watched(
        self, pipe: Any, arguments: dict[str, Any], wish: Wish, show: Callable[[Image.Image], None] | None = None
    ) -> dict[str, Any]:
        """Return the arguments with a callback for previews, if the pipeline takes one."""
        if not takes_previews(pipe):
            return arguments
        return {**arguments, "callback_on_step_end": self._previewer(wish).watch(show)}

    def _called(self, pipe: Any, arguments: dict[str, Any], seed: int, tell: Callable[[int, int], None]) -> Output:
        try:
            with watched_steps(pipe, tell):
                return self._call(pipe, arguments, seed)
        except BaseException:
            pipe.maybe_free_model_hooks()  # move offloaded weights off the GPU, as at the end of a call
            raise
