"""Input images, masks and videos as pipelines take them: upright, 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_accel.errors import ArgumentError, shortened

if TYPE_CHECKING:
    from PIL import Image

FILES = ("image", "images", "mask", "video", "videos")  # ends of the names of arguments that are read from files
VIDEOS = (".mp4", ".gif", ".mov", ".webm", ".mkv", ".avi")


def read_image(path: Path | None) -> Any:
    return None if path is None else _read("image", path, as_image)


def read_input(name: str, value: Any) -> Any:
    """Read the files that an argument of a call names: images, masks, or videos as lists of frames."""
    if isinstance(value, list):
        return [read_input(name, item) for item in value]
    is_file = isinstance(value, str) and name.endswith(FILES)
    return _read("call", Path(value).expanduser(), as_mask if "mask" in name else as_image) if is_file else value


def _read(field: str, path: Path, convert: Callable[[Image.Image], Image.Image]) -> Any:
    from diffusers.utils import load_video
    from PIL import Image

    name = shortened(str(path))
    try:
        path.stat()  # load_video would open an address
        if field == "call" and path.suffix.lower() in VIDEOS:
            return [convert(frame) for frame in load_video(str(path))]
        with Image.open(path) as image:
            return convert(image)
    except Exception as error:  # decoders raise errors of any type for broken files
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(field, f"{name} can't be read as an image: {shortened(str(reason))}") from None


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
