"""Kept text: the edit distance by an independent formula, the metric with a made-up OCR, and the true OCR on blur."""

import sys
import types
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from dit_accel.tools.measure import text_metrics as page
from dit_accel.tools.measure.text_metrics import edit_similarity, text_kept

LINES = {48: "NIGHT MARKET", 32: "open until dawn", 24: "Fresh bread & cakes", 18: "Track 9 to Ulm", 12: "No dogs"}


@cache
def naive_distance(a: str, b: str) -> int:
    """Levenshtein's distance by its recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    changed = naive_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(changed, naive_distance(a[1:], b) + 1, naive_distance(a, b[1:]) + 1)


def test_edit_similarity_matches_the_recursive_definition():
    """Random words of three letters, of every length from 0 to 7."""
    random = np.random.default_rng(0)
    for _ in range(100):
        a, b = ("".join(random.choice(list("abc"), random.integers(8))) for _ in range(2))
        expected = 1 - naive_distance(a, b) / max(len(a), len(b), 1)
        assert edit_similarity(a, b) == edit_similarity(b, a) == pytest.approx(expected)


def test_middle_frames_are_read_and_the_plain_ones_only_once(monkeypatch):
    """White space doesn't count, and a plain frame without text gives no value. A missing package is named."""
    monkeypatch.setattr(page, "find_spec", lambda name: object() if name == "rapidocr" else None)
    assert text_kept() == "the package onnxruntime is not installed"
    seen = []

    def read(image):
        seen.append((image.mode, image.size))
        lines = {255: ("open  daily", " 9 to 17"), 128: ("opendaily9", "to", "11"), 0: None}
        return types.SimpleNamespace(txts=lines[image.getpixel((0, 0))[0]])

    monkeypatch.setattr(page, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "rapidocr", types.SimpleNamespace(RapidOCR=lambda params: read))
    kept = text_kept()
    plain, fast, black = (torch.zeros(3, 3, 4, 6) for _ in range(3))
    plain[1], fast[1] = 1.0, 0.5
    assert kept(fast, plain) == pytest.approx(1 - 1 / 14) and kept(plain, plain) == 1.0
    assert kept(black, plain) == 0.0 and kept(plain, black) is None
    assert seen == [("RGB", (6, 4))] * 5  # both plain videos and three others


def test_less_text_is_kept_the_more_it_is_blurred():
    """The true OCR reads all lines of a sharp image; blur takes the smallest letters first, and all in the end."""
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    image = Image.new("RGB", (448, 288), (240, 235, 220))
    draw, top = ImageDraw.Draw(image), 16
    for size, line in LINES.items():
        draw.text((16, top), line, fill=(20, 30, 90), font=ImageFont.load_default(size))
        top += round(1.6 * size)

    def frames(blurred):
        return torch.from_numpy(np.array(blurred)).permute(2, 0, 1)[None] / 255

    kept = text_kept()
    radii = (0, 1.5, 2, 4, 9)
    blurs = [kept(frames(image.filter(ImageFilter.GaussianBlur(radius))), frames(image)) for radius in radii]
    assert blurs[0] == 1.0 and blurs[-1] == 0.0 and blurs == sorted(set(blurs), reverse=True), blurs
    assert kept(frames(image), torch.zeros(1, 3, 288, 448)) is None
