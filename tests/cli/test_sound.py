"""Videos with sound from the commands and the server's worker, on a tiny pipeline whose sound is a tone."""

import itertools

import numpy as np
import pytest
import torch

from dit_accel.cli import inspect
from dit_accel.serving import pipelines
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import Job
from dit_accel.serving.worker import Worker
from tests.clips import read_sound
from tests.models.tiny.videos import cosmos3

FRAMES, RATE, HERTZ = 5, 16_000, 500
SMALL = ("--steps", 6, "--height", 64, "--width", 64, "--num-frames", FRAMES)
CALL = ("--call", "enable_sound=true", "--call", "enable_safety_check=false")


@pytest.fixture(scope="module")
def singer():
    """A pipeline whose sound lasts as long as its video; the level differs from call to call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, _ = cosmos3()
    levels, tokens = itertools.cycle((0.2, 0.3, 0.5)), pipe.sound_tokenizer

    def decode(latents):
        times = torch.arange(latents.shape[-1] * tokens._hop_size) / RATE
        return next(levels) * torch.sin(2 * torch.pi * HERTZ * times)[None, None]

    tokens.decode = decode
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def model(singer, monkeypatch):
    for module in (pipelines, inspect):
        monkeypatch.setattr(module, "load_pipeline", lambda *_: singer)
    return "some/model"


def level(path, fps=24):
    """Level of the tone in a file, after a check of its frequency and its length."""
    samples, rate = read_sound(path)
    assert rate == RATE and samples.shape == (1, pytest.approx(FRAMES * RATE / fps, abs=1200))
    middle = samples[0, 800:2400] / 32767
    assert np.abs(np.fft.rfft(middle)).argmax() * RATE / 1600 == HERTZ
    return np.sqrt(2 * (middle**2).mean())


@pytest.mark.parametrize("name", ["fox.mp4", "fox"])
def test_compare_writes_the_sound_of_each_side(run, model, tmp_path, name):
    """NAME-plain has the plain side's; the .wav files of a gif or folders are among the written files."""
    result = run("generate", "-p", "a fox", "-m", model, *SMALL, *CALL, "--compare", "--repeats", 1, "-o", name)
    assert result.exit_code == 0, result.output
    clips = [name.replace("fox", f"fox{kind}") for kind in ("", "-plain", "-compare")]
    sounds = clips if name.endswith("4") else [f"fox{kind}.wav" for kind in ("", "-plain", "-compare")]
    files = {*clips, *sounds, "fox-strip.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert {line.removeprefix("wrote ") for line in result.stdout.splitlines() if "wrote" in line} == files
    fast, plain, both = (level(tmp_path / sound) for sound in sounds)
    assert fast == pytest.approx(both) and abs(fast - plain) > 0.05


def test_a_served_video_has_its_sound(model, tmp_path):
    """It lasts as long as the video, at the request's frame rate too; /v1/videos sends these bytes."""
    worker = Worker(Setup(model, call={"enable_sound": True, "enable_safety_check": False}))
    settings = {"prompt": "a fox", "seed": 3, "steps": 2, "width": 64, "height": 64, "num-frames": FRAMES}
    for fps, more in ((24, {}), (12, {"fps": 12.0})):
        (made,) = worker.run([Job(0, settings | more)], worker.loaded.preset, ".mp4", lambda *_: None)
        (tmp_path / "made.mp4").write_bytes(made.data)
        assert level(tmp_path / "made.mp4", fps) > 0.05
