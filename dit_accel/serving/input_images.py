"""Input images, masks and videos as pipelines take them: upright, 8 bits; and sound at the pipeline's sampling rate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, shortened
from dit_accel.serving.media import sampling_rate

if TYPE_CHECKING:
    from PIL import Image

FILES = ("image", "images", "mask", "video", "videos", "frames", "controls", "audio", "waveforms")
FILES += ("reference", "references")  # all: ends of the names of arguments that are read from files
VIDEOS = (".mp4", ".gif", ".mov", ".webm", ".mkv", ".avi")
SOUNDS = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac")


def read_image(path: Path | None) -> Any:
    return None if path is None else _read("image", path, as_image)


def read_input(name: str, value: Any, pipe: Any = None) -> Any:
    """Read the files that an argument of a call names, also in lists and mappings: images, masks, lists of frames.

    Sound is float32 ``[1, 2, samples]``. Blocks of ``pipe`` may take objects of their own, as MiniMax-H3's references.
    """
    if isinstance(value, list):
        return [read_input(name, item, pipe) for item in value]
    if isinstance(value, dict):
        return {key: read_input(name, item, pipe) for key, item in value.items()}
    if not isinstance(value, str) or not name.endswith(FILES):
        return value
    return _read("call", Path(value).expanduser(), as_mask if "mask" in name else as_image, name, pipe)


def _read(field: str, path: Path, convert: Callable[..., Image.Image], name: str = "", pipe: Any = None) -> Any:
    from diffusers.utils import load_video
    from PIL import Image

    from dit_accel.tools.media.video import read_sound

    suffix = path.suffix.lower() if field == "call" else ""
    form = "a video" if suffix in VIDEOS else "audio" if suffix in SOUNDS else "an image"
    reader = pipe.reader_of(name, form.split()[-1]) if hasattr(pipe, "reader_of") else None
    try:
        path.stat()  # diffusers would open an address
        if reader is not None:
            found, rate = reader(path), sampling_rate(pipe)
            if rate and getattr(found, "sample_rate", None) not in (None, rate):  # blocks resample by torchaudio
                found.audio, found.sample_rate = read_sound(path, rate), rate
            return found
        if form == "a video":
            return [convert(frame) for frame in load_video(str(path))]
        if form == "audio":
            sound = read_sound(path, sampling_rate(pipe) or 48_000)  # samples per second
            return sound if name.endswith("_audio") else sound[None]  # ACE-Step's has no batch
        with Image.open(path) as image:
            return convert(image)
    except Exception as error:  # decoders raise errors of any type for broken files
        reason = shortened(str(getattr(error, "strerror", None) or error))
        raise ArgumentError(field, f"{shortened(str(path))} can't be read as {form}: {reason}") from None


def as_image(image: Image.Image) -> Image.Image:
    """Return an RGB image; like diffusers' ``load_image`` it follows the EXIF orientation and ignores transparency."""
    return _upright(image).convert("RGB")


def as_mask(image: Image.Image) -> Image.Image:
    """Return a mask of grey levels, white where the image changes; OpenAI's masks are transparent there instead."""
    from PIL import ImageOps

    mask = _upright(image)
    alpha = mask.convert("RGBA").getchannel("A")
    return ImageOps.invert(alpha) if alpha.getextrema()[0] < 255 else mask.convert("L")


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image by its EXIF orientation, and scale 16-bit integers and floats to 8 bits, as Pillow does not."""
    import numpy as np
    from PIL import Image, ImageOps

    with suppress(SyntaxError):  # broken EXIF data
        image = ImageOps.exif_transpose(image)
    if not image.mode.startswith(("I", "F")):
        return image
    levels = np.nan_to_num(np.asarray(image).astype(np.float64))
    largest = 65535.0 if image.mode != "F" else next((top for top in (1.0, 255.0) if levels.max() <= top), 65535.0)
    grey = Image.fromarray(np.round(255 / largest * levels.clip(0, largest)).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    return grey
