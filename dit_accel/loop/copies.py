"""Copies of a scheduler with all that its step reads and writes, so that a trial of the step changes nothing."""

import copy
import itertools
import random
import sys
from collections import deque
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

DEPTH = 8  # objects within objects that are copied; a step's own state is nearer
RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
COPIED = (*RANDOM, np.ndarray, itertools.count, set, deque)


def copied(value: Any, known: dict[int, Any], depth: int = DEPTH) -> Any:
    """Return a copy of an object on the CPU, with the objects and the variables of functions that it holds.

    Models, pipelines and classes are not copied. ``known`` has copies by the ``id`` of originals, also within circles.
    """
    if id(value) in known or not depth:
        return known.get(id(value), value)
    within = partial(copied, known=known, depth=depth - 1)
    if isinstance(value, MethodType):
        return MethodType(within(value.__func__), within(value.__self__))
    if isinstance(value, partial):
        return partial(within(value.func), *map(within, value.args), **within(value.keywords))
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = value.detach().to("cpu", copy=True)
    elif isinstance(value, COPIED):
        result = copy.deepcopy(value)
    elif isinstance(value, FunctionType):
        cells = [known.setdefault(id(cell), CellType()) for cell in value.__closure__ or ()]
        shared = {name: within(item) for name, item in value.__globals__.items() if isinstance(item, RANDOM)}
        scope = {**value.__globals__, **shared}
        result = FunctionType(value.__code__, scope, value.__name__, value.__defaults__, tuple(cells))
        result.__kwdefaults__ = value.__kwdefaults__
        known[id(value)] = result
        for cell, original in zip(cells, value.__closure__ or (), strict=True):
            cell.cell_contents = within(original.cell_contents)
    elif type(value) is tuple:
        result = tuple(map(within, value))
    elif type(value) is list:
        result = known[id(value)] = []
        result.extend(map(within, value))
    elif type(value) is dict:
        result = known[id(value)] = {}
        result.update((key, within(item)) for key, item in value.items())
    elif _holds_state(value):
        result = known[id(value)] = object.__new__(type(value))
        vars(result).update((key, within(item)) for key, item in vars(value).items())
    known[id(value)] = result
    return result


def _holds_state(value: Any) -> bool:
    """Return True for an instance of a Python class that is no model, pipeline or part of Python."""
    kind: Any = type(value)
    is_large = isinstance(value, torch.nn.Module) or hasattr(kind, "components")
    is_plain = hasattr(value, "__dict__") and kind.__new__ is object.__new__ and not isinstance(value, type)
    return is_plain and not is_large and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
