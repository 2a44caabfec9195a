"""Plain and accelerated images, and videos (uint8 ``[frames, height, width, 3]``), side by side with labels."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dit_accel.errors import ShapeError

AMPLIFICATIONS = (1, 2, 4, 8, 16, 32, 64, 128)
MINIMUM_PANEL = 320  # pixels; smaller images are enlarged so that labels stay readable
STRIP_FRAMES = 6


def amplification(plain: Image.Image, fast: Image.Image) -> int:
    """Return the largest of `AMPLIFICATIONS` that saturates at most 0.1% of the differences."""
    peak = float(np.quantile(_difference(plain, fast), 0.999))
    return max((factor for factor in AMPLIFICATIONS if factor * peak <= 255), default=1)


def comparison_strip(plain: Image.Image, fast: Image.Image, labels: tuple[str, str]) -> Image.Image:
    """Both images side by side with their amplified absolute difference; images of different sizes are a ShapeError."""
    if plain.size != fast.size:
        raise ShapeError(f"plain and fast must have the same size, got {plain.size} and {fast.size}")
    factor = amplification(plain, fast)
    amplified = np.clip(factor * _difference(plain, fast), 0, 255).astype(np.uint8)
    panels = [plain.convert("RGB"), fast.convert("RGB"), Image.fromarray(amplified)]
    return captioned_row(panels, [*labels, f"difference, {factor} times" if amplified.any() else "difference: none"])


def comparison_clip(plain: np.ndarray, fast: np.ndarray, labels: tuple[str, str]) -> np.ndarray:
    """Both videos side by side with their labels above; videos that differ in shape are a ShapeError."""
    _require_same_clips(plain, fast)
    pairs = zip(plain, fast, strict=True)
    return np.stack([np.asarray(captioned_row([*map(Image.fromarray, pair)], labels)) for pair in pairs])


def frame_strip(plain: np.ndarray, fast: np.ndarray, labels: tuple[str, str]) -> Image.Image:
    """At most `STRIP_FRAMES` frames of both videos, from the first to the last; plain frames above.

    Frames wider than `MINIMUM_PANEL` are shrunk; smaller frames are enlarged by whole factors up to this width.
    """
    _require_same_clips(plain, fast)
    chosen = np.unique(np.linspace(0, len(plain) - 1, STRIP_FRAMES).round().astype(int))
    rows = []
    for clip, label in zip((plain, fast), labels, strict=True):
        panels = [Image.fromarray(clip[index]) for index in chosen]
        for panel in panels:
            panel.thumbnail((MINIMUM_PANEL, panel.height))
        captions = [label, *(f"frame {index}" for index in chosen[1:])]
        rows.append(captioned_row(panels, captions, scale=MINIMUM_PANEL // panels[0].width))
    return stacked(rows)


def stacked(rows: Sequence[Image.Image]) -> Image.Image:
    return Image.fromarray(np.concatenate([np.asarray(row) for row in rows]))


def captioned_row(panels: Sequence[Image.Image], captions: Sequence[str], scale: int | None = None) -> Image.Image:
    """RGB images of one size in a row, with captions above, enlarged by ``scale``; None = to `MINIMUM_PANEL`."""
    scale = scale or -(-MINIMUM_PANEL // panels[0].width)
    width, height = panels[0].width * scale, panels[0].height * scale
    margin, font = width // 40, ImageFont.load_default(max(16, width // 24))
    caption_height = int(font.size * 1.9)
    strip = Image.new("RGB", (len(panels) * (width + margin) - margin, height + caption_height), "white")
    draw = ImageDraw.Draw(strip)
    for column, (panel, caption) in enumerate(zip(panels, captions, strict=True)):
        left = column * (width + margin)
        strip.paste(panel.resize((width, height), Image.Resampling.NEAREST), (left, caption_height))
        draw.text((left + width / 2, caption_height / 2), caption, fill="black", font=font, anchor="mm")
    return strip


def _require_same_clips(plain: np.ndarray, fast: np.ndarray) -> None:
    if plain.shape != fast.shape:
        raise ShapeError(f"plain and fast must have the same shape, got {list(plain.shape)} and {list(fast.shape)}")


def _difference(plain: Image.Image, fast: Image.Image) -> np.ndarray:
    """Absolute difference in grey levels, int16 ``[height, width, 3]``."""
    first, second = (np.asarray(image.convert("RGB")).astype(np.int16) for image in (plain, fast))
    return np.abs(first - second)
