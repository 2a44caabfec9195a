"""Images of a comparison, in a folder, and a contact sheet of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dit_accel.tools.files import explained_writing, save_image
from dit_accel.tools.measure.kit import PLAIN, image_name
from dit_accel.tools.media.strips import captioned_row, stacked
from dit_accel.tools.media.video import middle_frame

PANEL = 256  # pixels; larger images are shrunk
MOST_PROMPTS = 12  # rows of the sheet


class Sheet:
    """Images of the plain runs and of each setting, in ``STEM-images``, and ``STEM-sheet.png``."""

    def __init__(self, stem: Path, prompts: int) -> None:
        self._folder = stem.with_name(f"{stem.name}-images")
        self.file = stem.with_name(f"{stem.name}-sheet.png")
        self._prompts = prompts

    def add(self, setting: str, prompt: int, frames: torch.Tensor) -> None:
        """Save the image of a run with a setting or `PLAIN`, from frames ``[frames, 3, height, width]`` in 0..1."""
        with explained_writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        save_image(middle_frame(frames), self._path(setting, prompt))

    def write(self, rows: Iterable[dict[str, Any]]) -> Path:
        """Write a row for each of the first prompts: the plain image, and those of our settings with their PSNR."""
        levels = {row["name"]: row["psnr_db_each"] for row in rows if row["ours"] and "error" not in row}
        # An earlier run may have measured settings without a sheet.
        shown = [name for name in (PLAIN, *levels) if self._path(name, 0).is_file()]
        strips = []
        for prompt in range(min(self._prompts, MOST_PROMPTS)):
            panels = [Image.open(self._path(name, prompt)).convert("RGB") for name in shown]
            for panel in panels:
                panel.thumbnail((PANEL, PANEL))
            captions = [f"{name}, {levels[name][prompt]:.1f} dB" if name in levels else name for name in shown]
            strips.append(captioned_row(panels, captions, scale=1))
        save_image(stacked(strips), self.file)
        return self.file

    def _path(self, setting: str, prompt: int) -> Path:
        return self._folder / image_name(setting, prompt)
