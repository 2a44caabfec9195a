"""A launch like one before goes to the compiled kernel at once; any difference that Triton compiles for does not."""

import pytest
import torch

from dit_accel.kernels._triton.launch import launch


class Compiled:
    """Notes what it is run with."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """A kernel of two tensors, two numbers and two constants, that notes what it is compiled for."""

    arg_names = ("x", "y", "length", "stride", "BLOCK", "IS_RAGGED")

    def __init__(self):
        self.compiled_for, self.runs = [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **named):
            self.compiled_for.append((grid, arguments, named))
            return Compiled(self.runs)

        return compile_and_run


def run(kernel, x, y=None, numbers=(5, 1), programs=3, **changed):
    launch(kernel, programs, (x, y), numbers, **{"IS_RAGGED": True, "BLOCK": 64, "num_warps": 4} | changed)


def test_the_second_like_call_runs_what_the_first_compiled():
    """The launch gets its own tensors and grid, and the constants in the kernel's order, without Triton's options."""
    kernel, first, second = Kernel(), torch.zeros(4), torch.ones(9)
    run(kernel, first)
    run(kernel, second, programs=7)
    ((grid, arguments, named),) = kernel.compiled_for
    assert grid == (3,) and named == {"IS_RAGGED": True, "BLOCK": 64, "num_warps": 4}
    assert arguments[0] is first
    ((grid, arguments),) = kernel.runs
    assert grid == (7, 1, 1) and arguments[0] is second and arguments[1:] == (None, 5, 1, 64, True)
    other = Kernel()
    run(other, first)
    assert len(other.compiled_for) == 1


OTHERS = {
    "dtype": {"x": torch.zeros(8, dtype=torch.float16)},
    "address": {"x": torch.zeros(8)[1:]},
    "tensor-for-none": {"y": torch.zeros(8)},
    "number": {"numbers": (6, 1)},
    "constant": {"BLOCK": 128},
    "option": {"num_warps": 8},
    "device": {"x": torch.zeros(8, device="meta")},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_call_is_compiled_anew(other, monkeypatch):
    if other.get("x") is not None and other["x"].is_meta:
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    kernel = Kernel()
    run(kernel, torch.zeros(8))
    run(kernel, **{"x": torch.zeros(8)} | other)
    assert len(kernel.compiled_for) == 2 and not kernel.runs
