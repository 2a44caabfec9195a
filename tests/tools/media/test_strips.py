"""Strips and videos that compare plain and accelerated outputs: their pixels, captions and geometry."""

from functools import partial

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.tools.media.strips import amplification, comparison_clip, comparison_strip, frame_strip

LABELS = ("plain", "accelerated")


def _picture(width: int = 320, height: int = 320, level: int = 100) -> Image.Image:
    return Image.fromarray(np.full((height, width, 3), level, np.uint8))


def _clip(levels, width: int = 320, height: int = 160) -> np.ndarray:
    """A video with plain grey frames of those levels."""
    return np.stack([np.asarray(_picture(width, height, level)) for level in levels])


@pytest.mark.parametrize(
    ("difference", "factor"), [(0, 128), (1, 128), (2, 64), (3, 64), (4, 32), (100, 2), (150, 1)], ids=str
)
def test_amplification_is_the_largest_that_does_not_saturate(difference, factor):
    """A uniform difference d is amplified by the largest allowed power of two with factor · d ≤ 255."""
    assert amplification(_picture(level=50), _picture(level=50 + difference)) == factor


def test_strip_holds_both_pictures_and_the_amplified_difference():
    """The panels are the images' own pixels and |a − b| times the factor, with room for captions above."""
    plain, fast = _picture(), _picture(level=106)
    strip = np.asarray(comparison_strip(plain, fast, factor=8))
    assert strip.shape[1] == 3 * 320 + 2 * 8 and strip.shape[0] > 320
    panels = [strip[-320:, left : left + 320] for left in (0, 328, 656)]
    assert [int(panel.min()) for panel in panels] == [int(panel.max()) for panel in panels] == [100, 106, 48]
    caption = strip[:-320]
    assert all((caption[:, left : left + 320] < 128).any() for left in (0, 328, 656))


def test_strip_enlarges_small_pictures_by_whole_pixels():
    """A 32-pixel image becomes 320 pixels wide with every pixel a square of ten."""
    plain = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    strip = np.asarray(comparison_strip(plain, plain))
    np.testing.assert_array_equal(strip[-320::10, :320:10], np.asarray(plain))


def test_comparison_clip_holds_both_clips_below_their_labels():
    """Every frame shows that frame of both, pixel for pixel, under captions that stay the same."""
    plain, fast = _clip([10, 20, 30]), _clip([11, 21, 31])
    clip = comparison_clip(plain, fast, LABELS)
    np.testing.assert_array_equal(clip[:, -160:, :320], plain)
    np.testing.assert_array_equal(clip[:, -160:, -320:], fast)
    captions = clip[:, :-160]
    assert (captions == captions[0]).all()
    assert (captions[0, :, :320] < 128).any() and (captions[0, :, -320:] < 128).any()


@pytest.mark.parametrize(
    ("frames", "shown"), [(17, [0, 3, 6, 10, 13, 16]), (6, [0, 1, 2, 3, 4, 5]), (2, [0, 1]), (1, [0])], ids=str
)
def test_frame_strip_shows_frames_from_the_first_to_the_last(frames, shown):
    """Six frames at most, evenly spaced, the plain video's in the upper row and the other's in the lower."""
    plain, fast = _clip(range(100, 100 + frames)), _clip(range(200, 200 + frames))
    strip = np.asarray(frame_strip(plain, fast, LABELS))
    middles = [column * (320 + 8) + 160 for column in range(len(shown))]
    assert strip.shape[1] == len(shown) * (320 + 8) - 8
    upper, lower = np.split(strip, 2)
    assert (upper[:-160, :320] != lower[:-160, :320]).any(), "the labels"
    assert (upper[:-160, 320:] == lower[:-160, 320:]).all(), "numbers of the frames"
    assert [int(value) for value in upper[-80, middles, 0]] == [100 + frame for frame in shown]
    assert [int(value) for value in lower[-80, middles, 0]] == [200 + frame for frame in shown]


@pytest.mark.parametrize(("width", "shown"), [(48, 288), (160, 320), (256, 256), (1280, 320)], ids=str)
def test_frame_strip_scales_frames_by_whole_pixels(width, shown):
    """Small frames are enlarged, 320 wide at most: frames of 256 pixels stay as they are; larger frames are shrunk."""
    frames = _clip(range(6), width, width // 2)
    strip = frame_strip(frames, frames, LABELS)
    assert strip.width == 6 * shown + 5 * (shown // 40) and shown < strip.height < shown + 100


@pytest.mark.parametrize(
    ("compare", "plain", "fast", "message"),
    [
        (comparison_strip, _picture(), _picture(height=160), r"\(320, 320\) and \(320, 160\)"),
        *(
            (compare, _clip([0, 1]), _clip([0, 1, 2]), r"same shape, got \[2, 160, 320, 3\] and \[3, 160, 320, 3\]")
            for compare in (partial(comparison_clip, labels=LABELS), partial(frame_strip, labels=LABELS))
        ),
    ],
    ids=["images", "videos", "frames"],
)
def test_outputs_of_different_shapes_are_refused(compare, plain, fast, message):
    """Both shapes are named."""
    with pytest.raises(ShapeError, match=message):
        compare(plain, fast)
