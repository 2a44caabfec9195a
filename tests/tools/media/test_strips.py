"""Strips and videos that compare plain and accelerated outputs: their pixels, captions and geometry."""

import numpy as np
import pytest
from PIL import Image

from dit_accel.errors import ShapeError
from dit_accel.tools.media.strips import amplification, comparison_clip, comparison_strip, frame_strip

LABELS = ("plain", "accelerated")


def picture(width: int = 320, height: int = 320, level: int = 100) -> Image.Image:
    return Image.fromarray(np.full((height, width, 3), level, np.uint8))


def clip_of(levels, width: int = 320, height: int = 160) -> np.ndarray:
    """A video with plain grey frames of those levels."""
    return np.stack([np.asarray(picture(width, height, level)) for level in levels])


def test_amplification_is_the_largest_that_does_not_saturate():
    """A uniform difference d is amplified by the largest allowed power of two with factor · d ≤ 255."""
    for difference, factor in {0: 128, 1: 128, 2: 64, 3: 64, 4: 32, 100: 2, 150: 1}.items():
        assert amplification(picture(level=50), picture(level=50 + difference)) == factor, difference


def test_strip_holds_both_pictures_and_the_amplified_difference():
    """The panels are the images' own pixels and |a − b| times the factor, with room for captions above.

    A 32-pixel image becomes 320 pixels wide with every pixel a square of ten.
    """
    strip = np.asarray(comparison_strip(picture(), picture(level=106), LABELS))
    assert strip.shape[1] == 3 * 320 + 2 * 8 and strip.shape[0] > 320
    panels = [strip[-320:, left : left + 320] for left in (0, 328, 656)]
    assert [int(panel.min()) for panel in panels] == [int(panel.max()) for panel in panels] == [100, 106, 6 * 32]
    caption = strip[:-320]
    assert all((caption[:, left : left + 320] < 128).any() for left in (0, 328, 656))
    small = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    strip = np.asarray(comparison_strip(small, small, LABELS))
    np.testing.assert_array_equal(strip[-320::10, :320:10], np.asarray(small))


def test_comparison_clip_holds_both_clips_below_their_labels():
    """Every frame shows that frame of both, pixel for pixel, under captions that stay the same."""
    plain, fast = clip_of([10, 20, 30]), clip_of([11, 21, 31])
    clip = comparison_clip(plain, fast, LABELS)
    np.testing.assert_array_equal(clip[:, -160:, :320], plain)
    np.testing.assert_array_equal(clip[:, -160:, -320:], fast)
    captions = clip[:, :-160]
    assert (captions == captions[0]).all()
    assert (captions[0, :, :320] < 128).any() and (captions[0, :, -320:] < 128).any()


@pytest.mark.parametrize(("frames", "shown"), [(17, [0, 3, 6, 10, 13, 16]), (2, [0, 1]), (1, [0])], ids=str)
def test_frame_strip_shows_frames_from_the_first_to_the_last(frames, shown):
    """Six frames at most, evenly spaced, the plain video's in the upper row and the other's in the lower."""
    plain, fast = clip_of(range(100, 100 + frames)), clip_of(range(200, 200 + frames))
    strip = np.asarray(frame_strip(plain, fast, LABELS))
    middles = [column * (320 + 8) + 160 for column in range(len(shown))]
    assert strip.shape[1] == len(shown) * (320 + 8) - 8
    upper, lower = np.split(strip, 2)
    assert (upper[:-160, :320] != lower[:-160, :320]).any(), "the labels"
    assert (upper[:-160, 320:] == lower[:-160, 320:]).all(), "numbers of the frames"
    assert [int(value) for value in upper[-80, middles, 0]] == [100 + frame for frame in shown]
    assert [int(value) for value in lower[-80, middles, 0]] == [200 + frame for frame in shown]


def test_frame_strip_scales_frames_by_whole_pixels():
    """Small frames are enlarged, 320 wide at most: frames of 256 pixels stay as they are; larger frames are shrunk."""
    for width, shown in {48: 288, 160: 320, 256: 256, 1280: 320}.items():
        frames = clip_of(range(6), width, width // 2)
        strip = frame_strip(frames, frames, LABELS)
        assert strip.width == 6 * shown + 5 * (shown // 40) and shown < strip.height < shown + 100, width


def test_outputs_of_different_shapes_are_refused():
    """Both shapes are named."""
    with pytest.raises(ShapeError, match=r"\(320, 320\) and \(320, 160\)"):
        comparison_strip(picture(), picture(height=160), LABELS)
    for compare in (comparison_clip, frame_strip):
        with pytest.raises(ShapeError, match=r"same shape, got \[2, 160, 320, 3\] and \[3, 160, 320, 3\]"):
            compare(clip_of([0, 1]), clip_of([0, 1, 2]), LABELS)
