"""Solvers of higher order run over the noise levels that the pipeline's own one would have."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from dit_accel.tools.measure.compare import solvers
from dit_accel.tools.measure.compare.methods import Subject
from tests.tiny import tiny_output, tiny_pipeline

SOLVED = {"DPM++ 2M": solvers.FEWER_STEPS["fewer-steps-dpm"], "UniPC": solvers.FEWER_STEPS["fewer-steps-unipc"]}
STATIC = {"shift": 7.0}
DYNAMIC = {
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": 1.2,
    "max_shift": 2.7,
    "base_image_seq_len": 64,
    "max_image_seq_len": 1024,
}


def schedule(pipe, name, **changes):
    """Noise levels ``[steps + 1]`` and timesteps ``[steps]`` that the pipeline sets for a call."""

    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = True
        return tensors

    tiny_output(pipe, name, callback_on_step_end=stop, **changes)
    return pipe.scheduler.sigmas.clone(), pipe.scheduler.timesteps.clone()


@pytest.mark.parametrize("solver", solvers.SOLVERS)
@pytest.mark.parametrize(
    ("name", "config"),
    [("flux", DYNAMIC), ("hunyuan", STATIC), ("framepack", DYNAMIC)],
    ids=["flux-dynamic", "hunyuan-static", "framepack-dynamic"],
)
def test_noise_levels_are_the_pipelines_own(name, config, solver):
    """With any shift, to 1e-4, from the first level to the final 0; timesteps too."""
    pipe = tiny_pipeline(name)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**config)
    sigmas, timesteps = schedule(pipe, name, steps=20)
    with SOLVED[solver].methods(20)[-1].put_on(Subject(pipe, 20, 1, None)) as changes:
        assert isinstance(pipe.scheduler, solvers.SOLVERS[solver])
        solved = schedule(pipe, name, **changes)
    assert len(solved[0]) == 21 and solved[0][-1] == 0
    torch.testing.assert_close(solved[0], sigmas, rtol=0, atol=1e-4)
    torch.testing.assert_close(solved[1], timesteps, rtol=0, atol=0)


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_noise_levels_are_even_before_the_shift_where_the_pipeline_has_no_wish(solver):
    """The levels are the solver's own choice, without the jump to 0 at the end of Euler's."""
    pipe = tiny_pipeline("wan")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**STATIC)
    with SOLVED[solver].methods(10)[-1].put_on(Subject(pipe, 10, 1, None)) as changes:
        sigmas, timesteps = schedule(pipe, "wan", **changes)
    even = torch.linspace(1.0, 0.0, 11)
    torch.testing.assert_close(sigmas, 7 * even / (1 + 6 * even), rtol=0, atol=1e-4)
    torch.testing.assert_close(timesteps, 1000 * sigmas[:-1], rtol=0, atol=0.01)
