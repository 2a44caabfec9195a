"""Partial images of a request: coarse images of unfinished steps, from :mod:`dit_accel.tools.media.preview`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

from dit_accel.serving.prompts import PARTIAL_IMAGES, Job

if TYPE_CHECKING:
    from PIL import Image

    from dit_accel.tools.media.preview import Previewer

KEPT = 16  # sizes whose previewers are kept


class Previews:
    """Previewers of a pipeline by the size of its images; each learns from the first image of its size."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._by_size: dict[tuple[int | None, int | None], Previewer] = {}

    def previewer(self, job: Job) -> Previewer | None:
        from dit_accel.tools.media.preview import Previewer

        if "callback_on_step_end" not in inspect.signature(self._pipe.__call__).parameters:
            return None
        size = job.settings.get("height"), job.settings.get("width")
        self._by_size[size] = previewer = self._by_size.pop(size, None) or Previewer()
        for oldest in list(self._by_size)[:-KEPT]:
            del self._by_size[oldest]
        return previewer

    def of(self, job: Job, suffix: str) -> JobPreviews | None:
        previewer, count = self.previewer(job), job.settings.get(PARTIAL_IMAGES, 0)
        is_used = previewer is not None and (count or not previewer.has_learned)
        return JobPreviews(previewer, count, suffix) if is_used else None


class JobPreviews:
    """Partial images of one run: files with this suffix, ``count`` of them, spread evenly over the steps."""

    def __init__(self, previewer: Previewer, count: int, suffix: str) -> None:
        self.previewer, self._count, self._suffix = previewer, count, suffix
        self._steps = 0
        self._drawn: list[bytes] = []  # not passed on yet

    def step(self, tell: Callable[..., None], done: int, steps: int) -> None:
        drawn, self._drawn, self._steps = self._drawn, [], steps
        tell(done, steps, *drawn)

    def callback(self) -> Callable[..., dict[str, Any]]:
        return self.previewer.watch(self._keep, self._is_due)

    def _is_due(self, index: int) -> bool:
        parts = self._count + 1
        return index + 1 in {round(self._steps * part / parts) for part in range(1, parts)}

    def _keep(self, image: Image.Image) -> None:
        from PIL import Image

        file = BytesIO()
        image.save(file, Image.registered_extensions()[self._suffix])
        self._drawn = [file.getvalue()]
