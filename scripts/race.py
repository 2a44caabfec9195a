"""Record the README's animation: an image plain and accelerated, by two runs that follow each other, shown together.

OMP_NUM_THREADS=1 python -m scripts.race docs/figures/race.gif
"""

import argparse
import time
from pathlib import Path
from typing import Any

from PIL import Image

from dit_accel.pipeline import preset_for
from dit_accel.serving import Job, Setup, Worker
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.media.strips import captioned_row

PROMPT = "a large orange striped ring right of a small blue star over the sea by day"
SIDE, PACE, RATE, HOLD = 256, 4, 8, 20  # pixels, seconds shown in one, frames a second, last frames
COLOURS = 256  # of the file


class Recording:
    """Images of a call, each with the seconds since its start and the steps that were finished then."""

    def __init__(self, worker: Worker, preset: Any, steps: int) -> None:
        job, previewer = Job(0, {"prompt": PROMPT, "seed": 0, "steps": steps}), worker.previews.previewer(Job(0, {}))
        self.steps, self._images = steps, [(0.0, 0, Image.new("RGB", (SIDE, SIDE), "grey"))]
        worker.use(preset)
        self._started = time.perf_counter()
        output = worker.call([job], lambda *_: None, previewer.watch(self._take, lambda _: True))
        self.result = self._take(output.results[0])
        self.seconds = self._images[-1][0]
        previewer.learn(self.result)

    def _take(self, image: Image.Image) -> Image.Image:
        steps = min(len(self._images), self.steps)
        self._images.append((time.perf_counter() - self._started, steps, image.resize((SIDE, SIDE))))
        return image

    def at(self, seconds: float) -> tuple[Image.Image, str]:
        _, steps, image = max(each for each in self._images if each[0] <= seconds)
        state = f"step {steps} of {self.steps}, {seconds:.1f} s" if seconds < self.seconds else f"{self.seconds:.1f} s"
        return image, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help=".gif file")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    worker = Worker(Setup("demo-flux", "none"))
    Recording(worker, None, 4)  # warm-up, from which previews learn
    sides = [Recording(worker, preset, options.steps) for preset in (None, preset_for(worker.pipe))]
    frames = []
    for number in range(round(max(side.seconds for side in sides) * RATE / PACE) + HOLD):
        images, states = zip(*(side.at(number * PACE / RATE) for side in sides), strict=True)
        captions = [f"{name}: {state}" for name, state in zip(("plain", "accelerated"), states, strict=True)]
        frames.append(captioned_row(images, captions, 1))
    palette = frames[-1].quantize(COLOURS)  # of both results, so that no colour changes between frames
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(options.output, save_all=True, append_images=frames[1:], duration=1000 // RATE, loop=0)
    quality = psnr(*(side.result for side in sides))
    print(" and ".join(f"{side.seconds:.1f} s" for side in sides) + f", PSNR {quality:.1f} dB: {options.output}")


if __name__ == "__main__":
    main()
