"""Page of ``dit-accel app``, built with Gradio: inputs on the left, results on the right.

Annotations are evaluated here, because Gradio passes the request to functions that annotate it.
"""

import html
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dit_accel.errors import DitAccelError
from dit_accel.presets import preset_names
from dit_accel.serving.media import Clips, Pictures
from dit_accel.tools.demo import tuning_prompts, unknown_words
from dit_accel.tools.playground import (
    LONGEST_PROMPT,
    Began,
    Cancelled,
    Compared,
    Event,
    Made,
    Playground,
    Run,
    Step,
    Waiting,
    Wish,
)
from dit_accel.tools.timeline import timeline_svg

if TYPE_CHECKING:
    import gradio
    from PIL import Image

REFRESH = 0.2  # seconds between updates of the timeline, so that they don't slow down the steps
REMEMBERED = 12  # results of a session
MOST_VISITORS = 20  # runs that wait at once; others are queued by gradio
LONGEST_KEPT = 24 * 3600  # seconds that an output file is kept


def build_page(
    playground: Playground, media: Mapping[str, Pictures | Clips], model: str, models: list[str], *, any_model: bool
) -> "gradio.Blocks":
    """Build the page; the caller launches it.

    Args:
        media: output form (image or video) of each model that the playground has loaded.
        model: selected at first.
        models: offered in the list.
        any_model: whether visitors may enter other models, which are then loaded.
    """
    import gradio as gr

    runs: dict[str, Run] = {}  # by session
    presets = [name for name in preset_names() if not name.startswith("video-")]

    def number(label: str) -> gr.Number:
        return gr.Number(0, label=label, precision=0, min_width=100)

    def make(
        prompt: str,
        model: str,
        preset: str,
        target: float,
        seed: int,
        steps: int,
        height: int,
        width: int,
        num_frames: int,
        history: list[tuple[Any, str]],
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        wish = Wish(
            prompt, model, preset, target or None, seed, *(n or None for n in (steps, height, width, num_frames))
        )
        try:
            run = runs[request.session_hash] = playground.start(wish)
            with TemporaryDirectory() as folder:
                view = _View(wish, media, Path(folder))
                try:
                    for event in run:
                        if view.take(event):
                            yield shown(view, history)
                finally:
                    run.cancel()
        except DitAccelError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None

    def shown(view: "_View", history: list[tuple[Any, str]]) -> dict[Any, Any]:
        """Return the changed components of the page."""
        changes = {status: view.status} | {drawn: view.timeline(side) for side, drawn in timelines.items()}
        if view.is_finished:
            history[:] = [(view.pictures()[1], view.caption), *history][:REMEMBERED]
            changes |= {beside: view.pictures(), figures: view.figures, session: history, gallery: history}
            changes |= {
                clip: gr.update(value=file, visible=file is not None)
                for clip, file in zip((plain_clip, fast_clip), view.clips(), strict=True)
            }
        return changes

    def stop(request: gr.Request) -> None:
        run = runs.pop(request.session_hash, None)
        if run is not None:
            run.cancel()

    with gr.Blocks(title="dit-accel", analytics_enabled=False, delete_cache=(3600, LONGEST_KEPT)) as page:
        session = gr.State([])
        gr.Markdown("# dit-accel\nThe plain image or video and the accelerated one, from the same prompt and noise.")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                prompt = gr.Textbox(tuning_prompts(model)[0], label="Prompt", lines=2, max_length=LONGEST_PROMPT)
                chosen = gr.Dropdown(
                    models,
                    value=model,
                    label="Model",
                    info="A demo model, an id on the Hugging Face Hub, or a folder." if any_model else None,
                    allow_custom_value=any_model,
                )
                preset = gr.Dropdown(presets, value="balanced", label="Preset")
                target = gr.Slider(
                    0,
                    1,
                    value=0,
                    step=0.01,
                    label="target_error",
                    info="Lower is closer to plain, higher is faster; 0 = the preset's value.",
                )
                with gr.Row():
                    steps, seed = number("Steps"), number("Seed")
                with gr.Row():
                    sizes = [number("Height"), number("Width"), number("Frames")]
                gr.Markdown("0 = the model's default, for steps and sizes.")
                with gr.Row():
                    begin, cancel = gr.Button("Generate both", variant="primary"), gr.Button("Cancel")
            with gr.Column(scale=3, min_width=400):
                status = gr.Markdown("No results yet.")
                beside = gr.ImageSlider(label="Plain | accelerated", type="pil", format="png", interactive=False)
                with gr.Row():
                    plain_clip, fast_clip = (gr.Video(label=side, visible=False) for side in ("Plain", "Accelerated"))
                figures = gr.Markdown()
                timelines = {side: gr.HTML() for side in ("plain", "accelerated")}
        gallery = gr.Gallery(
            label="This session", columns=6, fit_columns=False, height=240, object_fit="contain", interactive=False
        )

        gr.on(
            [begin.click, prompt.submit, target.release],
            make,
            [prompt, chosen, preset, target, seed, steps, *sizes, session],
            [status, beside, plain_clip, fast_clip, figures, *timelines.values(), session, gallery],
            api_name="make",
            trigger_mode="once",
            concurrency_limit=MOST_VISITORS,
            show_progress="hidden",
        )
        cancel.click(stop, api_name="cancel", queue=False)
        page.unload(stop)
    return page


class _View:
    """State of the page during one run, updated by the run's events.

    Args:
        media: output form of each loaded model.
        folder: videos are written to it.
    """

    def __init__(self, wish: Wish, media: Mapping[str, Pictures | Clips], folder: Path) -> None:
        self._wish, self._media, self._folder = wish, media, folder
        self._steps: dict[str, list[Step]] = {"plain": [], "accelerated": []}
        self._made: dict[str, Made] = {}
        self._drawn_at = -math.inf
        self.status = self.figures = self.caption = ""

    def take(self, event: Event) -> bool:
        """Process an event; return True if the page should update. Not every step updates it, which would cost time."""
        match event:
            case Waiting(ahead):
                self.status = f"Waiting for {ahead} earlier {'run' if ahead == 1 else 'runs'}."
            case Began(what):
                self.status = f"{what.capitalize()} …"
            case Step(side, index, steps):
                self._steps[side].append(event)
                self.status = f"{side.capitalize()}: step {index + 1} of {steps}."
            case Made(side):
                self._made[side] = event
            case Cancelled():
                self.status = "Cancelled."
            case Compared():
                self._finish(event)
        due = not isinstance(event, Step) or time.monotonic() - self._drawn_at >= REFRESH
        self._drawn_at = time.monotonic() if due else self._drawn_at
        return due

    def _finish(self, end: Compared) -> None:
        plain, fast = (self._made[side].output for side in ("plain", "accelerated"))
        quality = "identical" if math.isinf(end.psnr) else f"{end.psnr:.1f} dB"
        kept = " (cached)" if self._made["plain"].kept else ""
        target = getattr(end.preset.schedule, "target_error", None)
        settings = end.preset.name if target is None else f"{end.preset.name}, target_error {target:g}"
        computed = f"{end.report.computed_fraction or 1.0:.0%}"
        columns = [*plain.stages, "whole call"]
        speedups = {"denoising": end.speedup, "whole call": plain.seconds / fast.seconds}
        rows = [["seconds", *columns], ["---"] * (1 + len(columns))]
        for side, output in ((f"plain{kept}", plain), ("accelerated", fast)):
            rows.append([side, *(f"{seconds:.2f}" for seconds in (*output.stages.values(), output.seconds))])
        rows.append(["speed-up", *(f"{speedups[name]:.2f}×" if name in speedups else "" for name in columns)])
        decoded = f", decoded {end.report.decoding}" if end.report.decoding else ""
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        self.figures = f"{table}\n\nPSNR {quality}, {computed} computed{decoded}"
        self.caption = f"{end.speedup:.2f}×, {quality} · {settings} · {self._wish.model} · {self._wish.prompt}"
        unknown, _ = unknown_words(self._wish.model, self._wish.prompt)
        notes = [*end.report.notes, *([f"{self._wish.model} does not know {', '.join(unknown)}."] if unknown else [])]
        self.status = "  \n".join([f"Done: {settings}.", *map(html.escape, notes)])

    @property
    def is_finished(self) -> bool:
        return bool(self.figures)

    def timeline(self, side: str) -> str:
        """Timeline of the side's steps so far; empty before the first step."""
        steps = self._steps[side]
        drawn = timeline_svg([(step.mode, step.error) for step in steps], steps[0].steps) if steps else ""
        return f"<b>{side.capitalize()}</b>{drawn}" if drawn else ""

    def pictures(self) -> "tuple[Image.Image, Image.Image]":
        """Plain and accelerated image; for videos, their middle frames."""
        from PIL import Image

        plain, fast = (
            made if isinstance(made, Image.Image) else Image.fromarray(made[len(made) // 2]) for made in self._results()
        )
        return plain, fast

    def clips(self) -> list[str | None]:
        """Write both videos and return their files; None for images."""
        medium = self._media[self._wish.model]
        if not isinstance(medium, Clips):
            return [None, None]
        files = [self._folder / f"{side}.mp4" for side in self._made]
        for result, file in zip(self._results(), files, strict=True):
            medium.write(result, file)
        return [str(file) for file in files]

    def _results(self) -> list[Any]:
        return [self._made[side].output.results[0] for side in ("plain", "accelerated")]
