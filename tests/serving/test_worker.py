"""A worker's jobs that fail or are cancelled, and its previews, without a pipeline."""

import io
from functools import partial

import pytest
import torch
from PIL import Image

from dit_accel.errors import UnsupportedError
from dit_accel.serving import previews as previewing
from dit_accel.serving import worker as working
from dit_accel.serving.media import Pictures
from dit_accel.serving.previews import JobPreviews, Previews
from dit_accel.serving.prompts import PARTIAL_IMAGES, Job
from dit_accel.serving.worker import Worker
from dit_accel.tools.measure.timing import Output


class Pipe:
    """A pipeline that counts how often its offloaded weights are moved away."""

    freed = 0

    def __call__(self, callback_on_step_end=None):
        pass

    def maybe_free_model_hooks(self):
        self.freed += 1


@pytest.fixture
def worker():
    made = object.__new__(Worker)
    made.pipe, made.medium, made.previews, made.preset, made.suffix = Pipe(), Pictures(), Previews(Pipe()), None, ".png"
    made._base = made._loras = None
    return made


def job(width=32, height=48, partial=0):
    return Job(0, {"height": height, "width": width, "seed": 3} | ({PARTIAL_IMAGES: partial} if partial else {}))


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnsupportedError, None], ids=["interrupted", "failed", "made"])
def test_an_ended_job_leaves_nothing_on_the_gpu(worker, monkeypatch, error):
    """Weights of an offloaded pipeline that a call has left go back, latents are dropped, and the bar is its own."""
    latents = []

    def call(pipe, arguments, seed):
        (previewer,) = worker.previews._by_size.values()
        previewer.latents = previewer._before = torch.zeros(1, 4, 6, 4)
        latents.append(previewer)
        pipe.progress_bar(total=2).update()
        if error:
            raise error
        return Output([Image.new("RGB", (32, 48))], 2.0, 1.0, 2)

    monkeypatch.setattr(working, "timed_call", call)
    monkeypatch.setattr(worker, "_arguments", lambda batch: {})
    for number in (1, 2):
        steps = []
        try:
            (made,) = worker.run([job(partial=1)], None, ".png", lambda *step, to=steps: to.append(step[:2]))
            assert made.data.startswith(b"\x89PNG")
        except (KeyboardInterrupt, UnsupportedError) as raised:
            assert type(raised) is error
        assert steps == [(0, 2), (1, 2)] and worker.pipe.freed == (number if error else 0)
        assert vars(worker.pipe).keys() <= {"freed"}
        assert (latents[-1].latents, latents[-1]._before) == (None, None)


def test_each_size_has_its_own_previewer(monkeypatch):
    """Of both sides; the sizes that were used longest ago go first, and using one again keeps it."""
    monkeypatch.setattr(previewing, "KEPT", 2)
    previews = Previews(Pipe())

    def of(width, height):
        return previews.of(job(width, height), ".png").previewer

    wide, tall = of(48, 32), of(32, 48)
    assert wide is not tall and of(48, 32) is wide
    square = of(32, 32)
    assert of(48, 32) is wide and of(32, 32) is square and of(32, 48) is not tall
    square._weights = "learned"
    assert previews.of(job(32, 32), ".png") is None and previews.of(job(32, 32, partial=1), ".png") is not None


@pytest.mark.parametrize(
    ("count", "steps", "due"), [(0, 6, []), (1, 6, [3]), (2, 6, [2, 4]), (3, 8, [2, 4, 6]), (3, 2, [1, 2]), (1, 1, [])]
)
def test_partial_images_are_spread_evenly(count, steps, due):
    """Each is passed on once, with the step after which it was drawn."""
    told, previews = [], JobPreviews(None, count, ".png")
    tell = partial(previews.step, lambda *step: told.append(step))
    tell(0, steps)
    for step in range(steps):
        if previews._is_due(step):
            previews._keep(Image.new("RGB", (3, 2), (step, 0, 0)))
        tell(step + 1, steps)
    assert [(done, total) for done, total, *_ in told] == [(step, steps) for step in range(steps + 1)]
    drawn = {done: Image.open(io.BytesIO(image[0])) for done, _, *image in told if image}
    assert [*drawn] == due and all(image.getpixel((0, 0))[0] == done - 1 for done, image in drawn.items())
