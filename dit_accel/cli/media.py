"""What pipelines make, pictures or clips: how each is named, written and compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.cli.options import OptionError, require_writable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Labels = tuple[str, str]

# Frames a second of what a family was trained on, by the beginning of its pipelines' names.
FRAMES_A_SECOND = {"Wan": 16.0, "CogVideoX": 8.0, "Mochi": 30.0}
USUAL_FRAMES_A_SECOND = 24.0


def require_plausible_output(path: Path) -> None:
    """Checks what needs no model: that a picture, a clip or a folder of frames could be written to ``path``.

    Raises:
        OptionError: it has no name, the suffix is of no format here, or the file can't be written.
        UnsupportedError: it is an mp4, and imageio-ffmpeg is missing.
    """
    from PIL import Image

    from dit_accel.tools.video import FILE_SUFFIXES, is_folder_of_frames, require_codec

    if not path.name:
        raise OptionError("--output", f"{path} is a folder without a name; name a file, or a folder for frames")
    if is_folder_of_frames(path):
        return
    if path.suffix.lower() not in (*FILE_SUFFIXES, *Image.registered_extensions()):
        raise OptionError(
            "--output", f"{path} must end in .png, .jpg or .webp, or for a clip in {' or '.join(FILE_SUFFIXES)}"
        )
    require_writable(path, "--output")
    if path.suffix.lower() in FILE_SUFFIXES:
        require_codec(path, "--output")


class Pictures:
    """What an image pipeline makes: PIL pictures."""

    default_output = Path("output.png")

    def require_output(self, path: Path, *, compare: bool) -> None:
        """Checks that a picture can be written to ``path``, and its comparison beside it.

        Raises:
            OptionError: one is a folder, can't be written, or Pillow can't tell from its name which format to write.
        """
        from PIL import Image

        for file in [path, *(_beside(path, kind) for kind in ("plain", "compare") if compare)]:
            require_writable(file, "--output")
        if path.suffix.lower() not in Image.registered_extensions():
            raise OptionError("--output", f"{path} must end in .png, .jpg or .webp: this model makes pictures")

    def write(self, picture: Image.Image, path: Path) -> None:
        picture.save(path)

    def write_comparison(self, plain: Image.Image, fast: Image.Image, labels: Labels, path: Path) -> list[Path]:
        """Writes NAME-plain and NAME-compare beside the picture NAME, and returns their paths."""
        from dit_accel.tools.strips import comparison_strip

        beside = {"plain": plain, "compare": comparison_strip(plain, fast, labels)}
        for kind, picture in beside.items():
            picture.save(_beside(path, kind))
        return [_beside(path, kind) for kind in beside]

    def quality(self, plain: list[Image.Image], fast: list[Image.Image]) -> dict[str, Any]:
        """``psnr_db`` (None where identical) over all pictures, ``ssim`` as their mean, and ``identical``."""
        import numpy as np

        return _quality(*(np.stack([np.asarray(picture) for picture in side]) for side in (plain, fast)))


class Clips:
    """What a video pipeline makes: uint8 arrays ``[frames, height, width, 3]``, written at ``fps`` frames a second."""

    default_output = Path("output.mp4")

    def __init__(self, fps: float) -> None:
        self.fps = fps

    def require_output(self, path: Path, *, compare: bool) -> None:
        """Checks that a clip can be written to ``path``, and its comparison beside it in the same form.

        Raises:
            OptionError: the suffix is no clip's, one can't be written, or a folder holds more than frames.
            UnsupportedError: it is an mp4, and imageio-ffmpeg is missing.
        """
        from dit_accel.tools.video import FILE_SUFFIXES, is_folder_of_frames, require_codec

        folder = is_folder_of_frames(path)
        if not folder and path.suffix.lower() not in FILE_SUFFIXES:
            raise OptionError(
                "--output",
                f"{path} must end in {' or '.join(FILE_SUFFIXES)}, or be a folder of frames (a name without "
                "suffix): this model makes video",
            )
        require_codec(path, "--output", folder=folder)
        for clip in [path, *(_beside(path, kind) for kind in ("plain", "compare") if compare)]:
            if folder:
                _require_folder_of_frames(clip)
            else:
                require_writable(clip, "--output")
        if compare:
            require_writable(_strip(path), "--output")

    def write(self, clip: np.ndarray, path: Path) -> None:
        from dit_accel.tools.video import write_clip

        write_clip(clip, path, self.fps)

    def write_comparison(self, plain: np.ndarray, fast: np.ndarray, labels: Labels, path: Path) -> list[Path]:
        """Writes the clips NAME-plain and NAME-compare and the picture NAME-strip.png, and returns their paths."""
        from dit_accel.tools.strips import comparison_clip, frame_strip
        from dit_accel.tools.video import is_folder_of_frames, write_clip

        beside = {"plain": plain, "compare": comparison_clip(plain, fast, labels)}
        for kind, clip in beside.items():
            write_clip(clip, _beside(path, kind), self.fps, folder=is_folder_of_frames(path))
        frame_strip(plain, fast, labels).save(_strip(path))
        return [*(_beside(path, kind) for kind in beside), _strip(path)]

    def quality(self, plain: list[np.ndarray], fast: list[np.ndarray]) -> dict[str, Any]:
        """As that of :class:`Pictures`, over the frames of all clips."""
        import numpy as np

        return _quality(np.concatenate(plain), np.concatenate(fast))


def medium_of(pipe: Any, model_fps: float | None = None, fps: float | None = None) -> Pictures | Clips:
    """What a pipeline makes.

    Args:
        pipe: a diffusers pipeline.
        model_fps: frames a second that the model says it was trained on.
        fps: what the user asked for.

    Raises:
        OptionError: ``fps`` was given for a pipeline of pictures.
    """
    from dit_accel.pipeline import makes_video

    if makes_video(pipe):
        return Clips(fps or model_fps or _family_fps(pipe))
    if fps is not None:
        raise OptionError("--fps", f"{type(pipe).__name__} makes pictures, which have no frames")
    return Pictures()


def numbered(path: Path, index: int, count: int) -> Path:
    """The path of one of ``count`` pictures: NAME itself, or NAME-0, NAME-1, …"""
    return path if count == 1 else _beside(path, str(index))


def _family_fps(pipe: Any) -> float:
    if pipe.config.get("expand_timesteps"):  # Wan 2.2 TI2V 5B, unlike its siblings
        return USUAL_FRAMES_A_SECOND
    name = type(pipe).__name__
    return next((fps for family, fps in FRAMES_A_SECOND.items() if name.startswith(family)), USUAL_FRAMES_A_SECOND)


def _beside(path: Path, kind: str) -> Path:
    return path.with_stem(f"{path.stem}-{kind}")


def _strip(path: Path) -> Path:
    return _beside(path, "strip").with_suffix(".png")


def _require_folder_of_frames(path: Path) -> None:
    from dit_accel.tools.video import foreign_files

    if path.is_file():
        raise OptionError("--output", f"{path} is no folder that frames can be written into; name a new one")
    foreign = foreign_files(path)
    if foreign:
        raise OptionError(
            "--output", f"folder {path} holds more than frames of a clip ({foreign[0]}); name another or a new one"
        )
    require_writable(path / "0000.png" if path.is_dir() else path, "--output")


def _quality(plain: np.ndarray, fast: np.ndarray) -> dict[str, Any]:
    from dit_accel.tools.metrics import clip_ssim, psnr

    decibels = psnr(plain, fast)
    identical = math.isinf(decibels)
    return {"psnr_db": None if identical else decibels, "ssim": clip_ssim(plain, fast), "identical": identical}
