"""Read videos in tests."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from PIL import Image


def read_clip(path: Path) -> np.ndarray:
    """Read the video in a file or folder of frames: uint8 ``[frames, height, width, 3]``."""
    if path.is_dir():
        return np.stack([np.asarray(Image.open(frame).convert("RGB")) for frame in sorted(path.glob("[0-9]*.png"))])
    if path.suffix.lower() == ".gif":
        return imageio.imread(path, plugin="pillow", mode="RGB", index=...)
    return imageio.imread(path, plugin="FFMPEG")
