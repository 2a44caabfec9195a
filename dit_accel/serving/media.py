"""Output of pipelines, images or videos with their sound: names, files and comparisons."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, UnsupportedError, shortened
from dit_accel.serving.outputs import require_writable
from dit_accel.tools.files import save_image

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    Labels = tuple[str, str]
    Sounds = tuple[torch.Tensor | None, torch.Tensor | None]

SAMPLING_RATES = (  # components that make sound, and the key of their configuration; the first one present decides
    ("vocoder", "output_sampling_rate"),  # LTX-2, whose audio_vae has the lower rate of the spectrograms
    ("sound_tokenizer", "sampling_rate"),  # Cosmos 3
    ("audio_vae", "sample_rate"),  # Kandinsky 6
    ("audio_vae", "sampling_rate"),  # MiniMax-H3
    ("vae", "sampling_rate"),  # of pipelines that make sound alone
)


def require_plausible_output(path: Path, *, compare: bool, force: bool) -> None:
    """Check, without the model, that an image, a video or a folder of frames can be written to ``path``."""
    from dit_accel.tools.media.video import FILE_SUFFIXES, is_folder_of_frames

    if is_folder_of_frames(path):
        return
    is_clip = path.suffix.lower() in FILE_SUFFIXES
    (Clips(24.0) if is_clip else Pictures()).require_output(path, compare=compare, force=force)


def _is_written_by_pillow(suffix: str) -> bool:
    """Return True if Pillow can write RGB images with this suffix; it can only read some formats."""
    from PIL import Image

    try:
        Image.new("RGB", (16, 16)).save(BytesIO(), Image.registered_extensions().get(suffix.lower(), suffix))
    except (KeyError, OSError, ValueError):
        return False
    return True


class Pictures:
    default_output = Path("output.png")

    def require_output(self, path: Path, *, compare: bool, force: bool) -> None:
        if not _is_written_by_pillow(path.suffix):
            rule = "must end in .png, .jpg or .webp for an image, in .mp4 or .gif for a video"
            raise ArgumentError("output", f"{shortened(str(path))} {rule}")
        for file in self.files(path, compare=compare):
            require_writable(file, "output", force=force)

    def files(self, path: Path, *, compare: bool) -> list[Path]:
        return _with_comparison(path, compare)

    def still(self, picture: Image.Image) -> Image.Image:
        return picture

    def write(self, picture: Image.Image, path: Path, sound: torch.Tensor | None = None) -> list[Path]:
        save_image(picture, path)
        return [path]

    def write_comparison(
        self, plain: Image.Image, fast: Image.Image, labels: Labels, path: Path, sounds: Sounds = (None, None)
    ) -> list[Path]:
        from dit_accel.tools.media.strips import comparison_strip

        _, *beside = _with_comparison(path)
        for picture, file in zip((plain, comparison_strip(plain, fast, labels)), beside, strict=True):
            save_image(picture, file)
        return beside


class Clips:
    """Videos, uint8 arrays ``[frames, height, width, 3]``, with sounds if their sampling rate is known."""

    default_output = Path("output.mp4")

    def __init__(self, fps: float, sampling_rate: int | None = None, in_chunks: bool = False) -> None:
        self.fps, self.sampling_rate, self.in_chunks = fps, sampling_rate, in_chunks  # decoded chunk by chunk

    def require_output(self, path: Path, *, compare: bool, force: bool) -> None:
        from dit_accel.tools.media.video import FILE_SUFFIXES, foreign_files, is_folder_of_frames, require_codec

        is_folder = is_folder_of_frames(path)
        if not is_folder and path.suffix.lower() not in FILE_SUFFIXES:
            rule = f"must end in {' or '.join(FILE_SUFFIXES)}, or be a folder of frames (a name without suffix)"
            raise ArgumentError("output", f"{path} {rule}: this model makes video")
        require_codec(path, "--output", folder=is_folder)
        for clip in _with_comparison(path, compare):
            if is_folder and os.path.isfile(clip):
                raise ArgumentError("output", f"{clip} is a file, which can't hold frames; name a new folder")
            if is_folder and (foreign := foreign_files(clip)):
                raise ArgumentError("output", f"{clip} has files that are no frames ({foreign[0]}); name a new folder")
            require_writable(clip / "0000.png" if is_folder and os.path.isdir(clip) else clip, "output", force=force)
        for file in self._others(path, compare):
            require_writable(file, "output", force=force)

    def files(self, path: Path, *, compare: bool) -> list[Path]:
        return [*_with_comparison(path, compare), *self._others(path, compare)]

    def _others(self, path: Path, compare: bool) -> list[Path]:
        from dit_accel.tools.media.video import is_folder_of_frames, sound_file

        clips = _with_comparison(path, compare) if self.sampling_rate else []
        sounds = [sound_file(clip, folder=is_folder_of_frames(path)) for clip in clips]
        return [*filter(None, sounds), *([_strip(path)] if compare else [])]

    def still(self, clip: np.ndarray) -> Image.Image:
        from PIL import Image

        return Image.fromarray(clip[len(clip) // 2])

    def write(
        self, clip: np.ndarray, path: Path, sound: torch.Tensor | None = None, *, folder: bool | None = None
    ) -> list[Path]:
        """Write a video with its sound; ``folder`` None = as the path says."""
        from dit_accel.tools.media.video import Sound, is_folder_of_frames, sound_file, write_clip

        folder = is_folder_of_frames(path) if folder is None else folder
        track = {} if sound is None or self.sampling_rate is None else {"sound": Sound(sound, self.sampling_rate)}
        if sound is not None and not track:
            warnings.warn("dit-accel: sound is left out, because its sampling rate is unknown", stacklevel=2)
        write_clip(clip, path, self.fps, folder=folder, **track)
        return [path, *filter(None, [track and sound_file(path, folder=folder)])]

    def write_comparison(
        self, plain: np.ndarray, fast: np.ndarray, labels: Labels, path: Path, sounds: Sounds = (None, None)
    ) -> list[Path]:
        from dit_accel.tools.media.strips import comparison_clip, frame_strip
        from dit_accel.tools.media.video import is_folder_of_frames

        _, *beside = _with_comparison(path)
        clips, folder = (plain, comparison_clip(plain, fast, labels)), is_folder_of_frames(path)
        written = [self.write(*parts, folder=folder) for parts in zip(clips, beside, sounds, strict=True)]
        save_image(frame_strip(plain, fast, labels), _strip(path))
        return [*chain(*written), _strip(path)]


Medium = Pictures | Clips


def medium_of(pipe: Any, model_fps: float | None = None, fps: float | None = None) -> Medium:
    """Return the output form of a pipeline; a video's frame rate is ``fps``, otherwise the model's or its family's."""
    from dit_accel.models.families import pipeline_family
    from dit_accel.pipeline import makes_video
    from dit_accel.tools.advise.identify import TABLE

    call = getattr(inspect.unwrap(type(pipe).__call__), "__code__", None)
    if getattr(pipe, "makes_sound_alone", False) or (call is not None and "AudioPipelineOutput" in call.co_names):
        raise UnsupportedError(f"{type(pipe).__name__} makes sound alone, which only dit-accel compare measures")
    if makes_video(pipe):
        family, name = pipeline_family(pipe), type(pipe).__name__
        usual = 24.0 if family is None else family.frames_per_second(pipe.config)
        usual = next((rate for part, rate in TABLE["frames_per_second"].items() if part in name), usual)
        in_chunks = name in getattr(family, "streamed", ())
        return Clips(fps or model_fps or usual, sampling_rate(pipe), in_chunks)
    if fps is not None:
        raise ArgumentError("fps", f"{type(pipe).__name__} makes images, which have no frame rate")
    return Pictures()


