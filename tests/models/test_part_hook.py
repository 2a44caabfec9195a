"""Parts of a block that level `layer` forecasts, and modules that only feed them."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.branch import BlockCall
from dit_accel.loop.tracker import StepMode
from dit_accel.models.hooks import register_hook
from dit_accel.models.part_hook import FeedHook, PartHook


class Part(torch.nn.Module):
    """Gives its input times its number of calls: a tensor, or two."""

    def __init__(self, is_tuple=False):
        super().__init__()
        self.calls, self.is_tuple = 0, is_tuple

    def forward(self, x):
        self.calls += 1
        made = x * self.calls
        return (made, -made) if self.is_tuple else made


class History:
    """Remembers all that it is given."""

    def __init__(self):
        self.coordinates, self.values = (), []

    def record(self, coordinate, value):
        self.coordinates = (coordinate, *self.coordinates)
        self.values.append(value)


@pytest.fixture
def hooked(monkeypatch):
    """A part with its hook, its history, and the call in progress, which is None at first."""

    def make(is_tuple=False, calls=1):
        histories = defaultdict(History)
        sites = SimpleNamespace(history=lambda part, memory: histories[part])
        preset = SimpleNamespace(forecast=SimpleNamespace(method="newton"))
        driver = SimpleNamespace(preset=preset)
        session = SimpleNamespace(call=None, driver=driver, histories=histories, history=histories["attn"])
        session.site = lambda name, kind: sites
        module = Part(is_tuple)
        register_hook(module, PartHook(session, "blocks.0", "attn", calls))
        return module, session

    forecasts = []
    monkeypatch.setattr(
        "dit_accel.models.part_hook.forecast", lambda *given: forecasts.append(given) or given[1].values[-1]
    )
    make.forecasts = forecasts
    return make


def call(session, mode, coordinate, records=True):
    branch = SimpleNamespace(memory=None, order=2)
    session.call = SimpleNamespace(
        mode=mode, coordinate=coordinate, records=records, branch=branch, site=session.site, blocks=BlockCall()
    )


X = torch.ones(1, 4, 8)


@pytest.mark.parametrize("is_tuple", [False, True], ids=["tensor", "tensors"])
def test_a_part_is_computed_remembered_and_forecast(hooked, is_tuple):
    """Outputs are kept in their own form; outside a run the part is unchanged, and unread outputs are not kept."""
    module, session = hooked(is_tuple)
    first = lambda output: output[0] if is_tuple else output  # noqa: E731
    assert torch.equal(first(module(X)), X) and session.history.values == []
    call(session, StepMode.FULL, 0.9, records=False)
    assert torch.equal(first(module(X)), 2 * X) and session.history.values == []
    call(session, StepMode.UPDATE, 0.8)
    assert torch.equal(first(module(X)), 3 * X) and session.history.coordinates == (0.8,)
    call(session, StepMode.DISPATCH, 0.7)
    output = module(X)
    assert isinstance(output, tuple) == is_tuple and torch.equal(first(output), 3 * X) and module.calls == 3
    ((method, history, coordinate, order),) = hooked.forecasts
    assert (method, coordinate, order) == ("newton", 0.7, 2) and history is session.history


def test_a_part_that_runs_in_chunks_is_refused(hooked):
    """Its second output in a step would be taken for another step's."""
    module, session = hooked()
    call(session, StepMode.FULL, 0.9)
    module(X)
    with pytest.raises(UnsupportedError, match=r"attn of blocks\.0 runs in chunks.*disable_forward_chunking"):
        module(X)
    call(session, StepMode.FULL, 0.8)
    module(X)
    call(session, StepMode.FULL, 0.8, records=False)
    module(X)


def test_each_call_of_a_part_has_its_own_history(hooked):
    """A block may call a part for the image and again for the text; a third call would be a chunk."""
    module, session = hooked(calls=2)
    for coordinate in (0.9, 0.8):
        call(session, StepMode.UPDATE, coordinate)
        made = [float(module(X)[0, 0, 0]) for _ in range(2)]
    call(session, StepMode.DISPATCH, 0.7)
    assert [float(module(X)[0, 0, 0]) for _ in range(2)] == made == [3, 4] and module.calls == 4
    call(session, StepMode.UPDATE, 0.6)
    module(X)
    module(X)
    with pytest.raises(UnsupportedError, match="in chunks"):
        module(X)


class Gate(torch.nn.Module):
    """Has no number of features."""

    def forward(self, x, tokens):
        return tokens * 2


@pytest.mark.parametrize("mode", [None, *StepMode])
def test_what_feeds_a_forecast_part_does_not_run(mode):
    """It returns zeros in its output's form and dtype; in all other steps, and outside of runs, it is unchanged."""
    session = SimpleNamespace(call=None if mode is None else SimpleNamespace(mode=mode))
    linear, gate = torch.nn.Linear(8, 3).double(), Gate()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    expected = linear(x), gate(None, tokens=x)
    for module in (linear, gate):
        register_hook(module, FeedHook(session))
    for output, plain in zip((linear(x), gate(None, tokens=x)), expected, strict=True):
        assert output.shape == plain.shape and output.dtype == plain.dtype
        assert torch.equal(output, torch.zeros_like(plain) if mode is StepMode.DISPATCH else plain)
