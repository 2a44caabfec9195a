"""What pipelines make, pictures or clips: how each is named, written and compared.

Checks raise an ``OptionError``, or an ``UnsupportedError`` where imageio-ffmpeg is missing for an mp4.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import OptionError, shortened
from dit_accel.serving.outputs import require_writable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Labels = tuple[str, str]

USUAL_FRAMES_A_SECOND = 24.0  # of models whose family is not known


def require_plausible_output(path: Path, *, compare: bool, force: bool) -> None:
    """Checks what needs no model: that a picture, a clip or a folder of frames could be written to ``path``."""
    from dit_accel.tools.video import FILE_SUFFIXES, is_folder_of_frames, require_codec

    if is_folder_of_frames(path):
        return
    is_clip = path.suffix.lower() in FILE_SUFFIXES
    if not is_clip and not _is_written_by_pillow(path.suffix):
        name = shortened(str(path))
        raise OptionError(
            "--output", f"{name} must end in .png, .jpg or .webp, or for a clip in {' or '.join(FILE_SUFFIXES)}"
        )
    for file in _with_comparison(path, compare):
        require_writable(file, "--output", force=force)
    if is_clip:
        require_codec(path, "--output")


def _is_written_by_pillow(suffix: str) -> bool:
    """Whether Pillow writes RGB pictures in the format of a suffix; many it only reads, or only with plug-ins."""
    from PIL import Image

    try:
        Image.new("RGB", (16, 16)).save(BytesIO(), Image.registered_extensions().get(suffix.lower(), suffix))
    except (KeyError, OSError, ValueError):
        return False
    return True


class Pictures:
    """What an image pipeline makes: PIL pictures."""

    default_output = Path("output.png")

    def require_output(self, path: Path, *, compare: bool, force: bool) -> None:
        """Checks that a picture can be written to ``path``, and its comparison beside it."""
        for file in self.files(path, compare=compare):
            require_writable(file, "--output", force=force)
        if not _is_written_by_pillow(path.suffix):
            raise OptionError("--output", f"{path} must end in .png, .jpg or .webp: this model makes pictures")

    def files(self, path: Path, *, compare: bool) -> list[Path]:
        """NAME, and with a comparison NAME-plain and NAME-compare."""
        return _with_comparison(path, compare)

    def write(self, picture: Image.Image, path: Path) -> None:
        picture.save(path)

    def write_comparison(self, plain: Image.Image, fast: Image.Image, labels: Labels, path: Path) -> list[Path]:
        """Writes NAME-plain and NAME-compare beside the picture NAME, and returns their paths."""
        from dit_accel.tools.strips import comparison_strip

        _, *beside = _with_comparison(path)
        for picture, file in zip((plain, comparison_strip(plain, fast, labels)), beside, strict=True):
            picture.save(file)
        return beside

    def quality(self, plain: list[Image.Image], fast: list[Image.Image]) -> dict[str, Any]:
        """``psnr_db`` (None where identical) over all pictures, ``ssim`` as their mean, and ``identical``."""
        import numpy as np

        return _quality(*(np.stack([np.asarray(picture) for picture in side]) for side in (plain, fast)))


class Clips:
    """What a video pipeline makes: uint8 arrays ``[frames, height, width, 3]``, written at ``fps`` frames a second."""

    default_output = Path("output.mp4")

    def __init__(self, fps: float) -> None:
        self.fps = fps

    def require_output(self, path: Path, *, compare: bool, force: bool) -> None:
        """Checks that a clip can be written to ``path``, and its comparison beside it in the same form."""
        from dit_accel.tools.video import FILE_SUFFIXES, foreign_files, is_folder_of_frames, require_codec

        is_folder = is_folder_of_frames(path)
        if not is_folder and path.suffix.lower() not in FILE_SUFFIXES:
            raise OptionError(
                "--output",
                f"{path} must end in {' or '.join(FILE_SUFFIXES)}, or be a folder of frames (a name without "
                "suffix): this model makes video",
            )
        require_codec(path, "--output", folder=is_folder)
        for clip in _with_comparison(path, compare):
            if is_folder and os.path.isfile(clip):
                raise OptionError("--output", f"{clip} is no folder that frames can be written into; name a new one")
            if is_folder and (foreign := foreign_files(clip)):
                holds = f"folder {clip} holds more than frames of a clip ({foreign[0]})"
                raise OptionError("--output", f"{holds}; name another or a new one")
            first = clip / "0000.png" if is_folder and os.path.isdir(clip) else clip
            require_writable(first, "--output", force=force)
        if compare:
            require_writable(_strip(path), "--output", force=force)

    def files(self, path: Path, *, compare: bool) -> list[Path]:
        """NAME, and with a comparison NAME-plain, NAME-compare and the picture NAME-strip.png."""
        return [*_with_comparison(path, compare), *([_strip(path)] if compare else [])]

    def write(self, clip: np.ndarray, path: Path) -> None:
        from dit_accel.tools.video import write_clip

        write_clip(clip, path, self.fps)

    def write_comparison(self, plain: np.ndarray, fast: np.ndarray, labels: Labels, path: Path) -> list[Path]:
        """Writes the clips NAME-plain and NAME-compare and the picture NAME-strip.png, and returns their paths."""
        from dit_accel.tools.strips import comparison_clip, frame_strip
        from dit_accel.tools.video import is_folder_of_frames, write_clip

        _, *beside = _with_comparison(path)
        for clip, file in zip((plain, comparison_clip(plain, fast, labels)), beside, strict=True):
            write_clip(clip, file, self.fps, folder=is_folder_of_frames(path))
        frame_strip(plain, fast, labels).save(_strip(path))
        return [*beside, _strip(path)]

    def quality(self, plain: list[np.ndarray], fast: list[np.ndarray]) -> dict[str, Any]:
        """As that of :class:`Pictures`, over the frames of all clips."""
        import numpy as np

        return _quality(np.concatenate(plain), np.concatenate(fast))


def medium_of(pipe: Any, model_fps: float | None = None, fps: float | None = None) -> Pictures | Clips:
    """What a pipeline makes; clips with the frame rate that was asked for, else the model's own, else its family's."""
    from dit_accel.models.families import pipeline_family
    from dit_accel.pipeline import makes_video

    if makes_video(pipe):
        family = pipeline_family(pipe)
        usual = USUAL_FRAMES_A_SECOND if family is None else family.frames_per_second(pipe.config)
        return Clips(fps or model_fps or usual)
    if fps is not None:
        raise OptionError("--fps", f"{type(pipe).__name__} makes pictures, which have no frames")
    return Pictures()


def numbered(path: Path, pictures: int) -> list[Path]:
    """The paths of so many pictures: NAME itself, or NAME-0, NAME-1, …"""
    if not path.name:
        raise OptionError("--output", f"{path} is a folder without a name; name a file, or a folder for frames")
    return [path] if pictures == 1 else [_beside(path, str(index)) for index in range(pictures)]


def unused(path: Path, pictures: int, files: Callable[[Path], list[Path]]) -> list[Path]:
    """The paths of pictures of which no file exists yet: those of NAME, else of NAME-2, NAME-3, …"""
    names = chain([path], (_beside(path, str(number)) for number in count(2)))
    candidates = (numbered(name, pictures) for name in names)
    return next(each for each in candidates if not any(file.exists() for path in each for file in files(path)))


def _beside(path: Path, kind: str) -> Path:
    return path.with_stem(f"{path.stem}-{kind}")


def _with_comparison(path: Path, compare: bool = True) -> list[Path]:
    """NAME, and where it is compared NAME-plain and NAME-compare."""
    return [path, *(_beside(path, kind) for kind in ("plain", "compare") if compare)]


def _strip(path: Path) -> Path:
    return _beside(path, "strip").with_suffix(".png")


def _quality(plain: np.ndarray, fast: np.ndarray) -> dict[str, Any]:
    from dit_accel.tools.metrics import clip_ssim, psnr

    decibels = psnr(plain, fast)
    identical = math.isinf(decibels)
    return {"psnr_db": None if identical else decibels, "ssim": clip_ssim(plain, fast), "identical": identical}