def sampling_rate(pipe: Any) -> int | None:
    """Return the samples per second of a pipeline's sound; None if it makes none or the rate is unknown."""
    rates = (getattr(getattr(getattr(pipe, name, None), "config", None), key, None) for name, key in SAMPLING_RATES)
    return next(filter(None, rates), None)


def size_note(asked: Mapping[str, Any], result: Any) -> str | None:
    """Return a note if a pipeline rounded the width, height or number of frames of an image or video, or None."""
    sizes = result.shape[2::-1] if hasattr(result, "shape") else result.size
    actual = dict(zip(("width", "height", "num-frames"), sizes, strict=False))
    wanted = {name: asked.get(name) or value for name, value in actual.items()}
    if wanted == actual:
        return None
    before, after = (" × ".join(map(str, size.values())) + " frames" * (len(size) > 2) for size in (wanted, actual))
    return f"the pipeline rounded the size {before} to {after}"


def numbered(path: Path, pictures: int) -> list[Path]:
    """Return the paths of ``pictures`` images: NAME for one, otherwise NAME-0, NAME-1, …"""
    if not path.name:
        raise ArgumentError("output", f"{path} has no name; name a file, or a folder for frames")
    return [path] if pictures == 1 else [_beside(path, str(index)) for index in range(pictures)]


def unused(path: Path, pictures: int, files: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the first of NAME, NAME-2, NAME-3, … for which no file exists yet, as paths of all images."""
    names = chain([path], (_beside(path, str(number)) for number in count(2)))
    candidates = (numbered(name, pictures) for name in names)
    return next(paths for paths in candidates if not any(file.exists() for path in paths for file in files(path)))


def _beside(path: Path, kind: str) -> Path:
    return path.with_stem(f"{path.stem}-{kind}")


def _with_comparison(path: Path, compare: bool = True) -> list[Path]:
    return [path, *(_beside(path, kind) for kind in ("plain", "compare") if compare)]


def _strip(path: Path) -> Path:
    return _beside(path, "strip").with_suffix(".png")
