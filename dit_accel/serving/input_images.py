"""Input images and masks as pipelines take them: upright, 8 bits.

Every command and route that reads an image converts it here.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


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
    """Turn an image by its EXIF orientation, and scale integers of 16 bits and floats to 8 bits.

    Pillow would clip them at 255. Floats are in 0..1, 0..255 or 0..65535, whichever holds the largest.
    """
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
