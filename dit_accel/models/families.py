"""What drives a transformer, by its family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dit_accel.errors import UnsupportedError
from dit_accel.loop.runs import Runs
from dit_accel.models import TRANSFORMER_NAMES, denoisers
from dit_accel.models.control_net import CONTROL_NET
from dit_accel.models.family import Family
from dit_accel.models.family_driver import BlockHooks, FamilyDriver
from dit_accel.models.hooks import parameter_names
from dit_accel.models.registry import FAMILIES
from dit_accel.models.transformer_hook import TIMESTEPS, TransformerDriver
from dit_accel.presets import FUSED_FAMILIES


def known_family(transformer: torch.nn.Module) -> Family | None:
    """The family of a transformer, by the name of its class or of one that it derives from; None = no facts."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    return next((family for family in FAMILIES if family.model in names), None)


def require_family(transformer: torch.nn.Module) -> Family:
    """The family of a transformer.

    Raises:
        UnsupportedError: no facts are known of it.
    """
    family = known_family(transformer)
    if family is None:
        raise UnsupportedError(
            f"the blocks of {type(transformer).__name__} are not known here: it must be a pipeline or transformer of "
            f"{', '.join(each.model for each in FAMILIES)}"
        )
    return family


def family_of(pipe: Any) -> str:
    """Name of a pipeline's model family; ``any`` where no facts are known of it."""
    known = {known_family(transformer) for transformer in denoisers(pipe).values()}
    family = known.pop() if len(known) == 1 else None
    return "any" if family is None else family.name


def left_plain(pipe: Any) -> list[str]:
    """Names of a pipeline's further components that a timestep is passed to; control nets only see what is denoised."""
    others = {name: part for name, part in vars(pipe).items() if name not in (*TRANSFORMER_NAMES, CONTROL_NET)}
    modules = {name: part for name, part in others.items() if isinstance(part, torch.nn.Module)}
    return [name for name, part in modules.items() if not set(TIMESTEPS).isdisjoint(parameter_names(part))]


def drive(
    transformer: torch.nn.Module, runs: Runs, name: str, called: Callable[[], torch.nn.Module]
) -> TransformerDriver:
    """What drives a transformer, not attached yet.

    Args:
        name: the transformer's name in the pipeline.
        called: gives what the pipeline calls, which may be a wrapper around the transformer.

    Raises:
        UnsupportedError: the transformer takes no timestep.
    """
    family = known_family(transformer)
    if family is None:
        return TransformerDriver(transformer, runs, name, called)
    return FamilyDriver(transformer, runs, name, called, family, _hand_written(family))


def _hand_written(family: Family) -> BlockHooks | None:
    """What makes the hooks of a family's blocks; imported here, for the installed diffusers may lack another family."""
    if family.name not in FUSED_FAMILIES:
        return None
    return import_module(f"dit_accel.models.fused.{family.name}").BLOCKS
