"""Videos on disk: reading returns the written frames, and the files are what players expect."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import OutputError, ShapeError
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.media.video import Sound, as_clip, foreign_files, is_folder_of_frames, write_clip
from tests.clips import read_clip, read_sound


def moving_square(frames: int = 5, height: int = 48, width: int = 64) -> np.ndarray:
    """A white square that moves right over a grey slope."""
    clip = np.zeros((frames, height, width, 3), np.uint8)
    clip[...] = np.linspace(40, 120, width, dtype=np.uint8)[:, None]
    for index, frame in enumerate(clip):
        frame[16:32, 4 + 8 * index : 20 + 8 * index] = 255
    return clip


def test_a_folder_of_frames_keeps_every_bit(tmp_path):
    """Frames are numbered from 0000 and come back in order, more than ten of them too; a shorter video replaces all."""
    for frames in (12, 3):
        write_clip(moving_square(frames), tmp_path / "frames", fps=8)
        names = sorted(path.name for path in (tmp_path / "frames").iterdir())
        assert names == [f"{index:04d}.png" for index in range(frames)]
        np.testing.assert_array_equal(read_clip(tmp_path / "frames"), moving_square(frames))


@pytest.mark.parametrize("name", ["CLIP.MP4", "clip.gif"])
def test_a_file_holds_every_frame_nearly_unchanged(tmp_path, name):
    """Number and order of the frames are kept; the compression loss stays above 30 dB PSNR.

    yuv420p halves both sides, so an odd side of an mp4 repeats its last pixels. It is H.264, as every browser takes it.
    """
    height, width = (47, 63) if name == "CLIP.MP4" else (48, 64)
    clip = moving_square(height=height, width=width)
    write_clip(clip, tmp_path / name, fps=23.976)
    read = read_clip(tmp_path / name)
    assert read.shape == (5, 48, 64, 3) and psnr(read[:, :height, :width], clip) > 30
    if name == "CLIP.MP4":
        facts = imageio.immeta(tmp_path / name, plugin="FFMPEG")
        assert facts["fps"] == pytest.approx(23.976, abs=0.01)
        assert facts["codec"] == "h264" and facts["pix_fmt"].startswith("yuv420p")


def test_gif_loops_at_nearly_the_frame_rate_asked_for(tmp_path):
    """A frame lasts the whole hundredths of a second nearest to 1 / fps, two at least; the video repeats."""
    for fps, duration in {8: 120, 15: 70, 24: 40, 30: 30, 60: 20, 100: 20}.items():
        write_clip(moving_square(), tmp_path / "clip.gif", fps=fps)
        with Image.open(tmp_path / "clip.gif") as gif:
            assert (gif.info["duration"], gif.info["loop"], gif.n_frames) == (duration, 0, 5)


RATE = 24_000


def tones(*hertz: float, seconds: float = 1.0, level: float = 0.5) -> np.ndarray:
    """A sine wave for each channel: float32 ``[channels, samples]``."""
    times = np.arange(round(seconds * RATE)) / RATE
    return np.stack([level * np.sin(2 * np.pi * tone * times) for tone in hertz]).astype(np.float32)


def spectral_peaks(samples: np.ndarray) -> list[float]:
    """The frequency with most energy in each channel, in Hz."""
    spectra = np.abs(np.fft.rfft(samples * np.hanning(samples.shape[1])))
    return list(spectra.argmax(axis=1) * RATE / samples.shape[1])


@pytest.mark.parametrize(
    "sound", [tones(440, seconds=0.6)[0], torch.from_numpy(tones(440, 1000, seconds=2.5))], ids=["short", "long-stereo"]
)
def test_an_mp4_holds_the_sound_of_its_video(tmp_path, sound):
    """Length, level and frequency of each channel, also where one of both is shorter; no frame is lost or repeated."""
    for name, written in (("silent.mp4", None), ("clip.mp4", Sound(sound, RATE))):
        write_clip(moving_square(8), tmp_path / name, fps=8, sound=written)
    samples, rate = read_sound(tmp_path / "clip.mp4")
    channels = np.atleast_2d(np.asarray(sound))
    assert rate == RATE and samples.shape[0] == len(channels)
    assert samples.shape[1] == pytest.approx(channels.shape[1], abs=1024)  # the frame of AAC
    middle = samples[:, RATE // 4 : -RATE // 4] / 32767
    np.testing.assert_allclose(np.sqrt((middle**2).mean(axis=1)), 0.5 / np.sqrt(2), rtol=0.01)
    assert spectral_peaks(middle) == pytest.approx([440, 1000][: len(channels)], abs=8)
    np.testing.assert_array_equal(read_clip(tmp_path / "clip.mp4"), read_clip(tmp_path / "silent.mp4"))
    assert read_sound(tmp_path / "silent.mp4") is None


@pytest.mark.parametrize(("name", "file"), [("clip.gif", "clip.wav"), ("frames", "frames.wav"), ("run.1", "run.1.wav")])
def test_a_gif_or_a_folder_has_a_file_for_its_sound(tmp_path, name, file):
    """In 16 bits; the folder holds frames alone."""
    sound = tones(440, 1000)
    write_clip(moving_square(), tmp_path / name, fps=8, folder=name != "clip.gif", sound=Sound(sound, RATE))
    samples, rate = read_sound(tmp_path / file)
    assert rate == RATE and {path.name for path in tmp_path.iterdir()} == {name, file}
    np.testing.assert_allclose(samples / 32767, sound, atol=0.5 / 32767)


def test_values_that_no_wave_holds_are_clipped_and_nan_is_silence(tmp_path):
    sound = np.array([np.nan, np.inf, -np.inf, 3.0, -3.0, 0.5], np.float32)
    write_clip(moving_square(), tmp_path / "frames", fps=8, sound=Sound(sound, RATE))
    samples, _ = read_sound(tmp_path / "frames.wav")
    assert samples.tolist() == [[0, 32767, -32767, 32767, -32767, 16384]]
    write_clip(moving_square(8), tmp_path / "clip.mp4", fps=8, sound=Sound(tones(440) * np.nan, RATE))
    samples, _ = read_sound(tmp_path / "clip.mp4")
    assert not samples.any() and samples.shape[1] == pytest.approx(RATE, abs=1024)


def test_as_clip_rounds_and_saturates():
    """Floats of 0..1 become the nearest of 0..255."""
    frames = np.array([-0.1, 0.0, 0.5 / 255 + 1e-6, 1.0, 1.2]).reshape(1, 1, 5, 1).repeat(3, axis=3)
    assert as_clip(frames)[0, 0, :, 0].tolist() == [0, 0, 1, 255, 255]


def test_which_names_are_folders(tmp_path):
    """A name without suffix is a new folder, and an existing folder is one with any name."""
    (tmp_path / "run.1").mkdir()
    paths = ("frames", "run.1", "clip.mp4", "clip.png")
    assert [is_folder_of_frames(tmp_path / name) for name in paths] == [True, True, False, False]


def test_files_that_are_no_frames_are_named(tmp_path):
    """Images numbered from 0000 to the first gap are frames; other files in the folder are not, and stay."""
    write_clip(moving_square(3), tmp_path, fps=8)
    others = ["0007.png", "1.png", "12345.png", "notes.txt"]
    for name in others:
        (tmp_path / name).touch()
    assert foreign_files(tmp_path) == others
    write_clip(moving_square(2), tmp_path, fps=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000.png", "0001.png", *others]
    assert foreign_files(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("clip", "name", "message"),
    [
        (moving_square() / 255.0, "clip.mp4", r"uint8 \[frames, height, width, 3\], got float64"),
        (moving_square()[0], "clip.mp4", r"got uint8 \[48, 64, 3\]"),
        (moving_square()[:0], "clip.gif", r"got uint8 \[0, 48, 64, 3\]"),
        (moving_square(), "clip.avi", "must end in .mp4 or .gif or be a folder"),
    ],
    ids=["floats", "a-picture", "no-frames", "suffix"],
)
def test_what_is_no_clip_is_refused(tmp_path, clip, name, message):
    """Each error names the requirement and the given value, and nothing is written."""
    with pytest.raises(ShapeError, match=message):
        write_clip(clip, tmp_path / name, fps=8)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """Limit the size of files as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "frames"])
@pytest.mark.parametrize("left", [100, 3000], ids=["at-once", "in-the-middle"])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, name, left):
    """ffmpeg alone would report success, and leave an mp4 that no player opens. A sound may fill the disk too."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 48, 64, 3), np.uint8)
    with full_disk(left), pytest.raises(OutputError, match=r"can't be written: File too large; free some space"):
        write_clip(noise, tmp_path / name, fps=8)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    with full_disk(20_000), pytest.raises(OutputError, match=r"clip\.wav can't be written: File too large"):
        write_clip(moving_square(2), tmp_path / "clip.gif", fps=8, sound=Sound(tones(440), RATE))
    assert not (tmp_path / "clip.wav").exists()
