"""Choice of the drivers of a pipeline's transformers, by their families, and whether a preset fits them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.models import TRANSFORMER_NAMES, denoisers
from dit_accel.models.beside.control_net import CONTROL_NET
from dit_accel.models.beside.other_caches import refuse_other_cache
from dit_accel.models.driver import BlockHooks, FamilyDriver
from dit_accel.models.families import FAMILIES, known_family
from dit_accel.models.families.family import Family, timestep_names
from dit_accel.models.hooks import find_hook, parameter_names
from dit_accel.models.presets import fitting_presets
from dit_accel.models.transformer import TransformerDriver
from dit_accel.models.wrappers import unwrapped, why_not_wrapped
from dit_accel.presets import Preset

ONLY_KNOWN = (
    f"only {', '.join(TRANSFORMER_NAMES)} and diffusers' transformers are known to be called once a step and branch"
)


def transformers_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the transformers of a pipeline by name; raise an :class:`UnsupportedError` if it can't be accelerated."""
    if not (transformers := denoisers(pipe)):
        if unloaded := [name for name in TRANSFORMER_NAMES if name in getattr(pipe, "_component_specs", ())]:
            fix = f"call pipe.load_components() or pipe.update_components({unloaded[0]}=…) first"
            raise UnsupportedError(f"pipe.{unloaded[0]} of this {type(pipe).__name__} is not loaded: {fix}")
        names = f"{', '.join(TRANSFORMER_NAMES[:-1])} or {TRANSFORMER_NAMES[-1]}, got {type(pipe).__name__}"
        needs = f"pipe must have a transformer of diffusers or a component named {names}"
        raise UnsupportedError(f"{needs}; pipelines that denoise with a UNet are not supported")
    if not hasattr(pipe, "scheduler"):
        needs = f"pipe must have a scheduler, which gives the steps, got {type(pipe).__name__}"
        raise UnsupportedError(f"{needs}; accelerate_transformer takes the timesteps of a loop without one")
    for name in transformers:
        if (reason := why_not_wrapped(getattr(pipe, name))) is not None:
            raise UnsupportedError(f"pipe.{name}: {reason}")
    return transformers


def left_plain(pipe: Any) -> dict[str, str]:
    """Return other components that take a timestep, except ControlNets, by name, and why they run unaccelerated."""
    driven = list(denoisers(pipe).values())
    return {
        name: ONLY_KNOWN
        for name, part in vars(pipe).items()
        if name != CONTROL_NET and isinstance(part, torch.nn.Module) and timestep_names(parameter_names(part))
        if not any(unwrapped(part) is item for item in driven)
    }


def drive(
    transformers: Mapping[str, torch.nn.Module], preset: Preset, called: Mapping[str, Callable[[], Any]]
) -> tuple[list[TransformerDriver], dict[str, UnsupportedError]]:
    """Return the drivers of transformers, not attached yet, and why others run unaccelerated, by name.

    Raises:
        UnsupportedError: none can be accelerated, one of a known class can't, or one has another cache.
        PresetError: `skip.layers` names a block that the transformers lack.
    """
    drivers: list[TransformerDriver] = []
    refusals: dict[str, UnsupportedError] = {}
    for name, transformer in transformers.items():
        config = getattr(getattr(find_hook(transformer), "acceleration", None), "config", None)
        if config is not None:  # disable_cache must undo that
            there = f"pipe.{name} is accelerated already, by enable_cache({config!r})"
            raise UnsupportedError(f"{there}: keep that, or call pipe.{name}.disable_cache() first")
        refuse_other_cache(transformer, name)
        family = known_family(transformer)
        try:
            if family is None:
                driver = TransformerDriver(transformer, preset, name, called[name])
            else:
                driver = FamilyDriver(transformer, preset, name, called[name], family, _hand_written(family))
            _check_family(preset, driver)
            drivers.append(driver)
        except UnsupportedError as error:
            if family is not None:
                raise
            refusals[name] = error
    if not drivers:
        raise next(iter(refusals.values()))
    layers = [layer for driver in drivers for layer in driver.layers()]
    if unknown := [name for name in preset.skip.layers if name not in layers]:
        names = f"names {', '.join(unknown)}, and this pipeline's blocks are {', '.join(layers)}"
        raise PresetError(f"skip.layers of preset {preset.name!r} {names}")
    return drivers, refusals


def _hand_written(family: Family) -> BlockHooks | None:
    """Return the hook classes of a family's blocks; imported late, because diffusers may lack other families."""
    return import_module(f"dit_accel.models.fused.{family.name}").BLOCKS if family.fused else None


def _check_family(preset: Preset, driver: TransformerDriver) -> None:
    model = type(driver.transformer).__name__
    if preset.model not in ("any", driver.family_name):
        fitting = ", ".join(fitting_presets(driver.family_name, driver.levels))
        why = f"is for {preset.model} models, and {model} is not one; presets that fit it: {fitting}"
        raise UnsupportedError(f"preset {preset.name!r} {why}")
    if preset.forecast.level not in driver.levels:
        can = f"it takes {', '.join(driver.levels)}. Families that can: {_families_at(preset.forecast.level)}"
        raise UnsupportedError(f"level {preset.forecast.level!r} of preset {preset.name!r} can't run on {model}; {can}")
    if preset.skip.steps == "all" and not isinstance(driver, FamilyDriver):
        why = f"can't run on {model}, whose blocks are not known; families that can: {_families_at('layer')}"
        raise UnsupportedError(f"skip.steps 'all' of preset {preset.name!r} {why}")


def _families_at(level: str) -> str:
    return ", ".join(family.name for family in FAMILIES if level != "head" or family.fused == "head")
