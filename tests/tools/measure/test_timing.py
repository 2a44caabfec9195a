"""Results of a pipeline's call: images, videos with sound, and sound alone."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from dit_accel.models import denoisers
from dit_accel.tools.measure import timing
from dit_accel.tools.measure.timing import run_pipeline, timed_output, transformer_clock
from dit_accel.tools.measure.tune.runs import FigureStore, MeasuredRuns
from tests.models.tiny import built, pipeline
from tests.models.tiny.sounds import longcat_audio

RAIN = {"num_inference_steps": 2, "audio_duration_s": 3.0}


@pytest.mark.parametrize(("name", "channels"), [("ltx2", 2), ("cosmos3", 8)], ids=["ltx2", "cosmos3"])
def test_a_video_comes_with_its_sound(name, channels):
    """Both functions return the same for a batch of videos and for one video without a batch."""
    pipe, arguments = built(name)
    arguments = {"prompt": None, **arguments, "num_inference_steps": 2, "num_frames": 5}
    output = timed_output(pipe, arguments, 0)
    ((frames, height, width, _),), (sound,) = [video.shape for video in output.results], output.sounds
    assert frames == 5 and sound.shape[0] == channels and sound.dtype == torch.float32
    prompt = arguments.pop("prompt")
    output = run_pipeline(pipe, arguments, prompt, 0)
    assert output["frames"].shape == (5, 3, height, width) and torch.equal(output["sound"], sound)


def test_a_clock_leaves_no_hook():
    """On none of several transformers, after an exception."""
    pipe = pipeline("wan22")
    with suppress(KeyError), transformer_clock(pipe):
        raise KeyError
    assert len(denoisers(pipe)) == 2
    assert not any(model._forward_hooks or model._forward_pre_hooks for model in denoisers(pipe).values())


def test_a_loop_lasts_from_its_first_call_to_its_last():
    """With the time between calls, which the time inside of them leaves out."""
    clock, now = timing._Clock(torch.device("cpu")), SimpleNamespace(seconds=3.0)

    def start():
        begin = now.seconds
        return lambda: (lambda length: lambda: length)(now.seconds - begin)

    clock._start = start
    for begin, end in ((3.0, 4.0), (8.0, 10.0), (11.0, 12.5)):
        now.seconds = begin
        clock.enter()
        now.seconds = end
        clock.leave()
    assert (clock.calls, clock.seconds, clock.loop_seconds) == (3, 4.5, 9.5)


def test_as_many_steps_run_as_asked_for():
    done = []

    def pipe(generator, output_type, callback_on_step_end=None):
        stopping = SimpleNamespace(_interrupt=False)
        for step in range(4):
            if not stopping._interrupt:
                done.append(step)
                if callback_on_step_end:
                    callback_on_step_end(stopping, step, None, {})
        return [output_type]

    for steps, expected in {1: 1, 3: 3, 4: 4, 9: 4, None: 4}.items():
        done.clear()
        assert timing.denoise(pipe, {}, 0, steps) == "latent" and len(done) == expected


def test_sound_alone_has_no_frames():
    """Tuning measures the PSNR of its amplitudes in 8 bits."""
    pipe = longcat_audio()
    kept = run_pipeline(pipe, RAIN, "rain", 0)
    assert kept.keys() == {"latents", "sound"} and kept["sound"].shape[0] == 1 and kept["sound"].min() < 0
    (amplitudes,) = MeasuredRuns(pipe, RAIN, ["rain"], 0, FigureStore(None, {}), lambda: None).plain(0)["frames"]
    assert torch.equal(amplitudes, (127.5 + 127.5 * kept["sound"][0].clamp(-1, 1)).round().byte())
