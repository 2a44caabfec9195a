"""Calls of a controller that no model makes."""

from types import SimpleNamespace

from dit_accel import load_preset
from dit_accel.loop.branch import Description
from dit_accel.loop.controller import Controller
from dit_accel.loop.tracker import Tick
from dit_accel.sparse.projections import Projections

NO_PROJECTIONS = Projections(load_preset("exact"), "transformer", (), {}, 64)


def controller_of(preset):
    """For calls that no model makes; the timestep is the step."""
    steps = 12
    clock = SimpleNamespace(
        read=lambda step, place=None: Tick("run", step, steps, range(steps), [1 - i / steps for i in range(steps)])
    )
    controller = Controller(preset, clock, "any")
    controller.add_transformer("transformer", ["first", "second"])
    return controller


def calling(controller, transformer, context, timestep, shapes, **given):
    """Begin a call and end it; ``given`` are functions in place of a description's methods."""
    described = Description(transformer, context, timestep, shapes)
    vars(described).update(given)
    return controller.calling(described)
