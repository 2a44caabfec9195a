"""The papers' schedules on our engine, for comparisons."""

from __future__ import annotations

import itertools
from typing import Any

from dit_accel import load_preset
from dit_accel.models.families import family_of
from dit_accel.tools.measure.compare import Method, of_preset


def fixed_schedules(pipe: Any) -> list[Method]:
    """TaylorSeer and FORA per layer, and fixed intervals at level ``output``."""
    methods = []
    family = family_of(pipe)
    settings = [(3, 1, 3), (3, 1, 4), (3, 1, 5), (3, 1, 6), (3, 1, 8), (3, 2, 3), (3, 2, 4), (8, 1, 4), (8, 2, 6)]
    for warmup, order, interval in settings:
        schedule = {"warmup": warmup, "interval": interval, "cooldown": 1}
        changes = {"schedule": schedule, "forecast": {"order": order}}
        label = f"W={warmup} N={interval} D={order}"
        stack = load_preset("exact", **changes)
        methods.append(of_preset("fixed interval, whole stack", f"stack {label}", stack))
        if family != "any":
            layers = load_preset("flux-taylorseer", model=family, **changes)
            methods.append(of_preset("TaylorSeer, our engine", f"layers {label}", layers))
    if family != "any":
        for warmup, interval in itertools.product((3, 8), (3, 4, 6)):
            changes = {"schedule": {"warmup": warmup, "interval": interval, "cooldown": 1}}
            reuse = load_preset("flux-taylorseer", model=family, **changes, forecast={"method": "reuse", "order": 0})
            methods.append(of_preset("FORA, our engine", f"FORA W={warmup} N={interval}", reuse))
    return methods
