"""Train a demo model from scratch in ten minutes on one H200, and write it as a diffusers pipeline folder.

    python -m scripts.demo_training.train --model demo-wan --output dit_accel/tools/assets/demo-wan --results RESULTS
    python -m scripts.demo_training.train ... --state STATE        # also keep the pipeline in float32, to resume from
    python -m scripts.demo_training.train ... --resume STATE       # resume the transformer and the text encoders
    python -m scripts.demo_training.train ... --resume STATE --vae-seconds 60               # ... and the autoencoder
    python -m scripts.demo_training.train ... --vae-seconds 60 --freeze-encoder  # its decoder: the latents stay
    python -m scripts.demo_training.train ... --resume STATE --vae OTHER         # with the autoencoder of OTHER
    python -m scripts.demo_training.train --model demo-wan --output /tmp/demo --smoke  # toy size, on any CPU

Writes the pipeline to --output; a sheet of held-out prompts, the log and the prompt-following table to --results.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from scripts.demo_training.driver import train_demo
from scripts.demo_training.hunyuan import Hunyuan
from scripts.demo_training.image_demo import ImageDemo
from scripts.demo_training.texture_demo import CollageDemo, MixedDemo, TextureDemo
from scripts.demo_training.video_demo import VideoDemo
from scripts.demo_training.wan import Wan

DEMOS = {
    "demo-flux": ImageDemo,
    "demo-wan": partial(VideoDemo, Wan()),
    "demo-hunyuan": partial(VideoDemo, Hunyuan()),
    "demo-textures": TextureDemo,
    "demo-mixed": MixedDemo,
    "demo-pictures": CollageDemo,
}


def main() -> None:
    """Train, export, and report."""
    options = _options()
    train_demo(DEMOS[options.model](small=options.smoke), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(DEMOS), required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--results", type=Path, help="folder of the sheet, the log and the table")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall-clock budget of everything")
    parser.add_argument("--vae-seconds", type=float, help="of them for the autoencoder; default: 0 with --resume")
    parser.add_argument("--seed", type=int, default=0, help="use another one with --resume for other scenes")
    parser.add_argument("--state", type=Path, help="folder to keep the float32 pipeline in")
    parser.add_argument("--resume", type=Path, help="folder of an earlier --state")
    parser.add_argument("--vae", type=Path, help="folder of an earlier --state, whose autoencoder replaces --resume's")
    parser.add_argument("--freeze-encoder", action="store_true", help="with --resume: train the decoder alone")
    parser.add_argument("--smoke", action="store_true", help="two steps of everything at toy size on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
