"""Files that commands are to write: their names, and that they can be written, known before any work."""

import os
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.errors import ArgumentError, UnsupportedError
from dit_accel.serving import media
from dit_accel.serving.outputs import PLOT_SUFFIXES, require_distinct, require_plot, require_writable
from dit_accel.tools.measure.metrics import psnr, quality
from dit_accel.tools.media import video
from tests.clips import read_sound
from tests.models.tiny.sounds import longcat_audio
from tests.tiny import tiny_pipeline


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("compare", [False, True], ids=["alone", "compared"])
@pytest.mark.parametrize("medium", [media.Pictures(), media.Clips(16.0)], ids=["pictures", "clips"])
def test_a_run_without_output_replaces_no_file(medium, compare, pictures, tmp_path):
    """The chosen name has no file of an earlier run, for any of its images."""
    first = tmp_path / medium.default_output

    def files(path):
        return medium.files(path, compare=compare)

    own = [file for path in media.numbered(first, pictures) for file in files(path)]
    assert media.unused(first, pictures, files) == media.numbered(first, pictures)
    for there in (*combinations(own, 1), tuple(own)):
        for file in there:
            file.touch()
        names = media.unused(first, pictures, files)
        assert names == media.numbered(first.with_stem(f"{first.stem}-2"), pictures)
        assert not any(file.exists() for path in names for file in files(path))
        for file in there:
            file.unlink()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, None),
        ({"width": 32, "height": 16, "num-frames": 5, "steps": 4}, None),
        ({"width": None, "height": 17}, "32 × 17 × 5 frames to 32 × 16 × 5 frames"),
        ({"width": 40}, "40 × 16 × 5 frames to 32 × 16 × 5 frames"),
        ({"num-frames": 7}, "32 × 16 × 7 frames to 32 × 16 × 5 frames"),
    ],
    ids=["no-size", "kept", "height", "width", "frames"],
)
def test_a_rounded_size_is_a_note(asked, told):
    """Sides that were not given are the pipeline's own; frames count for videos alone."""
    note = told and f"the pipeline rounded the size {told}"
    assert media.size_note(asked, np.zeros((5, 16, 32, 3), np.uint8)) == note
    of_image = note.replace(" × 5 frames", "") if note and "num-frames" not in asked else None
    assert media.size_note(asked, Image.new("RGB", (32, 16))) == of_image


@pytest.mark.parametrize("link", ["file", "dangling", "folder"])
def test_two_names_of_one_file_are_one_file(tmp_path, link):
    """Links count too, even before the file exists."""
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "a.png"
    if link == "file":
        target.touch()
    other = tmp_path / "b.png" if link != "folder" else tmp_path / "link" / "a.png"
    os.symlink(target if link != "folder" else target.parent, other if link != "folder" else other.parent)
    with pytest.raises(ArgumentError, match=r"json: .* is also the file of output"):
        require_distinct([("output", target), ("json", other)])
    require_distinct([("output", target), ("output", other), ("json", tmp_path / "c.png")])


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".webp", ".Mp4", ".GIF", ""])
def test_outputs_take_a_suffix_in_any_case(tmp_path, suffix):
    """Before the model is known, and by the medium that it makes; plots too."""
    for plot in PLOT_SUFFIXES:
        require_plot(tmp_path / f"plot{plot.upper()}", "plot", force=False)
    path = tmp_path / f"made{suffix}"
    media.require_plausible_output(path, compare=False, force=False)
    medium = media.Pictures() if suffix in (".png", ".JPG", ".webp") else media.Clips(8.0)
    medium.require_output(path, compare=True, force=False)


def test_looking_leaves_no_trace(tmp_path):
    """No new file, none changed, and none through a link."""
    there, link = tmp_path / "there.png", tmp_path / "link.png"
    there.write_bytes(b"before")
    os.utime(there, (1, 1))
    os.symlink(tmp_path / "elsewhere.png", link)
    for path in (there, link, tmp_path / "new.png"):
        require_writable(path, "output", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"there.png", "link.png"} and not link.exists()
    assert (there.read_bytes(), there.stat().st_mtime) == (b"before", 1)


def test_what_is_there_is_not_replaced_through_a_link(tmp_path):
    """A link to a file is that file, and one to a folder a folder."""
    (tmp_path / "there.png").touch()
    for target, told in (("there.png", "exists"), (".", "is a folder"), ("no/where.png", "does not exist")):
        link = tmp_path / "link.png"
        os.symlink(target, link)
        with pytest.raises(ArgumentError, match=told):
            require_writable(link, "output", force=False)
        link.unlink()


def test_a_pipe_is_written_without_a_look(tmp_path):
    """Opening one would wait for its reader; a device is no file to replace either."""
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/null"):
        require_writable(path, "output", force=False)


@pytest.mark.parametrize(
    "there", ["o.mp4", "o-plain.mp4", "o-compare.mp4", "o-strip.png", "f/0000.png", "f-plain/0000.png"]
)
def test_clips_that_are_there_stay_unless_they_are_to_be_replaced(tmp_path, there):
    """Files of a comparison too, and frames in folders."""
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).touch()
    path = tmp_path / ("o.mp4" if there.startswith("o") else "f")
    with pytest.raises(ArgumentError, match="exists"):
        media.Clips(8.0).require_output(path, compare=True, force=False)
    media.Clips(8.0).require_output(path, compare=True, force=True)
    if there not in ("o.mp4", "f/0000.png"):
        media.Clips(8.0).require_output(path, compare=False, force=False)


