"""Read videos and their sound in tests."""

import subprocess
import wave
from pathlib import Path
from tempfile import TemporaryDirectory

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


def read_sound(path: Path) -> tuple[np.ndarray, int] | None:
    """Read the sound of an mp4 or a .wav file: int16 ``[channels, samples]`` and its sampling rate; None = silent."""
    if path.suffix == ".mp4":
        if "Audio:" not in _ffmpeg("-i", path):
            return None
        with TemporaryDirectory() as folder:
            _ffmpeg("-i", path, "-vn", wav := Path(folder) / "sound.wav")
            return read_sound(wav)
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return samples.reshape(-1, file.getnchannels()).T, file.getframerate()


def _ffmpeg(*arguments: str | Path) -> str:
    """Run the ffmpeg of imageio-ffmpeg, and return what it prints."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-hide_banner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr
