"""``generate --stream``: the frames of each chunk are written once they are decoded."""

import time

import diffusers
import imageio.v3 as imageio
import numpy as np
import pytest

from dit_accel import accelerated, restore_pipeline
from dit_accel.serving import pipelines
from dit_accel.streaming import growing_mp4, streamed
from tests.models.tiny import built, outputs
from tests.tiny import tiny_pipeline

SIZE = ("--steps", 3, "--height", 48, "--width", 48, "--num-frames", 15)
CHUNKS = ("--call", "num_latent_frames_per_chunk=2", "--call", "history_sizes=[4, 2, 1]")  # of 3 frames


def helios():
    parts, wan = built("helios")[0].components, tiny_pipeline("wan")
    return diffusers.HeliosPipeline(**parts | {"tokenizer": wan.tokenizer, "text_encoder": wan.text_encoder})


@pytest.fixture
def generate(run, monkeypatch):
    models = {"helios": helios(), "wan": tiny_pipeline("wan")}
    monkeypatch.setattr(pipelines, "load_pipeline", lambda model, *_: models[model])
    yield lambda model, *options: run("generate", "-p", "a red fox", "-m", model, *SIZE, *options)
    restore_pipeline(models["helios"])


def test_chunks_are_the_frames_of_the_video():
    (pipe, arguments), shown = built("helios"), []
    changes = {"num_frames": 15, "height": 48, "width": 48, "num_inference_steps": 12, "output_type": "np"}
    with accelerated(pipe, "balanced"):
        whole = outputs(pipe, arguments, **changes)[0][0]
        with streamed(pipe, shown.append):
            assert np.array_equal(outputs(pipe, arguments, **changes)[0][0], whole)
    assert len(shown) == 5 and np.array_equal(np.concatenate(shown), whole)
    assert "decode" not in vars(pipe.vae)


def test_the_file_is_that_of_a_run_without_it(generate, tmp_path):
    assert generate("helios", *CHUNKS, "-o", "fox.mp4").exit_code == 0
    content = (tmp_path / "fox.mp4").read_bytes()
    result = generate("helios", *CHUNKS, "-o", "fox.mp4", "--stream", "--force")
    assert result.exit_code == 0 and result.output.count("3 frames more after") == 5
    assert (tmp_path / "fox.mp4").read_bytes() == content


def test_a_video_can_be_read_while_it_grows(tmp_path):
    frames = np.random.default_rng(0).random((3, 6, 6, 3)).repeat(8, 1).repeat(8, 2)
    path, found, latest = tmp_path / "fox.mp4", [], time.monotonic() + 30
    with growing_mp4(path, 8.0) as append:
        append(frames)
        append(frames)
        while len(found) < 4 and time.monotonic() < latest:
            time.sleep(0.1)
            found = imageio.imread(path, plugin="FFMPEG") if path.is_file() and path.stat().st_size > 2000 else []
    assert np.abs(found[:3] / 255 - frames).mean() < 0.05 and len(imageio.imread(path, plugin="FFMPEG")) == 6


@pytest.mark.parametrize(
    "model, options, message",
    [
        ("wan", (), "WanPipeline decodes once, after its last step: streaming gains nothing"),
        ("helios", ("-o", "fox.gif"), "writes .mp4 files alone"),
        ("helios", ("--compare",), "can't be used with --compare or --parallel"),
    ],
)
def test_what_gains_nothing_is_refused_before_the_run(generate, tmp_path, model, options, message):
    result = generate(model, "--stream", *options)
    assert result.exit_code != 0 and message in " ".join(result.output.split()) and not list(tmp_path.iterdir())
