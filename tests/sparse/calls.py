"""Calls of a controller that no model makes."""

from dit_accel.loop.branch import Description


def calling(controller, transformer, context, timestep, shapes, **methods):
    """Begin a call and end it; ``methods`` are functions in place of a description's methods."""
    described = Description(transformer, context, timestep, shapes)
    vars(described).update(methods)
    return controller.calling(described)
