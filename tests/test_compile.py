"""Compiled blocks run under the closed loop, which decides as without; what can't be compiled is refused."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dit_accel import accelerate_pipeline
from dit_accel.adapters.block_adapter import BlockAdapter
from dit_accel.errors import UnsupportedError
from dit_accel.testing import tiny_output, tiny_pipeline

STEPS = 12


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pipe():
    return tiny_pipeline("flux")


def test_the_loop_decides_alike_with_compiled_blocks(pipe):
    """One graph a block kind, and none more in a second run."""
    accelerate_pipeline(pipe, "flux-balanced")
    plain, modes = tiny_output(pipe, "flux", steps=STEPS), [step.mode for step in pipe.dit_accel.report().steps]
    counter = CompileCounter()
    pipe.transformer.compile_repeated_blocks(backend=counter)
    for _ in range(2):
        torch.testing.assert_close(tiny_output(pipe, "flux", steps=STEPS), plain)
        assert [step.mode for step in pipe.dit_accel.report().steps] == modes
        assert 2 <= counter.frame_count <= 3  # the first single block reads what double blocks wrote
    assert not torch._dynamo.utils.counters["graph_break"]


def test_blocks_that_the_preset_works_inside_of_must_not_be_compiled(pipe):
    pipe.transformer.compile_repeated_blocks(backend="eager")
    accelerate_pipeline(pipe, "flux-taylorseer")
    message = r"transformer_blocks\.0 is compiled, and preset 'flux-taylorseer' works inside of blocks"
    with pytest.raises(UnsupportedError, match=message):
        tiny_output(pipe, "flux", steps=STEPS)


def test_a_transformer_compiled_whole_is_refused(pipe):
    """In either way in which PyTorch compiles a module."""
    accelerate_pipeline(pipe, "flux-balanced")
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled whole.*compile_repeated_blocks"):
        tiny_output(pipe, "flux", steps=STEPS)
    wrapped = tiny_pipeline("flux")
    wrapped.transformer = torch.compile(wrapped.transformer, backend="eager")
    with pytest.raises(UnsupportedError, match="FluxTransformer2DModel is compiled whole"):
        accelerate_pipeline(wrapped, "flux-balanced")


def test_blocks_compiled_one_by_one_go_on_as_compiled(pipe, monkeypatch):
    """Whatever would run in their place."""
    monkeypatch.setattr(BlockAdapter, "fuses_kernels", lambda adapter, x: True)
    plain = tiny_output(pipe, "flux", steps=2)
    blocks = pipe.transformer.transformer_blocks
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend="eager")
    accelerate_pipeline(pipe, "exact")
    torch.testing.assert_close(tiny_output(pipe, "flux", steps=2), plain)
