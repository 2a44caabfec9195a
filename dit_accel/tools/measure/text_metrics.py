"""Metric of the text in an image: the share of the plain image's text that an OCR reads in the accelerated one.

The OCR is the package ``rapidocr`` on ``onnxruntime``; its wheel holds the models, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dit_accel.tools.media.video import middle_frame

if TYPE_CHECKING:
    import torch

PACKAGES = ("rapidocr", "onnxruntime")


def text_kept() -> Callable[[torch.Tensor, torch.Tensor], float | None] | str:
    """Return a function for the kept text of a video, or the reason why it is unavailable.

    The function takes frames of the accelerated and of the plain run, float ``[frames, 3, height, width]`` in 0..1, and
    returns the :func:`edit_similarity` of the texts in their middle frames, because reading an image takes about a
    second of a CPU core; None if the plain frame has no text.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    from rapidocr import RapidOCR

    read = RapidOCR(params={"Global.log_level": "critical"})

    def text_of(frames: torch.Tensor) -> str:
        # Detectors split a line at different places, so white space does not count.
        return "".join("".join(read(middle_frame(frames)).txts or ()).split())

    plain_text = lru_cache(maxsize=None)(text_of)  # every setting is compared with the same plain runs

    def kept(frames: torch.Tensor, plain: torch.Tensor) -> float | None:
        expected = plain_text(plain)
        return edit_similarity(text_of(frames), expected) if expected else None

    return kept


def edit_similarity(text: str, reference: str) -> float:
    """One minus the normalised edit distance, 0..1: ``1 − D(text, reference) / max(len(text), len(reference))``.

    ``D`` is Levenshtein's distance in characters: 1 − N.E.D. of ICDAR (Chng et al. 2019). Two empty texts give 1.
    """
    longest = max(len(text), len(reference))
    return 1.0 - _edit_distance(text, reference) / longest if longest else 1.0


def _edit_distance(text: str, reference: str) -> int:
    """Count the insertions, deletions and replacements of characters that turn one text into the other."""
    row = list(range(len(reference) + 1))
    for count, character in enumerate(text, 1):
        above, row = row, [count]
        for column, other in enumerate(reference):
            row.append(min(above[column] + (character != other), above[column + 1] + 1, row[column] + 1))
    return row[-1]
