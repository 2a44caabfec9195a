"""Choice of a transformer's driver, by its family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dit_accel.models import denoisers
from dit_accel.models.beside.control_net import CONTROL_NET
from dit_accel.models.driver import BlockHooks, FamilyDriver
from dit_accel.models.families import known_family
from dit_accel.models.families.family import Family, timestep_names
from dit_accel.models.hooks import parameter_names
from dit_accel.models.transformer import TransformerDriver
from dit_accel.models.wrappers import unwrapped
from dit_accel.presets import Preset


def left_plain(pipe: Any) -> list[str]:
    """Return names of other components that take a timestep, except ControlNets; they run unaccelerated."""
    driven = list(denoisers(pipe).values())
    others = {name: part for name, part in vars(pipe).items() if name != CONTROL_NET}
    modules = {name: part for name, part in others.items() if isinstance(part, torch.nn.Module)}
    return [
        name
        for name, part in modules.items()
        if timestep_names(parameter_names(part)) and not any(unwrapped(part) is item for item in driven)
    ]


def drive(
    transformer: torch.nn.Module, preset: Preset, name: str, called: Callable[[], torch.nn.Module]
) -> TransformerDriver:
    """Return the driver of a transformer, not attached yet.

    Raises:
        UnsupportedError: the transformer takes no timestep.
    """
    family = known_family(transformer)
    if family is None:
        return TransformerDriver(transformer, preset, name, called)
    return FamilyDriver(transformer, preset, name, called, family, _hand_written(family))


def _hand_written(family: Family) -> BlockHooks | None:
    """Return the hook classes of a family's blocks; imported late, because diffusers may lack other families."""
    if not family.fused:
        return None
    return import_module(f"dit_accel.models.fused.{family.name}").BLOCKS
