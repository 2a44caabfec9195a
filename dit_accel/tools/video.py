"""Clips on disk: mp4 (H.264 through imageio-ffmpeg, the extra `video`), gif, or a folder of numbered PNG pictures.

A clip is a uint8 array ``[frames, height, width, 3]``. A folder keeps every bit; a gif is cut down to 256 colours a
frame, and mp4 loses a little detail.
"""

from __future__ import annotations

import os
from itertools import count, takewhile
from pathlib import Path

import numpy as np
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.tools.extras import require_extra

FILE_SUFFIXES = (".mp4", ".gif")
# Constant rate factor of x264: 0 loses nothing, 23 is its default, and at 12 a difference is hard to see.
RATE_FACTOR = "12"
SHORTEST_GIF_FRAME = 20  # milliseconds; players show shorter ones much slower


def require_codec(path: Path, what: str, *, folder: bool = False) -> None:
    """Checks that what a clip's file needs is installed: imageio-ffmpeg for all but a gif and a folder of frames.

    Args:
        path: of the clip.
        what: the option or argument that names it, for the message.
        folder: whether it is a folder of frames, whatever its suffix.

    Raises:
        UnsupportedError: imageio-ffmpeg is missing.
    """
    if not folder and not is_folder_of_frames(path) and path.suffix.lower() != ".gif":
        require_extra("imageio-ffmpeg", f"{what} {path}")


def is_folder_of_frames(path: Path) -> bool:
    """Whether a path is meant for a folder of frames: it has no suffix, or is a folder already."""
    return os.path.isdir(path) or not path.suffix


def foreign_files(folder: Path) -> list[str]:
    """Names in a folder that are no frames of one clip; empty where there is no such folder."""
    found = {path.name for path in folder.iterdir()} if os.path.isdir(folder) else set()
    return sorted(found - {path.name for path in _frames(folder)})


def write_clip(clip: np.ndarray, path: Path, fps: float, *, folder: bool | None = None) -> None:
    """Writes a clip in the format that ``path`` asks for.

    Frames that a folder held before, from 0000.png to the first gap, are removed. An mp4's sides are even: an odd one
    repeats its last row or column. In a gif equal frames that follow each other become one that lasts longer.

    Args:
        clip: uint8 ``[frames, height, width, 3]``.
        path: ends in one of `FILE_SUFFIXES`, or is a folder, made if missing.
        fps: frames a second; a folder has none, and a gif's frames last whole hundredths of a second, two at least.
        folder: whether to write a folder of frames; None = if :func:`is_folder_of_frames` says so.

    Raises:
        ShapeError: ``clip`` is no clip, or the suffix is another.
        UnsupportedError: an mp4 needs imageio-ffmpeg, and it is not installed.
    """
    _require_clip(clip)
    if is_folder_of_frames(path) if folder is None else folder:
        path.mkdir(exist_ok=True)
        for old in _frames(path):
            old.unlink()
        for index, frame in enumerate(clip):
            Image.fromarray(frame).save(_frame(path, index))
    elif path.suffix.lower() == ".gif":
        first, *others = map(Image.fromarray, clip)
        duration = max(SHORTEST_GIF_FRAME, 10 * round(100 / fps))  # Pillow would cut off what is no hundredth
        first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
    elif path.suffix.lower() == ".mp4":
        require_codec(path, "path")
        import imageio.v3 as imageio

        even = np.pad(clip, [(0, 0), *((0, side % 2) for side in clip.shape[1:3]), (0, 0)], mode="edge")
        # Without macro_block_size=1 imageio would scale frames whose sides don't divide by 16.
        options = {"codec": "libx264", "macro_block_size": 1, "quality": None, "output_params": ["-crf", RATE_FACTOR]}
        imageio.imwrite(path, even, plugin="FFMPEG", fps=fps, **options)
    else:
        raise ShapeError(f"path must end in {' or '.join(FILE_SUFFIXES)} or be a folder, got {path}")


def as_clip(frames: np.ndarray) -> np.ndarray:
    """A pipeline's frames, floats in 0..1 ``[frames, height, width, 3]``, as a clip."""
    return np.round(255 * np.clip(frames, 0, 1)).astype(np.uint8)


def _frame(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.png"


def _frames(folder: Path) -> list[Path]:
    """The frames in a folder: 0000.png, 0001.png, … up to the first that is missing."""
    return list(takewhile(Path.is_file, (_frame(folder, index) for index in count())))


def _require_clip(clip: np.ndarray) -> None:
    if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3 or not clip.size:
        raise ShapeError(
            f"clip must be uint8 [frames, height, width, 3], got {clip.dtype} {list(clip.shape)}; see as_clip"
        )
