"""State of the page of ``dit-accel app`` during one run, updated by the run's events."""

from __future__ import annotations

import html
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.cli.web_form import target_of
from dit_accel.serving.media import Clips, size_note
from dit_accel.tools.playground import Began, Cancelled, Compared, Event, Made, Preview, Step, Waiting, Wish
from dit_accel.tools.timeline import EXPLANATION, timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL import Image

    from dit_accel.cli.web_form import Loaded

REFRESH = 0.2  # seconds between updates of the timeline, so that they don't slow down the steps
SIDES = ("plain", "accelerated")


class View:
    """State of the page during one run.

    Args:
        loaded: loaded models by name.
        folder: videos are written to it.
    """

    def __init__(self, wish: Wish, loaded: Mapping[str, Loaded], folder: Path) -> None:
        self._wish, self._loaded, self._folder = wish, loaded, folder
        self._steps: dict[str, list[Step]] = {side: [] for side in SIDES}
        self._made: dict[str, Made] = {}
        self._preview: Image.Image | None = None
        self._end: Compared | None = None
        self._drawn_at = -math.inf
        self.status = self.figures = self.caption = ""

    def take(self, event: Event) -> bool:
        """Process an event; return True if the page should update. Not every step updates it, which would cost time."""
        match event:
            case Waiting(ahead):
                self.status = f"Waiting for {ahead} earlier {'run' if ahead == 1 else 'runs'}."
            case Began(what):
                self.status = f"{what[0].upper()}{html.escape(what[1:])} …"
            case Step(side, index, steps):
                self._steps[side].append(event)
                self.status = f"{side.capitalize()}: step {index + 1} of {steps}."
            case Preview(image):
                self._preview = image
            case Made(side, output, kept):
                self._made[side] = event
                if side == "plain" and not kept:
                    self._preview = _still(output.results[0])
            case Cancelled():
                self.status = "Cancelled."
            case Compared():
                self._finish(event)
        due = not isinstance(event, Step) or time.monotonic() - self._drawn_at >= REFRESH
        self._drawn_at = time.monotonic() if due else self._drawn_at
        return due

    def _finish(self, end: Compared) -> None:
        self._end = end
        plain, fast = (self._made[side].output for side in SIDES)
        quality = "identical" if math.isinf(end.psnr) else f"PSNR {end.psnr:.1f} dB"
        target = target_of(end.preset)
        settings = end.preset.name if target is None else f"{end.preset.name}, target_error {target:g}"
        computed = f"{end.report.computed_fraction or 1.0:.0%}"
        kept = " (cached)" if self._made["plain"].kept else ""
        rows = [["seconds", f"plain{kept}", "accelerated", "speed-up"], ["---", *["---:"] * 3]]
        for stage, seconds in plain.stages.items():
            faster = f"{end.speedup:.2f}×" if stage == "denoising" else ""
            rows.append([stage, f"{seconds:.2f}", f"{fast.stages[stage]:.2f}", faster])
        whole = f"{plain.seconds / fast.seconds:.2f}×"
        rows.append(["**whole call**", f"{plain.seconds:.2f}", f"{fast.seconds:.2f}", whole])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        decoded = f"\n\nDecoded {html.escape(end.report.decoding, quote=False)}." if end.report.decoding else ""
        self.figures = f"{table}{decoded}"
        self.caption = f"{end.speedup:.2f}×, {quality}, {settings}. {self._wish.model}: {self._wish.prompt}"
        result = f"Denoising **{end.speedup:.2f}×** as fast, {quality}, {computed} computed."
        asked = {name: getattr(self._wish, name.replace("-", "_")) for name in ("width", "height", "num-frames")}
        rounded = size_note(asked, fast.results[0])
        notes = [*([f"Note: {rounded}."] if rounded else []), *end.report.notes]
        self.status = "  \n".join([f"Done: {settings}.", result, *map(html.escape, notes)])

    @property
    def is_finished(self) -> bool:
        return self._end is not None

    def timelines(self) -> str:
        """Timelines of both sides so far as HTML, with an explanation; empty before the first step."""
        drawn = [
            timeline(side.capitalize(), [(step.mode, step.error) for step in steps], steps[0].steps)
            for side, steps in self._steps.items()
            if steps
        ]
        return "".join([*drawn, f"<p>{EXPLANATION}</p>"] if drawn else [])

    def new_preview(self) -> tuple[Image.Image, str] | None:
        """Image and label of the plain side, once for each new image."""
        image, self._preview = self._preview, None
        is_whole = "plain" in self._made
        return image and (image, "Plain; the accelerated side follows" if is_whole else "Plain, a coarse preview")

    def pictures(self) -> tuple[Image.Image, Image.Image]:
        """Plain and accelerated image; for videos, their middle frames."""
        plain, fast = map(_still, self._results())
        return plain, fast

    def video(self) -> str | None:
        """Write both videos side by side with the accelerated side's sound, and return the file; None for images."""
        from dit_accel.tools.strips import comparison_clip

        medium = self._loaded[self._wish.model].medium
        if not isinstance(medium, Clips) or self._end is None:
            return None
        file = self._folder / "comparison.mp4"
        labels = ("plain", f"{self._end.preset.name}, {self._end.speedup:.2f} times as fast")
        medium.write(comparison_clip(*self._results(), labels), file, self._made["accelerated"].output.sound(0))
        return str(file)

    def _results(self) -> list[Any]:
        return [self._made[side].output.results[0] for side in SIDES]


def _still(result: Any) -> Image.Image:
    """Return an image, or the middle frame of a video."""
    from PIL import Image

    return result if isinstance(result, Image.Image) else Image.fromarray(result[len(result) // 2])
