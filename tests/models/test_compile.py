"""Compiled blocks run under the closed loop, which decides as without; what can't be compiled is refused."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dit_accel import accelerate_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.family_driver import FamilyDriver
from dit_accel.tools.testing import tiny_output, tiny_pipeline

STEPS = 12


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pipe():
    return tiny_pipeline("flux")


# Graphs: one a block kind, and one more where FLUX's first single block reads what double blocks wrote.
@pytest.mark.parametrize(("name", "graphs"), [("flux", (2, 3)), ("wan", (1, 1))])
def test_the_loop_decides_alike_with_compiled_blocks(name, graphs, monkeypatch):
    """As with fused kernels, which run where blocks are not compiled; a second run compiles nothing more."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    pipe = accelerate_pipeline(tiny_pipeline(name), "balanced", **{"schedule.target_error": 0.2})
    fused, steps = tiny_output(pipe, name, steps=STEPS), pipe.dit_accel.report().steps
    assert {step.mode for step in steps} == {"full", "update", "dispatch"}
    counter = CompileCounter()
    pipe.transformer.compile_repeated_blocks(backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(tiny_output(pipe, name, steps=STEPS), fused, atol=1e-4, rtol=1e-4)
        compiled = pipe.dit_accel.report().steps
        assert [step.mode for step in compiled] == [step.mode for step in steps]
        errors = [[step.error for step in run if step.error is not None] for run in (compiled, steps)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-2)
        assert graphs[0] <= counter.frame_count <= graphs[1]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_blocks_that_the_preset_works_inside_of_must_not_be_compiled(pipe):
    pipe.transformer.compile_repeated_blocks(backend="eager")
    accelerate_pipeline(pipe, "flux-taylorseer")
    message = r"transformer_blocks\.0 is compiled, and preset 'flux-taylorseer' works inside of blocks"
    with pytest.raises(UnsupportedError, match=message):
        tiny_output(pipe, "flux", steps=STEPS)


def test_a_transformer_compiled_whole_is_refused(pipe):
    """In either way in which PyTorch compiles a module."""
    accelerate_pipeline(pipe, "balanced")
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled whole.*compile_repeated_blocks"):
        tiny_output(pipe, "flux", steps=STEPS)
    wrapped = tiny_pipeline("flux")
    wrapped.transformer = torch.compile(wrapped.transformer, backend="eager")
    with pytest.raises(UnsupportedError, match="FluxTransformer2DModel is compiled whole"):
        accelerate_pipeline(wrapped, "balanced")


def test_blocks_compiled_one_by_one_go_on_as_compiled(pipe, monkeypatch):
    """Whatever would run in their place."""
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: True)
    plain = tiny_output(pipe, "flux", steps=2)
    blocks = pipe.transformer.transformer_blocks
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend="eager")
    accelerate_pipeline(pipe, "exact")
    torch.testing.assert_close(tiny_output(pipe, "flux", steps=2), plain)
