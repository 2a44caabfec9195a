"""Write videos: mp4 (H.264 through imageio-ffmpeg, extra `video`), gif, or a folder of numbered PNG files.

A video is a uint8 array ``[frames, height, width, 3]``. A folder is lossless, a gif has 256 colours per frame, and mp4
loses a little detail. An mp4 holds the sound too (AAC); the others have a .wav file for it.
"""

from __future__ import annotations

import os
import subprocess
import wave
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from dit_accel.constants import RATE_FACTOR, X264
from dit_accel.errors import ShapeError
from dit_accel.tools.extras import require_extra
from dit_accel.tools.files import explained_writing, save_image, whole_file

if TYPE_CHECKING:
    import torch

FILE_SUFFIXES = (".mp4", ".gif")
AUDIO_BITRATE = "192k"
SHORTEST_GIF_FRAME = 20  # milliseconds; players show shorter frames much slower


class Sound(NamedTuple):
    """Sound of a video."""

    samples: np.ndarray | torch.Tensor  # floats in −1..1 [samples] or [channels, samples], on the CPU
    rate: int  # samples per second


def require_codec(path: Path, what: str, *, folder: bool = False) -> None:
    """Check that imageio-ffmpeg is installed if ``path`` needs it, as an mp4 does; errors begin with ``what``."""
    if not folder and not is_folder_of_frames(path) and path.suffix.lower() != ".gif":
        require_extra("imageio-ffmpeg", f"{what} {path}")


def is_folder_of_frames(path: Path) -> bool:
    """Return True if a path stands for a folder of frames: it has no suffix, or is an existing folder."""
    return os.path.isdir(path) or not path.suffix


def foreign_files(folder: Path) -> list[str]:
    """Return names in a folder that are not frames of one video; empty if the folder does not exist."""
    found = {path.name for path in folder.iterdir()} if os.path.isdir(folder) else set()
    return sorted(found - {path.name for path in _frames(folder)})


def sound_file(path: Path, *, folder: bool) -> Path | None:
    """Return the .wav file for the sound of a gif or a folder of frames; None for an mp4, which holds its sound."""
    if folder:
        return path.with_name(f"{path.name}.wav")
    return path.with_suffix(".wav") if path.suffix.lower() == ".gif" else None


def write_clip(
    clip: np.ndarray, path: Path, fps: float, *, folder: bool | None = None, sound: Sound | None = None
) -> None:
    """Write a video, uint8 ``[frames, height, width, 3]``, and its sound into the mp4 or to :func:`sound_file`.

    ``path`` ends in one of `FILE_SUFFIXES`, or is a folder, created if missing, whose old frames are removed;
    ``folder=None`` decides as :func:`is_folder_of_frames`. An odd side of an mp4 repeats its last row or column. A gif
    frame lasts a multiple of 0.01 s, at least 0.02 s. A sound shorter or longer than the video is written whole.

    Raises:
        OutputError: the video can't be written, for example because the disk is full; no part of it is left.
        ShapeError: ``clip`` has another shape or dtype, or the suffix is unknown.
        UnsupportedError: imageio-ffmpeg is not installed, which an mp4 needs.
    """
    if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3 or not clip.size:
        values = f"{clip.dtype} {list(clip.shape)}"
        raise ShapeError(f"clip must be uint8 [frames, height, width, 3], got {values}; see as_clip")
    folder = is_folder_of_frames(path) if folder is None else folder
    if folder:
        _write_frames(clip, path)
    elif path.suffix.lower() == ".gif":
        first, *others = map(Image.fromarray, clip)
        duration = max(SHORTEST_GIF_FRAME, 10 * round(100 / fps))  # Pillow truncates to hundredths of a second
        with whole_file(path) as part:
            first.save(part, save_all=True, append_images=others, duration=duration, loop=0)
    elif path.suffix.lower() == ".mp4":
        with whole_file(path) as part:
            _write_mp4(clip, part, fps, sound)
    else:
        raise ShapeError(f"path must end in {' or '.join(FILE_SUFFIXES)} or be a folder, got {path}")
    if sound is not None and (wav := sound_file(path, folder=folder)):
        with whole_file(wav) as part:
            _write_wav(sound, part)


