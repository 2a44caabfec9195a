"""Videos made chunk by chunk: each chunk is a run of its own, and all of them share the time of the call."""

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated
from dit_accel.loop import budget
from dit_accel.loop.budget import Deadline
from tests.models.test_key_value_caches import built as smooth
from tests.models.tiny import built, outputs, videos
from tests.rounding import distance
from tests.tiny import tiny_output, tiny_pipeline

FIVE_CHUNKS = {"num_frames": 15, "height": 48, "width": 48, "num_inference_steps": 12}
CHUNKS = {
    "helios": (FIVE_CHUNKS, "4 of this call, which forecast 28 of 48 steps"),
    "anyflow-far": ({"num_inference_steps": 12}, "2 of this call, which forecast 8 of 24 steps"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_each_chunk_starts_anew(name):
    """Nothing of a chunk enters the next one's forecasts, and nothing is kept after the call."""
    (pipe, arguments), (changes, earlier) = built(name), CHUNKS[name]
    plain = outputs(pipe, arguments, **changes)[0]

    def forget(pipe, step, timestep, tensors):
        if step == 11:
            pipe.dit_accel.reset()
        return {}

    with accelerated(pipe, "balanced"):
        forgetting = outputs(pipe, arguments, callback_on_step_end=forget, **changes)[0]
        made = outputs(pipe, arguments, **changes)[0]
        report, run = pipe.dit_accel.report(), pipe.dit_accel._runs.of(pipe)
    assert torch.equal(made, forgetting) and 0 < distance(made, plain) < 0.05
    assert report.earlier == earlier and earlier in str(report)
    assert "rest" in report.parts and run.branches.all() == []


@pytest.mark.parametrize("kind", [{}, {"num_frames": 9, "overlap_history": 1}], ids=["whole", "in-two-windows"])
def test_diffusion_forcing_of_all_frames_in_step_is_forecast(kind):
    """Each frame has a copy of the scheduler, so that only the timesteps show the steps."""
    pipe, run = smooth(videos.diffusion_forcing)
    plain = run(**kind)
    with accelerated(pipe, "balanced"):
        assert 0 < distance(run(**kind), plain) < 0.03
        report = pipe.dit_accel.report()
        assert report.notes == [] and report.steps_by_mode["dispatch"] == 3
        assert report.earlier == ("1 of this call, which forecast 3 of 8 steps" if kind else None)


def test_chunks_share_the_time_that_is_left(monkeypatch):
    """5 s of 11 are for decoding: a chunk that begins late gets its share of what is left, and the last one all."""
    now = 100.0
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now)
    call = Deadline(11.0, now, after=5.0)
    assert call.of_run(1, 1)._limit == 6.0  # of the call
    assert call.of_run(1, 5)._limit == pytest.approx(6 / 5)
    now += 4.0  # the first chunk, decoded in 1 s, took 3 s
    assert call.of_run(2, 5)._limit == pytest.approx(4 + (11 - 4 - 4) / 4)
    now += 5.0
    assert call.of_run(5, 5)._limit == 10.0  # its decode follows
    assert 10.0 < call.of_run(6, 5)._limit < 11.0  # more chunks than in the call before


def test_a_call_knows_the_number_of_chunks_of_the_call_before():
    pipe, arguments = built("helios")
    with accelerated(pipe, "balanced", max_seconds=1e3):
        for known in (1, 5):
            outputs(pipe, arguments, **FIVE_CHUNKS)
            parts = pipe.dit_accel._runs.of(pipe).parts
            assert (parts.previous_runs, parts.runs) == (known, 5)


def test_a_call_whose_beginning_is_not_seen_has_no_earlier_runs():
    """Users replace ``check_inputs``, whose call marks the beginning; the deadline of the call before has passed."""
    pipe = accelerate_pipeline(tiny_pipeline("flux"), "balanced", max_seconds=1e3)
    for _ in range(2):
        tiny_output(pipe, "flux", steps=8)
        assert pipe.dit_accel.report().earlier is None
        pipe.check_inputs = lambda *_, **__: None