@pytest.mark.parametrize(("model", "fps"), [("wan", 16), ("cogvideox", 8), ("mochi", 30), ("hunyuan", 24), ("ltx", 24)])
def test_clips_of_a_run_are_written_at_one_rate(monkeypatch, tmp_path, model, fps):
    """Plain, accelerated and side by side: the family's rate unless another is given."""
    rates = []
    monkeypatch.setattr(video, "write_clip", lambda clip, path, rate, folder=None: rates.append(rate))
    clip, medium = np.zeros((5, 16, 16, 3), dtype=np.uint8), media.medium_of(tiny_pipeline(model))
    medium.write(clip, tmp_path / "o.mp4")
    medium.write_comparison(clip, clip, ("plain", "accelerated"), tmp_path / "o.mp4")
    assert rates == [fps] * 3


@pytest.mark.parametrize(("name", "holds"), [("o.mp4", True), ("o.gif", False), ("o", False)])
@pytest.mark.parametrize("compare", [False, True], ids=["alone", "compared"])
def test_files_of_sound_are_files_of_the_run(tmp_path, name, holds, compare):
    """A run with sound writes exactly the files that it announces, and replaces none without --force."""
    path, medium = tmp_path / name, media.Clips(8.0, 24_000)
    clip, sound = np.zeros((5, 16, 16, 3), dtype=np.uint8), torch.zeros(2, 240)
    medium.require_output(path, compare=compare, force=False)
    files, written = medium.files(path, compare=compare), medium.write(clip, path, sound)
    if compare:
        written += medium.write_comparison(clip, clip, ("plain", "accelerated"), path, (sound, sound))
    assert sorted(files) == sorted(written) == sorted(tmp_path.iterdir())
    sounds = [file for file in files if file.suffix == ".wav"]
    assert len(sounds) == (0 if holds else 3 if compare else 1)
    for file in sounds:
        (other := tmp_path / f"for {file.stem}").mkdir()
        (other / file.name).touch()
        with pytest.raises(ArgumentError, match=f"{file.name} exists"):
            medium.require_output(other / name, compare=compare, force=False)
        medium.require_output(other / name, compare=compare, force=True)


def test_what_lies_beside_an_existing_folder_is_of_its_kind(tmp_path):
    """NAME decides once: if the folder `run.1` exists, the others are folders too, whatever their suffix."""
    (tmp_path / "run.1").mkdir()
    clip = np.zeros((5, 16, 16, 3), dtype=np.uint8)
    media.Clips(8.0).write_comparison(clip, clip, ("plain", "accelerated"), tmp_path / "run.1")
    assert {path.name for path in tmp_path.iterdir()} == {"run.1", "run-plain.1", "run-compare.1", "run-strip.png"}
    assert len([*(tmp_path / "run-plain.1").iterdir()]) == len([*(tmp_path / "run-compare.1").iterdir()]) == 5


def test_sides_of_a_comparison_have_their_own_sound(tmp_path):
    """NAME-compare has the accelerated side's."""
    clip, plain, fast = np.zeros((5, 16, 16, 3), dtype=np.uint8), torch.full((1, 99), 0.5), torch.full((1, 99), 0.25)
    medium = media.Clips(8.0, 24_000)
    medium.write(clip, tmp_path / "o", fast)
    medium.write_comparison(clip, clip, ("plain", "accelerated"), tmp_path / "o", (plain, fast))
    levels = {file.name: read_sound(file)[0].max() for file in tmp_path.glob("*.wav")}
    assert levels == {"o.wav": 8192, "o-plain.wav": 16384, "o-compare.wav": 8192}


def test_sound_at_an_unknown_rate_is_left_out_with_a_warning(tmp_path):
    clip = np.zeros((5, 16, 16, 3), dtype=np.uint8)
    with pytest.warns(UserWarning, match="sound is left out, because its sampling rate is unknown"):
        assert media.Clips(8.0).write(clip, tmp_path / "o.mp4", torch.zeros(1, 240)) == [tmp_path / "o.mp4"]
    assert read_sound(tmp_path / "o.mp4") is None


@pytest.mark.parametrize(
    ("components", "rate"),
    [
        ({"vocoder": {"output_sampling_rate": 24_000}, "audio_vae": {"sample_rate": 16_000}}, 24_000),
        ({"sound_tokenizer": {"sampling_rate": 48_000}}, 48_000),
        ({"vocoder": {"upsample_rates": [4]}, "audio_vae": {"sample_rate": 44_100}}, 44_100),
        ({"sound_tokenizer": None, "vae": {"sample_rate": 8}}, None),
    ],
    ids=["ltx2", "cosmos3", "kandinsky6", "silent"],
)
def test_the_component_that_makes_sound_has_its_rate(components, rate):
    """The spectrograms of LTX-2 have a lower rate than its vocoder's sound."""
    parts = {name: config and SimpleNamespace(config=SimpleNamespace(**config)) for name, config in components.items()}
    assert media.sampling_rate(SimpleNamespace(**parts)) == rate


def test_sound_alone_is_refused_before_a_run():
    with pytest.raises(UnsupportedError, match="LongCatAudioDiTPipeline makes sound alone, which only"):
        media.medium_of(longcat_audio())


@pytest.mark.parametrize("is_video", [False, True], ids=["pictures", "clips"])
def test_quality_is_that_of_everything_made(is_video):
    """Figures cover all outputs: one that differs among several lowers both."""
    plain = np.random.default_rng(0).integers(0, 200, (2, 16, 16, 3), dtype=np.uint8)
    fast = np.stack([plain[0], plain[1] + 40])
    sides = [[each[None] if is_video else Image.fromarray(each) for each in side] for side in (plain, fast)]
    figures = quality(*sides)
    assert figures["psnr_db"] == pytest.approx(psnr(plain, fast)) and not figures["identical"] and figures["ssim"] < 1
    assert quality(sides[0], sides[0]) == {"psnr_db": None, "ssim": pytest.approx(1.0), "identical": True}