def _write_frames(clip: np.ndarray, folder: Path) -> None:
    with explained_writing(folder):
        folder.mkdir(exist_ok=True)
    for old in _frames(folder):
        old.unlink()
    try:
        for index, frame in enumerate(clip):
            save_image(Image.fromarray(frame), _frame(folder, index))
    except BaseException:
        for written in _frames(folder):  # fewer frames would look like a shorter video
            written.unlink()
        raise


def _write_mp4(clip: np.ndarray, path: Path, fps: float, sound: Sound | None) -> None:
    require_codec(path, "path")
    import imageio.v3 as imageio

    even = np.pad(clip, [(0, 0), *((0, side % 2) for side in clip.shape[1:3]), (0, 0)], mode="edge")
    options = {**X264, "plugin": "FFMPEG", "fps": fps, "output_params": ["-crf", RATE_FACTOR]}
    with TemporaryDirectory() as temporary:
        if sound is not None:
            wav = Path(temporary) / "sound.wav"
            _write_wav(sound, wav)
            options |= {"audio_path": str(wav), "audio_codec": "aac"}
            options["output_params"] += ["-b:a", AUDIO_BITRATE]
        with suppress(OSError):  # ffmpeg has ended early
            imageio.imwrite(path, even, **options)
    if not _is_whole(path):
        with path.open("ab") as file:
            file.write(bytes(2**20))  # raises the reason, such as a full disk, which ffmpeg does not report
        raise OSError("ffmpeg wrote only a part of it")


def _is_whole(mp4: Path) -> bool:
    """Return True if the boxes of an mp4 fill the file, and the last one is the index of its frames."""
    if not mp4.is_file():
        return False
    end, kind, length = 0, b"", mp4.stat().st_size
    with mp4.open("rb") as file:
        while end < length:
            file.seek(end)
            size, kind = int.from_bytes(file.read(4)), file.read(4)
            end += (int.from_bytes(file.read(8)) if size == 1 else size) or length + 1  # an open box has size 0
    return end == length and kind == b"moov"


def _write_wav(sound: Sound, path: Path) -> None:
    """Write a sound in 16 bits; values outside of −1..1 are clipped, and NaN is silence."""
    samples = np.atleast_2d(np.nan_to_num(np.asarray(sound.samples)).clip(-1, 1))
    with wave.open(str(path), "wb") as file:
        file.setparams((len(samples), 2, sound.rate, 0, "NONE", None))
        file.writeframes(np.round(32767 * samples.T).astype("<i2").tobytes())


def read_sound(path: Path, rate: int) -> torch.Tensor:
    """Read the sound of a file, float32 ``[2, samples]`` at a rate; without any it is a ValueError."""
    require_extra("imageio-ffmpeg", str(path))
    import torch
    from imageio_ffmpeg import get_ffmpeg_exe

    form = ["-f", "f32le", "-ar", str(rate), "-af", "pan=stereo|FL<FL+FC|FR<FR+FC"]  # mono at its level, on both sides
    done = subprocess.run([get_ffmpeg_exe(), "-v", "error", "-i", path, *form, "-"], capture_output=True, check=False)
    if not done.stdout:
        raise ValueError(done.stderr.decode(errors="replace").strip() or "it holds no samples")
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(-1, 2).T


def as_clip(frames: np.ndarray) -> np.ndarray:
    """Convert a pipeline's frames, floats in 0..1 ``[frames, height, width, 3]``, to uint8."""
    return np.round(255 * np.clip(frames, 0, 1)).astype(np.uint8)


def middle_frame(frames: torch.Tensor) -> Image.Image:
    """Convert the frame in the middle of a video, floats in 0..1 ``[frames, 3, height, width]``, to an image."""
    middle = frames[len(frames) // 2].clamp(0, 1).mul(255).round().byte().permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(middle.numpy()))


def _frame(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.png"


def _frames(folder: Path) -> list[Path]:
    """Return the frames in a folder: 0000.png, 0001.png, … up to the first gap."""
    return list(takewhile(Path.is_file, (_frame(folder, index) for index in count())))
