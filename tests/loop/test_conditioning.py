"""Detection of changes in a call's conditioning."""

import pytest
import torch

from dit_accel.loop.conditioning import Conditioning


def told(*values):
    """Changes found at each of some calls with one item."""
    conditioning = Conditioning()
    return [conditioning.changed({"item": value}) for value in values]


def prompt(value=1.0):
    return torch.full((2, 3), value)


class Gathered(torch.Tensor):
    """A tensor of another type, as a collective gives."""


ONE, OTHER, THIRD = prompt(1.0), prompt(2.0), prompt(3.0)
SQUARE = torch.arange(4.0).view(2, 2)
CHANGED = ["item"]


@pytest.mark.parametrize(
    "values, found",
    [
        pytest.param([ONE, OTHER, THIRD, THIRD, THIRD, ONE], [[], [], [], [], [], CHANGED], id="holds-after-two"),
        pytest.param([(0.5,), (0.2,), (0.2,)], [[], [], CHANGED], id="settings-at-the-second-call"),
        pytest.param([ONE, ONE, ONE, ONE], [[], [], [], []], id="same-object"),
        pytest.param([ONE, ONE, OTHER, OTHER], [[], [], CHANGED, []], id="another-tensor"),
        pytest.param([prompt() for _ in range(4)], [[], [], [], []], id="equal-tensors-made-anew"),
        pytest.param([prompt(), prompt(), prompt(2.0)], [[], [], CHANGED], id="another-value-made-anew"),
        pytest.param([ONE[:1], ONE[:1], ONE[1:]], [[], [], []], id="equal-views"),
        pytest.param([prompt(value) for value in (1, 2, 3, 4, 5)], [[]] * 5, id="differs-at-every-call"),
        pytest.param([prompt(value) for value in (1, 1, 2, 3, 4)], [[], [], CHANGED, [], []], id="begins-to-differ"),
        pytest.param([ONE, OTHER, OTHER, OTHER], [[], [], CHANGED, []], id="changed-at-the-second-call"),
        pytest.param([3.5, 3.5, 1.0, 1.0], [[], [], CHANGED, []], id="number"),
        pytest.param([3.5, 1.0, 1.0], [[], [], CHANGED], id="number-at-the-second-call"),
        pytest.param([1, 0.5, 0.5], [[], [], CHANGED], id="whole-number-at-first"),
        pytest.param([float("nan")] * 3, [[], [], []], id="no-number"),
        pytest.param([torch.Tensor._make_subclass(Gathered, ONE), ONE, ONE], [[], [], []], id="another-type-first"),
        pytest.param(["extract", "cached", "cached"], [[], [], []], id="mode-that-only-begins"),
        pytest.param([(0.5, "a"), (0.5, "a"), (0.2, "a")], [[], [], CHANGED], id="settings-of-adapters"),
        pytest.param([ONE, ONE, None], [[], [], CHANGED], id="tensor-goes"),
        pytest.param([ONE, ONE, ONE.double()], [[], [], CHANGED], id="another-dtype"),
        pytest.param([SQUARE, SQUARE, SQUARE.T], [[], [], CHANGED], id="transposed-in-place"),
    ],
)
def test_what_held_and_differs_is_a_change(values, found):
    """An item that has held its value is noticed when it differs, and one that differs at every call is not."""
    assert told(*values) == found


@pytest.mark.parametrize(
    "values, moved",
    [
        pytest.param([ONE, OTHER, OTHER], [False, True, False], id="tensor"),
        pytest.param([3.5, 1.0, 2.0], [False, True, False], id="number"),
        pytest.param([1, 0.5, 0.5], [False, True, False], id="whole-number-first"),
        pytest.param([torch.nn.Parameter(ONE), OTHER, OTHER], [False, True, False], id="parameter-first"),
        pytest.param([ONE, ONE, OTHER], [False, False, False], id="held"),
        pytest.param(["extract", "cached", "cached"], [False, False, False], id="mode"),
        pytest.param([None, ONE, ONE], [False, False, False], id="begins"),
    ],
)
def test_what_differs_at_the_second_call_may_be_a_change(values, moved):
    """No earlier call shows whether it differs at every one."""
    conditioning, found = Conditioning(), []
    for value in values:
        conditioning.changed({"item": value})
        found.append(conditioning.moved)
    assert found == moved


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_are_written_to_are_noticed(mode):
    with mode():
        value, conditioning = prompt(), Conditioning()
        assert [conditioning.changed({"item": value}) for _ in range(3)] == [[], [], []]
        value[0, 0] = 5.0
        assert conditioning.changed({"item": value}) == CHANGED


def test_items_that_come_and_go_are_noticed():
    conditioning = Conditioning()
    assert [conditioning.changed({"a": 1.0}) for _ in range(2)] == [[], []]
    assert conditioning.changed({"a": 1.0, "b": 2.0}) == ["b"] and conditioning.changed({"a": 1.0}) == ["b"]


def test_what_differs_at_every_call_is_not_kept():
    """Residuals of a ControlNet are large, and are let go of once they are known to differ."""
    conditioning = Conditioning()
    for value in range(4):
        conditioning.changed({"item": prompt(float(value))})
    assert not any(isinstance(item.value, torch.Tensor) for item in conditioning._items.values())


def test_subclasses_of_tensors_are_not_read():
    """A tensor that represents a deferred call is compared by identity, because reading it would run the call."""

    class Deferred(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError("was read")

    values = [torch.Tensor._make_subclass(Deferred, prompt()) for _ in range(3)]
    assert told(*values) == [[], [], []]
